"""Turns what can go wrong in a run into one line."""

import contextlib
from collections.abc import Iterator

from jgg.cli.errors import enough_memory, one_line
from jgg.train import TrainingError

__all__ = ["one_line", "training"]


@contextlib.contextmanager
def training(what: str) -> Iterator[None]:
    """Ends the process in one line where training cannot go on, or where memory runs out.

    Args:
      what: the options that take less memory.
    """
    try:
        with enough_memory(what):
            yield
    except TrainingError as error:
        raise SystemExit(f"jgg: {error}") from error
