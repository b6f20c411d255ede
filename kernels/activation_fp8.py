"""The activation between an expert's two products in FP8, and its backward pass; both quantize what they store."""

import triton
import triton.language as tl

from .activation import activate, activate_backward, load_gate_and_up, store_gate_and_up
from .quantize import BLOCK, quantize_row_blocks, store_row_blocks
from .tiles import add, row_pointers, store_tile


@triton.jit
def _store_quantized(
    values,
    scales,
    value,
    rows,
    exists,
    column,
    half,
    COLUMNS: tl.constexpr,
    HALVES: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
):
    """Quantizes and stores part of one half; rows have HALVES halves, each of COLUMNS columns with their own scales."""
    SCALES: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    value, scale = quantize_row_blocks(value, LARGEST, POWER_OF_2)
    store_row_blocks(
        values + half * COLUMNS,
        scales + half * SCALES,
        value,
        scale,
        rows,
        exists,
        column,
        COLUMNS,
        HALVES * COLUMNS,
        HALVES * SCALES,
    )


@triton.jit
def _load_kept(
    values,
    scales,
    rows,
    exists,
    column,
    half,
    COLUMNS: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The values, in float32, that `_store_quantized` stored."""
    SCALES: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    columns = column + tl.arange(0, BLOCK_COLUMNS)
    mask = exists[:, None] & (columns < COLUMNS)[None, :]
    pointers = row_pointers(values + half * COLUMNS, rows, columns, HALVES * COLUMNS)
    value = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    blocks = column // BLOCK + tl.arange(0, BLOCK_COLUMNS // BLOCK)
    mask = exists[:, None] & (blocks < SCALES)[None, :]
    scale = tl.load(row_pointers(scales + half * SCALES, rows, blocks, HALVES * SCALES), mask=mask, other=0.0)
    value = tl.reshape(value, (BLOCK_ROWS, BLOCK_COLUMNS // BLOCK, BLOCK)) * scale[:, :, None]
    return tl.reshape(value, (BLOCK_ROWS, BLOCK_COLUMNS))


@triton.jit
def activate_fp8_kernel(
    pre,
    hidden_values,
    hidden_scales,
    kept_values,
    kept_scales,
    num_rows,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CURVE: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """hidden = f(gate) * up, or f(pre) where it is not GATED, quantized; and pre, quantized.

    Arrays: pre as in `activate_kernel`; hidden_values [num_rows, COLUMNS]; hidden_scales [num_rows, COLUMNS / BLOCK],
    rounded up; kept_values and kept_scales the same for gate and for up, [num_rows, halves, ...], or None. The grid is
    (num_rows / BLOCK_ROWS, COLUMNS / BLOCK_COLUMNS), rounded up.
    """
    HALVES: tl.constexpr = 2 if GATED else 1
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = rows < num_rows
    column = tl.program_id(1) * BLOCK_COLUMNS
    gate, up = load_gate_and_up(pre, rows, exists, column, COLUMNS, GATED, INTERLEAVED, BLOCK_ROWS, BLOCK_COLUMNS)
    value = activate(gate, up, GATED, CURVE, LIMIT, ALPHA)
    _store_quantized(hidden_values, hidden_scales, value, rows, exists, column, 0, COLUMNS, 1, LARGEST, POWER_OF_2)
    if kept_values is not None:
        _store_quantized(kept_values, kept_scales, gate, rows, exists, column, 0, COLUMNS, HALVES, LARGEST, POWER_OF_2)
        if GATED:
            _store_quantized(
                kept_values, kept_scales, up, rows, exists, column, 1, COLUMNS, HALVES, LARGEST, POWER_OF_2
            )


@triton.jit
def activate_backward_fp8_kernel(
    kept_values,
    kept_scales,
    z,
    weights,
    d_pre,
    d_values,
    d_scales,
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
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Computes the same as `activate_backward_kernel`, from a pre-activation that `activate_fp8_kernel` kept.

    Arrays: d_pre [num_rows, halves * COLUMNS], laid out as pre was; d_values and d_scales, d_pre quantized after it was
    rounded to its dtype, or None. They need gate and up side by side, and COLUMNS a multiple of BLOCK where it is
    GATED.
    """
    HALVES: tl.constexpr = 2 if GATED else 1
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = rows < num_rows
    weight = tl.load(weights + rows, mask=exists, other=0.0)[:, None]
    products = tl.full([BLOCK_ROWS, BLOCK_COLUMNS], 0.0, tl.float32)
    for column in tl.range(0, COLUMNS, BLOCK_COLUMNS):
        gate = _load_kept(kept_values, kept_scales, rows, exists, column, 0, COLUMNS, HALVES, BLOCK_ROWS, BLOCK_COLUMNS)
        up = gate
        if GATED:
            up = _load_kept(
                kept_values, kept_scales, rows, exists, column, 1, COLUMNS, HALVES, BLOCK_ROWS, BLOCK_COLUMNS
            )
        columns = column + tl.arange(0, BLOCK_COLUMNS)
        mask = exists[:, None] & (columns < COLUMNS)[None, :]
        z_block = tl.load(row_pointers(z, rows, columns, COLUMNS), mask=mask, other=0.0).to(tl.float32)
        value, d_gate, d_up = activate_backward(gate, up, weight * z_block, GATED, CURVE, LIMIT, ALPHA)
        products += value * z_block
        store_gate_and_up(
            d_pre, d_gate, d_up, rows, exists, column, COLUMNS, GATED, INTERLEAVED, BLOCK_ROWS, BLOCK_COLUMNS
        )
        if d_values is not None:
            tl.static_assert(COLUMNS % BLOCK == 0 or not GATED)
            d_gate, d_up = d_gate.to(z.dtype.element_ty).to(tl.float32), d_up.to(z.dtype.element_ty).to(tl.float32)
            _store_quantized(d_values, d_scales, d_gate, rows, exists, column, 0, COLUMNS, HALVES, LARGEST, POWER_OF_2)
            if GATED:
                _store_quantized(
                    d_values, d_scales, d_up, rows, exists, column, 1, COLUMNS, HALVES, LARGEST, POWER_OF_2
                )
        if SCALE_HIDDEN:
            value *= weight
        store_tile(hidden, value, rows, exists, column, COLUMNS, BLOCK_COLUMNS)
    tl.store(row_sums + rows, tl.reduce(products, 1, add), mask=exists)
