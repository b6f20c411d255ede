"""Records a run's options in a TOML file, and finds which of them changed when the run resumes."""

import json
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path

from jgg.core.files import check_regular, replace_text


def note_run(path: Path, options: Mapping[str, object], noted: Mapping[str, object], comment: str = "") -> None:
    """Writes the options of a run, for `jgg COMMAND --config` to read, and further values as a table [noted].

    Options that are None are left out. Values are strings, paths, numbers, bools and lists of them.
    """
    lines = [f"# {comment}\n"] if comment else []
    lines += [f"{name} = {_toml(value)}\n" for name, value in options.items() if value is not None]
    lines += ["\n[noted]\n", *(f"{name} = {_toml(value)}\n" for name, value in noted.items() if value is not None)]
    replace_text(path, "".join(lines))


def changes(
    path: Path, options: Mapping[str, object], noted: Mapping[str, object], free: Collection[str] = ()
) -> list[str]:
    """What differs from the run recorded in `path`, each as "NAME is VALUE, was VALUE"; options in `free` may differ.

    Raises: ValueError: the file is not TOML.
    """
    before, before_noted = _read(path)
    return _changes(before, _plain(options), free) + _changes(before_noted, _plain(noted), ())


def check_notes(path: Path, *names: str) -> None:
    """Raises FileExistsError or ValueError if a path exists and does not hold the notes of a run.

    Args:
      names: the names of the further values that each run records.

    Raises: ValueError: it is not TOML. OSError: it cannot be read.
    """
    if path.exists() and not set(names) <= _read(path)[1].keys():
        raise FileExistsError(f"{path} is there and notes no run: choose another name")


def noted_in(path: Path) -> dict[str, object]:
    """The further values that a file records about a run.

    Raises: ValueError: the file is not TOML.
    """
    return _read(path)[1]


def _read(path: Path) -> tuple[dict[str, object], dict[str, object]]:
    """The options in a file, and the further values."""
    check_regular(path)
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a TOML file: {' '.join(str(error).split())}") from error
    noted = options.pop("noted", {})
    return options, noted if isinstance(noted, dict) else {}


def _changes(before: Mapping[str, object], now: Mapping[str, object], free: Collection[str]) -> list[str]:
    names = [name for name in {**now, **before} if name not in free and before.get(name) != now.get(name)]
    return [f"{name} is {now.get(name)}, was {before.get(name)}" for name in names]


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    """The values as they read back from a file."""
    return tomllib.loads("".join(f"{name} = {_toml(value)}\n" for name, value in values.items() if value is not None))


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, int | float):
        return repr(value)
    # JSON's strings are TOML's, but for this character
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
