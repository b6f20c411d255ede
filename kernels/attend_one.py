"""Attention of one new token of each sequence to the cached keys and values before it, and the writing of its own.

Queries that share keys are the rows of a tile. The softmax begins with the token's own key, and goes on with the cached
ones in steps of BLOCK_KEYS, from the first position on; a step in which nothing is seen changes nothing. So the bits of
a result depend neither on the capacity of the cache nor on the other sequences. Long caches are cut into parts of PART
keys, one program each, whose results `add_parts_kernel` adds up, first part first.

Logits are kept times log2(e), since exp2 is what GPUs have. Source: Dao et al., Flash-Decoding, 2023.
"""

import triton
import triton.language as tl

from .tiles import add, highest, row_pointers

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_seen(position, is_local, WINDOW: tl.constexpr):
    """The first position that the token at `position` attends to; WINDOW 0 is none, is_local may be None."""
    if WINDOW:
        first = tl.maximum(position - WINDOW + 1, 0)
        if is_local is not None:
            first = tl.where(tl.load(is_local) != 0, first, 0)
    else:
        first = 0
    return first


@triton.jit
def with_sink(highest_logit, total, acc, sinks, heads, exists):
    """The result [rows, features]: acc / total, where a logit of each row's head, or None, takes part in the total."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=exists, other=0.0).to(tl.float32) * LOG2_E
        with_own = tl.maximum(highest_logit, sink)
        factor = tl.exp2(highest_logit - with_own)
        total = total * factor + tl.exp2(sink - with_own)
        acc = acc * factor[:, None]
    return acc / total[:, None]


@triton.jit
def attend_one_kernel(
    q,
    k,
    v,
    layer,
    positions,
    is_local,
    sinks,
    k_cache,
    v_cache,
    attended,
    highest_logits,
    totals,
    capacity,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FEATURES: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    """Puts k and v into the cache at the positions, and attends to all positions up to there, or to the last WINDOW.

    Arrays: q and attended [B, KV_HEADS, GROUP, FEATURES]; k, v [B, KV_HEADS, FEATURES]; k_cache, v_cache [layers, B,
    capacity, KV_HEADS, FEATURES]; layer int32 [], positions int32 [B], is_local bool [] or None, sinks [KV_HEADS *
    GROUP] or None. The grid is (B, KV_HEADS, parts). With highest_logits and totals [parts, B, KV_HEADS, GROUP] in
    float32, attended [parts, B, KV_HEADS, GROUP, FEATURES] has the parts' sums in float32 instead.
    """
    sequence, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + sequence)
    first = first_seen(position, is_local, WINDOW)
    number = sequence * KV_HEADS + kv_head
    rows = tl.arange(0, BLOCK_GROUP)
    features = tl.arange(0, BLOCK_FEATURES)
    is_row, is_feature = rows < GROUP, features < FEATURES
    queries = number * GROUP + rows
    q_block = tl.load(
        row_pointers(q, queries, features, FEATURES), mask=is_row[:, None] & is_feature[None, :], other=0.0
    )
    own_k = tl.load(k + number * FEATURES + features, mask=is_feature, other=0.0)
    own_v = tl.load(v + number * FEATURES + features, mask=is_feature, other=0.0)

    # int64: a cache may hold more than 2**31 elements
    offset = (tl.load(layer).to(tl.int64) * tl.num_programs(0) + sequence) * capacity * (KV_HEADS * FEATURES)
    offset += kv_head * FEATURES
    is_last = part == position // PART
    own_offset = offset + position.to(tl.int64) * (KV_HEADS * FEATURES) + features
    is_stored = is_last & (position >= 0) & (position < capacity)
    stored_features = tl.where(is_stored, FEATURES, 0)
    tl.store(k_cache + own_offset, own_k, mask=features < stored_features)
    tl.store(v_cache + own_offset, own_v, mask=features < stored_features)

    own_logits = tl.reduce(q_block.to(tl.float32) * own_k.to(tl.float32)[None, :], 1, add) * (SCALE * LOG2_E)
    highest_logit = tl.where(is_last, own_logits, float("-inf"))
    total = tl.where(is_last, tl.full([BLOCK_GROUP], 1.0, tl.float32), 0.0)
    acc = tl.full([BLOCK_GROUP, BLOCK_FEATURES], 0.0, tl.float32)
    acc += tl.where(is_last, own_v.to(tl.float32), 0.0)[None, :]
    end = tl.minimum((part + 1) * PART, tl.minimum(position, capacity))
    start = tl.maximum(part * PART, first // BLOCK_KEYS * BLOCK_KEYS)
    for key in tl.range(start, end, BLOCK_KEYS):
        keys = key + tl.arange(0, BLOCK_KEYS)
        is_seen = (keys >= first) & (keys < end)
        mask = is_seen[:, None] & is_feature[None, :]
        at = row_pointers(offset, keys, features, KV_HEADS * FEATURES)
        k_block = tl.load(k_cache + at, mask=mask, other=0.0)
        logits = tl.dot(q_block, k_block.T, input_precision=PRECISION) * (SCALE * LOG2_E)
        logits = tl.where(is_seen[None, :], logits, float("-inf"))
        higher = tl.maximum(highest_logit, tl.reduce(logits, 1, highest))
        weights = tl.exp2(logits - higher[:, None])
        factor = tl.exp2(highest_logit - higher)
        v_block = tl.load(v_cache + at, mask=mask, other=0.0)
        acc = tl.dot(weights.to(v_block.dtype), v_block, acc * factor[:, None], input_precision=PRECISION)
        total = total * factor + tl.reduce(weights, 1, add)
        highest_logit = higher

    if highest_logits is None:
        acc = with_sink(highest_logit, total, acc, sinks, kv_head * GROUP + rows, is_row)
    else:
        queries += part * tl.num_programs(0) * (KV_HEADS * GROUP)
        tl.store(highest_logits + queries, highest_logit, mask=is_row)
        tl.store(totals + queries, total, mask=is_row)
    at = row_pointers(attended, queries, features, FEATURES)
    tl.store(at, acc.to(attended.dtype.element_ty), mask=is_row[:, None] & is_feature[None, :])


@triton.jit
def add_parts_kernel(
    parts,
    highest_logits,
    totals,
    positions,
    is_local,
    sinks,
    attended,
    HEADS: tl.constexpr,
    FEATURES: tl.constexpr,
    WINDOW: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    """attended [B, HEADS, FEATURES] from what `attend_one_kernel` leaves of each part; the grid is (B, HEADS).

    BLOCK_PARTS parts are added up at once, whatever the capacity is, so that the order of additions is the same.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + sequence)
    last_part = position // PART
    features = tl.arange(0, BLOCK_FEATURES)
    query = sequence * HEADS + head
    highest_logit = tl.full([1], float("-inf"), tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    acc = tl.full([1, BLOCK_FEATURES], 0.0, tl.float32)
    first_part = first_seen(position, is_local, WINDOW) // PART
    for step in tl.range(first_part // BLOCK_PARTS, last_part // BLOCK_PARTS + 1):
        part = step * BLOCK_PARTS + tl.arange(0, BLOCK_PARTS)
        is_seen = (part >= first_part) & (part <= last_part)
        queries = part * tl.num_programs(0) * HEADS + query
        of_parts = tl.load(highest_logits + queries, mask=is_seen, other=float("-inf"))
        higher = tl.maximum(highest_logit, tl.reduce(of_parts, 0, highest, keep_dims=True))
        weights = tl.exp2(of_parts - higher)
        factor = tl.exp2(highest_logit - higher)
        sums = tl.load(totals + queries, mask=is_seen, other=0.0) * weights
        mask = is_seen[:, None] & (features < FEATURES)[None, :]
        values = tl.load(row_pointers(parts, queries, features, FEATURES), mask=mask, other=0.0) * weights[:, None]
        total = total * factor + tl.reduce(sums, 0, add, keep_dims=True)
        acc = acc * factor[:, None] + tl.reduce(values, 0, add, keep_dims=True)
        highest_logit = higher
    heads = head + tl.arange(0, 1)
    result = with_sink(highest_logit, total, acc, sinks, heads, heads < HEADS)
    at = row_pointers(attended, query + tl.arange(0, 1), features, FEATURES)
    tl.store(at, result.to(attended.dtype.element_ty), mask=(features < FEATURES)[None, :])
