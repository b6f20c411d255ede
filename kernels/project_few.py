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
    low_rows,
    low_q,
    low_k,
    low_v,
    q,
    k,
    v,
    num_rows,
    REDUCED: tl.constexpr,
    Q_COLUMNS: tl.constexpr,
    K_COLUMNS: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    Q_RANK: tl.constexpr,
    K_RANK: tl.constexpr,
    V_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    ROW_TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_REDUCED: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """q = x @ w_q + b_q, and k and v in the same way; the grid is the tiles of columns of q, then of k, then of v.

    Arrays: x [num_rows, REDUCED]; w_q [REDUCED, Q_COLUMNS], b_q [Q_COLUMNS], q [num_rows, Q_COLUMNS]; num_rows is at
    most ROW_TILES * BLOCK_ROWS; the row tiles of a column tile follow each other in the grid. All biases may be None.
    Unless low_rows [num_rows, Q_RANK + K_RANK + V_RANK] are None, its columns of q times low_q [Q_RANK, Q_COLUMNS] are
    added to q before the bias, and those that follow to k and v. Each product has all columns of low_rows, those of the
    others times zero, so that sums have the bits of a term with such zeros.
    """
    Q_TILES: tl.constexpr = (Q_COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    K_TILES: tl.constexpr = (K_COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    tile = tl.program_id(0)
    if ROW_TILES > 1:
        tile //= ROW_TILES
    is_q, is_k = tile < Q_TILES, tile < Q_TILES + K_TILES
    w, y = tl.where(is_q, w_q, tl.where(is_k, w_k, w_v)), tl.where(is_q, q, tl.where(is_k, k, v))
    num_columns = tl.where(is_q, Q_COLUMNS, tl.where(is_k, K_COLUMNS, V_COLUMNS))
    if Q_COLUMNS % 16 == 0 and K_COLUMNS % 16 == 0 and V_COLUMNS % 16 == 0:
        # says so of a number that the compiler does not know; else it loads one element at a time
        num_columns = tl.multiple_of(num_columns, 16)
    tile -= tl.where(is_q, 0, tl.where(is_k, Q_TILES, Q_TILES + K_TILES))
    rows = tl.arange(0, BLOCK_ROWS)
    if ROW_TILES > 1:
        rows += tl.program_id(0) % ROW_TILES * BLOCK_ROWS
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
    if low_rows is not None:
        low = tl.where(is_q, low_q, tl.where(is_k, low_k, low_v))
        first = tl.where(is_q, 0, tl.where(is_k, Q_RANK, Q_RANK + K_RANK))
        rank = tl.where(is_q, Q_RANK, tl.where(is_k, K_RANK, V_RANK))
        RANKS: tl.constexpr = Q_RANK + K_RANK + V_RANK
        BLOCK_RANK: tl.constexpr = min(64, max(16, triton.next_power_of_2(RANKS)))
        for step in tl.range(0, RANKS, BLOCK_RANK):
            reduced = step + tl.arange(0, BLOCK_RANK)
            own = reduced - first
            mask = is_row[:, None] & (reduced < RANKS)[None, :]
            low_block = tl.load(row_pointers(low_rows, rows, reduced, RANKS), mask=mask, other=0.0)
            mask = ((own >= 0) & (own < rank))[:, None] & is_column[None, :]
            matrix = tl.load(row_pointers(low, own, columns, num_columns), mask=mask, other=0.0)
            acc = tl.dot(low_block, matrix, acc, input_precision=PRECISION)
    if b_q is not None:
        bias = tl.where(is_q, b_q, tl.where(is_k, b_k, b_v))
        acc += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = row_pointers(y, rows, columns, num_columns)
    tl.store(at, acc.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
