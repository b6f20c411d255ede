"""Attention of one new token of each sequence to cached latents, which are the keys and the values of all heads.

The steps are those of `attend_latents`, so that a token's result has the bits that it has among other tokens. Heads
are the rows of a tile, so that a latent is read once for all of them, and each part of the latents has a program of its
own; `add_parts_kernel` of `attend_one` adds up the parts.
"""

import triton
import triton.language as tl

from .attend import no_keys
from .attend_latents import add_latents, load_queries
from .tiles import highest, row_pointers


@triton.jit
def attend_latents_one_kernel(
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
    is_head = heads < HEADS
    queries = sequence * HEADS + heads
    q_block, q_rest = load_queries(q, queries, is_head, RANK, REST, BLOCK_RANK, BLOCK_REST)

    # int64: a cache may hold more than 2**31 elements
    base = latents + (tl.load(layer).to(tl.int64) * tl.num_programs(1) + sequence) * capacity * FEATURES
    highest_logit, total, acc = no_keys(BLOCK_HEADS, BLOCK_RANK)
    end = tl.minimum(tl.minimum((part + 1) * PART, position + 1), capacity)
    for key in tl.range(part * PART, end, BLOCK_KEYS):
        highest_logit, total, acc = add_latents(
            highest_logit,
            total,
            acc,
            q_block,
            q_rest,
            base,
            key,
            end,
            heads * 0 + position,
            RANK,
            REST,
            SCALE,
            PRECISION,
            BLOCK_KEYS,
        )

    if part * PART < end:
        queries += part * tl.num_programs(1) * HEADS
        tl.store(highest_logits + queries, highest_logit, mask=is_head)
        tl.store(totals + queries, tl.reduce(total, 1, highest), mask=is_head)
        columns = tl.arange(0, BLOCK_RANK)
        at = row_pointers(attended, queries, columns, RANK)
        tl.store(at, acc, mask=is_head[:, None] & (columns < RANK)[None, :])
