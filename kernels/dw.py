"""The dW kernel and its ragged-K main loop: dw[group] = (left rows)^T @ (right rows)."""

import triton
import triton.language as tl

from .tiles import (
    ceil_div,
    load_rows,
    row_pointers,
    store_tile,
    tile_coordinates,
    token_positions,
)


@triton.jit
def load_block(
    matrix,
    first_row,
    start,
    group_end,
    positions,
    exists,
    column,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Rows of one group as [BLOCK_ROWS, BLOCK_COLUMNS], zero from group_end on.

    GATHER is 0 for rows start, start + 1, ... and d > 0 for rows positions // d, all counted from first_row.
    """
    if TMA:
        block = load_rows(matrix, first_row + start, first_row + group_end, column, BLOCK_ROWS, BLOCK_COLUMNS)
    else:
        if GATHER == 0:
            rows = start + tl.arange(0, BLOCK_ROWS)
            in_rows = rows < group_end
        else:
            rows = positions // GATHER
            in_rows = exists
        columns = column + tl.arange(0, BLOCK_COLUMNS)
        mask = in_rows[:, None] & (columns < COLUMNS)[None, :]
        # other=0: the reduction runs over rows, so a lane past the group's end must not count
        block = tl.load(row_pointers(matrix, first_row + rows, columns, COLUMNS), mask=mask, other=0.0)
    return block


@triton.jit
def dw_kernel(
    left,
    right,
    gather_indices,
    num_pieces,
    scale,
    group_starts,
    group_ends,
    dw,
    num_rows,
    num_positions,
    num_groups,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    LEFT_HAS_PIECES: tl.constexpr,
    GATHER_LEFT: tl.constexpr,
    GATHER_RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA_LEFT: tl.constexpr,
    TMA_RIGHT: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_LEFT: tl.constexpr,
    BLOCK_RIGHT: tl.constexpr,
):
    """dw[g] = sum over the rows i of group g of left[i] (outer) right[i].

    Arrays: left [rows, LEFT]; right [rows, RIGHT]; gather_indices [num_rows], bad outside [0, num_positions), or None;
    group_starts and group_ends [num_groups]; dw [num_groups, LEFT, RIGHT]. One of left and right is dy, the other x.
    With num_pieces [1], dy is the sum of that many matrices of num_rows rows, stored one after the other. scale,
    float32 [1] or None, multiplies dy.
    With TMA_LEFT and TMA_RIGHT, left and right are TMA descriptors. A group without rows gets zeros.
    """
    left_tiles: tl.constexpr = (LEFT + BLOCK_LEFT - 1) // BLOCK_LEFT
    right_tiles: tl.constexpr = (RIGHT + BLOCK_RIGHT - 1) // BLOCK_RIGHT
    tiles = num_groups * left_tiles * right_tiles

    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        group = tile // (left_tiles * right_tiles)
        left_tile, right_tile = tile_coordinates(tile - group * left_tiles * right_tiles, left_tiles, right_tiles, BAND)
        left_column = left_tile * BLOCK_LEFT
        right_column = right_tile * BLOCK_RIGHT
        group_start = tl.load(group_starts + group)
        group_end = tl.load(group_ends + group)
        # at least one step, on rows that all lie past the end: a flattened loop needs a body for an empty group
        steps = tl.maximum(ceil_div(group_end - group_start, BLOCK_ROWS), 1)
        acc = tl.full([BLOCK_LEFT, BLOCK_RIGHT], 0.0, tl.float32)
        for step in tl.range(0, steps if num_pieces is None else steps * tl.load(num_pieces)):
            start = group_start + (step if num_pieces is None else step % steps) * BLOCK_ROWS
            piece = 0 if num_pieces is None else step // steps * num_rows
            rows = start + tl.arange(0, BLOCK_ROWS)
            positions, exists = token_positions(gather_indices, rows, group_end, num_positions)
            left_block = load_block(
                left,
                piece if LEFT_HAS_PIECES else 0,
                start,
                group_end,
                positions,
                exists,
                left_column,
                LEFT,
                TMA_LEFT,
                GATHER_LEFT,
                BLOCK_ROWS,
                BLOCK_LEFT,
            )
            right_block = load_block(
                right,
                0 if LEFT_HAS_PIECES else piece,
                start,
                group_end,
                positions,
                exists,
                right_column,
                RIGHT,
                TMA_RIGHT,
                GATHER_RIGHT,
                BLOCK_ROWS,
                BLOCK_RIGHT,
            )
            acc = tl.dot(left_block.T, right_block, acc, input_precision=PRECISION)

        if scale is not None:
            acc *= tl.load(scale)
        left_columns = left_column + tl.arange(0, BLOCK_LEFT)
        matrix = dw + group.to(tl.int64) * (LEFT * RIGHT)
        store_tile(matrix, acc, left_columns, left_columns < LEFT, right_column, RIGHT, BLOCK_RIGHT)
