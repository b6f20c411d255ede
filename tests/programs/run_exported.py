"""Runs exported programs where neither Triton nor jgg is installed: folder/NAME.program on folder/NAME.npz.

Writes what NAME returned to folder/NAME.out.npz, for each NAME among the arguments after the folder.
"""

import sys
from pathlib import Path


def main():
    for package in ("triton", "jax_triton", "jgg"):
        sys.modules[package] = None  # as if it were not installed
    import jax
    import jax.export
    import numpy as np

    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        program = jax.export.deserialize(bytearray((folder / f"{name}.program").read_bytes()))
        with np.load(folder / f"{name}.npz") as arrays:
            _, structure = jax.tree.flatten(program.in_tree.unflatten(program.in_avals))
            arguments, _ = structure.unflatten([arrays[f"arr_{i}"] for i in range(len(arrays))])
        results = jax.tree.leaves(jax.jit(program.call)(*arguments))
        np.savez(folder / f"{name}.out.npz", *map(np.asarray, results))


if __name__ == "__main__":
    main()
