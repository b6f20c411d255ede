"""The loss of a model on the texts of a file, in three units."""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import jgg.data
from jgg.experts.sharding import MoESharding
from jgg.models import Decoder, ModelConfig
from jgg.train.losses import held_out_loss, perplexity_of

_LENGTH, _TOKENS = 2048, 2**14  # of a sequence, and of a batch, by default


class Measured(NamedTuple):
    """How well a model predicts what a file teaches.

    Attributes:
      loss: the negative natural logarithm of a token's probability, the mean over tokens by their rows' weights.
      perplexity: exp of it.
      bits_per_byte: the negative base-2 logarithm of the text's probability for each of its bytes in UTF-8, without
        special tokens. Use it to compare models with different tokenizers. None for no bytes.
      tokens: the tokens that were predicted.
      skipped_rows: the rows that --skip-unmarked skipped.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    skipped_rows: int


class Texts:
    """What a file teaches, tokenized; raises ValueError, OSError or ImportError where that cannot be."""

    def __init__(self, file: Path, args: argparse.Namespace, config: ModelConfig, sharding: MoESharding | None) -> None:
        self.file, tokenizer = file, jgg.data.load_tokenizer(args.model)
        self._split = None if sharding is None else sharding.named(sharding.token_spec)
        length, devices = args.sequence_length or _LENGTH, jax.device_count()
        self._size = args.batch_size or -(-max(1, _TOKENS // length) // devices) * devices
        ends = jgg.data.stop_tokens(args.model)  # not the adapter's, so that the same is measured with and without it
        self._batches = jgg.data.batches(
            file,
            tokenizer,
            length=length,
            batch_size=self._size,
            splits=True,
            seed=None if args.limit is None else args.seed,
            skip_unmarked=args.skip_unmarked,
            normalize=False,
            end_token=ends[0] if ends else None,
        )
        jgg.data.check_vocabulary(tokenizer, [self._batches.largest_token], config, f"--data {file}")
        self._sequences = min(self._batches.num_sequences, args.limit or self._batches.num_sequences)

    def measured(self, model: Decoder) -> Measured:
        """The loss of a model."""
        counts: list[tuple[int, float, float]] = []
        loss = held_out_loss(model, self._counted_parts(counts), batch_sharding=self._split)
        tokens, weight, num_bytes = map(sum, zip(*counts, strict=True))
        bits = loss * weight / math.log(2) / num_bytes if num_bytes else None
        return Measured(loss, perplexity_of(loss), bits, int(tokens), self._batches.num_skipped)

    def _counted_parts(self, counts: list[tuple[int, float, float]]) -> Iterator[dict[str, np.ndarray]]:
        """The batches [1, batch_size, length]; appends the tokens, weights and bytes that each has to `counts`.

        Sequences behind the last one that is asked for have no weight.
        """
        for first in range(0, self._sequences, self._size):
            number, left = first // self._size, self._sequences - first
            batch, num_bytes = self._batches[number], self._batches.num_bytes(number)
            weights = batch["weights"]
            weights[:, left:] = 0
            total = float(np.sum(weights, dtype=np.float64))
            counts.append((int(np.count_nonzero(weights)), total, float(np.sum(num_bytes[:, :left]))))
            yield batch
