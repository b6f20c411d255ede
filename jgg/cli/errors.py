"""Turns what can go wrong with files, options, packages and memory into one line; needs no JAX to be imported."""

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INTERRUPTED = 130  # the exit code that shells report for a command ended by an interrupt from the keyboard
TERMINATED = 143  # and for one that SIGTERM ended


class UsageError(ValueError):
    """Arguments that do not fit together; `main` prints the message under the command's usage."""


def import_with_extra(module: str, extra: str | None) -> Any:
    """Imports a module of jgg that needs an extra; if that is not installed, exits and says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if extra is None or error.name is None or error.name.partition(".")[0] == "jgg":
            raise
        message = f"jgg: {error.name} is not installed: pip install 'jgg[{extra}]'"
        raise SystemExit(message) from error


@contextlib.contextmanager
def one_line(extra: str = "train") -> Iterator[None]:
    """Raises UsageError for what a folder, a file or an option is found to be wrong by.

    Ends the process where a package is missing, with the extra of jgg that installs it.
    """
    try:
        yield
    except UsageError:
        raise
    except ImportError as error:
        hint = "" if "pip install" in str(error) else f": pip install 'jgg[{extra}]'"
        raise SystemExit(f"jgg: {error}{hint}") from error
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(" ".join(str(error).split())) from error


@contextlib.contextmanager
def enough_memory(options: str) -> Iterator[None]:
    """Ends the process in one line where memory runs out; it names the options that take less."""
    import jax

    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        text = " ".join(str(error).split())[:200]
        if isinstance(error, jax.errors.JaxRuntimeError) and not text.startswith("RESOURCE_EXHAUSTED"):
            raise
        raise SystemExit(f"jgg: memory runs out: take less of {options}{_share_of_gpu()} ({text})") from error


def _share_of_gpu() -> str:
    """How much of the GPU's memory JAX may use, and the setting that limits it; nothing without a GPU."""
    import jax

    if jax.default_backend() != "gpu":
        return ""
    names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    name = next(filter(os.environ.get, names), names[1])
    share = float(os.environ.get(name) or 0.75)
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    size = "" if limit is None else f", {limit / 2**30:.1f} GiB"
    return f"; JAX may use {share:.0%} of the GPU's memory{size}, and more with {name} above {share:g}"


@contextlib.contextmanager
def writes(path: Path) -> Iterator[None]:
    """Ends the process in one line where a file or a folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise SystemExit(f"jgg: could not write {path}: {error.strerror or ' '.join(str(error).split())}") from error


def told[Value](values: Iterator[Value]) -> Iterator[Value]:
    """The values; what goes wrong in making them, not in what the caller does with them, is told in one line."""
    while True:
        with one_line():
            new = next(values, None)
        if new is None:
            return
        yield new
