"""`batches`: batches for training and evaluation. Each depends only on its number; grain orders them."""

import datetime
import functools
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from jgg.core.arguments import as_int
from jgg.data.packing import pack
from jgg.data.store import Store, fill
from jgg.data.tokenizers import Tokenizer, special_token

Path = str | os.PathLike[str]
Paths = Path | Sequence[Path]

DTYPES = {"tokens": np.int32, "targets": np.int32, "segments": np.int32, "weights": np.float32}


class Batches:
    """Batches of packed sequences, in an order that depends on a seed; `batches` makes them.

    `self[n]` is batch n, counted from 0. With a seed there is no last batch: each epoch has all sequences once, in a
    new order. With `seed=None` each sequence comes once, empty sequences fill the last batch, and a loop ends there.

    `len(self)` is the number of batches in an epoch, rounded up.

    Attributes:
      num_examples: examples with something to learn.
      num_cut: rows cut at the end because they were longer than a sequence.
      num_left_out: rows that had nothing to learn.
      num_skipped: conversations that the chat template cannot mark, with `skip_unmarked`.
      num_learned: learned tokens of all examples.
      num_sequences: sequences in an epoch. Where files are mixed, an epoch has as much learned weight as all files
        together.
      fill: the share of positions in sequences that have a token.
      end_tokens: the tokens that end examples and the assistant's turns in them, sorted.
      largest_token: the largest token, which `check_vocabulary` can compare with a model's vocabulary.
      digest: hex digest of the tokens, the loss mask and the weights. A run that resumes compares it.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        shares: Sequence[float],
        shape: tuple[int, int, int],
        *,
        packing: bool,
        normalize: bool,
        seed: int | None,
    ) -> None:
        self._shape, self._per_batch = shape, shape[0] * shape[1]
        self._is_normalized, self._is_endless = normalize, seed is not None
        sources = [_Sequences(store, shape[2], packing) for store in stores]
        self.num_examples = sum(len(store.sizes) for store in stores)
        self.num_cut = sum(store.num_cut for store in stores)
        self.num_left_out = sum(store.num_left_out for store in stores)
        self.num_skipped = sum(store.num_skipped for store in stores)
        self.num_learned = sum(store.num_learned for store in stores)
        self.end_tokens = sorted({token for store in stores for token in store.end_tokens})
        self.largest_token = max(store.largest_token for store in stores)
        self.digest = hashlib.sha256(" ".join(store.digest for store in stores).encode()).hexdigest()
        positions = sum(map(len, sources)) * shape[2]
        self.fill = sum(int(np.sum(store.sizes - 1)) for store in stores) / positions
        self.num_sequences, self._dataset = _ordered(sources, shares, seed)

    def __len__(self) -> int:
        return -(-self.num_sequences // self._per_batch)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Batch `index`, counted from 0; see `batches`."""
        if index < 0 or not (self._is_endless or index < len(self)):
            raise IndexError(f"index must be at least 0 and, without a seed, below {len(self)}, got {index}")
        sequences = self._sequences(index)
        batch: dict[str, np.ndarray] = {
            name: np.zeros((self._per_batch, self._shape[2]), dtype) for name, dtype in DTYPES.items()
        }
        for name, array in batch.items():
            array[: len(sequences)] = [sequence[name] for sequence in sequences]
        if self._is_normalized:
            total = np.sum(batch["weights"], dtype=np.float64)
            batch["weights"] = (batch["weights"] * (self._shape[0] / total)).astype(np.float32)
        return {name: array.reshape(self._shape) for name, array in batch.items()}

    def num_bytes(self, index: int) -> np.ndarray:
        """The UTF-8 bytes of the learned text in each sequence of batch `index`, times the weights of the rows.

        A token counts for the bytes of its text. A special token counts for none; tokens that share a character
        divide its bytes among them.

        Returns: float64 [accumulate, batch_size].
        """
        found = [sequence["num_bytes"] for sequence in self._sequences(index)]
        return np.array([*found, *[0.0] * (self._per_batch - len(found))]).reshape(self._shape[:2])

    def _sequences(self, index: int) -> list[dict[str, np.ndarray]]:
        numbers = range(index * self._per_batch, (index + 1) * self._per_batch)
        return [self._dataset[n] for n in numbers if self._is_endless or n < self.num_sequences]

    def of_step(self, step: int) -> dict[str, np.ndarray]:
        """The batch of training step `step`, counted from 1, in the form that `jgg.train.Trainer.fit` expects."""
        return self[step - 1]


def batches(
    data: Paths | Mapping[str, float],
    tokenizer: Tokenizer,
    *,
    length: int,
    batch_size: int,
    accumulate: int = 1,
    packing: bool = True,
    splits: bool = False,
    seed: int | None = 0,
    normalize: bool = True,
    end_token: int | None = None,
    date: datetime.date | None = None,
    skip_unmarked: bool = False,
) -> Batches:
    """Tokenizes the rows of files, plans the sequences, and returns the batches.

        tokenizer = jgg.data.load_tokenizer(folder)
        data = jgg.data.batches("train.jsonl", tokenizer, length=2048, batch_size=4)
        for record in trainer.fit(data.of_step, 3 * len(data)): ...

    All rows are read once, at the start. Their tokens are kept in a temporary file, 4 bytes each, and memory holds
    only a few numbers per example. Equal files, tokenizer and arguments give equal batches, in another process too.

    A batch has these arrays, each [accumulate, batch_size, length]:

    - "tokens" and "targets", int32: a token and the next one; 0 where there is none.
    - "segments", int32: 1, 2, ... for the examples of a sequence, each attending only to itself; 0 for padding.
    - "weights", float32: what the targets' losses are multiplied by: 0 where a target is not learned, otherwise the
      row's weight times a factor that makes the batch's weights add up to `accumulate`. If a part's loss is the sum of
      its weighted losses, the mean over the parts is then the weighted mean over all learned tokens.

    Args:
      data: a file; a list of files, which are read as one; or {file: share} to mix files. The shares are positive
        numbers: the files' learned tokens, counted by weight, are in this proportion however large the files are, and
        a file starts over when it ends. `rows` says what a file may be, `examples_of` what a row may be.
      tokenizer: what `load_tokenizer` returned.
      length: tokens per sequence.
      batch_size: sequences processed at once.
      accumulate: number of parts in a batch, each of batch_size sequences.
      packing: whether a sequence may have several examples. The longest examples are placed first, each into the
        fullest sequence that has room for it.
      splits: whether examples longer than a sequence are divided rather than cut.
      seed: seed of the order, at least 0 and below 2**32; None for one pass in the order of the plan.
      normalize: whether the weights of a batch are scaled as above; False keeps the rows' weights.
      end_token: the token that ends a text, such as the first of `stop_tokens(folder)`, see `examples_of`; None for
        the tokenizer's own, -1 for none.
      date: the date that chat templates such as gpt-oss's write as today's; None for today. A run that resumes
        on another day must pass the day it started.
      skip_unmarked: whether conversations that the chat template cannot mark are skipped and counted, see
        `UnmarkedError`; otherwise the first one raises an error.

    Raises:
      ImportError: grain is not installed, or pyarrow for a table.
      OSError: a file cannot be read, or the folder for temporary files is full.
      TypeError, ValueError: an argument, a file or a row is wrong; the message names it.
    """
    length, batch_size, accumulate = (
        as_int(name, value, 1)
        for name, value in (("length", length), ("batch_size", batch_size), ("accumulate", accumulate))
    )
    if seed is not None and not 0 <= as_int("seed", seed, 0) < 2**32:
        raise ValueError(f"seed must be at least 0 and below {2**32}, got {seed}")
    if seed is not None:
        _grain()  # before all is read
    groups, shares = _groups(data)
    if len(groups) > 1 and seed is None:
        raise ValueError("seed must be an int where data are mixed, got None: one pass has no shares")
    own_end = special_token(tokenizer, "eos_token_id") if end_token is None else end_token if end_token >= 0 else None
    read = functools.partial(fill, tokenizer=tokenizer, length=length, splits=splits, skip_unmarked=skip_unmarked)
    stores = [read(group, end_token=own_end, date=date) for group in groups]
    shape = accumulate, batch_size, length
    return Batches(stores, shares, shape, packing=packing, normalize=normalize, seed=seed)


def _groups(data: Paths | Mapping[str, float]) -> tuple[list[list[Path]], list[float]]:
    """The files that are shuffled together, and their shares."""
    if isinstance(data, Mapping):
        for name, share in data.items():
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < math.inf:
                raise ValueError(f"data must have a finite share above 0 for each file, got {share!r} for {name}")
    groups: list[list[Path]] = [[name] for name in data] if isinstance(data, Mapping) else [_listed(data)]
    if not groups or not groups[0]:
        raise ValueError("data must have a file, got none")
    return groups, list(map(float, data.values())) if isinstance(data, Mapping) else [1.0]


def _listed(data: Paths) -> list[Path]:
    return [data] if isinstance(data, str | os.PathLike) else list(data)


class _Sequences:
    """The sequences of a store, as a grain data source."""

    def __init__(self, store: Store, length: int, packing: bool) -> None:
        self._store, self._length = store, length
        self._order, self._bounds = pack(store.sizes - 1, length, packing)
        # the sum of the weights of learned tokens, in the mean over sequences
        self.mean_weight = float(np.dot(store.weights.astype(np.float64), store.learned)) / len(self)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        sequence = {name: np.zeros(self._length, dtype) for name, dtype in DTYPES.items()}
        start, numbers = 0, self._order[self._bounds[index] : self._bounds[index + 1]]
        sequence["num_bytes"] = np.dot(self._store.num_bytes[numbers], self._store.weights[numbers].astype(np.float64))
        for segment, number in enumerate(numbers, 1):
            tokens, learned, weight = self._store.example(number)
            own = slice(start, start + len(tokens) - 1)
            sequence["tokens"][own], sequence["targets"][own] = tokens[:-1], tokens[1:]
            sequence["segments"][own], sequence["weights"][own] = segment, learned[1:] * weight
            start = own.stop
        return sequence


def _grain() -> ModuleType:
    try:
        import grain
    except ImportError as error:
        raise ImportError("batches in an order of their own need grain: pip install grain") from error
    return grain


def _ordered(sources: Sequence[_Sequences], shares: Sequence[float], seed: int | None) -> tuple[int, Any]:
    """The number of sequences in an epoch, and the sequences in their order."""
    if seed is None:
        return len(sources[0]), sources[0]
    grain = _grain()
    seeds = np.random.SeedSequence(seed).generate_state(len(sources)).tolist()
    endless = [
        grain.MapDataset.source(source).shuffle(seed=own).repeat() for source, own in zip(sources, seeds, strict=True)
    ]
    if len(endless) == 1:
        return len(sources[0]), endless[0]
    # sequences are drawn in proportions that give the weights of their learned tokens these shares
    counts = np.array([share / source.mean_weight for share, source in zip(shares, sources, strict=True)])
    proportions = counts / np.sum(counts)
    means = np.array([source.mean_weight for source in sources])
    total = np.dot(means, [len(source) for source in sources])
    return math.ceil(total / np.dot(means, proportions)), grain.MapDataset.mix(endless, proportions.tolist())
