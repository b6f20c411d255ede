"""Parses the command line of `jgg`, and the file of options that `--config run.toml` names, without JAX."""

import argparse
import itertools
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from jgg.cli.arguments import Parser
from jgg.cli.commands import COMMANDS
from jgg.cli.declarations import REQUIRED, Declaration, Flag, Options, add_options
from jgg.core.versions import __version__

# also in pyproject.toml, mkdocs.yml and README.md
DESCRIPTION = (
    "Fine-tune, train and run mixture-of-experts (MoE) models in JAX, with fast Triton kernels for NVIDIA GPUs."
)


def make_parser() -> Parser:
    """Makes the parser of `jgg` and its commands.

    Parsed arguments have the options that are given, `command`, its name, and `parser`, the command's.
    """
    parser = Parser(prog="jgg", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"jgg {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, options in COMMANDS.items():
        description = options.__doc__
        command = commands.add_parser(
            name,
            help=description,
            description=description,
            epilog=options.epilog(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,  # a default would take the place of what a file says
        )
        add_options(command, options)
        command.set_defaults(parser=command)
    return parser


def parse(arguments: Sequence[str]) -> Options:
    """The options of a command: those of the command line, then those of the file of --config, then defaults.

    Without arguments it shows help. After help or a mistake the process ends here.
    """
    args, unknown = make_parser().parse_known_args(arguments or ["--help"])
    given = vars(args)
    parser, command = given.pop("parser"), given.pop("command")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}: jgg {command} --help lists the options")
    declared, values = COMMANDS[command].declared(), given
    if "config" in given:
        # one on the command line takes the place of all that stand for it in the file
        replaced = {declared[name].alternative for name in given} - {None}
        read = _options_in(given["config"], parser, COMMANDS[command])
        kept = {name: value for name, value in read.items() if declared[name].alternative not in replaced}
        values = kept | given
    needed = {name: each for name, each in declared.items() if each.default is REQUIRED}
    missing = [each.flag(name) for name, each in needed.items() if name not in values]
    if missing:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    options = COMMANDS[command](**values)
    options.parser = parser
    return options


def _options_in(path: str, parser: Parser, options: type[Options]) -> dict[str, Any]:
    """The options that a file gives; ends the process in one line if it is wrong."""
    parser.where = f"--config {path}: "
    read = vars(parser.parse_args(list(_arguments_in(path, parser, options))))
    parser.where = ""
    return {name: value for name, value in read.items() if name != "parser"}


def _arguments_in(path: str, parser: Parser, options: type[Options]) -> Iterator[str]:
    """The command line that a file stands for. Its tables, which say more of a run, are no options."""
    declared = {name: each for name, each in options.declared().items() if name != "config"}
    read = _read(path, parser)
    content = {key.replace("-", "_"): (key, value) for key, value in read.items()}
    twice = next((key for key in read if key != content[key.replace("-", "_")][0]), None)
    if twice is not None:
        parser.error(f"{twice} must be given once, got {content[twice.replace('-', '_')][0]} too")
    places = [name for name, each in declared.items() if each.is_place]
    for before, name in itertools.pairwise(places):
        if name in content and before not in content:
            parser.error(f"{name} must be given with {before}, got it alone")
    for name in sorted(content, key=lambda name: places.index(name) if name in places else len(places)):
        key, value = content[name]
        if name in declared:
            flag = "" if name in places else declared[name].flag(name)
            yield from _arguments_of(flag, key, value, parser, declared[name])
        elif not isinstance(value, dict):
            parser.error(f"{key} must be the name of an option, which jgg {options.__name__.lower()} --help lists")


def _arguments_of(flag: str, key: str, value: object, parser: Parser, option: Declaration) -> Iterator[str]:
    is_flag = option.action is Flag
    if any("\0" in str(each) for each in (value if isinstance(value, list) else [value])):
        parser.error(f"argument {flag or key}: must have no null byte, got {value!r}")
    if is_flag or option.action == "store_true":
        if not isinstance(value, bool):
            parser.error(f"argument {flag}: must be true or false, got {value!r}")
        if value or is_flag:
            yield flag if value else f"--no-{flag.removeprefix('--')}"
    elif option.action == "append" and isinstance(value, list):
        yield from (f"{flag}={each}" for each in value)
    elif isinstance(value, list) and ("nargs" in option.settings or len(value) == 1):
        yield from (flag, *map(str, value)) if flag else map(str, value)
    elif isinstance(value, list | dict):
        parser.error(f"argument {flag or key}: must be one value, got {value}")
    else:
        yield f"{flag}={value}" if flag else str(value)


def _read(path: str, parser: Parser) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        parser.error(f"must be a file that can be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        parser.error(f"must be a TOML file: {error}")
