"""Print a script by which a shell completes commands and options.

shtab makes the script from the parser. It is plain shell code, so completing a command does not start Python.
"""

import argparse
from collections.abc import Iterator

from _jgg_command.parser import make_parser
from jgg.cli import options
from jgg.core.versions import __version__
from jgg.measuring.workloads import load_layers


def run(args) -> int:
    """Prints the script; returns 0."""
    shtab = options.import_with_extra("shtab", "completion")
    parser = make_parser(__version__)
    for action in _actions(parser):
        if action.dest == "layer":
            action.choices = list(load_layers(None))
        elif action.metavar in ("FILE", "PREFIX"):
            action.complete = shtab.FILE
    print(shtab.complete(parser, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator:
    """Yields the actions of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
