"""Writes a command's files; a failure to write one is reported at the end and does not stop the command."""

import sys
from collections.abc import Callable
from pathlib import Path


class Output:
    """Writes a command's files, and remembers which could be written."""

    def __init__(self) -> None:
        self._written: dict[Path, Path] = {}  # where each file is that could be written
        self._failures: dict[Path, str] = {}  # why others could not

    def write(self, path: Path, write: Callable[[Path], Path]) -> None:
        """Calls `write(path)`, which returns where it wrote.

        If it fails, `report` says so, unless a later call for the same path succeeds.
        """
        try:
            self._written[path] = write(path)
            self._failures.pop(path, None)
        except OSError as error:
            self._failures[path] = error.strerror or str(error)

    def report(self, quiet: bool = False) -> int:
        """Prints the files written, unless quiet, and the failures to stderr; returns 1 after a failure, else 0."""
        written = [str(place) for path, place in self._written.items() if path not in self._failures]
        failures = [f"{path}: {failure}" for path, failure in self._failures.items()]
        if written and not quiet:
            print(f"Wrote {' and '.join(written)}")
        if failures:
            print(f"jgg: could not write {'; '.join(failures)}", file=sys.stderr)
        return int(bool(failures))
