"""Attention of one new token of each sequence to the cached keys and values before it, and the writing of its own.

The steps are those of `attend`, so that a token's result has the bits that it has among the tokens of a whole sequence.
Queries that share keys are the rows of a tile, and each part of the keys has a program of its own; with more than one
part, `add_parts_kernel` adds them up.
"""

import triton
import triton.language as tl

from .attend import (
    LOG2_E,
    LOWEST,
    ONES,
    add_part,
    add_step,
    first_seen,
    load_scales,
    load_window,
    multiplied,
    no_keys,
    result_of,
    slot_of,
)
from .tiles import highest, row_pointers


@triton.jit
def first_of_token(position, has_window, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that the token at `position` attends to; WINDOW and CHUNK are 0 for none."""
    if CHUNK:
        return position // CHUNK * CHUNK
    else:
        return first_seen(position, has_window, WINDOW)


@triton.jit
def attend_one_kernel(
    q,
    k,
    v,
    k_scale,
    v_scale,
    layer,
    positions,
    is_local,
    sinks,
    firsts,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    attended,
    highest_logits,
    totals,
    capacity,
    slots,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FEATURES: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    CHUNK: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    """Puts k and v into the cache at the positions, and attends to all positions up to there, or to the last WINDOW, or
    to those of the same CHUNK.

    Arrays: q and attended [B, KV_HEADS, GROUP, FEATURES]; k, v [B, KV_HEADS, FEATURES]; k_cache, v_cache [layers, B,
    slots, KV_HEADS, FEATURES] with `capacity` positions, or with the last RING of them in a layer with the window;
    k_scale, v_scale [B, KV_HEADS] and k_scales, v_scales [layers, B, slots, KV_HEADS], float32, if the others are in
    FP8, else None; firsts int32 [layers], the first slot of each if the caches are [1, B, slots, ...], or None; layer
    int32 [], positions int32 [B], is_local bool [] or None, sinks [KV_HEADS * GROUP] or None. The grid is (B, KV_HEADS,
    parts), from the first part that is seen on. With highest_logits and totals [parts, B, KV_HEADS, GROUP] in float32,
    attended [parts, B, KV_HEADS, GROUP, FEATURES] has the parts' sums in float32 instead.
    """
    STRIDE: tl.constexpr = KV_HEADS * FEATURES
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    position, has_window = tl.load(positions + sequence), load_window(is_local)
    first = first_of_token(position, has_window, WINDOW, CHUNK)
    part = first // PART + tl.program_id(2)
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
    if firsts is None:
        offset = (tl.load(layer).to(tl.int64) * tl.num_programs(0) + sequence) * slots * STRIDE
    else:
        offset = (sequence.to(tl.int64) * slots + tl.load(firsts + tl.load(layer))) * STRIDE
    offset += kv_head * FEATURES
    is_last = part == position // PART
    own_offset = offset + slot_of(position, has_window, RING).to(tl.int64) * STRIDE + features
    is_stored = is_last & (position >= 0) & (position < capacity)
    stored_features = tl.where(is_stored, FEATURES, 0)
    tl.store(k_cache + own_offset, own_k, mask=features < stored_features)
    tl.store(v_cache + own_offset, own_v, mask=features < stored_features)
    own_k, own_v = own_k.to(q_block.dtype), own_v.to(q_block.dtype)
    scales_at = offset // FEATURES
    if k_scales is not None:
        own_k_scale, own_v_scale = tl.load(k_scale + number), tl.load(v_scale + number)
        own_scale_at = scales_at + slot_of(position, has_window, RING) * KV_HEADS
        tl.store(k_scales + own_scale_at, own_k_scale, mask=is_stored)
        tl.store(v_scales + own_scale_at, own_v_scale, mask=is_stored)

    highest_logit, total, acc = no_keys(BLOCK_GROUP, BLOCK_FEATURES)
    own_step = position // BLOCK_KEYS * BLOCK_KEYS
    end = tl.minimum((part + 1) * PART, tl.minimum(own_step, capacity))
    start = tl.maximum(part * PART, first // BLOCK_KEYS * BLOCK_KEYS)
    for key in tl.range(start, end, BLOCK_KEYS):
        keys = key + tl.arange(0, BLOCK_KEYS)
        own_slots = slot_of(key, has_window, RING) + tl.arange(0, BLOCK_KEYS)
        at = row_pointers(offset, own_slots, features, STRIDE)
        k_block = tl.load(k_cache + at, mask=is_feature[None, :], other=0.0)
        scales_of_k = load_scales(k_scales, scales_at, own_slots, keys < end, KV_HEADS)
        logits = multiplied(q_block, k_block, scales_of_k, PRECISION)
        if WINDOW + CHUNK:
            logits = tl.where((keys >= first)[None, :], logits, float("-inf"))
        v_block = tl.load(v_cache + at, mask=is_feature[None, :], other=0.0).to(q_block.dtype)
        scales_of_v = load_scales(v_scales, scales_at, own_slots, keys < end, KV_HEADS)
        highest_logit, total, acc = add_step(
            highest_logit, total, acc, logits, v_block, SCALE * LOG2_E, PRECISION, scales_of_v
        )
    if is_last:  # the step that ends with the token's own key, which the cache may not have yet
        keys = own_step + tl.arange(0, BLOCK_KEYS)
        own_slots = slot_of(own_step, has_window, RING) + tl.arange(0, BLOCK_KEYS)
        at = row_pointers(offset, own_slots, features, STRIDE)
        is_before = (keys >= first) & (keys < tl.minimum(position, capacity))
        mask = is_before[:, None] & is_feature[None, :]
        is_own = (keys == position)[:, None]
        k_block = tl.where(is_own, own_k[None, :], tl.load(k_cache + at, mask=mask, other=0.0).to(q_block.dtype))
        v_block = tl.where(is_own, own_v[None, :], tl.load(v_cache + at, mask=mask, other=0.0).to(q_block.dtype))
        scales_of_k = load_scales(k_scales, scales_at, own_slots, is_before, KV_HEADS)
        scales_of_v = load_scales(v_scales, scales_at, own_slots, is_before, KV_HEADS)
        if k_scales is not None:
            scales_of_k = tl.where(keys == position, own_k_scale, scales_of_k)
            scales_of_v = tl.where(keys == position, own_v_scale, scales_of_v)
        logits = multiplied(q_block, k_block, scales_of_k, PRECISION)
        is_seen = (keys >= first) & (keys <= position)
        logits = tl.where(is_seen[None, :], logits, float("-inf"))
        highest_logit, total, acc = add_step(
            highest_logit, total, acc, logits, v_block, SCALE * LOG2_E, PRECISION, scales_of_v
        )

    if highest_logits is None:
        acc, highest_logit, _ = result_of(highest_logit, total, acc, sinks, kv_head * GROUP + rows, is_row)
    else:
        queries += tl.program_id(2) * tl.num_programs(0) * (KV_HEADS * GROUP)
        tl.store(highest_logits + queries, highest_logit, mask=is_row)
        tl.store(totals + queries, tl.reduce(total, 1, highest), mask=is_row)
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
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    """attended [B, HEADS, FEATURES] from what `attend_one_kernel` leaves of each part; the grid is (B, HEADS)."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + sequence)
    last_part = position // PART
    features = tl.arange(0, BLOCK_FEATURES)
    query = sequence * HEADS + head
    highest_logit, total, acc = no_keys(1, BLOCK_FEATURES)
    first_part = first_of_token(position, load_window(is_local), WINDOW, CHUNK) // PART
    for step in tl.range(first_part, last_part + 1, UNROLL):
        loaded = ()  # of several parts, before any of them is waited for
        for number in tl.static_range(UNROLL):
            part = step + number + tl.arange(0, 1)
            queries = (part - first_part) * tl.num_programs(0) * HEADS + query
            is_seen = part <= last_part
            mask = is_seen[:, None] & (features < FEATURES)[None, :]
            part_highest = tl.load(highest_logits + queries, mask=is_seen, other=LOWEST)
            part_total = tl.load(totals + queries, mask=is_seen, other=0.0)
            part_acc = tl.load(row_pointers(parts, queries, features, FEATURES), mask=mask, other=0.0)
            loaded += ((part_highest, tl.broadcast_to(part_total[:, None], (1, ONES)), part_acc),)
        for number in tl.static_range(UNROLL):
            part_highest, part_total, part_acc = loaded[number]
            highest_logit, total, acc = add_part(highest_logit, total, acc, part_highest, part_total, part_acc)
    heads = head + tl.arange(0, 1)
    result, highest_logit, _ = result_of(highest_logit, total, acc, sinks, heads, heads < HEADS)
    at = row_pointers(attended, query + tl.arange(0, 1), features, FEATURES)
    tl.store(at, result.to(attended.dtype.element_ty), mask=(features < FEATURES)[None, :])
