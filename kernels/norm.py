"""RMS norm of rows, with what is added to them before in the same pass, and its backward pass; float32 inside."""

import triton
import triton.language as tl

from .tiles import add


@triton.jit
def norm_kernel(
    x,
    added,
    scale,
    total,
    y,
    COLUMNS: tl.constexpr,
    EPSILON: tl.constexpr,
    ADDED_SCALE: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """total = x + ADDED_SCALE * added, and y = total / sqrt(mean(total ** 2) + EPSILON) * scale.

    Arrays: x, added, total and y [rows, COLUMNS], scale [COLUMNS]; without `added` there is no total, and x is in its
    place. y is made of total in its own dtype, as the backward pass finds it. The grid is (rows,); a block has all
    columns, so that the sum over a row does not depend on other rows.
    """
    columns = tl.arange(0, BLOCK_COLUMNS)
    mask = columns < COLUMNS
    at = tl.program_id(0).to(tl.int64) * COLUMNS + columns
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if added is not None:
        value += ADDED_SCALE * tl.load(added + at, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=mask)
        value = rounded.to(tl.float32)
    factors = tl.load(scale + columns, mask=mask, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.reduce(value * value, 0, add) / COLUMNS + EPSILON)
    tl.store(y + at, (value * root * factors).to(y.dtype.element_ty), mask=mask)


@triton.jit
def norm_backward_kernel(
    x,
    scale,
    dy,
    d_total,
    dx,
    d_scale,
    num_rows,
    COLUMNS: tl.constexpr,
    EPSILON: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The gradient of x where y = norm(x) * scale, plus d_total, and the gradient of scale, in parts.

    Arrays: x, dy, d_total (or None) and dx [num_rows, COLUMNS], scale [COLUMNS], d_scale float32 [programs, COLUMNS],
    whose sum over the programs is the gradient of scale. The grid is (num_rows / ROWS,), rounded up.
    """
    columns = tl.arange(0, BLOCK_COLUMNS)
    mask = columns < COLUMNS
    program = tl.program_id(0).to(tl.int64)
    factors = tl.load(scale + columns, mask=mask, other=0.0).to(tl.float32)
    d_factors = tl.full([BLOCK_COLUMNS], 0.0, tl.float32)
    first = program * ROWS
    for row in tl.range(first, tl.minimum(first + ROWS, num_rows)):
        at = row * COLUMNS + columns
        # all are loaded before the sums over the row, which wait for every thread
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        if d_total is not None:
            other_ways = tl.load(d_total + at, mask=mask, other=0.0).to(tl.float32)
        scaled = gradient * factors
        squares = tl.reduce(value * value, 0, add)
        products = tl.reduce(scaled * value, 0, add)
        root = tl.rsqrt(squares / COLUMNS + EPSILON)
        normalized = value * root
        d_factors += gradient * normalized
        result = root * (scaled - products * root / COLUMNS * normalized)
        if d_total is not None:
            result += other_ways
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=mask)
    tl.store(d_scale + program * COLUMNS + columns, d_factors, mask=mask)
