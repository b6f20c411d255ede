"""The command `jgg`: parses its arguments, so that help needs no JAX, and then has `jgg.cli` run the command.

Without a GPU it hides what JAX's CUDA plugin writes about that. The plugin writes while it is loaded, before a setting
could reach it, and importing anything from jgg loads it. So this package is not part of jgg.
"""

import contextlib
import importlib.metadata
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence

from _jgg_command.memory import take_most
from _jgg_command.parser import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `jgg` with these arguments, by default the process's, and returns the exit code."""
    # parse ends the process after help or a mistake
    args = parse(_version(), sys.argv[1:] if arguments is None else arguments)
    take_most()
    with _held_back() as notes:
        import jax

        from jgg.cli import run
        from jgg.cli.info import has_nvidia_gpu

        # one of several processes must not ask for devices before it has joined the others
        if getattr(args, "coordinator", None) is None and not has_nvidia_gpu():
            with contextlib.suppress(RuntimeError, AssertionError):  # without any backend, the command says so
                jax.devices()
                notes.truncate(0)
    return run(args)


def _version():
    """The version that is installed; a checkout may be used without one."""
    try:
        return importlib.metadata.version("jgg")
    except importlib.metadata.PackageNotFoundError:
        return "of a checkout that is not installed"


@contextlib.contextmanager
def _held_back() -> Iterator:
    """Redirects stderr, C++'s too, to a temporary file and yields it; at the end its content goes to stderr.

    If no temporary file can be made, as on a full disk, stderr is not redirected.
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
