"""Blocks of weights as kernels read them: dense, in FP8 with scales, or packed in MXFP4; and the scales of rows."""

import triton
import triton.language as tl

from .mxfp4 import GROUP, unpack_rows
from .quantize import BLOCK
from .tiles import load_block


@triton.jit
def load_weight(
    w,
    group,
    k,
    column,
    REDUCED: tl.constexpr,
    W_COLUMNS: tl.constexpr,
    REDUCED_IS_MINOR: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_REDUCED: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """A [BLOCK_REDUCED, BLOCK_COLUMNS] block of the group's weights, zero past their edges."""
    if REDUCED_IS_MINOR:
        block = load_block(w, group, column, k, W_COLUMNS, REDUCED, TMA, BLOCK_COLUMNS, BLOCK_REDUCED).T
    else:
        block = load_block(w, group, k, column, REDUCED, W_COLUMNS, TMA, BLOCK_REDUCED, BLOCK_COLUMNS)
    return block


@triton.jit
def load_weight_scales(
    w_scales,
    group,
    k,
    column,
    REDUCED: tl.constexpr,
    W_COLUMNS: tl.constexpr,
    REDUCED_IS_MINOR: tl.constexpr,
    SCALED_REDUCED: tl.constexpr,
    SCALED_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The group's scales [1, BLOCK_COLUMNS] for the features from k on that share one; zero past the edges."""
    STEPS: tl.constexpr = (REDUCED + SCALED_REDUCED - 1) // SCALED_REDUCED
    W_BLOCKS: tl.constexpr = (W_COLUMNS + SCALED_COLUMNS - 1) // SCALED_COLUMNS
    columns = column + tl.arange(0, BLOCK_COLUMNS)
    block, step = columns // SCALED_COLUMNS, k // SCALED_REDUCED
    offsets = block * STEPS + step if REDUCED_IS_MINOR else step * W_BLOCKS + block
    pointers = w_scales + group.to(tl.int64) * (W_BLOCKS * STEPS) + offsets
    return tl.load(pointers, mask=columns < W_COLUMNS, other=0.0)[None, :]


@triton.jit
def load_row_scales(x_scales, rows, exists, k, REDUCED: tl.constexpr, BLOCK_REDUCED: tl.constexpr):
    """The scales [rows, 1] of the rows' features from k on; BLOCK_REDUCED features share one; zero past the rows."""
    tl.static_assert(BLOCK % BLOCK_REDUCED == 0)
    SCALES: tl.constexpr = (REDUCED + BLOCK - 1) // BLOCK
    return tl.load(x_scales + rows.to(tl.int64) * SCALES + k // BLOCK, mask=exists, other=0.0)[:, None]


@triton.jit
def dequantize(values, scales, dtype: tl.constexpr):
    """values * scales, rounded once to `dtype`, as `jgg.products.unpack.dequantized` computes it."""
    return (values.to(tl.float32) * scales.to(tl.float32)).to(dtype)


@triton.jit
def load_scaled_weight(
    w,
    w_scales,
    group,
    k,
    column,
    dtype: tl.constexpr,
    REDUCED: tl.constexpr,
    W_COLUMNS: tl.constexpr,
    REDUCED_IS_MINOR: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_REDUCED: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    SCALED_REDUCED: tl.constexpr,
    SCALED_COLUMNS: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """A block as `load_packed_weight` returns it, of weights in FP8."""
    tl.static_assert(SCALED_REDUCED % BLOCK_REDUCED == 0)
    values = load_weight(w, group, k, column, REDUCED, W_COLUMNS, REDUCED_IS_MINOR, TMA, BLOCK_REDUCED, BLOCK_COLUMNS)
    scales = load_weight_scales(
        w_scales,
        group,
        k,
        column,
        REDUCED,
        W_COLUMNS,
        REDUCED_IS_MINOR,
        SCALED_REDUCED,
        SCALED_COLUMNS,
        BLOCK_COLUMNS,
    )
    return dequantize(values, scales, dtype)


@triton.jit
def load_packed_weight(
    w,
    w_scales,
    group,
    k,
    column,
    dtype: tl.constexpr,
    REDUCED: tl.constexpr,
    W_COLUMNS: tl.constexpr,
    REDUCED_IS_MINOR: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_REDUCED: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """A block as `load_weight` returns it, of weights that are packed along the reduced axis, in `dtype`.

    The reduced features are placed by `places.for_threads`.
    """
    HALF: tl.constexpr = BLOCK_REDUCED // 2
    STEPS: tl.constexpr = REDUCED // GROUP
    pairs = load_weight(w, group, k // 2, column, REDUCED // 2, W_COLUMNS, REDUCED_IS_MINOR, TMA, HALF, BLOCK_COLUMNS)
    steps = k // GROUP + tl.arange(0, BLOCK_REDUCED // GROUP)
    columns = column + tl.arange(0, BLOCK_COLUMNS)
    if REDUCED_IS_MINOR:
        offsets = columns[None, :] * STEPS + steps[:, None]
    else:
        offsets = steps[:, None] * W_COLUMNS + columns[None, :]
    mask = (steps < STEPS)[:, None] & (columns < W_COLUMNS)[None, :]
    scales = tl.load(w_scales + group.to(tl.int64) * (STEPS * W_COLUMNS) + offsets, mask=mask, other=0)
    return unpack_rows(pairs, scales, dtype, PRODUCTS)
