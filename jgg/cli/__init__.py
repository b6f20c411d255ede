"""Runs the commands of `jgg`, each by the module of its name; _jgg_command declares them and their options."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable

import jax

from jgg.cli.options import INTERRUPTED, UsageError


def run(args: argparse.Namespace, command: Callable[[argparse.Namespace], int] | None = None) -> int:
    """Runs a command, by default the function `run` of its module, and returns the exit code."""
    try:
        code = (command or _runner(args.command))(args)
        sys.stdout.flush()  # so that an error of stdout is raised here
        return code
    except UsageError as error:
        args.parser.error(str(error))
        raise  # not reached: error() ends the process
    except RuntimeError as error:
        if not str(error).startswith("Unable to initialize backend"):
            raise
        print(f"jgg: {error}\nSee jgg info for what to mend.", file=sys.stderr)
        return 1
    except AssertionError:
        if _has_device():
            raise
        print("jgg: JAX has no device.\nSee jgg info for what to mend.", file=sys.stderr)
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


def _runner(name) -> Callable[[argparse.Namespace], int]:
    """Imports the module of a command and returns its function `run`."""
    return importlib.import_module(f"jgg.cli.{name}").run


def _stdout_works():
    """Whether stdout takes one more line."""
    try:
        print(flush=True)
        return True
    except OSError:
        return False


def _has_device():
    """Whether a backend of JAX starts; JAX raises AssertionError if JAX_PLATFORMS names only one that is missing."""
    try:
        return bool(jax.devices())
    except (RuntimeError, AssertionError):
        return False
