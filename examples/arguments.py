"""Arguments of finetune.py and generate.py: types of options, and a parser that says in one line what is wrong."""

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator

import jax


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Argument type: a whole number from `least` to `most`, by default the largest int32."""

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if least <= int(text) <= most:
                return int(text)
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, got {text!r}")

    return parse


def number(expected: str, is_valid: Callable[[float], bool]) -> Callable[[str], float]:
    """Argument type: a number for which `is_valid` holds; `expected` describes it."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if is_valid(float(text)):
                return float(text)
        raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")

    return parse


positive = number("a finite number above 0", lambda value: 0 < value < math.inf)


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str):
        """Ends the program, without the list of all options."""
        self.exit(2, f"{self.prog}: {message}\n")


@contextlib.contextmanager
def enough_memory(options: str) -> Iterator[None]:
    """Ends the program in one line where memory runs out; it names the options that take less."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        text = " ".join(str(error).split())[:200]
        if isinstance(error, jax.errors.JaxRuntimeError) and not text.startswith("RESOURCE_EXHAUSTED"):
            raise
        raise SystemExit(f"memory runs out: take less of {options} ({text})") from error
