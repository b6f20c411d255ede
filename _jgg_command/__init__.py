"""The command `jgg` as it is installed: `python -m jgg` with help before JAX, and without the notes about CUDA.

JAX's CUDA plugin writes those as it is loaded, before a setting could reach it, and whatever is imported from jgg loads
it. So this is no part of that package, and parses the arguments first.
"""

import contextlib
import importlib.metadata
import io
import os
import sys
import tempfile
from collections.abc import Iterator

from _jgg_command.parser import parse


def main() -> int:
    """Runs `jgg` and returns the exit code."""
    # ends the process after help, and at a mistake
    args = parse(importlib.metadata.version("jgg"), sys.argv[1:])
    with _held_back() as notes:
        import jax

        from jgg.cli import run
        from jgg.cli.info import has_nvidia_gpu

        if not has_nvidia_gpu():
            with contextlib.suppress(RuntimeError, AssertionError):  # without any backend, the command says so
                jax.devices()
                notes.truncate(0)
    return run(args)


@contextlib.contextmanager
def _held_back() -> Iterator:
    """Gives a file that takes what goes to stderr meanwhile, C++'s too; what it holds in the end goes there.

    Where no folder takes temporary files, as on a full disk, stderr is left alone.
    """
    with contextlib.ExitStack() as stack:
        try:
            notes = stack.enter_context(tempfile.TemporaryFile())
        except OSError:
            yield io.BytesIO()
            return
        stderr = os.dup(2)
        os.dup2(notes.fileno(), 2)
        try:
            yield notes
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            notes.seek(0)
            os.write(2, notes.read())
