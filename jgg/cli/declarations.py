"""Options of a command as the fields of one dataclass, from which its parser, its files and its help are made."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

REQUIRED = dataclasses.MISSING  # the default of an option that must be given
_SITE = "https://jgg-project.github.io/jgg/latest"


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What an option has in addition to its name and its type in Python.

    Attributes:
      group: the heading of --help that it stands under.
      what: its meaning.
      default: its value where it is not given; REQUIRED if it must be.
      settings: further arguments of `add_argument`.
      shown: its default in words; None for the default itself.
      is_place: whether it is known by its place on the command line, not by its name.
      is_read: whether it names what the command reads.
      is_noted: whether the notes of a run have it.
      may_change: whether it may be another one where a run goes on.
      alternative: the name that options share which stand for each other.
      is_exclusive: whether at most one of these may be given.
    """

    group: str = ""
    what: str = ""
    default: object = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shown: str | None = None
    is_place: bool = False
    is_read: bool = False
    is_noted: bool = True
    may_change: bool = False
    alternative: str | None = None
    is_exclusive: bool = False

    @property
    def action(self) -> str | type[argparse.Action] | None:
        """The action of `add_argument`."""
        return self.settings.get("action")

    def flag(self, name: str) -> str:
        """The option as a command line has it."""
        return self.settings["metavar"] if self.is_place else f"--{name.replace('_', '-')}"

    def help(self, name: str) -> str:
        """The meaning and the default; of a flag that is on, what --no-NAME means, which is all that --help shows."""
        shown: object = self.shown
        if self.default is True:
            return f"do not {self.what}".replace("%", "%%")
        if shown is None and self.default is not REQUIRED and self.default is not False:
            shown = self.default
        return (self.what if shown is None else f"{self.what} (default: {shown})").replace("%", "%%")


class Flag(argparse.BooleanOptionalAction):
    """Is set by --NAME and --no-NAME; of these --help shows the one that changes something."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """Sets the option; --help leaves one of its names to it."""
        setattr(namespace, self.dest, not str(option_string).startswith("--no-"))


def option(
    group: str, what: str, kind: Callable[[str], object] | None = None, default: object = None, **settings: object
) -> Any:
    """A field of a command's options: the heading it stands under, its meaning, the type of its argument, its default.

    `settings` are other attributes of `Declaration`, and arguments of `add_argument`.
    """
    settings |= {"group": group, "what": what, "default": default} | ({} if kind is None else {"type": kind})
    return _field(Declaration(), **settings)


def flag(group: str, what: str, default: bool = False, **settings: Any) -> Any:
    """A field that is set by --NAME and --no-NAME."""
    return option(group, what, default=default, action=Flag, **settings)


def switch(group: str, what: str, **settings: Any) -> Any:
    """A field that is set by --NAME."""
    return option(group, what, default=False, action="store_true", **settings)


def changed(options: type, name: str, **changes: object) -> Any:
    """A copy of a field of other options, with another default or other settings."""
    (field,) = (field for field in dataclasses.fields(options) if field.name == name)
    return _field(field.metadata["option"], **changes)


def _field(base: Declaration, **changes: Any) -> Any:
    own = {name: changes.pop(name) for name in vars(base).keys() & changes.keys()}
    declaration = dataclasses.replace(base, settings={**base.settings, **changes}, **own)
    return dataclasses.field(default=declaration.default, metadata={"option": declaration})


@dataclasses.dataclass(kw_only=True)
class Options:
    """The options of a command, which its subclass of the command's name has; its docstring is the description.

    Attributes:
      example: a command line.
      page: the page of the documentation.
      module: whose function `run` runs the command.
      extra: the extra of jgg that the command needs.
      parser: the parser of the command, once they are parsed.
    """

    example: ClassVar[str]
    page: ClassVar[str] = "command/"
    module: ClassVar[str]
    extra: ClassVar[str | None] = None
    parser: argparse.ArgumentParser = dataclasses.field(init=False, repr=False, compare=False)

    @classmethod
    def declared(cls) -> dict[str, Declaration]:
        """The declaration of each option, by its name."""
        fields = dataclasses.fields(cls)
        return {field.name: field.metadata["option"] for field in fields if "option" in field.metadata}

    @classmethod
    def epilog(cls) -> str:
        """What --help ends with."""
        return f"example:\n  {cls.example}\n\npage:\n  {_SITE}/{cls.page}"

    @property
    def command(self) -> str:
        """The name of the command."""
        return type(self).__name__.lower()

    def reads(self) -> Iterator[tuple[str, Path]]:
        """What the command reads, each with its option."""
        for name, option in self.declared().items():
            value = getattr(self, name) if option.is_read else None
            for each in value if isinstance(value, list) else [] if value is None else [value]:
                yield option.flag(name), Path(each)

    def noted(self) -> dict[str, object]:
        """What the notes of a run have, with full paths."""
        noted = {name: option for name, option in self.declared().items() if option.is_noted}
        return {name: _whole(getattr(self, name), option.is_read) for name, option in noted.items()}


def _whole(value: object, is_read: bool) -> object:
    """An option with full paths; a name of what is read is a path if that is there, else it is one on the Hub."""
    if isinstance(value, list):
        return [_whole(each, is_read) for each in value]
    if isinstance(value, Path) or (is_read and isinstance(value, str) and Path(value).exists()):
        return Path(value).resolve()
    return value


def add_options(parser: argparse.ArgumentParser, options: type[Options], *names: str) -> None:
    """Declares the options of a command, or those of these names alone, under their headings.

    They have no defaults if the parser's `argument_default` suppresses them.
    """
    groups: dict[str | None, Any] = {}
    for name, each in options.declared().items():
        if names and name not in names:
            continue
        if each.group not in groups:
            groups[each.group] = parser.add_argument_group(each.group)
        group = groups[each.group]
        if each.is_exclusive:
            if each.alternative not in groups:
                groups[each.alternative] = group.add_mutually_exclusive_group()
            group = groups[each.alternative]
        settings = {**each.settings, "help": each.help(name)}
        if each.is_place:
            settings["nargs"] = "?"
        if parser.argument_default is not argparse.SUPPRESS:
            settings["default"] = None if each.default is REQUIRED else each.default
        action = group.add_argument(name if each.is_place else each.flag(name), **settings)
        if each.action is Flag:  # both stay known to the parser
            action.option_strings = [action.option_strings[bool(each.default)]]
