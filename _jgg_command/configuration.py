"""Options from a file: `--config run.toml` gives those that the command line does not."""

import argparse
import itertools
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from _jgg_command.arguments import Parser


def add_config(parser: Parser, *needed: str, such_as: str = "") -> None:
    """Declares --config, and the names of the options that must be given, there or on the command line."""
    what = f"TOML file of options{such_as}: a key is an option's name without its dashes"
    parser.add_argument("--config", metavar="FILE", help=what)
    parser.needed = needed


def with_file(args: argparse.Namespace, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command, with those of the file that --config names where the command line has none.

    Places, known by their order alone, that neither has are None.

    Ends the process in one line if the file is wrong, or if an option is given neither here nor there.

    Args:
      args: the parsed arguments of a command, with its parser.
      arguments: what they were parsed from, without the name of the command.
    """
    parser = args.parser
    if getattr(args, "config", None) is not None:
        parser.where = f"--config {args.config}: "
        own = parser.parse_args(list(_arguments_in(args.config, parser)))
        parser.where = ""
        kept = vars(own).keys() - _replaced(parser, arguments)
        values = {name: value for name, value in vars(own).items() if name in kept} | {"command": args.command}
        args = parser.parse_args(arguments, argparse.Namespace(**values))
    for place in _places(parser):
        vars(args).setdefault(place, None)
    missing = [name for name in parser.needed if getattr(args, name, None) is None]
    if missing:
        parser.error(f"the following arguments are required: {', '.join(_shown(parser, name) for name in missing)}")
    return args


def _replaced(parser: Parser, arguments: Sequence[str]) -> set[str]:
    """The options whose values in a file do not count beside this command line, though it may not set them itself."""
    repeated = {action.dest for action in parser._actions if isinstance(action, argparse._AppendAction)}
    absent = object()
    before = {action.dest: None if action.dest in repeated else absent for action in parser._actions}
    found = vars(parser.parse_args(arguments, argparse.Namespace(**before)))
    given = {name for name, value in before.items() if found.get(name) is not value}
    return (repeated & given).union(*(names for names in parser.alternatives if given.intersection(names)))


def _arguments_in(path: str, parser: Parser) -> Iterator[str]:
    """The command line that a file stands for. Its tables, which say more of a run, are no options."""
    options = {action.dest: action for action in parser._actions}
    read = _read(path, parser)
    content = {key.replace("-", "_"): (key, value) for key, value in read.items()}
    twice = next((key for key in read if key != content[key.replace("-", "_")][0]), None)
    if twice is not None:
        parser.error(f"{twice} must be given once, got {content[twice.replace('-', '_')][0]} too")
    places = _places(parser)
    for before, name in itertools.pairwise(places):
        if name in content and before not in content:
            parser.error(f"{name} must be given with {before}, got it alone")
    in_order = sorted(content, key=lambda name: places.index(name) if name in places else len(places))
    for key, value in map(content.__getitem__, in_order):
        option = options.get(key.replace("-", "_"))
        if isinstance(value, dict) and option is None:
            continue
        if option is None or option.dest in ("help", "config"):
            parser.error(f"{key} must be the name of an option, which jgg {_command(parser)} --help lists")
        name = option.option_strings[0] if option.option_strings else ""
        if isinstance(option, argparse.BooleanOptionalAction | argparse._StoreTrueAction):
            if not isinstance(value, bool):
                parser.error(f"argument {name}: must be true or false, got {value!r}")
            if value or isinstance(option, argparse.BooleanOptionalAction):
                yield name if value else f"--no-{name.removeprefix('--')}"
        elif isinstance(option, argparse._AppendAction) and isinstance(value, list):
            yield from (f"{name}={each}" for each in value)
        elif isinstance(value, list) and (option.nargs == "+" or len(value) == 1):
            yield from (name, *map(str, value)) if name else map(str, value)
        elif isinstance(value, list | dict):
            parser.error(f"argument {name or key}: must be one value, got {value}")
        else:
            yield f"{name}={value}" if name else str(value)


def _places(parser: Parser) -> list[str]:
    return [action.dest for action in parser._actions if not action.option_strings]


def _read(path: str, parser: Parser) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        parser.error(f"must be a file that can be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        parser.error(f"must be a TOML file: {error}")


def _command(parser: Parser) -> str:
    return parser.prog.rpartition(" ")[2]


def _shown(parser: Parser, name: str) -> str:
    """An option as the command line has it, by its name."""
    (option,) = (action for action in parser._actions if action.dest == name)
    return option.option_strings[0] if option.option_strings else str(option.metavar)
