"""Checks, before a command computes anything, that what it writes replaces neither what it reads nor what others wrote.

Files count by what they are, not by their names: links are followed, and what is there must be a file of jgg's.
"""

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from jgg.cli.errors import UsageError
from jgg.core.files import check_regular, is_new_or_empty
from jgg.hf.files import read_object


class Target(NamedTuple):
    """Something that a command writes.

    Attributes:
      option: the option that says where, such as "--output".
      named: what the option names.
      what: what it is: "a folder" or "a file" if the option names it itself, else such as "its log".
      path: the file or folder.
      check: raises ValueError or OSError unless a command may write there.
      is_whole: whether the command writes nothing else into it: a file, or a folder that must hold nothing else.
      goes_on: whether it may be the file of --config, as the notes of a run that goes on are.
    """

    option: str
    named: Path
    what: str
    path: Path
    check: Callable[[], object]
    is_whole: bool = True
    goes_on: bool = False

    def error(self, reason: str) -> UsageError:
        """The error of an option that names the wrong place."""
        if self.path == self.named:
            return UsageError(f"{self.option} must be {self.what} of its own, got {self.named}, {reason}")
        return UsageError(f"{self.option} must be another, got {self.named}: {self.what} is {self.path}, {reason}")


def check_files(read: Iterable[tuple[str, Path]], targets: Iterable[Target]) -> None:
    """Raises UsageError if a command would lose a file, or could not write one.

    Args:
      read: all that the command reads, each with its option.
      targets: all that it writes.
    """
    read, checked = list(read), list[Target]()
    for target in targets:
        for option, path in read:
            if is_same(target.path, path) and not (target.goes_on and option == "--config"):
                raise target.error(f"which {option} reads")
        for other in checked:
            if is_same(target.path, other.path):
                raise target.error(f"which {other.option} writes")
            for inner, outer in ((target, other), (other, target)):
                if outer.is_whole and is_inside(inner.path, outer.path):
                    raise inner.error(f"which is in {outer.path}, of {outer.option}")
        try:
            target.check()
        except UsageError:
            raise
        except (OSError, ValueError) as error:
            raise UsageError(f"{target.option}: {' '.join(str(error).split())}") from error
        checked.append(target)


def is_same(path: Path, other: Path) -> bool:
    """Whether two paths lead to one file or folder, which need not exist: through links, or names in other cases."""
    return _place_of(path) == _place_of(other)


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path leads into a folder; neither need exist."""
    return any(is_same(each, folder) for each in Path(os.path.realpath(path)).parents)


def _place_of(path: Path) -> tuple[object, ...]:
    """The file system's number of the nearest file or folder that is there, and the names from it on."""
    path = Path(os.path.realpath(path))
    for each in (path, *path.parents):
        try:
            status = each.stat()
        except OSError:
            continue
        return status.st_dev, status.st_ino, path.relative_to(each).parts
    return (path,)


def check_writable(option: str, folder: Path) -> None:
    """Raises UsageError unless files can be written into a folder, which may be missing."""
    nearest = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(each))
    reason = None if nearest.is_dir() else f"{nearest} is no folder"
    if reason is None:
        try:  # what the system lets a program write, it says only when it is tried
            with tempfile.TemporaryDirectory(dir=nearest) as trial:
                (Path(trial) / folder.absolute().relative_to(nearest)).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{nearest} does not take it: {error.strerror}"
    if reason is not None:
        raise UsageError(f"{option} must be a folder to write into, got {folder}: {reason}")


def check_new(option: str, folder: Path) -> None:
    """Raises UsageError unless a folder can be written, and is new or empty, as a whole model's must be."""
    check_writable(option, folder)
    if not is_new_or_empty(folder):
        raise UsageError(f"{option} must be new or an empty folder, got {folder}")


def check_results(path: Path, *keys: str) -> None:
    """Raises ValueError if there is another file than one with the results of a command, which have these keys."""
    if path.is_dir() or not path.exists():  # nothing replaces a folder
        return
    check_regular(path)
    try:
        is_own = set(keys) <= read_object(path).keys()
    except ValueError:
        is_own = False
    if not is_own:
        raise ValueError(f"{path} is there and holds no results of this command: choose another name")
