"""Turns what can go wrong in a run into one line."""

import contextlib
from collections.abc import Iterator

import jax

from jgg.cli.options import UsageError
from jgg.train import TrainingError


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Raises UsageError for what a folder, a file or an option is found to be wrong by."""
    try:
        yield
    except UsageError:
        raise
    except ImportError as error:
        raise SystemExit(f"jgg: {error}: pip install 'jgg[train]'") from error
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(" ".join(str(error).split())) from error


@contextlib.contextmanager
def training(what: str) -> Iterator[None]:
    """Ends the process in one line where training cannot go on, or where memory runs out.

    Args:
      what: the options that take less memory.
    """
    try:
        yield
    except TrainingError as error:
        raise SystemExit(f"jgg: {error}") from error
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        text = " ".join(str(error).split())[:200]
        if isinstance(error, jax.errors.JaxRuntimeError) and not text.startswith("RESOURCE_EXHAUSTED"):
            raise
        raise SystemExit(f"jgg: memory runs out: take less of {what} ({text})") from error
