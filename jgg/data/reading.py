"""Reads the rows of files one by one: JSONL, parquet and Arrow, and folders of Hugging Face's datasets."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from jgg.core.files import check_regular
from jgg.data.tables import table_rows


def rows(path: str | os.PathLike[str], *, needed: str | None = None) -> Iterator[tuple[str, object]]:
    """Reads the rows of a file one by one, each with a name for errors, such as "train.jsonl:3".

    Memory holds only one line, or some rows of a table, at a time.

    Args:
      path: a JSONL file, in UTF-8 with or without a byte order mark, whose blank lines are ignored; a parquet or an
        Arrow file; or a folder that `datasets.Dataset.save_to_disk` wrote. A file is recognized by its content, not its
        name.
      needed: a column that each table must have; all columns are then read. By default only columns of examples are.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is none of these, a line is not JSON, or a table lacks a column.
    """
    path = Path(path)
    try:
        if path.is_dir():
            for part in _files_of_dataset(path):
                yield from table_rows(part, needed)
            return
        check_regular(path)
        with path.open("rb") as file:
            start = file.read(6)
        is_table = start.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"))
        yield from table_rows(path, needed) if is_table else _lines(path)
    except OSError as error:
        raise type(error)(f"{path} must be a file that can be read: {error.strerror}") from error


def _files_of_dataset(folder: Path) -> list[Path]:
    """The Arrow files of a folder that `datasets.Dataset.save_to_disk` wrote, in order."""
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(each.name for each in folder.iterdir() if each.is_dir()))
        raise ValueError(f"{folder} must be one split of a dataset, got a folder of several: {splits}")
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        names = [str(file["filename"]) for file in state["_data_files"]]
    except FileNotFoundError:
        raise ValueError(
            f"{folder} must be a file, or a folder that datasets' save_to_disk wrote, got one without state.json: "
            f"give its files"
        ) from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f'{folder / "state.json"} must list files in "_data_files": {error}') from error
    return [folder / Path(name).name for name in names]


def _lines(path: Path) -> Iterator[tuple[str, object]]:
    """The JSON of each non-blank line; only a line feed ends a line, as strings may hold other separators."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            name = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")  # Windows' programs begin with a mark
            except UnicodeDecodeError as error:
                raise ValueError(f"{name} must be UTF-8, got the byte {line[error.start]:#04x}") from error
            if text.strip():
                try:
                    row = json.loads(text)
                except (ValueError, RecursionError) as error:
                    got = f"{text[:80].strip()}: {error}"
                    raise ValueError(f"{name} must be a JSON object on one line, got {got}") from error
                yield name, row
