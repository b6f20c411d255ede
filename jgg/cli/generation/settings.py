"""How `jgg generate` draws tokens: by its options, and else as transformers does by generation_config.json."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jgg.core.arguments import as_finite, as_flag, as_int, check
from jgg.hf.files import read_object

MAX_NEW_TOKENS = 256  # where neither an option nor the file says how many; transformers' max_length is 20


class _Key(NamedTuple):
    """A number in generation_config.json: transformers' default, which numbers it may be, and these in words."""

    default: float
    is_valid: Callable[[float], bool]
    expected: str
    is_whole: bool = False


_KEYS = {
    "temperature": _Key(1.0, lambda value: value >= 0, "at least 0"),
    "top_k": _Key(50, lambda value: value >= 0, "at least 0", is_whole=True),
    "top_p": _Key(1.0, lambda value: 0 < value <= 1, "greater than 0 and at most 1"),
    "min_p": _Key(0.0, lambda value: 0 <= value <= 1, "at least 0 and at most 1"),
    "repetition_penalty": _Key(1.0, lambda value: value > 0, "greater than 0"),
    "max_new_tokens": _Key(MAX_NEW_TOKENS, lambda value: value >= 1, "at least 1", is_whole=True),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `jgg.models.stream` and `stream_text` are called with; `top_k` is 0 for all tokens."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_new_tokens: int
    stop: tuple[str, ...]

    def drawing(self) -> dict[str, Any]:
        """The arguments of `stream` that say how tokens are drawn."""
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        return {name: getattr(self, name) for name in names} | {"top_k": self.top_k or None}


def settings_of(args: argparse.Namespace, folder: Path) -> Settings:
    """The settings by options, by the folder's generation_config.json, and by transformers' defaults.

    As in transformers, temperature, top_k, top_p and min_p count only where tokens are drawn: if the file says
    `do_sample`, or an option gives a temperature.

    Raises: ValueError, TypeError: the file is no JSON object, or a number in it is wrong.
    """
    path = folder / "generation_config.json"
    content = read_object(path) if path.is_file() else {}
    found: dict[str, Any] = {name: getattr(args, name) for name in _KEYS}
    found |= {name: _number(content, name, path) for name, value in found.items() if value is None}
    do_sample = content.get("do_sample")
    is_drawn = args.temperature is not None or (do_sample is not None and as_flag(f"do_sample of {path}", do_sample))
    if not is_drawn:
        found["temperature"] = 0.0
    return Settings(
        **found,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        stop=tuple(_stop_strings(content, path) if args.stop is None else args.stop),
    )


def _number(content: dict[str, object], name: str, path: Path) -> object:
    """A number of the file, or transformers' default."""
    key, value, where = _KEYS[name], content.get(name), f"{name} of {path}"
    if value is None:
        return key.default
    number = as_int(where, value) if key.is_whole else as_finite(where, value)
    check(key.is_valid(number), f"{where} must be {key.expected}, got {number}.")
    return number


def _stop_strings(content: dict[str, Any], path: Path) -> list[str]:
    value = content.get("stop_strings")
    strings = [] if value is None else [value] if isinstance(value, str) else value
    is_right = isinstance(strings, list) and all(isinstance(each, str) and each for each in strings)
    check(is_right, f"stop_strings of {path} must be a text, a list of texts or null, got {value!r}.")
    return strings
