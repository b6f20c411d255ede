"""The files that a command writes: what cannot be written is told at the end and loses nothing that was measured."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Output:
    """Writes a command's files, and remembers which could be written."""

    def __init__(self) -> None:
        self._failures: dict[Path, str] = {}  # an empty text for a file that was written

    def write(self, path: Path, write: Callable[[Path], Any]) -> None:
        """Writes a file by a function of its path; if that fails, `report` says so, unless a later call succeeds."""
        try:
            write(path)
            self._failures[path] = ""
        except OSError as error:
            self._failures[path] = error.strerror or str(error)

    def report(self, quiet: bool = False) -> int:
        """Prints which files were written, unless quiet, and to stderr which were not; returns 1 for these, else 0."""
        written = [str(path) for path, failure in self._failures.items() if not failure]
        failures = [f"{path}: {failure}" for path, failure in self._failures.items() if failure]
        if written and not quiet:
            print(f"Wrote {' and '.join(written)}")
        if failures:
            print(f"jgg: could not write {'; '.join(failures)}", file=sys.stderr)
        return int(bool(failures))
