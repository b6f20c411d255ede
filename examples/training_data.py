"""Reads the examples that finetune.py learns from, and packs them into sequences and batches."""

import argparse
import bisect
import json
import math
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from folders import encode, load_tokenizer, render, stop_tokens


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The JSON of each line that is not blank, and the line's name for errors."""
    try:
        kind = path.stat().st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # a pipe may wait for ever, and some devices never end
            raise SystemExit(f"--data must be a file that can be read, got {path}, a pipe or a device")
        data = path.read_bytes()
    except OSError as error:
        raise SystemExit(f"--data must be a file that can be read, got {path}: {error.strerror}") from error
    try:
        text = data.decode("utf-8-sig")  # Windows' programs begin a file with a mark
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SystemExit(f"{path}:{line} must be UTF-8, got the byte {data[error.start]:#04x}") from error
    # split("\n"): a string of JSON may hold what splitlines takes for the end of a line
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise SystemExit(f"{path}:{number} must be a JSON object, got {line[:80].strip()}: {error}") from error
            yield f"{path}:{number}", row


def read_examples(options: argparse.Namespace, tokenizer: Any = None) -> list[tuple[np.ndarray, int]]:
    """The tokens of each line of the data, and the number of the first of them that is learned.

    Args:
      options: folder, data and sequence_length of finetune.py.
      tokenizer: of the folder; it is loaded if it is None.
    """
    tokenizer = load_tokenizer(options.folder) if tokenizer is None else tokenizer
    own_end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    end = (stop_tokens(options.folder) or own_end)[:1]
    examples, num_cut = [], 0
    for name, row in read_rows(options.data):
        try:
            ids, first = _tokens_of(row, tokenizer, end)
        except ValueError as error:
            raise SystemExit(f"{name}: {error}") from error
        num_cut += len(ids) > options.sequence_length + 1
        ids = ids[: options.sequence_length + 1]
        if len(ids) > max(first, 1):  # else nothing to learn is left of it
            examples.append((np.array(ids, np.int32), first))
    if not examples:
        raise SystemExit(f"{options.data} must have an example with tokens to learn, got none")
    print(f"{len(examples)} examples, {num_cut} cut to --sequence-length, or left out where nothing to learn is left")
    return examples


def _tokens_of(row: Any, tokenizer: Any, end: list[int]) -> tuple[list[int], int]:
    """A row's tokens, and the number of the first that is learned: what is learned is tokenized with what is before it.

    Raises: ValueError: the row or its text is wrong, or the chat template fails.
    """
    is_rendered = False
    match row:
        case {"prompt": str(prompt), "completion": str(completion)}:
            text, start = prompt + completion, len(prompt)
        case {"text": str(text)}:
            start = 0
        case {"messages": [*_, {"role": "assistant"}] as messages}:
            is_rendered = True
            text, start = render(tokenizer, messages, row.get("tools"))
        case _:
            keys = '"prompt" and "completion", "text", or "messages" that end with the assistant\'s'
            raise ValueError(f"a row must have {keys}, got {json.dumps(row)[:80]}")
    ids, ends = encode(tokenizer, text, is_rendered=is_rendered)
    first = next((number for number, past in enumerate(ends) if past > start), len(ids))
    return ids if is_rendered or ids[-1:] == end else ids + end, first


def pack(examples: list[tuple[np.ndarray, int]], length: int, is_packed: bool) -> dict[str, np.ndarray]:
    """Packs examples: tokens, targets, learned (whether a target is) and segments, 0 for padding; each [N, length]."""
    rows: list[list[tuple[np.ndarray, int]]] = []
    rooms: list[tuple[int, int]] = []  # the room that is left in a sequence and its number, sorted
    # the longest first, each into the fullest sequence that has room
    for example in sorted(examples, key=lambda example: -len(example[0])):
        size = len(example[0]) - 1
        place = bisect.bisect_left(rooms, (size, 0))
        if place == len(rooms):
            room, row = length, len(rows)
            rows.append([])
        else:
            room, row = rooms.pop(place)
        rows[row].append(example)
        if is_packed:
            bisect.insort(rooms, (room - size, row))
    names = {"tokens": np.int32, "targets": np.int32, "learned": np.float32, "segments": np.int32}
    data = {name: np.zeros((len(rows), length), dtype) for name, dtype in names.items()}
    for row, own in enumerate(rows):
        start = 0
        for segment, (ids, first) in enumerate(own, 1):
            end = start + len(ids) - 1
            data["tokens"][row, start:end], data["targets"][row, start:end] = ids[:-1], ids[1:]
            data["learned"][row, max(start + first - 1, start) : end] = 1
            data["segments"][row, start:end] = segment
            start = end
    return data


def batch_of(data: dict[str, np.ndarray], step: int, options: argparse.Namespace) -> dict[str, np.ndarray]:
    """The batch of a step, [accumulate, batch size, length]: each epoch has all sequences in an order of its own.

    By "weights" of the targets, the mean of the losses of its parts is the mean over all tokens that are learned.
    """
    shape, count = (options.accumulate, options.batch_size), len(data["tokens"])
    epochs, places = np.divmod((step - 1) * math.prod(shape) + np.arange(math.prod(shape)), count)
    orders = {epoch: np.random.default_rng((options.seed, epoch)).permutation(count) for epoch in set(epochs.tolist())}
    rows = [orders[epoch][place] for epoch, place in zip(epochs.tolist(), places, strict=True)]
    batch = {name: array[rows].reshape(*shape, -1) for name, array in data.items()}
    learned = batch.pop("learned")
    return batch | {"weights": learned * np.float32(options.accumulate / np.sum(learned))}


def lengths_of(batch: dict[str, np.ndarray]) -> np.ndarray:
    """The number of tokens of each example in a batch."""
    segments = batch["segments"].reshape(-1, batch["segments"].shape[-1])
    return np.concatenate([np.bincount(row)[1:] for row in segments])
