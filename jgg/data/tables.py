"""Reads rows of parquet and Arrow files with pyarrow, a few at a time."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jgg.core.files import check_regular

KINDS = {"prompt", "completion"}, {"text"}, {"messages"}  # the columns of each kind of row
COLUMNS = *("prompt", "completion", "text", "messages"), *("tools", "weight")
ROWS_AT_ONCE = 256


def table_rows(path: Path, needed: str | None = None) -> Iterator[tuple[str, object]]:
    """The rows of a table, each with its name, such as "train.parquet:3"; the first is 1.

    A row has only the columns that an example may have, or all columns if the table `needed` one, and no nulls: in a
    column of objects every row has all keys, and templates would take a null key as given.

    Raises: ImportError, OSError, ValueError: see `rows`.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ImportError("parquet and Arrow files need pyarrow: pip install pyarrow") from error
    number = 0
    check_regular(path)
    try:
        with _opened(path) as (names, batches):
            if not any(kind <= set(names) for kind in (KINDS if needed is None else [{needed}])):
                expected = '"prompt" and "completion", "text" or "messages"' if needed is None else f'"{needed}"'
                raise ValueError(f"{path} must have the columns {expected}, got {', '.join(names) or 'none'}")
            own = [name for name in (COLUMNS if needed is None else names) if name in names]
            twice = [name for name in own if names.count(name) > 1]
            if twice:
                raise ValueError(f"{path} must have each column once, got several of the name {twice[0]}")
            for batch in batches(own):
                for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                    for row in _python_rows(batch.slice(start, ROWS_AT_ONCE).select(own), path, number + 1):
                        number += 1
                        yield f"{path}:{number}", without_nulls(row)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the second of what is cut off, too
        raise ValueError(f"{path} must be a whole parquet or Arrow file: {' '.join(str(error).split())}") from error


def _python_rows(batch: Any, path: Path, first: int) -> list[object]:
    """The rows of a batch, numbered from `first`; raises ValueError that names a wrong one."""
    try:
        return batch.to_pylist()
    except Exception as error:  # of any type, for values that Python cannot hold
        if batch.num_rows > 1:
            return [row for n in range(batch.num_rows) for row in _python_rows(batch.slice(n, 1), path, first + n)]
        name, text = f"{path}:{first}", " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if isinstance(error, UnicodeDecodeError):
            raise ValueError(f"{name} must be UTF-8, got the byte {error.object[error.start]:#04x}") from error
        raise ValueError(f"{name} must have values that Python can hold, got {text}") from error


def without_nulls(value: object) -> object:
    """A row without keys whose value is None, including those of nested objects."""
    if isinstance(value, dict):
        return {key: without_nulls(own) for key, own in value.items() if own is not None}
    return [without_nulls(own) for own in value] if isinstance(value, list) else value


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Yields the names of a table's columns, and a function that takes columns and yields batches of their rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with path.open("rb") as file:
        start = file.read(6)
    if start.startswith(b"PAR1"):
        # buffered: else all of a group of rows is read at once, which may be all of the file
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=2**20) as table:
            yield table.schema_arrow.names, lambda own: table.iter_batches(ROWS_AT_ONCE, columns=own)
        return
    with pa.memory_map(str(path)) as source:
        if start == b"ARROW1":
            with pa.ipc.open_file(source) as table:
                yield table.schema.names, lambda _: map(table.get_batch, range(table.num_record_batches))
        else:  # what datasets writes
            with pa.ipc.open_stream(source) as table:
                yield table.schema.names, lambda _: table
