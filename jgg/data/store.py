"""Keeps the tokens of examples in an unnamed file, which the system loads on demand."""

import datetime
import errno
import functools
import hashlib
import itertools
import os
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, NamedTuple

import numpy as np

from jgg.data.chat import Text
from jgg.data.examples import Example, examples_with_texts
from jgg.data.reading import rows
from jgg.data.rendering import UnmarkedError
from jgg.data.tokenizers import Tokenizer

ROWS_AT_ONCE = 128  # rows in memory, which threads tokenize


class Store(NamedTuple):
    """The examples from some files, without those that have nothing to learn.

    Attributes:
      tokens: the tokens of all examples, one after the other, int32, in a mapped file; a learned token t is stored as
        t, any other as -1 - t.
      starts: where in `tokens` each example starts, int64 [examples].
      sizes: number of tokens of each example, int64 [examples], at least 2.
      weights: the weight of each learned token of an example, float32 [examples].
      learned: number of learned tokens of each example, int64 [examples].
      num_bytes: the UTF-8 bytes of the text that an example's learned tokens stand for, int64 [examples].
      num_cut: rows that were longer than a sequence and lost their end.
      num_left_out: rows that had nothing to learn, or nothing left to learn once they were cut.
      num_skipped: conversations that the chat template cannot mark.
      largest_token: the largest token.
      end_tokens: the tokens that end uncut examples and the assistant's turns in them, sorted.
      digest: hex digest of the tokens, the loss mask and the weights.
    """

    tokens: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    weights: np.ndarray
    learned: np.ndarray
    num_bytes: np.ndarray
    num_cut: int
    num_left_out: int
    num_skipped: int
    largest_token: int
    end_tokens: list[int]
    digest: str

    @property
    def num_learned(self) -> int:
        """The number of learned tokens of all examples."""
        return int(np.sum(self.learned))

    def example(self, number: int) -> Example:
        """The example of this number."""
        start = self.starts[number]
        found = self.tokens[start : start + self.sizes[number]]
        return Example(np.where(found < 0, ~found, found), found >= 0, float(self.weights[number]))


def fill(
    paths: Sequence[str | os.PathLike[str]],
    tokenizer: Tokenizer,
    length: int,
    *,
    splits: bool = False,
    end_token: int | None = None,
    date: datetime.date | None = None,
    skip_unmarked: bool = False,
) -> Store:
    """Tokenizes all rows of some files, a few rows at a time.

    Args:
      paths: the files, as `rows` takes them.
      tokenizer: what `load_tokenizer` returned.
      length: tokens of a sequence; examples of more than `length` + 1 tokens are cut or divided.
      splits: whether longer examples are divided; each part begins with the last token of the previous one.
      end_token: see `examples_of`.
      date: see `encode_conversation`.
      skip_unmarked: whether rows of an `UnmarkedError` are skipped and counted.

    Raises:
      OSError, ValueError: see `rows` and `examples_of`; the message begins with the row's name. OSError also if the
        folder for temporary files is full.
    """
    try:
        with tempfile.TemporaryFile() as file:
            writer = _Writer(file, length, splits)
            read = functools.partial(examples_with_texts, tokenizer=tokenizer, end_token=end_token, date=date)
            tokenizer("", verbose=False)  # forgets what tokenizer.json has of padding, as threads must not side by side
            for examples in _examples_of_rows(paths, read, skip_unmarked):
                writer.add(examples)
            if not writer.sizes:
                cut = f"; rows that were cut to {length} tokens: {writer.num_cut}" if writer.num_cut else ""
                skipped = (
                    f"; rows that the chat template cannot mark: {writer.num_skipped}" if writer.num_skipped else ""
                )
                files = ", ".join(map(str, paths))
                raise ValueError(f"{files} must have an example with tokens to learn, got none{cut}{skipped}")
            return writer.store()
    except OSError as error:  # of closing the file, too
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f"{tempfile.gettempdir()}, the folder of TMPDIR"
        raise OSError(f"the tokens of the data must have room in {where}: {error.strerror}") from error


def _examples_of_rows(
    paths: Sequence[str | os.PathLike[str]], read: Callable[[object], list[tuple[Example, Text]]], skip_unmarked: bool
) -> Iterator[list[tuple[Example, Text]] | None]:
    """The examples of each row, in order; None for a skipped row.

    Threads tokenize the rows, since the tokenizer releases Python's lock.
    """

    def named(row: tuple[str, object]) -> list[tuple[Example, Text]] | None:
        try:
            return read(row[1])
        except UnmarkedError as error:
            if skip_unmarked:
                return None
            hint = "skip_unmarked=True, or the option --skip-unmarked, skips such rows"
            raise ValueError(f"{row[0]}: {error}; {hint}") from error
        except ValueError as error:
            raise ValueError(f"{row[0]}: {error}") from error

    with ThreadPoolExecutor() as pool:
        for some in itertools.batched(itertools.chain.from_iterable(map(rows, paths)), ROWS_AT_ONCE):
            yield from pool.map(named, some)


class _Writer:
    """Writes examples and records where they are."""

    def __init__(self, file: IO[bytes], length: int, splits: bool) -> None:
        self.file, self.length, self.splits = file, length, splits
        self.sizes, self.weights, self.learned, self.num_bytes = array("q"), array("f"), array("q"), array("q")
        self.num_cut = self.num_left_out = self.num_skipped = self.largest_token = 0
        self.ends: set[int] = set()
        self.digest = hashlib.sha256()

    def add(self, examples: list[tuple[Example, Text]] | None) -> None:
        """Writes the examples of a row, each with its text; None for a skipped row."""
        if examples is None:
            self.num_skipped += 1
            return
        before, is_cut = len(self.sizes), False
        for (tokens, learned, weight), text in examples:
            if not weight:
                continue
            marked = np.where(learned, tokens, ~tokens)
            if len(tokens) > self.length + 1 and not self.splits:
                marked, is_cut = marked[: self.length + 1], True
            else:
                self.ends |= text.ends
            for start in range(0, max(len(marked) - 1, 1), self.length):
                own = slice(start, start + self.length + 1)
                self._add(marked[own], text.num_bytes[own], weight)
        self.num_cut += is_cut
        self.num_left_out += len(self.sizes) == before

    def _add(self, marked: np.ndarray, num_bytes: np.ndarray, weight: float) -> None:
        num_learned = int(np.sum(marked[1:] >= 0))
        if not num_learned:
            return
        self.largest_token = max(self.largest_token, int(np.max(np.where(marked < 0, ~marked, marked))))
        content = marked.astype("<i4").tobytes()
        self.file.write(content)
        self.digest.update(np.array([len(marked), weight], "<f8").tobytes())
        self.digest.update(content)
        self.sizes.append(len(marked))
        self.weights.append(weight)
        self.learned.append(num_learned)
        self.num_bytes.append(int(np.sum(num_bytes[1 : len(marked)], where=marked[1:] >= 0)))

    def store(self) -> Store:
        """What was written."""
        self.file.flush()
        tokens = np.memmap(self.file, "<i4", mode="r")
        sizes, learned, num_bytes = (np.array(each, np.int64) for each in (self.sizes, self.learned, self.num_bytes))
        weights, starts = np.array(self.weights, np.float32), np.cumsum(sizes) - sizes
        counts = self.num_cut, self.num_left_out, self.num_skipped, self.largest_token
        of_examples = tokens, starts, sizes, weights, learned, num_bytes
        return Store(*of_examples, *counts, sorted(self.ends), self.digest.hexdigest())
