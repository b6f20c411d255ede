"""The command `jgg`: parses its arguments, for which it imports no JAX, and runs the command that they name.

A command's options are a dataclass, whose attribute `module` names the module that runs it.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jgg.cli.console import held_back
from jgg.cli.errors import INTERRUPTED, UsageError, import_with_extra
from jgg.cli.memory import take_most
from jgg.cli.parsing import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `jgg` with these arguments, by default the process's, and returns the exit code.

    Without a GPU it hides what JAX's CUDA plugin writes about that, while it is loaded: no setting reaches it then.
    """
    # parse ends the process after help or a mistake
    args = parse(sys.argv[1:] if arguments is None else arguments)
    take_most()
    with held_back() as notes:
        import jax

        from jgg.cli.info import has_nvidia_gpu

        # one of several processes must not ask for devices before it has joined the others
        if getattr(args, "coordinator", None) is None and not has_nvidia_gpu():
            with contextlib.suppress(RuntimeError, AssertionError):  # without any backend, the command says so
                jax.devices()
                notes.truncate(0)
    return run(args)


def run(args: Any, command: Callable[[Any], int] | None = None) -> int:
    """Runs a command, by default the one whose options these are, and returns the exit code."""
    try:
        code = (command or import_with_extra(args.module, args.extra).run)(args)
        sys.stdout.flush()  # so that an error of stdout is raised here
        return code
    except UsageError as error:
        args.parser.error(str(error))
        raise  # not reached: error() ends the process
    except RuntimeError as error:
        if not str(error).startswith("Unable to initialize backend"):
            raise
        print(f"jgg: {error}\nSee jgg info for what to fix.", file=sys.stderr)
        return 1
    except AssertionError:
        if _has_device():
            raise
        print("jgg: JAX has no device.\nSee jgg info for what to fix.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if _stdout_works():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # a broken pipe only means that the reader, such as head, has enough
            print(f"jgg: could not write stdout: {error.strerror}", file=sys.stderr)
        return 1


def _stdout_works():
    """Whether stdout takes one more line."""
    try:
        print(flush=True)
        return True
    except OSError:
        return False


def _has_device():
    """Whether a backend of JAX starts; JAX raises AssertionError if JAX_PLATFORMS names only one that is missing."""
    import jax

    try:
        return bool(jax.devices())
    except (RuntimeError, AssertionError):
        return False
