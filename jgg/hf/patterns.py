"""Matches names with regular expressions from adapters. They come from other people, so matching time is limited."""

import re

_SECONDS = 5.0  # for one name; a pattern that is no trap takes microseconds


def check_pattern(pattern: str) -> None:
    """Raises ValueError, with only the reason, unless `re` accepts the pattern."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error


def matches(pattern: str, name: str) -> bool:
    """Returns what `bool(re.fullmatch(pattern, name))` does.

    Raises: ValueError: matching takes seconds.
    """
    if set("*+?{|(").isdisjoint(pattern):  # each part matches one character: `re` never goes back
        return bool(re.fullmatch(pattern, name))
    import regex

    try:
        return bool(regex.fullmatch(pattern, name, timeout=_SECONDS))
    except TimeoutError as error:
        raise ValueError(f"{pattern!r} takes more than {_SECONDS:.0f} s to match {name!r}") from error


def matches_end(pattern: str, name: str) -> bool:
    r"""Returns whether the pattern matches the whole name, or everything after one of its dots, as `matches` does."""
    return matches(rf"(?:.*\.)?(?:{pattern})", name)
