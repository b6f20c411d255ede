"""The product of few rows and a matrix of few columns, whose reduced axis is cut into parts: a program for each."""

import triton
import triton.language as tl

from .tiles import row_pointers


@triton.jit
def logits_few_kernel(
    x,
    w,
    parts,
    num_rows,
    REDUCED: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_REDUCED: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """parts[p] = x[:, p * PART : (p + 1) * PART] @ w[p * PART : (p + 1) * PART]; the grid is (column tiles, parts).

    Arrays: x [num_rows, REDUCED], w [REDUCED, COLUMNS], parts float32 [parts, num_rows, COLUMNS]; num_rows is at most
    BLOCK_ROWS.
    """
    part = tl.program_id(1)
    rows = tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_row, is_column = rows < num_rows, columns < COLUMNS
    acc = tl.full([BLOCK_ROWS, BLOCK_COLUMNS], 0.0, tl.float32)
    for step in tl.range(0, PART, BLOCK_REDUCED):
        reduced = part * PART + step + tl.arange(0, BLOCK_REDUCED)
        is_reduced = reduced < REDUCED
        mask = is_row[:, None] & is_reduced[None, :]
        x_block = tl.load(row_pointers(x, rows, reduced, REDUCED), mask=mask, other=0.0)
        mask = is_reduced[:, None] & is_column[None, :]
        w_block = tl.load(row_pointers(w, reduced, columns, COLUMNS), mask=mask, other=0.0)
        acc = tl.dot(x_block, w_block, acc, input_precision=PRECISION)
    at = row_pointers(parts, part * num_rows + rows, columns, COLUMNS)
    tl.store(at, acc, mask=is_row[:, None] & is_column[None, :])
