"""The queries, keys and values of few rows: three matrices that one launch reads."""

import triton
import triton.language as tl

from .tiles import row_pointers


@triton.jit
def project_few_kernel(
    x,
    w_q,
    w_k,
    w_v,
    b_q,
    b_k,
    b_v,
    q,
    k,
    v,
    num_rows,
    REDUCED: tl.constexpr,
    Q_COLUMNS: tl.constexpr,
    K_COLUMNS: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_REDUCED: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """q = x @ w_q + b_q, and k and v in the same way; the grid is the tiles of columns of q, then of k, then of v.

    Arrays: x [num_rows, REDUCED]; w_q [REDUCED, Q_COLUMNS], b_q [Q_COLUMNS], q [num_rows, Q_COLUMNS]; num_rows is at
    most BLOCK_ROWS. All biases may be None.
    """
    Q_TILES: tl.constexpr = (Q_COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    K_TILES: tl.constexpr = (K_COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    tile = tl.program_id(0)
    is_q, is_k = tile < Q_TILES, tile < Q_TILES + K_TILES
    w, y = tl.where(is_q, w_q, tl.where(is_k, w_k, w_v)), tl.where(is_q, q, tl.where(is_k, k, v))
    num_columns = tl.where(is_q, Q_COLUMNS, tl.where(is_k, K_COLUMNS, V_COLUMNS))
    if Q_COLUMNS % 16 == 0 and K_COLUMNS % 16 == 0 and V_COLUMNS % 16 == 0:
        # says so of a number that the compiler does not know; else it loads one element at a time
        num_columns = tl.multiple_of(num_columns, 16)
    tile -= tl.where(is_q, 0, tl.where(is_k, Q_TILES, Q_TILES + K_TILES))
    rows = tl.arange(0, BLOCK_ROWS)
    columns = tl.multiple_of(tile * BLOCK_COLUMNS, BLOCK_COLUMNS) + tl.arange(0, BLOCK_COLUMNS)
    is_row, is_column = rows < num_rows, columns < num_columns
    acc = tl.full([BLOCK_ROWS, BLOCK_COLUMNS], 0.0, tl.float32)
    for step in tl.range(0, REDUCED, BLOCK_REDUCED):
        reduced = step + tl.arange(0, BLOCK_REDUCED)
        is_reduced = reduced < REDUCED
        mask = is_row[:, None] & is_reduced[None, :]
        x_block = tl.load(row_pointers(x, rows, reduced, REDUCED), mask=mask, other=0.0)
        mask = is_reduced[:, None] & is_column[None, :]
        w_block = tl.load(row_pointers(w, reduced, columns, num_columns), mask=mask, other=0.0)
        acc = tl.dot(x_block, w_block, acc, input_precision=PRECISION)
    if b_q is not None:
        bias = tl.where(is_q, b_q, tl.where(is_k, b_k, b_v))
        acc += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = row_pointers(y, rows, columns, num_columns)
    tl.store(at, acc.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
