"""The gated delta rule token after token: one order of additions for training, prompts and decoding.

A row of one token and a row of thousands are computed by the same compiled program: what differs is known only when it
runs. So the bits of a token's result depend on the tokens of its own sequence alone. A warp has some columns of a
head's state in its registers; the columns do not depend on each other.

Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, https://arxiv.org/abs/2412.06464.
"""

import triton
import triton.language as tl

from .tiles import add


@triton.jit
def over_features(x):
    """The sums over the first two axes, which are the features."""
    return tl.reduce(tl.reduce(x, 0, add), 0, add)


@triton.jit
def delta_rule_in_order_kernel(
    q,
    k,
    v,
    log_decay,
    beta,
    layer,
    states,
    y,
    befores,
    corrections,
    length_and_keeps,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FEATURES: tl.constexpr,
    VALUE_FEATURES: tl.constexpr,
    SCALE: tl.constexpr,
    EPSILON: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """S = exp(log_decay) S, then S += beta k (v - k^T S)^T, and y = SCALE q^T S, of normalized q and k, per token.

    Arrays: q, k float32 [B, length, KEY_HEADS, FEATURES]; v float32 and y [B, length, h, VALUE_FEATURES] with h =
    KEY_HEADS * GROUP; log_decay, beta float32 [B, length, h]; layer int32 []; states float32 [layers, B, h, FEATURES,
    VALUE_FEATURES]. length_and_keeps is 2 * length, plus 1 to write what the backward pass reads: befores [B, h,
    chunks, FEATURES, VALUE_FEATURES], the states before each CHUNK tokens, and corrections like v, v - k^T S. A warp
    holds a block as [BLOCK_FEATURES // LANES, LANES, BLOCK_COLUMNS], the first axis in registers. The grid is (blocks
    of columns, h, B).
    """
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    STATE: tl.constexpr = FEATURES * VALUE_FEATURES
    OF_LANE: tl.constexpr = BLOCK_FEATURES // LANES
    length, keeps = length_and_keeps >> 1, (length_and_keeps & 1) != 0
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    # features that follow each other are in one thread, which loads them from shared memory at once
    features = tl.arange(0, OF_LANE)[:, None] + (tl.arange(0, LANES) * OF_LANE)[None, :]
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_feature, is_column = features < FEATURES, columns < VALUE_FEATURES
    is_in_state = is_feature[:, :, None] & is_column[None, None, :]
    # int64: stacked states may hold more than 2**31 elements
    in_state = (features * VALUE_FEATURES).to(tl.int64)[:, :, None] + columns.to(tl.int64)[None, None, :]
    # loads of several columns at once would spread a column over more threads, and so its sums
    in_state = tl.max_contiguous(in_state, (1, 1, 1))
    number = sequence * HEADS + head
    at_state = states + (tl.load(layer).to(tl.int64) * tl.num_programs(2) * HEADS + number) * STATE + in_state
    state = tl.load(at_state, mask=is_in_state, other=0.0)  # [OF_LANE, LANES, BLOCK_COLUMNS]
    at_before = befores + number * ((length + CHUNK - 1) // CHUNK) * STATE + in_state
    zeros = tl.full(state.shape, 0.0, tl.float32)
    for token in tl.range(0, length, num_stages=STAGES):
        row = sequence * length + token
        at_key = (row * KEY_HEADS + head // GROUP) * FEATURES + features
        at_value = (row * HEADS + head) * VALUE_FEATURES + columns
        k_row = tl.load(k + at_key, mask=is_feature, other=0.0)
        q_row = tl.load(q + at_key, mask=is_feature, other=0.0)
        decay = tl.exp(tl.load(log_decay + row * HEADS + head))
        beta_one = tl.load(beta + row * HEADS + head)
        v_row = tl.load(v + at_value, mask=is_column, other=0.0)
        if keeps and token % CHUNK == 0:
            before = state.to(befores.dtype.element_ty)
            tl.store(at_before + (token // CHUNK) * STATE, before, mask=is_in_state)
        k_root = tl.rsqrt(over_features(k_row * k_row) + EPSILON)
        q_root = tl.rsqrt(over_features(q_row * q_row) + EPSILON) * SCALE
        # + 0: a state that was forgotten has no negative zeros, as a new one
        state = tl.fma(state, zeros + decay, zeros)
        correction = v_row - over_features(state * k_row[:, :, None]) * k_root
        if keeps:
            tl.store(corrections + at_value, correction.to(corrections.dtype.element_ty), mask=is_column)
        state += k_row[:, :, None] * (correction * (beta_one * k_root))[None, None, :]
        y_row = over_features(state * q_row[:, :, None]) * q_root
        tl.store(y + at_value, y_row.to(y.dtype.element_ty), mask=is_column)
    tl.store(at_state, state, mask=is_in_state)
