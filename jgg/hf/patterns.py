"""Matches names by regular expressions in polynomial time; `re` backtracks, and some patterns take it for ever."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator

_TOKEN = re.compile(r"\(\?P<\w+>|\(\?[:=!]|\{\d*,?\d*\}\??|[*+?]\??|\[\^?\]?(?:\\.|[^\]\\])*\]|\\.|.", re.DOTALL)
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_ESCAPES = set("dDwWsSntrfva")  # each stands for one character
_AT_A_WORD = {"\\b": True, "\\B": False}


def check_pattern(pattern: str) -> None:
    """Raises ValueError, with the reason alone, unless `matches` takes the pattern."""
    try:
        re.compile(pattern)
        if not _is_plain(pattern):
            _parsed(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error


def matches(pattern: str, name: str) -> bool:
    """Returns what `bool(re.fullmatch(pattern, name))` does.

    Raises: ValueError: the pattern has what is not regular, such as a back-reference, or a lookbehind or flags.
    """
    if _is_plain(pattern):
        return bool(re.fullmatch(pattern, name))
    return bool(_ends(_parsed(pattern), name) >> len(name) & 1)


def matches_end(pattern: str, name: str) -> bool:
    r"""Returns whether the pattern matches the name, or what follows one of its dots, as `matches` does."""
    if _is_plain(pattern):
        return bool(re.fullmatch(rf"(?:.*\.)?{pattern}", name))
    return matches(rf"(?:.*\.)?(?:{pattern})", name)


def _is_plain(pattern: str) -> bool:
    """Whether each part of the pattern matches one character, so that `re` never goes back."""
    return set("*+?{|(").isdisjoint(pattern)


@dataclasses.dataclass(frozen=True, eq=False)
class _Node:
    """A part of a pattern: `kind` of `parts`, or of what `test` accepts.

    Kinds: "one" character that `test` takes; "here", a place in the text that `test` takes; "ahead", a place where the
    part matches what follows, or does not if `least` is 0; "either" of the parts; "chain" of the parts; "repeat" of the
    part, at least `least` times and at most `most` times (None: any number).
    """

    kind: str
    parts: tuple["_Node", ...] = ()
    test: Callable[..., bool] = bool
    least: int = 0
    most: int | None = None


def _ends(root: _Node, text: str) -> int:
    """The places where a match from the text's beginning may end, as the bits of a number.

    Each part is looked at once for each place, so that time grows with the pattern's length and a power of the text's.
    """

    @functools.cache
    def ends(node: _Node, start: int) -> int:
        match node.kind:
            case "one":
                return 1 << start + 1 if start < len(text) and node.test(text[start]) else 0
            case "here":
                return 1 << start if node.test(text, start) else 0
            case "ahead":
                return 1 << start if bool(ends(node.parts[0], start)) == bool(node.least) else 0
            case "either":
                return functools.reduce(lambda found, part: found | ends(part, start), node.parts, 0)
            case "chain":
                return functools.reduce(then, node.parts, 1 << start)
            case _:
                return repeated(node, start)

    def then(places: int, node: _Node) -> int:
        return functools.reduce(lambda found, start: found | ends(node, start), _bits(places), 0)

    def repeated(node: _Node, start: int) -> int:
        (part,) = node.parts
        limit = len(text) + 1  # of so many times one matched nothing, so that more change nothing
        places = 1 << start
        for _ in range(min(node.least, limit)):
            places = then(places, part)
        new = places
        for _ in range(limit if node.most is None else min(node.most - node.least, limit)):
            new = then(new, part) & ~places
            if not new:
                break
            places |= new
        return places

    return ends(root, 0)


def _bits(number: int) -> Iterator[int]:
    """The places of the bits that are set."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


@functools.lru_cache(4096)
def _parsed(pattern: str) -> _Node:
    """The pattern, which `re` compiles."""
    tokens = _TOKEN.findall(pattern)[::-1]
    node = _either(tokens)
    if tokens:
        raise ValueError(f"unbalanced {tokens[-1]}")
    return node


def _either(tokens: list[str]) -> _Node:
    """Parses alternatives, up to a parenthesis that closes."""
    chains = [_chain(tokens)]
    while tokens and tokens[-1] == "|":
        tokens.pop()
        chains.append(_chain(tokens))
    return chains[0] if len(chains) == 1 else _Node("either", tuple(chains))


def _chain(tokens: list[str]) -> _Node:
    parts: list[_Node] = []
    while tokens and tokens[-1] not in ("|", ")"):
        node = _atom(tokens.pop(), tokens)
        counts = _counts(tokens[-1]) if tokens else None
        if counts is not None:
            tokens.pop()
            node = _Node("repeat", (node,), least=counts[0], most=counts[1])
        parts.append(node)
    return _Node("chain", tuple(parts))


def _counts(token: str) -> tuple[int, int | None] | None:
    """How often a quantifier, greedy or not, lets a part be repeated; None if the token is none."""
    token = token if token == "?" else token.removesuffix("?")
    if token in _COUNTS:
        return _COUNTS[token]
    if len(token) < 3:
        return None
    low, comma, high = token[1:-1].partition(",")
    if token[0] != "{" or not (comma or low):
        return None
    return int(low or 0), int(high) if high else None if comma else int(low)


def _atom(token: str, tokens: list[str]) -> _Node:
    """Parses what a quantifier may follow."""
    if token in ("(", "(?:", "(?=", "(?!") or token.startswith("(?P<"):
        if token == "(" and tokens and tokens[-1].startswith("?"):
            raise ValueError("groups may begin with (, (?:, (?P<name>, (?= or (?! alone")
        node = _either(tokens)
        tokens.pop()  # the parenthesis that closes
        return node if token not in ("(?=", "(?!") else _Node("ahead", (node,), least=int(token == "(?="))
    if token in ("^", "\\A"):
        return _Node("here", test=lambda text, place: place == 0)
    if token in ("$", "\\Z"):
        return _Node("here", test=lambda text, place: place == len(text) or (token == "$" and text[place:] == "\n"))
    if token in _AT_A_WORD:
        return _Node("here", test=lambda text, place: _is_edge(text, place) == _AT_A_WORD[token])
    if _counts(token) is not None:
        raise ValueError(f"{token} must follow what it repeats, and may not follow another quantifier")
    if token[0] == "\\" and token[1].isalnum() and token[1] not in _ESCAPES:
        raise ValueError(f"{token} is not supported")
    one = re.compile(token if len(token) > 1 or token == "." else re.escape(token))
    return _Node("one", test=lambda character: one.fullmatch(character) is not None)


def _is_edge(text: str, place: int) -> bool:
    """Whether a word begins or ends at a place."""
    is_word = [bool(re.match(r"\w", character)) for character in (text[:place][-1:], text[place : place + 1])]
    return is_word[0] != is_word[1]
