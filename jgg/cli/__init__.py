"""The command `jgg`: `main` finds the subcommand, whose module has `add_arguments` and `run`."""

import argparse
import importlib
import os
import sys

import jgg
from _jgg_command import make_parser
from jgg.cli.options import INTERRUPTED, UsageError


def main(argv: list[str] | None = None) -> int:
    """Runs `jgg` with `argv`, by default the process's arguments, and returns the exit code."""
    args = parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()  # so that what is wrong with it shows here
        return code
    except UsageError as error:
        args.parser.error(str(error))
        raise  # which it does not come to
    except RuntimeError as error:
        if not str(error).startswith("Unable to initialize backend"):
            raise
        print(f"jgg: {error}\nSee jgg info for what to mend.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # who reads the output, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def parser() -> argparse.ArgumentParser:
    """The whole parser of `jgg`.

    A command is a module of jgg.cli with add_arguments(parser) and run(args) -> exit code. Every command line imports
    it, so what needs packages of an extra lies in other modules, which run imports with import_with_extra.
    """
    whole, commands = make_parser(jgg.__version__)
    for name, command in commands.items():
        module = importlib.import_module(f"jgg.cli.{name}")
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return whole
