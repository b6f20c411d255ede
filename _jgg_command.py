"""The command `jgg` as it is installed: `python -m jgg` without the notes about CUDA that come first where no GPU is.

JAX's CUDA plugin writes them as it is loaded, before a setting could reach it, and whatever is imported from jgg loads
it. So this is no module of the package. Nor does `jgg --help`, which lists the commands of this file, load JAX.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

COMMANDS = {  # modules of jgg.cli
    "info": "Show versions, devices and which implementation runs here.",
    "demo": "Train a small mixture-of-experts language model here and plot what it did.",
    "bench": "Time grouped GEMMs here, check them, and compare them with other libraries.",
    "tune": "Find fast kernel configurations for this GPU and keep them in a file that jgg reads.",
    "scale": "Measure a whole MoE layer on 1, 2, 4, ... of this process's devices, at the same tokens for each.",
    "plan": "Estimate how an MoE layer scales to many GPUs: bytes on links, FLOPs, memory, and how to split it best.",
    "completion": "Print a script by which a shell completes commands and options.",
}


def make_parser(version: str = "") -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of `jgg`, and those of its commands by name, which have no options yet."""
    parser = argparse.ArgumentParser(prog="jgg", description="Grouped GEMM for JAX mixture-of-experts training.")
    parser.add_argument("--version", action="version", version=f"jgg {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    return parser, {name: commands.add_parser(name, help=text, description=text) for name, text in COMMANDS.items()}


def main() -> int:
    """Runs `jgg` and returns the exit code."""
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        make_parser()[0].parse_args()  # ends the process
    with _held_back() as notes:
        import jax

        from jgg.cli import main
        from jgg.cli.info import has_nvidia_gpu

        if not has_nvidia_gpu():
            with contextlib.suppress(RuntimeError):  # where no backend starts, the command meets that itself
                jax.devices()
                notes.truncate(0)
    return main()


@contextlib.contextmanager
def _held_back() -> Iterator:
    """Gives a file that takes what goes to stderr meanwhile, C++'s too; what it holds in the end goes there."""
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as notes:
        os.dup2(notes.fileno(), 2)
        try:
            yield notes
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            notes.seek(0)
            os.write(2, notes.read())


if __name__ == "__main__":
    sys.exit(main())
