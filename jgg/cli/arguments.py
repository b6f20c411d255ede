"""Types of arguments, which say what was expected, and the parser of a command, whose errors are one line."""

import argparse
import math
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import NoReturn


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Argument type: a whole number from `least` to `most`, by default the largest int32."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, got {value}")
        if value > most:
            raise argparse.ArgumentTypeError(f"must be {most} or less, got {value}")
        return value

    return parse


def number(expected: str, is_valid: Callable[[float], bool]) -> Callable[[str], float]:
    """Argument type: a number for which `is_valid` holds; `expected` describes it."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
        if not is_valid(value):
            raise argparse.ArgumentTypeError(f"must be {expected}, got {value}")
        return value

    return parse


positive_int = whole(1)  # sizes are computed in int32
seed = whole(0, 2**32 - 1)  # what NumPy and JAX accept; different seeds give different data
positive_float = number("greater than 0 and finite", lambda value: 0 < value < math.inf)


def file(text: str) -> str:
    """Argument type: the name of a file, which need not exist."""
    if os.path.basename(text) in ("", ".", ".."):
        raise argparse.ArgumentTypeError(f"must end in the name of a file, not of a folder, got {text!r}")
    return text


def prefix(text: str) -> str:
    """Argument type: a prefix of files, in a folder that exists and takes files."""
    folder = os.path.dirname(file(text)) or "."
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"{text} is in {folder}, which is no folder")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} is in {folder}, which takes no files: {error.strerror}") from None
    return text


def new_file(text: str) -> pathlib.Path:
    """Argument type: a file to write, in a folder that exists and takes files."""
    path = pathlib.Path(prefix(text))
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, got the folder {text}")
    return path


def path(text: str) -> pathlib.Path:
    """Argument type: a path other than "", which pathlib takes for the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("must be a path, got ''")
    return pathlib.Path(text)


def named_folder(text: str) -> pathlib.Path:
    """Argument type: a folder that has a name; files next to it are named after it."""
    folder = path(text)
    if folder.absolute().name in ("", ".."):
        raise argparse.ArgumentTypeError(f"must end in the name of a folder, got {text!r}")
    return folder


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, without the list of all options, and takes no part of an option's name for it.

    Attributes:
      where: what the message of a mistake begins with.
    """

    where = ""

    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, **{"allow_abbrev": False} | settings)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> object:
        """The value of an argument; older Pythons take the "--" of --option=-- for the end of all options."""
        if action.option_strings and arg_strings == ["--"]:
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return value if action.nargs is None else [value]
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        """Ends the process."""
        self.exit(2, f"{self.prog}: error: {self.where}{' '.join(message.split())}\n")
