"""Writes a command's files; a failure to write one is reported at the end and does not stop the command."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Output:
    """Writes a command's files, and remembers which could be written."""

    def __init__(self) -> None:
        self._failures: dict[Path, str] = {}  # why each file could not be written; "" if it was written

    def write(self, path: Path, write: Callable[[Path], Any]) -> None:
        """Calls `write(path)`; if it fails, `report` says so, unless a later call for the same path succeeds."""
        try:
            write(path)
            self._failures[path] = ""
        except OSError as error:
            self._failures[path] = error.strerror or str(error)

    def report(self, quiet: bool = False) -> int:
        """Prints the files written, unless quiet, and the failures to stderr; returns 1 after a failure, else 0."""
        written = [str(path) for path, failure in self._failures.items() if not failure]
        failures = [f"{path}: {failure}" for path, failure in self._failures.items() if failure]
        if written and not quiet:
            print(f"Wrote {' and '.join(written)}")
        if failures:
            print(f"jgg: could not write {'; '.join(failures)}", file=sys.stderr)
        return int(bool(failures))
