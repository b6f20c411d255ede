"""The demo's text: the language reference that CPython carries for `help()`, as bytes."""

import random
import re
from typing import NamedTuple

import numpy as np

HELD_OUT_FRACTION = 0.1
_SPLIT_SEED = 0


class Corpus(NamedTuple):
    """Bytes to train on and bytes to measure on.

    Attributes:
      train: uint8 [bytes].
      held_out: uint8 [bytes], whole topics; none of their paragraphs is in train.
    """

    train: np.ndarray
    held_out: np.ndarray


def load_corpus() -> Corpus:
    """Reads `pydoc_data.topics`, 0.35 MB of English and examples, and splits it by whole topics.

    Topics repeat each other ("with" is a part of "compound"), so each paragraph is kept once, in the longest topic
    that has it. Tables, which are mostly spaces and lines, are left out. The split is always the same for one version
    of Python; another version has another text.
    """
    from pydoc_data.topics import topics

    texts = list(_without_repeats_and_tables(topics))
    random.Random(_SPLIT_SEED).shuffle(texts)
    room = HELD_OUT_FRACTION * sum(map(len, texts))
    train, held_out = [], []
    for text in texts:
        if len(text) <= room:
            held_out.append(text)
            room -= len(text)
        else:
            train.append(text)
    return Corpus(_as_bytes(train), _as_bytes(held_out))


def _without_repeats_and_tables(topics: dict[str, str]):
    """Yields what is kept of each topic, longest topic first."""
    seen = set()
    for text in sorted(topics.values(), key=lambda text: (-len(text), text)):
        paragraphs = [p for p in re.split(r"\n\n+", text.strip("\n")) if p not in seen and not _is_table(p)]
        seen.update(paragraphs)
        if paragraphs:
            yield "\n\n".join(paragraphs) + "\n"


def _is_table(paragraph: str) -> bool:
    return paragraph.lstrip().startswith(("+-", "|"))


def _as_bytes(texts: list[str]) -> np.ndarray:
    return np.frombuffer("\n\n".join(texts).encode(), np.uint8)


def held_out_windows(text: np.ndarray, seq: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts a text into windows such that every byte but the first is predicted exactly once.

    A window has seq + 1 bytes, and all but its first are predicted; the next window begins at its
    last byte.

    Args:
      text: uint8 [bytes], at least 2.
      seq: bytes that are predicted in a window.
      batch: windows in a batch.

    Returns: windows uint8 [batches, batch, seq + 1], and is_real bool [batches, batch, seq], False
      where a prediction only fills up the last batch.
    """
    targets = len(text) - 1
    count = -(-targets // (seq * batch)) * batch  # windows, the filling ones included
    positions = seq * np.arange(count)[:, None] + np.arange(seq + 1)
    windows = text[np.minimum(positions, targets)]
    is_real = positions[:, 1:] <= targets
    return windows.reshape(-1, batch, seq + 1), is_real.reshape(-1, batch, seq)
