"""Attention of several tokens to latents, which are the keys and the values of all heads, in the order of `attend`.

A tile's rows are the heads of one token after those of another, so that tiles are full whatever the number of heads.
The result is that of `attend_latents_one`, bit for bit.
"""

import triton
import triton.language as tl

from .attend import LN_2, LOG2_E, add_part, add_step, no_keys, result_of
from .tiles import add, row_pointers


@triton.jit
def load_queries(
    q,
    queries,
    exists,
    RANK: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """The first RANK and the other features of the rows `queries` of q [rows, RANK + REST]."""
    columns, others = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_REST)
    at = row_pointers(q, queries, columns, RANK + REST)
    q_block = tl.load(at, mask=exists[:, None] & (columns < RANK)[None, :], other=0.0)
    at = row_pointers(q + RANK, queries, others, RANK + REST)
    return q_block, tl.load(at, mask=exists[:, None] & (others < REST)[None, :], other=0.0)


@triton.jit
def add_latents(
    highest_logit,
    total,
    acc,
    q_block,
    q_rest,
    base,
    key,
    end,
    positions,
    RANK: tl.constexpr,
    REST: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """The softmax of rows at `positions` with one step more, of the latents at base from `key` on and before `end`."""
    columns, others = tl.arange(0, q_block.shape[1]), tl.arange(0, q_rest.shape[1])
    keys = key + tl.arange(0, BLOCK_KEYS)
    is_key = (keys < end)[:, None]
    at = row_pointers(base, keys, columns, RANK + REST)
    block = tl.load(at, mask=is_key & (columns < RANK)[None, :], other=0.0)
    at = row_pointers(base + RANK, keys, others, RANK + REST)
    rest = tl.load(at, mask=is_key & (others < REST)[None, :], other=0.0)
    logits = tl.dot(q_block, block.T, input_precision=PRECISION)
    logits = tl.dot(q_rest, rest.T, logits, input_precision=PRECISION)
    logits = tl.where(keys[None, :] <= positions[:, None], logits, float("-inf"))
    return add_step(highest_logit, total, acc, logits, block, SCALE * LOG2_E, PRECISION)


@triton.jit
def attend_latents_kernel(
    q,
    latents,
    layer,
    offset,
    starts,
    summed,
    log_sums,
    length,
    capacity,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    REST: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Sums of the first RANK features of a sequence's latents up to each token's own, by a softmax of all features'
    products with q.

    Arrays: q [B, length, HEADS, RANK + REST]; latents [layers, B, capacity, RANK + REST]; layer, offset and starts as
    in `attend_kernel`; summed [B, length, HEADS, RANK]; log_sums float32 [B, length, HEADS]. The grid is (tiles of
    rows, B), the longest tiles first.
    """
    sequence = tl.program_id(1)
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_ROWS
    rows = row + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_RANK)
    end_of_rows = tl.minimum(row + BLOCK_ROWS, length * HEADS)
    exists, tokens = rows < length * HEADS, rows // HEADS
    queries = sequence.to(tl.int64) * length * HEADS + rows
    q_block, q_rest = load_queries(q, queries, exists, RANK, REST, BLOCK_RANK, BLOCK_REST)

    of_sequence = sequence.to(tl.int64)
    if layer is not None:
        of_sequence += tl.load(layer).to(tl.int64) * tl.num_programs(1)
    first = 0 if offset is None else tl.load(offset)
    own_starts = tokens * 0
    if starts is not None:
        starts += sequence.to(tl.int64) * length
        own_starts = tl.maximum(tl.load(starts + tokens, mask=exists, other=0), 0)

    while row < end_of_rows:  # one sequence of those in the tile after the other
        start = 0
        if starts is not None:
            start = tl.maximum(tl.load(starts + row // HEADS), 0)
        is_row = exists & (own_starts == start)
        row += tl.reduce(is_row.to(tl.int32), 0, add)
        positions = first + tokens - start
        end = tl.minimum(first + (row - 1) // HEADS + 1, capacity) - start
        base = latents + (of_sequence * capacity + start) * (RANK + REST)
        highest_logit, total, acc = no_keys(BLOCK_ROWS, BLOCK_RANK)
        for part in tl.range(0, (end + PART - 1) // PART):
            part_highest, part_total, part_acc = no_keys(BLOCK_ROWS, BLOCK_RANK)
            for key in tl.range(part * PART, tl.minimum(end, (part + 1) * PART), BLOCK_KEYS):
                part_highest, part_total, part_acc = add_latents(
                    part_highest,
                    part_total,
                    part_acc,
                    q_block,
                    q_rest,
                    base,
                    key,
                    end,
                    positions,
                    RANK,
                    REST,
                    SCALE,
                    PRECISION,
                    BLOCK_KEYS,
                )
            highest_logit, total, acc = add_part(highest_logit, total, acc, part_highest, part_total, part_acc)
        y, highest_logit, total = result_of(highest_logit, total, acc, None, tokens, is_row)
        at = row_pointers(summed, queries, columns, RANK)
        tl.store(at, y.to(summed.dtype.element_ty), mask=is_row[:, None] & (columns < RANK)[None, :])
        tl.store(log_sums + queries, (highest_logit + tl.log2(total)) * LN_2, mask=is_row)
