"""What commands share: types of arguments, an error for wrong ones, numbers as text, imports of an extra's packages."""

import argparse
import importlib
import math
from pathlib import Path

from jgg.implementations import choice
from jgg.target import device_target

INTERRUPTED = 130  # exit code, as a shell reports a command that an interrupt from the keyboard ended


class UsageError(ValueError):
    """Arguments that do not fit together; `main` prints the message under the command's usage."""


def positive_int(text: str) -> int:
    """Argument type: a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def positive_float(text: str) -> float:
    """Argument type: a number greater than 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, got {value}")
    return value


def check_out(prefix: str):
    """Raises UsageError for a prefix of output files, --out, whose folder does not exist."""
    folder = Path(prefix).parent
    if not folder.is_dir():
        raise UsageError(f"--out {prefix} is in {folder}, which is no folder")


def check_implementation(name: str | None):
    """Raises UsageError for an --implementation that cannot run on this machine."""
    if name == "triton" and device_target() is None:
        raise UsageError("--implementation triton needs a GPU that JAX can use: see jgg info")
    try:
        choice.check_implementation(name)
    except (ImportError, ValueError) as error:
        raise UsageError(str(error)) from error


def number(value: float | None) -> str:
    """A number of three digits or more; "-" for None."""
    if value is None:
        return "-"
    decimals = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{min(decimals, 5)}f}"


def import_with_extra(module: str, extra: str):
    """Imports a module of jgg that needs an extra; without it, exits with what installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "jgg":
            raise
        message = f"jgg: {error.name} is not installed: pip install 'jgg[{extra}]'"
        raise SystemExit(message) from error
