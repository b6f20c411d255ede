"""Scores pairs of a context and a continuation with a model, in batches of few shapes; works without lm-eval."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jgg.models import Decoder, Scores
from jgg.models.placement import on_host

_TOKENS = 2**14  # of a batch whose size nobody gave
_LEAST_WIDTH = 32


class Pair(NamedTuple):
    """The tokens of a context, and the following tokens, whose probability is requested."""

    context: Sequence[int]
    continuation: Sequence[int]


class Batch(NamedTuple):
    """The sequences that share one array [rows, width].

    Attributes:
      indices: which sequences, at most `rows` of them.
      rows: a multiple of the number of devices that split sequences.
      width: at least the length of the longest sequence.
    """

    indices: list[int]
    rows: int
    width: int


def batches(model: Decoder, lengths: Sequence[int], size: int | None, more: int = 0) -> Iterator[Batch]:
    """Divides sequences into batches by their lengths, the longest first, so that memory runs out at once or never.

    There are four widths between two powers of two, so that few programs are compiled and little is padded.

    Args:
      model: its sharding says how many devices split the rows.
      lengths: of the sequences, in tokens.
      size: the rows of a batch; None for as many as have 16,384 tokens, with `more` tokens in each.
      more: how many tokens each sequence will get.
    """
    sharding = model.options.sharding
    devices = 1 if sharding is None else sharding.size(*sharding.token_axes)
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        width = _width(lengths[order[0]])
        rows = size or min(max(1, _TOKENS // (width + more)), 1 << (len(lengths) - 1).bit_length())
        rows = -(-rows // devices) * devices
        yield Batch(order[:rows], rows, width)
        order = order[rows:]


def _width(length: int) -> int:
    step = max(_LEAST_WIDTH, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step


def score(
    model: Decoder, pairs: Sequence[Pair], size: int | None, max_length: int
) -> Iterator[tuple[int, tuple[float, bool]]]:
    """Yields the number of each pair with its answer, as soon as there is one; the longest pairs come first.

    An answer is the natural logarithm of the continuation's probability, and whether greedy decoding would give the
    continuation. Pairs that differ only in their last token, as the answers to a question may, run through the model
    once.

    Args:
      model: what computes the probabilities.
      pairs: each with at least one token of context and one of continuation; contexts are cut from the left to the
        tokens that max_length leaves.
      size: as in `batches`.
      max_length: the maximum number of tokens that run through the model.

    Raises: ValueError: a continuation has more tokens than max_length.
    """
    alike: dict[tuple[int, ...], list[int]] = {}  # the pairs for each sequence that runs through the model
    for number, (context, continuation) in enumerate(pairs):
        if len(continuation) > max_length:
            most = f"max_length, {max_length} tokens"
            raise ValueError(f"a continuation must have at most {most}, got {len(continuation)}")
        alike.setdefault((*context, *continuation)[-max_length - 1 : -1], []).append(number)
    rows = list(alike.items())
    graphdef, state = nnx.split(model)
    for batch in batches(model, [len(tokens) for tokens, _ in rows], size):
        own = [rows[index] for index in batch.indices]
        tokens, targets, mask = _arrays(pairs, own, batch)
        scores = jax.tree.map(on_host, _scores(graphdef, state, tokens, targets, mask))
        for row, (ids, numbers) in enumerate(own):
            for column, number in enumerate(numbers):
                where = row, slice(len(ids) - len(pairs[number].continuation), len(ids)), column
                own_scores = scores.log_probabilities[where].sum(dtype=np.float64)
                yield number, (float(own_scores), bool(scores.is_greedy[where].all()))


def _arrays(
    pairs: Sequence[Pair], own: Sequence[tuple[tuple[int, ...], list[int]]], batch: Batch
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens int32 [rows, width], targets int32 [rows, width, C] and the mask of tokens that are no padding.

    C is a power of two, at least the number of pairs of each row.
    """
    alternatives = 1 << (max(len(numbers) for _, numbers in own) - 1).bit_length()
    tokens = np.zeros((batch.rows, batch.width), np.int32)
    targets = np.zeros((*tokens.shape, alternatives), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, (ids, numbers) in enumerate(own):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
        targets[row, : len(ids) - 1] = np.array(ids[1:], np.int32)[:, None]
        targets[row, len(ids) - 1, : len(numbers)] = [pairs[number].continuation[-1] for number in numbers]
    return tokens, targets, mask


@functools.partial(jax.jit, static_argnums=0)
def _scores(graphdef: Any, state: Any, tokens: jax.Array, targets: jax.Array, mask: jax.Array) -> Scores:
    return nnx.merge(graphdef, state).scores(tokens, targets, mask=mask)
