"""Weighted gather-and-sum of each token's rows: y[t] = sum over j of scales[t, j] * rows[positions[t, j]]."""

import triton
import triton.language as tl

from .tiles import row_pointers

BLOCK = tl.constexpr(128)  # columns of a row that share a scale


@triton.jit
def combine_kernel(
    rows,
    row_scales,
    positions,
    scales,
    y,
    num_tokens,
    num_rows,
    first_of_rows,
    first_of_y,
    COLUMNS: tl.constexpr,
    ROWS_COLUMNS: tl.constexpr,
    Y_COLUMNS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Sums in float32, choice after choice; a position outside [0, num_rows) adds nothing.

    Arrays: rows [num_rows, ROWS_COLUMNS], positions and scales (or None) [num_tokens * TOPK], y [num_tokens,
    Y_COLUMNS]. COLUMNS columns are read from first_of_rows on and written from first_of_y on, both multiples of 16.
    The grid is (tokens / BLOCK_ROWS, COLUMNS / BLOCK_COLUMNS), rounded up. Of quantized rows, row_scales are
    [num_rows, ROWS_COLUMNS / BLOCK], rounded up, and first_of_rows and BLOCK_COLUMNS are multiples of BLOCK.
    """
    tokens = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_COLUMNS
    columns = column + tl.arange(0, BLOCK_COLUMNS)
    in_columns = (columns < COLUMNS)[None, :]
    # says that these are multiples of 16; else the compiler loads and stores one element at a time
    rows_columns = tl.multiple_of(first_of_rows + column, 16) + tl.arange(0, BLOCK_COLUMNS)
    y_columns = tl.multiple_of(first_of_y + column, 16) + tl.arange(0, BLOCK_COLUMNS)
    IS_COPY: tl.constexpr = TOPK == 1 and scales is None and row_scales is None
    acc = tl.full([BLOCK_ROWS, BLOCK_COLUMNS], 0.0, tl.float32)
    for choice in tl.static_range(TOPK):
        slots = tokens * TOPK + choice
        position = tl.load(positions + slots, mask=tokens < num_tokens, other=-1)
        exists = (position >= 0) & (position < num_rows)
        pointers = row_pointers(rows, position, rows_columns, ROWS_COLUMNS)
        value = tl.load(pointers, mask=exists[:, None] & in_columns, other=0.0)
        if not IS_COPY:
            value = value.to(tl.float32)
        if row_scales is not None:
            blocks = (first_of_rows + column) // BLOCK + tl.arange(0, BLOCK_COLUMNS // BLOCK)
            pointers = row_pointers(row_scales, position, blocks, (ROWS_COLUMNS + BLOCK - 1) // BLOCK)
            scale = tl.load(pointers, mask=exists[:, None] & (blocks * BLOCK < ROWS_COLUMNS)[None, :], other=0.0)
            value = tl.reshape(value, (BLOCK_ROWS, BLOCK_COLUMNS // BLOCK, BLOCK)) * scale[:, :, None]
            value = tl.reshape(value, (BLOCK_ROWS, BLOCK_COLUMNS))
        if scales is not None:
            value *= tl.load(scales + slots, mask=exists, other=0.0).to(tl.float32)[:, None]
        acc = value if IS_COPY else acc + value
    mask = (tokens < num_tokens)[:, None] & in_columns
    tl.store(row_pointers(y, tokens, y_columns, Y_COLUMNS), acc.to(y.dtype.element_ty), mask=mask)
