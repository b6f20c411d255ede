"""The router's logits: rows times a matrix of few columns, in one order of additions for any number of rows."""

import triton
import triton.language as tl

from .tiles import row_pointers


@triton.jit
def logits_kernel(
    x,
    w,
    w_scale,
    logits,
    num_rows,
    REDUCED: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_REDUCED: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """logits = x @ w * w_scale; the grid is the tiles, those of the same rows one after the other.

    Arrays: x [num_rows, REDUCED]; w [REDUCED, COLUMNS * PIECES], whose column c is the sum of the PIECES columns from
    c * PIECES on; w_scale float32 [1], a power of two, or None for 1; logits float32 [num_rows, COLUMNS]. With TMA, x
    and w are descriptors.

    Each product is added to one sum, from the first feature to the last, whatever the tile and the step: tensor cores
    add 16 features (8 of float32) at a time, in every tile the same ones.
    """
    COLUMN_TILES: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    W_COLUMNS: tl.constexpr = COLUMNS * PIECES
    row = tl.program_id(0) // COLUMN_TILES * BLOCK_ROWS
    column = tl.program_id(0) % COLUMN_TILES * BLOCK_COLUMNS
    rows, columns = row + tl.arange(0, BLOCK_ROWS), column + tl.arange(0, BLOCK_COLUMNS)
    w_columns = column * PIECES + tl.arange(0, BLOCK_COLUMNS * PIECES)
    exists = rows < num_rows
    acc = tl.full([BLOCK_ROWS, BLOCK_COLUMNS * PIECES], 0.0, tl.float32)
    for step in tl.range(0, REDUCED, BLOCK_REDUCED):
        if TMA:
            x_block, w_block = x.load([row, step]), w.load([step, column * PIECES])
        else:
            reduced = step + tl.arange(0, BLOCK_REDUCED)
            is_reduced = reduced < REDUCED
            mask = exists[:, None] & is_reduced[None, :]
            x_block = tl.load(row_pointers(x, rows, reduced, REDUCED), mask=mask, other=0.0)
            mask = is_reduced[:, None] & (w_columns < W_COLUMNS)[None, :]
            w_block = tl.load(row_pointers(w, reduced, w_columns, W_COLUMNS), mask=mask, other=0.0)
        acc = tl.dot(x_block, w_block, acc, input_precision=PRECISION)
    if PIECES == 2:
        high, low = acc.reshape(BLOCK_ROWS, BLOCK_COLUMNS, 2).split()
        # where the first product is infinite, the low pieces, which may be zero, would make it NaN
        acc = tl.where(tl.abs(high) < float("inf"), high + low, high)
    if w_scale is not None:
        acc *= tl.load(w_scale)
    at = row_pointers(logits, rows, columns, COLUMNS)
    tl.store(at, acc, mask=exists[:, None] & (columns < COLUMNS)[None, :])
