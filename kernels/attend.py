"""Attention in steps over keys: one order of additions for training, prompts and decoding.

The keys of a sequence are taken in steps of BLOCK_KEYS and in parts of PART keys, both counted from the sequence's own
first key. A part has a softmax of its own, its sums of weights are a product with ones, and parts are added up first
part first. A step or part that is hidden from a query changes no bit of the query's sums. So the bits of a result
depend only on the query's own sequence, not on other queries, a cache's capacity, what else a row holds, or the
kernel: `attend_one` takes the same steps for one query. Multiply-adds are spelled out, as compilers might choose others
in each kernel.

Logits are kept times log2(e), since exp2 is what GPUs have. Source: Dao, FlashAttention-2, 2023; for the parts, Dao et
al., Flash-Decoding, 2023.
"""

import triton
import triton.language as tl

from .tiles import add, highest, row_pointers

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite: two of them have a difference
ONES = tl.constexpr(8)  # columns of ones: a tensor core's least


@triton.jit
def first_seen(position, has_window, WINDOW: tl.constexpr):
    """The first position that the token at `position` attends to; WINDOW 0 is none."""
    if WINDOW:
        return tl.where(has_window, tl.maximum(position - WINDOW + 1, 0), 0)
    else:
        return position * 0


@triton.jit
def load_window(is_local):
    """Whether the window holds; is_local may be None."""
    return True if is_local is None else tl.load(is_local) != 0


@triton.jit
def slot_of(position, has_window, RING: tl.constexpr):
    """Where a position's key is in its layer's part of a cache, which keeps the last RING if the layer has the window;
    RING 0 keeps all."""
    if RING:
        return tl.where(has_window, position % RING, position)
    else:
        return position


@triton.jit
def no_keys(BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr):
    """The softmax of no keys: highest logit [rows], sum of weights [rows, ONES], weighted sum of values."""
    highest_logit = tl.full([BLOCK_ROWS], LOWEST, tl.float32)
    total = tl.full([BLOCK_ROWS, ONES], 0.0, tl.float32)
    return highest_logit, total, tl.full([BLOCK_ROWS, BLOCK_FEATURES], 0.0, tl.float32)


@triton.jit
def load_scales(scales, head, keys, is_key, HEADS: tl.constexpr):
    """The scales of keys or values in FP8, of one head, of several that follow each other from `head` on; else None."""
    if scales is None:
        return None
    else:
        return tl.load(scales + head + keys * HEADS, mask=is_key, other=0.0)


@triton.jit
def multiplied(q_block, k_block, k_scale, PRECISION: tl.constexpr):
    """Products [rows, keys] of queries and keys; keys in FP8 have a scale each, else None."""
    logits = tl.dot(q_block, k_block.to(q_block.dtype).T, input_precision=PRECISION)
    if k_scale is not None:
        logits = logits * k_scale[None, :]
    return logits


@triton.jit
def add_step(highest_logit, total, acc, logits, v_block, SCALE: tl.constexpr, PRECISION: tl.constexpr, v_scale=None):
    """The softmax with the keys of one step more: logits [rows, keys], -inf where unseen, times SCALE.

    Values that were in FP8 have a scale each, which weights are multiplied by.
    """
    higher = tl.maximum(highest_logit, tl.reduce(logits, 1, highest) * SCALE)
    weights = tl.exp2(tl.fma(logits, tl.full(logits.shape, SCALE, tl.float32), -higher[:, None]))
    factor = tl.exp2(highest_logit - higher)
    of_values = weights
    weights = weights.to(v_block.dtype)
    ones = tl.full([v_block.shape[0], ONES], 1.0, v_block.dtype)
    # both first: what writes to accumulators between two products makes the assembler wait after each instruction
    total, acc = total * factor[:, None], acc * factor[:, None]
    total = tl.dot(weights, ones, total, input_precision=PRECISION)
    if v_scale is not None:
        weights = (of_values * v_scale[None, :]).to(v_block.dtype)
    acc = tl.dot(weights, v_block, acc, input_precision=PRECISION)
    return higher, total, acc


@triton.jit
def add_part(highest_logit, total, acc, part_highest, part_total, part_acc):
    """The softmax of the keys before a part and of those in it."""
    higher = tl.maximum(highest_logit, part_highest)
    factor = tl.exp2(highest_logit - higher)[:, None]
    part_factor = tl.exp2(part_highest - higher)[:, None]
    total = tl.fma(total, tl.broadcast_to(factor, total.shape), part_total * part_factor)
    acc = tl.fma(acc, tl.broadcast_to(factor, acc.shape), part_acc * part_factor)
    return higher, total, acc


@triton.jit
def result_of(highest_logit, total, acc, sinks, heads, exists):
    """The result [rows, features], highest logit and sum of weights [rows]; a row's sink takes part, if not None."""
    total = tl.reduce(total, 1, highest)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=exists, other=0.0).to(tl.float32)
        higher = tl.maximum(highest_logit, sink * LOG2_E)
        factor = tl.exp2(highest_logit - higher)
        weight = tl.exp2(tl.fma(sink, tl.full(sink.shape, LOG2_E, tl.float32), -higher))
        total = tl.fma(total, factor, weight)
        acc = acc * factor[:, None]
        highest_logit = higher
    return acc * (1.0 / total)[:, None], highest_logit, total


@triton.jit
def attend_kernel(
    q,
    k,
    v,
    k_scales,
    v_scales,
    layer,
    offset,
    starts,
    is_local,
    sinks,
    firsts,
    attended,
    log_sums,
    length,
    capacity,
    slots,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FEATURES: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
    BY_TMA: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    """Each query attends to the keys of its own sequence up to itself, or to the last WINDOW of them.

    Arrays: q and attended [B, length, KV_HEADS * GROUP, FEATURES]; k, v [layers, B, slots, KV_HEADS, FEATURES] with
    `capacity` keys, or with the last RING of them in a layer with the window; k_scales, v_scales float32 [layers, B,
    slots, KV_HEADS] if k and v are in FP8, else None; layer int32 [] or None for the first; firsts int32 [layers], the
    first slot of each if k and v are [1, B, slots, ...], or None; offset int32 [], the place in k of the first query,
    or None for 0; starts int32 [B, length], the place of the first key of each query's sequence, which never decreases
    along a row, or None for 0; is_local bool [] or None; sinks [KV_HEADS * GROUP] or None; log_sums float32 [B,
    KV_HEADS * GROUP, length], the logarithm of the sum in each softmax. The grid is (heads, B, tiles of queries), the
    longest tiles first.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    head, sequence = tl.program_id(0), tl.program_id(1)
    first = (tl.num_programs(2) - 1 - tl.program_id(2)) * BLOCK_QUERIES
    queries = first + tl.arange(0, BLOCK_QUERIES)
    features = tl.arange(0, BLOCK_FEATURES)
    exists, is_feature = queries < length, features < FEATURES
    rows = sequence.to(tl.int64) * length + queries
    at = row_pointers(head * FEATURES, rows, features, HEADS * FEATURES)
    q_block = tl.load(q + at, mask=exists[:, None] & is_feature[None, :], other=0.0)

    of_sequence = sequence
    first_slot = sequence * 0
    if firsts is not None:
        first_slot += tl.load(firsts + tl.load(layer))
    elif layer is not None:
        of_sequence += tl.load(layer) * tl.num_programs(1)
    places = queries if offset is None else queries + tl.load(offset)
    has_window = load_window(is_local)
    own_starts = queries * 0
    if starts is not None:
        own_starts = tl.maximum(tl.load(starts + rows, mask=exists, other=0), 0)

    end = tl.minimum(first + BLOCK_QUERIES, length)
    while first < end:  # one sequence of those in the tile after the other
        start = 0
        if starts is not None:
            start = tl.maximum(tl.load(starts + sequence.to(tl.int64) * length + first), 0)
        is_row = exists & (own_starts == start)
        count = tl.reduce(is_row.to(tl.int32), 0, add)
        positions = places - start
        lowest = first - start if offset is None else first - start + tl.load(offset)
        last = lowest + count - 1
        y, highest_logit, total = attend_to(
            q_block,
            k,
            v,
            k_scales,
            v_scales,
            of_sequence,
            first_slot + start,
            slots,
            capacity - start,
            head // GROUP * FEATURES,
            positions,
            lowest,
            last,
            has_window,
            sinks,
            queries * 0 + head,
            is_row,
            KV_HEADS * FEATURES,
            FEATURES,
            WINDOW,
            RING,
            SCALE,
            PRECISION,
            PART,
            BY_TMA,
            BLOCK_KEYS,
        )
        tl.store(attended + at, y.to(attended.dtype.element_ty), mask=is_row[:, None] & is_feature[None, :])
        sums = (highest_logit + tl.log2(total)) * LN_2
        tl.store(log_sums + (sequence.to(tl.int64) * HEADS + head) * length + queries, sums, mask=is_row)
        first += count


@triton.jit
def attend_to(
    q_block,
    k,
    v,
    k_scales,
    v_scales,
    of_sequence,
    first_slot,
    slots,
    capacity,
    column,
    positions,
    lowest,
    last,
    has_window,
    sinks,
    heads,
    is_row,
    STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
    BY_TMA: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """What `result_of` gives for queries at positions `lowest` to `last` of a sequence with keys from first_slot on."""
    keys_of_step = tl.arange(0, BLOCK_KEYS)
    features = tl.arange(0, q_block.shape[1])
    in_step = keys_of_step[:, None] * STRIDE + features[None, :]
    first_keys, first_of_last = first_seen(positions, has_window, WINDOW), first_seen(last, has_window, WINDOW)
    highest_logit, total, acc = no_keys(q_block.shape[0], q_block.shape[1])
    begin = first_seen(tl.maximum(lowest, 0), has_window, WINDOW) // BLOCK_KEYS * BLOCK_KEYS
    end = tl.minimum(last + 1, capacity)
    for part in tl.range(begin // PART, (end + PART - 1) // PART):
        part_highest, part_total, part_acc = no_keys(q_block.shape[0], q_block.shape[1])
        for key in tl.range(tl.maximum(begin, part * PART), tl.minimum(end, (part + 1) * PART), BLOCK_KEYS):
            keys = key + keys_of_step
            slot = first_slot + slot_of(key, has_window, RING)
            if BY_TMA:
                k_block = k.load([of_sequence, slot, column]).reshape(BLOCK_KEYS, q_block.shape[1])
            else:
                mask = (keys < end)[:, None]
                if q_block.shape[1] > FEATURES:
                    mask = mask & (features < FEATURES)[None, :]
                # int64: a cache may hold more than 2**31 elements
                at = (tl.cast(of_sequence, tl.int64) * slots + slot) * STRIDE + column
                k_block = tl.load(k + at + in_step, mask=mask, other=0.0)
            scales_at = (tl.cast(of_sequence, tl.int64) * slots + slot) * (STRIDE // FEATURES) + column // FEATURES
            k_scale = load_scales(k_scales, scales_at, keys_of_step, keys < end, STRIDE // FEATURES)
            logits = multiplied(q_block, k_block, k_scale, PRECISION)
            if (key + BLOCK_KEYS > lowest + 1) | (key < first_of_last):
                is_seen = keys[None, :] <= positions[:, None]
                if WINDOW:
                    is_seen = is_seen & (keys[None, :] >= first_keys[:, None])
                logits = tl.where(is_seen, logits, float("-inf"))
            if BY_TMA:
                v_block = v.load([of_sequence, slot, column]).reshape(BLOCK_KEYS, q_block.shape[1])
            else:
                v_block = tl.load(v + at + in_step, mask=mask, other=0.0)
            v_scale = load_scales(v_scales, scales_at, keys_of_step, keys < end, STRIDE // FEATURES)
            v_block = v_block.to(q_block.dtype)
            part_highest, part_total, part_acc = add_step(
                part_highest, part_total, part_acc, logits, v_block, SCALE * LOG2_E, PRECISION, v_scale
            )
        highest_logit, total, acc = add_part(highest_logit, total, acc, part_highest, part_total, part_acc)
    return result_of(highest_logit, total, acc, sinks, heads, is_row)
