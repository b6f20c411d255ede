"""The command `jgg`: `main` finds the subcommand, whose module has `add_arguments` and `run`."""

import argparse
import importlib
import sys

import jgg
from jgg.cli.options import INTERRUPTED, UsageError

# A command is a module of jgg.cli with add_arguments(parser), run(args) -> exit code and a docstring
# whose first line is its help. Every command line imports it, so what needs packages of an extra
# lies in other modules, which run imports with import_with_extra.
COMMANDS = ("info", "demo", "bench", "tune", "scale", "plan")


def main(argv: list[str] | None = None) -> int:
    """Runs `jgg` with `argv`, by default the process's arguments, and returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except UsageError as error:
        args.parser.error(str(error))
        raise  # which it does not come to
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED


def _parser():
    parser = argparse.ArgumentParser(prog="jgg", description=jgg.__doc__)
    parser.add_argument("--version", action="version", version=f"jgg {jgg.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name in COMMANDS:
        module = importlib.import_module(f"jgg.cli.{name}")
        summary = str(module.__doc__).splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser
