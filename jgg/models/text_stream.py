"""`stream_text`: the text of new tokens as it comes, up to a stop string, which may end inside a token."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jgg.core.arguments import check
from jgg.models.streaming import Stream

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # at the end of a text for the bytes of a character that is not whole yet


def stream_text(
    stream: Stream,
    decoders: Sequence[Callable[[list[int]], str]],
    *,
    stop: Sequence[str] = (),
    stop_tokens: Sequence[int] = (),
) -> Iterator[list[str]]:
    """Yields the text of each row of a `jgg.models.Stream`, piece by piece.

    A row ends before the first stop string in its text. A stop string may begin and end inside tokens; if two overlap,
    the one that ends first counts. Text that may be the beginning of a stop string is held back until this is known,
    and so is text that further tokens may change, such as the bytes of an incomplete character. So the pieces add up to
    the text of all tokens at once, whatever the stream's chunks.

    Args:
      stream: a stream of R rows that has not yielded a token yet.
      decoders: for each row, a function from its new tokens to the text that they add, such as
        `functools.partial(jgg.data.continuation, tokenizer, prompt)`. The text of more tokens must begin with the
        text of fewer, except for U+FFFD at the end, which stands for an incomplete character. A text with an attribute
        `settled`, such as `continuation` returns, need only keep that many of its first characters.
      stop: strings that end a row, and are left out of its text; not empty.
      stop_tokens: tokens that end a row of the stream and are left out of its text.

    Yields: a piece of text for each row, often "". At the end, `stream.is_done` tells which rows were ended by a stop
      token or a stop string.

    Raises: ValueError: an argument is wrong, or the model's logits are NaN.
    """
    rows = len(stream.is_done)
    check(len(decoders) == rows, f"decoders must be of {rows} rows, got {len(decoders)}.")
    check(all(stop), f"stop must have strings that are not empty, got {list(stop)!r}.")
    return _pieces(stream, decoders, tuple(stop), frozenset(stop_tokens))


def _pieces(
    stream: Stream,
    decoders: Sequence[Callable[[list[int]], str]],
    stop: tuple[str, ...],
    stop_tokens: frozenset[int],
) -> Iterator[list[str]]:
    given, is_cut = [0] * len(decoders), np.zeros(len(decoders), bool)  # how many characters of each row are out
    for _ in stream:
        is_last = stream.tokens.shape[1] == stream.max_new_tokens
        pieces = []
        for row, decode in enumerate(decoders):
            text = ""
            if not is_cut[row]:
                tokens = _tokens_of(stream, row, stop_tokens)
                text, is_cut[row] = cut(decode(tokens), stop, is_last=is_last or bool(stream.is_done[row]))
            pieces.append(text[given[row] :])
            given[row] = max(given[row], len(text))
        stream.end(is_cut)
        yield pieces


class Cut(NamedTuple):
    """The part of a text that is certain, and whether a stop string has ended it."""

    text: str
    is_stopped: bool


def cut(text: str, stop: Sequence[str], *, is_last: bool = True) -> Cut:
    """A text up to the first stop string, the one that ends first.

    Args:
      is_last: whether nothing follows. If not, text that may change or begin a stop string is left out.
    """
    if not is_last:
        text = text[: getattr(text, "settled", len(text))].rstrip(_UNKNOWN)
    ends = [(text.find(each) + len(each), -len(each)) for each in stop if each in text]
    if ends:
        end, size = min(ends)
        return Cut(text[: end + size], True)
    if is_last:
        return Cut(text, False)
    begun = max((size for each in stop for size in range(1, len(each)) if text.endswith(each[:size])), default=0)
    return Cut(text[: len(text) - begun], False)


def _tokens_of(stream: Stream, row: int, stop_tokens: frozenset[int]) -> list[int]:
    """The new tokens of a row, without the one that ended it."""
    length = int(stream.lengths[row])
    has_all = length == stream.tokens.shape[1] or stream.tokens[row, length] >= 0
    check(has_all, f"the model's logits are NaN after {length} new tokens")
    tokens = stream.tokens[row, :length].tolist()
    return tokens[:-1] if tokens and tokens[-1] in stop_tokens else tokens
