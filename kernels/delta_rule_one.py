"""One token more of the gated delta rule for each sequence, whose states are updated in place."""

import triton
import triton.language as tl

from .tiles import add


@triton.jit
def normalized_row(x, EPSILON: tl.constexpr):
    """A row's features in float32, divided by the root of their sum of squares plus EPSILON."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.reduce(x * x, 0, add) + EPSILON)


@triton.jit
def delta_rule_one_kernel(
    q,
    k,
    v,
    log_decay,
    beta,
    layer,
    states,
    y,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FEATURES: tl.constexpr,
    VALUE_FEATURES: tl.constexpr,
    SCALE: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """S = exp(log_decay) S, then S += beta k (v - k^T S)^T, and y = SCALE q^T S, of normalized q and k.

    Arrays: q, k [B, KEY_HEADS, FEATURES]; v and y [B, h, VALUE_FEATURES] with h = KEY_HEADS * GROUP; log_decay, beta
    float32 [B, h]; layer int32 []; states float32 [layers, B, h, FEATURES, VALUE_FEATURES]. The grid is (blocks of
    columns, h, B): the columns of a state do not depend on each other.
    """
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    head, sequence = tl.program_id(1), tl.program_id(2)
    features = tl.arange(0, BLOCK_FEATURES)
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_feature, is_column = features < FEATURES, columns < VALUE_FEATURES
    number = sequence * HEADS + head
    # int64: stacked states may hold more than 2**31 elements
    of_layer = tl.load(layer).to(tl.int64) * tl.num_programs(2) * HEADS + number
    at_state = of_layer * (FEATURES * VALUE_FEATURES) + features[:, None] * VALUE_FEATURES + columns[None, :]
    is_in_state = is_feature[:, None] & is_column[None, :]
    state = tl.load(states + at_state, mask=is_in_state, other=0.0)
    at_key = (sequence * KEY_HEADS + head // GROUP) * FEATURES + features
    q_row = normalized_row(tl.load(q + at_key, mask=is_feature, other=0.0), EPSILON) * SCALE
    k_row = normalized_row(tl.load(k + at_key, mask=is_feature, other=0.0), EPSILON)
    at_value = number * VALUE_FEATURES + columns
    v_row = tl.load(v + at_value, mask=is_column, other=0.0).to(tl.float32)
    state *= tl.exp(tl.load(log_decay + number))
    correction = (v_row - tl.reduce(state * k_row[:, None], 0, add)) * tl.load(beta + number)
    state += k_row[:, None] * correction[None, :]
    tl.store(states + at_state, state, mask=is_in_state)
    y_row = tl.reduce(state * q_row[:, None], 0, add)
    tl.store(y + at_value, y_row.to(y.dtype.element_ty), mask=is_column)
