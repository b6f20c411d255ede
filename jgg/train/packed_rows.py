"""Sampled rows in sequences of one length, several to a sequence, as a trainer takes them with the least padding."""

from typing import NamedTuple

import numpy as np

from jgg.core.arguments import as_int, check, check_instance
from jgg.data.packing import pack
from jgg.models.rollouts import TrainingRows


class PackedRows(NamedTuple):
    """R rows of prompts and new tokens in P sequences of W tokens; NumPy arrays.

    Attributes:
      tokens, targets: int32 [P, W], the token at each place and the one that follows it; zeros after the last row.
      segments: int32 [P, W], the number of the row in its sequence, from 1; 0 after the last row.
      rows: int32 [P, W], the row of each token, for what a row has one number of, such as its advantage; 0 after the
        last row.
      is_new: bool [P, W], where the target is a new token, whose loss counts.
      log_probabilities, sampled_log_probabilities: float32 [P, W], of the targets that are new; 0 elsewhere.
      topk_indices: int32 [L, P, W, k], the experts of `tokens`; -1 after the last row.
    """

    tokens: np.ndarray
    targets: np.ndarray
    segments: np.ndarray
    rows: np.ndarray
    is_new: np.ndarray
    log_probabilities: np.ndarray
    sampled_log_probabilities: np.ndarray
    topk_indices: np.ndarray


def pack_rows(rows: TrainingRows, length: int, *, multiple: int = 1) -> PackedRows:
    """Packs rows into sequences; with `mask=segments > 0` and `segments`, `Decoder.losses` gives them the same losses.

    A row's last token has no target and is left out.

    Examples:
      >>> import jgg.models, jgg.train
      >>> from flax import nnx
      >>> config = jgg.models.model_config({
      ...     "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 16,
      ...     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
      ...     "num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
      ... })
      >>> model = jgg.models.Decoder(config, rngs=nnx.Rngs(0))
      >>> drawn = jgg.models.generate(model, [[1, 2], [3, 4]], [2, 6], details=True)
      >>> packed = jgg.train.pack_rows(drawn.training_rows([[1, 2], [3, 4]]), 16)
      >>> packed.segments
      array([[1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0, 0, 0]], dtype=int32)

    Args:
      rows: from `Generated.training_rows`.
      length: W, at least the tokens of the longest row less one.
      multiple: P is rounded up to a multiple of this, such as the number of parts in which a batch is learned; programs
        are compiled for each P.

    Raises: ValueError: a row is longer than `length`, or a number is less than 1. TypeError: rows are no TrainingRows.
    """
    check_instance("rows", rows, TrainingRows, "a TrainingRows")
    length, multiple = as_int("length", length, 1), as_int("multiple", multiple, 1)
    tokens, targets, mask, is_new, log_probabilities, sampled, choices = map(np.asarray, rows)
    sizes = mask.sum(axis=1)
    longest = sizes.max(initial=0)
    check(longest <= length, f"length must be at least {longest}, for the longest row, got {length}.")
    order, offsets = pack(np.maximum(sizes, 1), length)
    count = max(1, -(-(len(offsets) - 1) // multiple)) * multiple
    sequences = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))  # of each row in `order`
    own = sizes[order]
    ends = np.cumsum(own)
    firsts = ends - own
    begins = firsts - firsts[offsets[:-1]][sequences]  # where a row begins in its sequence
    row, column = np.repeat(order, own), np.arange(own.sum()) - np.repeat(firsts, own)
    places = np.repeat(sequences, own), np.repeat(begins, own) + column
    numbers = np.arange(len(order)) - offsets[:-1][sequences] + 1

    def packed(values: np.ndarray) -> np.ndarray:
        array = np.zeros((count, length), values.dtype)
        array[places] = values
        return array

    experts = np.full((choices.shape[0], count, length, choices.shape[-1]), -1, choices.dtype)
    experts[:, *places] = choices[:, row, column]
    return PackedRows(
        packed(tokens[row, column]),
        packed(targets[row, column]),
        packed(np.repeat(numbers, own).astype(np.int32)),
        packed(row.astype(np.int32)),
        packed(is_new[row, column]),
        packed(log_probabilities[row, column]),
        packed(sampled[row, column]),
        experts,
    )
