"""The activation between an expert's two products, and one pass that computes all that its backward pass needs."""

import triton
import triton.language as tl

from .tiles import add, row_pointers, store_tile


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def curve_and_slope(gate, CURVE: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """f(gate) and its derivative; both are NaN if gate is NaN."""
    if CURVE == "silu":
        s = sigmoid(gate)
        value = gate * s
        slope = s * (1 + gate * (1 - s))
    elif CURVE == "clamped_silu":
        clamped = tl.where(gate > LIMIT, LIMIT, gate)
        s = sigmoid(ALPHA * clamped)
        value = clamped * s
        slope = tl.where(gate > LIMIT, 0.0, s * (1 + ALPHA * clamped * (1 - s)))
    elif CURVE == "gelu":
        s = 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
        value = gate * s
        slope = s + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    elif CURVE == "gelu_tanh":  # (1 + tanh(a)) / 2 = sigmoid(2 * a)
        s = sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        value = gate * s
        slope = s + value * (1 - s) * (1.5957691216057308 + 0.2140644488 * gate * gate)
    elif CURVE == "relu":
        value = tl.where(gate < 0, 0.0, gate)
        slope = tl.where(gate > 0, 1.0, 0.0)
    else:
        tl.static_assert(CURVE == "relu_squared")
        relu = tl.where(gate < 0, 0.0, gate)
        value = relu * relu
        slope = 2 * relu
    return value, slope


@triton.jit
def factor_and_slope(up, CURVE: tl.constexpr, LIMIT: tl.constexpr):
    """The factor that a gated activation multiplies f(gate) by, and its derivative with respect to up."""
    if CURVE == "clamped_silu":
        factor = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1
        slope = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, 1.0)
    else:
        factor = up
        slope = 1.0
    return factor, slope


@triton.jit
def activate(gate, up, GATED: tl.constexpr, CURVE: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """f(gate) * up, or f(gate) where it is not GATED; float32."""
    value, _ = curve_and_slope(gate, CURVE, LIMIT, ALPHA)
    if GATED:
        factor, _ = factor_and_slope(up, CURVE, LIMIT)
        value *= factor
    return value


@triton.jit
def activate_backward(
    gate, up, d_hidden, GATED: tl.constexpr, CURVE: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr
):
    """The hidden features, d gate and d up (d gate again where it is not GATED)."""
    value, slope = curve_and_slope(gate, CURVE, LIMIT, ALPHA)
    d_gate = d_hidden * slope
    d_up = d_gate
    if GATED:
        factor, factor_slope = factor_and_slope(up, CURVE, LIMIT)
        d_gate *= factor
        d_up = d_hidden * value * factor_slope
        value *= factor
    return value, d_gate, d_up


@triton.jit
def as_pairs(pre):
    """A pointer to an INTERLEAVED row as integers of twice the bits: each holds a feature's gate and up.

    A thread then holds gate, up, z and hidden of the same features, so that threads exchange nothing.
    """
    return pre.to(tl.pointer_type(tl.int64 if pre.dtype.element_ty == tl.float32 else tl.int32))


@triton.jit
def split_pairs(pairs, dtype: tl.constexpr):
    """The gate and up, in float32, of integers loaded through `as_pairs`."""
    BITS: tl.constexpr = dtype.primitive_bitwidth
    integer: tl.constexpr = tl.int32 if dtype == tl.float32 else tl.int16
    gate = pairs.to(integer).to(dtype, bitcast=True)
    up = (pairs >> BITS).to(integer).to(dtype, bitcast=True)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def join_pairs(gate, up):
    """Reverses `split_pairs`, for gate and up in the dtype of the row."""
    BITS: tl.constexpr = gate.dtype.primitive_bitwidth
    integer: tl.constexpr = tl.int32 if gate.dtype == tl.float32 else tl.int16
    pair: tl.constexpr = tl.int64 if gate.dtype == tl.float32 else tl.int32
    low = gate.to(integer, bitcast=True).to(pair) & ((1 << BITS) - 1)
    return low | (up.to(integer, bitcast=True).to(pair) << BITS)


@triton.jit
def load_gate_and_up(
    pre,
    rows,
    exists,
    column,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Gate and up, float32 [BLOCK_ROWS, BLOCK_COLUMNS]; where it is not GATED, up is gate again."""
    columns = column + tl.arange(0, BLOCK_COLUMNS)
    mask = exists[:, None] & (columns < COLUMNS)[None, :]
    if not GATED:
        gate = tl.load(row_pointers(pre, rows, columns, COLUMNS), mask=mask, other=0.0).to(tl.float32)
        up = gate
    elif INTERLEAVED:
        pairs = tl.load(row_pointers(as_pairs(pre), rows, columns, COLUMNS), mask=mask, other=0)
        gate, up = split_pairs(pairs, pre.dtype.element_ty)
    else:
        gate = tl.load(row_pointers(pre, rows, columns, 2 * COLUMNS), mask=mask, other=0.0).to(tl.float32)
        up = tl.load(row_pointers(pre + COLUMNS, rows, columns, 2 * COLUMNS), mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def store_gate_and_up(
    pre,
    gate,
    up,
    rows,
    exists,
    column,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Stores gate and up to pre, where `load_gate_and_up` finds them."""
    columns = column + tl.arange(0, BLOCK_COLUMNS)
    mask = exists[:, None] & (columns < COLUMNS)[None, :]
    if not GATED:
        store_tile(pre, gate, rows, exists, column, COLUMNS, BLOCK_COLUMNS)
    elif INTERLEAVED:
        pairs = join_pairs(gate.to(pre.dtype.element_ty), up.to(pre.dtype.element_ty))
        tl.store(row_pointers(as_pairs(pre), rows, columns, COLUMNS), pairs, mask=mask)
    else:
        dtype = pre.dtype.element_ty
        tl.store(row_pointers(pre, rows, columns, 2 * COLUMNS), gate.to(dtype), mask=mask)
        tl.store(row_pointers(pre + COLUMNS, rows, columns, 2 * COLUMNS), up.to(dtype), mask=mask)


@triton.jit
def activate_kernel(
    pre,
    hidden,
    num_rows,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CURVE: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """hidden = f(gate) * up, or f(pre) where it is not GATED.

    Arrays: pre [num_rows, 2 * COLUMNS], gate and up side by side or INTERLEAVED, or [num_rows, COLUMNS]; hidden
    [num_rows, COLUMNS]. The grid is (num_rows / BLOCK_ROWS, COLUMNS / BLOCK_COLUMNS), rounded up.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = rows < num_rows
    column = tl.program_id(1) * BLOCK_COLUMNS
    gate, up = load_gate_and_up(pre, rows, exists, column, COLUMNS, GATED, INTERLEAVED, BLOCK_ROWS, BLOCK_COLUMNS)
    value = activate(gate, up, GATED, CURVE, LIMIT, ALPHA)
    store_tile(hidden, value, rows, exists, column, COLUMNS, BLOCK_COLUMNS)


@triton.jit
def activate_backward_kernel(
    pre,
    z,
    weights,
    in_group,
    d_pre,
    hidden,
    row_sums,
    num_rows,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALE_HIDDEN: tl.constexpr,
    CURVE: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Computes d pre, hidden, and row_sums, each row's sum of hidden * z, where d hidden[i] is weights[i] * z[i].

    Arrays: pre and d_pre as in `activate_kernel`; z like hidden; weights and row_sums float32 [num_rows]; in_group int8
    [num_rows], where rows with 0 get a row sum of 0 and are otherwise not written. SCALE_HIDDEN writes hidden times its
    row's weight; row_sums never include the weight. The grid is (num_rows / BLOCK_ROWS,), rounded up.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = tl.load(in_group + rows, mask=rows < num_rows, other=0) != 0
    weight = tl.load(weights + rows, mask=exists, other=0.0)[:, None]
    products = tl.full([BLOCK_ROWS, BLOCK_COLUMNS], 0.0, tl.float32)
    any_exists = tl.reduce(exists.to(tl.int32), 0, add) > 0
    for column in tl.range(0, tl.where(any_exists, COLUMNS, 0), BLOCK_COLUMNS):
        gate, up = load_gate_and_up(pre, rows, exists, column, COLUMNS, GATED, INTERLEAVED, BLOCK_ROWS, BLOCK_COLUMNS)
        columns = column + tl.arange(0, BLOCK_COLUMNS)
        mask = exists[:, None] & (columns < COLUMNS)[None, :]
        z_block = tl.load(row_pointers(z, rows, columns, COLUMNS), mask=mask, other=0.0).to(tl.float32)
        value, d_gate, d_up = activate_backward(gate, up, weight * z_block, GATED, CURVE, LIMIT, ALPHA)
        products += value * z_block
        store_gate_and_up(
            d_pre, d_gate, d_up, rows, exists, column, COLUMNS, GATED, INTERLEAVED, BLOCK_ROWS, BLOCK_COLUMNS
        )
        if SCALE_HIDDEN:
            value *= weight
        store_tile(hidden, value, rows, exists, column, COLUMNS, BLOCK_COLUMNS)
    tl.store(row_sums + rows, tl.reduce(products, 1, add), mask=rows < num_rows)
