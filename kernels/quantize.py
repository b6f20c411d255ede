"""Quantization to FP8, with one scale for each block of 128 features of a row, or of 128 x 128 weights.

Source: DeepSeek-V3 Technical Report (arXiv 2412.19437), 3.3.2.
"""

import triton
import triton.language as tl

from .tiles import row_pointers

BLOCK = tl.constexpr(128)
_LEAST_SCALE = tl.constexpr(1.1754943508222875e-38)  # subnormal numbers are zero on some devices


@triton.jit
def highest_or_nan(left, right):
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(highest, LARGEST: tl.constexpr, POWER_OF_2: tl.constexpr):
    """The scale of a block whose largest magnitude is `highest`, for values of up to LARGEST; NaN if that is NaN."""
    scale = tl.maximum(highest * (1.0 / LARGEST), _LEAST_SCALE, propagate_nan=tl.PropagateNan.ALL)
    if POWER_OF_2:  # rounded up: a carry into the exponent where the fraction is not zero
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(scale < float("inf"), bits.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def scaled(value, scale, LARGEST: tl.constexpr):
    """value / scale, clamped to the range of FP8, [-LARGEST, LARGEST]."""
    return tl.clamp(value * (1.0 / scale), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quantize_row_blocks(value, LARGEST: tl.constexpr, POWER_OF_2: tl.constexpr):
    """The scaled values [rows, n * BLOCK], float32 within the range of FP8, and the scales [rows, n]."""
    rows: tl.constexpr = value.shape[0]
    count: tl.constexpr = value.shape[1] // BLOCK
    blocks = tl.reshape(value, (rows, count, BLOCK))
    scale = scale_of(tl.reduce(tl.abs(blocks), 2, highest_or_nan), LARGEST, POWER_OF_2)
    return tl.reshape(scaled(blocks, scale[:, :, None], LARGEST), (rows, count * BLOCK)), scale


@triton.jit
def store_row_blocks(
    values,
    scales,
    value,
    scale,
    rows,
    exists,
    column,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Stores the results of `quantize_row_blocks` from `column` on, a multiple of BLOCK, and before column COLUMNS.

    A row of `values` has STRIDE elements, and a row of `scales` SCALES.
    """
    columns = column + tl.arange(0, value.shape[1])
    mask = exists[:, None] & (columns < COLUMNS)[None, :]
    tl.store(row_pointers(values, rows, columns, STRIDE), value.to(values.dtype.element_ty), mask=mask)
    blocks = column // BLOCK + tl.arange(0, scale.shape[1])
    mask = exists[:, None] & (blocks * BLOCK < COLUMNS)[None, :]
    tl.store(row_pointers(scales, rows, blocks, SCALES), scale, mask=mask)


@triton.jit
def quantize_rows_kernel(
    x,
    values,
    scales,
    num_rows,
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Quantizes x [num_rows, COLUMNS] to values of its shape and scales [num_rows, COLUMNS / BLOCK], rounded up.

    The grid is (num_rows / BLOCK_ROWS, COLUMNS / BLOCK_COLUMNS), rounded up; BLOCK_COLUMNS is a multiple of BLOCK.
    """
    SCALES: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = rows < num_rows
    column = tl.program_id(1) * BLOCK_COLUMNS
    columns = column + tl.arange(0, BLOCK_COLUMNS)
    mask = exists[:, None] & (columns < COLUMNS)[None, :]
    block = tl.load(row_pointers(x, rows, columns, COLUMNS), mask=mask, other=0.0).to(tl.float32)
    value, scale = quantize_row_blocks(block, LARGEST, POWER_OF_2)
    store_row_blocks(values, scales, value, scale, rows, exists, column, COLUMNS, COLUMNS, SCALES)


@triton.jit
def quantize_weights_kernel(
    w,
    values,
    scales,
    transposed,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
):
    """Quantizes w [matrices, ROWS, COLUMNS] in blocks of BLOCK x BLOCK.

    Arrays: values, of w's shape, or None; transposed, the same transposed, [matrices, COLUMNS, ROWS], or None; scales
    [matrices, ROWS / BLOCK, COLUMNS / BLOCK], rounded up. The grid is (COLUMNS / BLOCK, ROWS / BLOCK, matrices),
    rounded up.
    """
    matrix = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    first = matrix * ROWS * COLUMNS
    block = tl.load(row_pointers(w + first, rows, columns, COLUMNS), mask=mask, other=0.0).to(tl.float32)
    highest = tl.reduce(tl.reduce(tl.abs(block), 1, highest_or_nan), 0, highest_or_nan)
    scale = scale_of(highest, LARGEST, POWER_OF_2)
    value = scaled(block, scale, LARGEST)
    if values is not None:
        pointers = row_pointers(values + first, rows, columns, COLUMNS)
        tl.store(pointers, value.to(values.dtype.element_ty), mask=mask)
    tl.store(scales + (matrix * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0), scale)
    if transposed is not None:
        pointers = row_pointers(transposed + first, columns, rows, ROWS)
        tl.store(pointers, tl.trans(value).to(transposed.dtype.element_ty), mask=tl.trans(mask))
