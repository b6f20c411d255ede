"""Attention of one new token of each sequence to cached latents, which are the keys and the values of all heads.

Heads are the rows of a tile, so that a latent is read once for all of them, and each part of the latents has a program
of its own; `add_parts_kernel` of `attend_one` adds up several parts.
"""

import triton
import triton.language as tl

from .attend import LOG2_E, add_step, no_keys
from .tiles import highest, row_pointers


@triton.jit
def attend_latents_kernel(
    q,
    latents,
    layer,
    positions,
    attended,
    highest_logits,
    totals,
    capacity,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    REST: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Sums of the first RANK features of latents up to each position, by a softmax of all features' products with q.

    Arrays: q [B, HEADS, RANK + REST]; latents [layers, B, capacity, RANK + REST]; layer int32 [], positions int32 [B];
    attended float32 [parts, B, HEADS, RANK], highest_logits and totals float32 [parts, B, HEADS], as `add_parts_kernel`
    takes them. The grid is (tiles of heads, B, parts); parts after a position are not written.
    """
    FEATURES: tl.constexpr = RANK + REST
    sequence, part = tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + sequence)
    heads = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    columns, others = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_REST)
    is_head, is_column, is_other = heads < HEADS, columns < RANK, others < REST
    queries = sequence * HEADS + heads
    at = row_pointers(q, queries, columns, FEATURES)
    q_block = tl.load(at, mask=is_head[:, None] & is_column[None, :], other=0.0)
    at = row_pointers(q + RANK, queries, others, FEATURES)
    q_rest = tl.load(at, mask=is_head[:, None] & is_other[None, :], other=0.0)

    # int64: a cache may hold more than 2**31 elements
    base = latents + (tl.load(layer).to(tl.int64) * tl.num_programs(1) + sequence) * capacity * FEATURES
    highest_logit, total, acc = no_keys(BLOCK_HEADS, BLOCK_RANK)
    end = tl.minimum(tl.minimum((part + 1) * PART, position + 1), capacity)
    for key in tl.range(part * PART, end, BLOCK_KEYS):
        keys = key + tl.arange(0, BLOCK_KEYS)
        is_key = keys < end
        block = tl.load(
            row_pointers(base, keys, columns, FEATURES), mask=is_key[:, None] & is_column[None, :], other=0.0
        )
        rest = tl.load(
            row_pointers(base + RANK, keys, others, FEATURES), mask=is_key[:, None] & is_other[None, :], other=0.0
        )
        logits = tl.dot(q_block, block.T, input_precision=PRECISION)
        logits = tl.dot(q_rest, rest.T, logits, input_precision=PRECISION)
        logits = tl.where(is_key[None, :], logits, float("-inf"))
        highest_logit, total, acc = add_step(highest_logit, total, acc, logits, block, SCALE * LOG2_E, PRECISION)

    if part * PART < end:
        queries += part * tl.num_programs(1) * HEADS
        tl.store(highest_logits + queries, highest_logit, mask=is_head)
        tl.store(totals + queries, tl.reduce(total, 1, highest), mask=is_head)
        tl.store(row_pointers(attended, queries, columns, RANK), acc, mask=is_head[:, None] & is_column[None, :])
