"""Compiles a training step with its kernels for a GPU that this machine does not have, and writes it to a file.

    python examples/export_for_gpu.py --target 90 --out step.jax     # H100, H200; on a laptop, in a minute
    python examples/export_for_gpu.py --load step.jax                # where the GPU is, or on a CPU

Where it is loaded, the program needs JAX with the same minor version of jaxlib, but neither jgg nor Triton. Exporting
needs JAX's CUDA plugin, of jaxlib's version: without a GPU, `pip install --no-deps jax-cuda12-plugin==VERSION`.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp

TOKENS, FEATURES, HIDDEN, EXPERTS, TOPK = 512, 128, 64, 8, 2
SHAPES = (
    jax.ShapeDtypeStruct((FEATURES, EXPERTS), jnp.bfloat16),
    jax.ShapeDtypeStruct((EXPERTS, 2 * HIDDEN, FEATURES), jnp.bfloat16),
    jax.ShapeDtypeStruct((EXPERTS, FEATURES, HIDDEN), jnp.bfloat16),
)
X = jax.ShapeDtypeStruct((TOKENS, FEATURES), jnp.bfloat16)


def make_step():
    import jgg

    @jax.jit
    def step(params, x):
        def loss(params):
            w_router, w_gate_up, w_down = params
            routing = jgg.route(x @ w_router, TOPK)
            y = jgg.moe_mlp(x, w_gate_up, w_down, routing)
            return jnp.mean(jnp.square((y - x).astype(jnp.float32)))

        value, gradients = jax.value_and_grad(loss)(params)
        return [p - 8 * g for p, g in zip(params, gradients, strict=True)], value

    return step


def check(out: Path) -> None:
    """Ends the process if there is something else than a program of this kind, which would be lost."""
    if out.exists():
        try:
            jax.export.deserialize(bytearray(out.read_bytes()))
        except Exception as error:  # of any type, for other files
            raise SystemExit(f"--out must be a new file or an exported program, got {out}") from error


def export(target: int, out: Path) -> None:
    import jgg

    check(out)
    with jgg.target(target):
        exported = jgg.export(make_step(), platforms=["cpu", "cuda"])(list(SHAPES), X)
    out.write_bytes(exported.serialize())
    print(f"wrote {out}, for {' and '.join(exported.platforms)}: {out.stat().st_size / 1e6:.2f} MB")


def load(path: Path) -> None:
    step = jax.jit(jax.export.deserialize(path.read_bytes()).call)
    keys = jax.random.split(jax.random.key(0), 4)
    *params, x = (
        jax.random.normal(key, of.shape, of.dtype) / (1 if of is X else of.shape[-1] ** 0.5)
        for key, of in zip(keys, (*SHAPES, X), strict=True)
    )
    for index in range(3):
        params, loss = step(params, x)
        print(f"step {index}: loss {loss:.4f}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=int, default=90, help="compute capability of the GPU (%(default)s)")
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--load", type=Path, help="a file to run instead")
    options = parser.parse_args(arguments)
    if options.out is not None:
        export(options.target, options.out)
    if options.load is not None:
        load(options.load)


if __name__ == "__main__":
    main()
