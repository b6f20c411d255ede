"""Packs examples into sequences by size."""

import bisect
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike


def pack(sizes: np.ndarray, length: int, is_packed: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Chooses the examples of each sequence: the longest first, each into the fullest sequence that has room.

    Source: best-fit decreasing, https://en.wikipedia.org/wiki/Bin_packing_problem.

    Args:
      sizes: number of positions that each example takes, int [examples], each from 1 to `length`.
      length: number of positions in a sequence.
      is_packed: whether a sequence may have more than one example.

    Returns: the numbers of the examples, ordered by sequence, int64 [examples]; and the offsets in this array where
      each sequence begins, followed by where the last one ends, int64 [sequences + 1].
    """
    sequence_of = np.empty(len(sizes), np.int64)
    by_room: dict[int, list[int]] = {}  # the sequences that have so much room left
    rooms: list[int] = []  # the keys of `by_room`, sorted
    count = 0
    for example in np.argsort(-sizes, kind="stable").tolist() if is_packed else range(len(sizes)):
        place = bisect.bisect_left(rooms, sizes[example]) if is_packed else len(rooms)
        if place == len(rooms):
            room, sequence, count = length, count, count + 1
        else:
            room = rooms[place]
            sequence = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        sequence_of[example], room = sequence, room - int(sizes[example])
        if room and is_packed:
            if room not in by_room:
                bisect.insort(rooms, room)
            by_room.setdefault(room, []).append(sequence)
    order = np.argsort(sequence_of, kind="stable")
    return order, np.searchsorted(sequence_of[order], np.arange(count + 1))


def lengths_of(batch: Mapping[str, ArrayLike]) -> np.ndarray:
    """The number of tokens of each example in a batch that has "segments", for `jgg.train.Trainer`; int [examples]."""
    segments = np.asarray(batch["segments"])
    segments = segments.reshape(-1, segments.shape[-1])
    lengths = np.concatenate([np.bincount(row)[1:] for row in segments])
    return lengths[lengths > 0]
