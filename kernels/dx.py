"""The dX kernel: forward's main loop on dy and w, reducing over N; the epilogue adds the top-k weight gradient."""

import triton
import triton.language as tl

from .forward import add_low_rank, multiply_rows
from .tiles import add, row_pointers, store_tile, tile_coordinates, token_positions, zero_outside


@triton.jit
def dx_kernel(
    dy,
    num_pieces,
    scale,
    w,
    low_rows,
    low_matrices,
    x,
    topk_weights,
    gather_indices,
    group_starts,
    group_ends,
    tile_group,
    tile_start,
    tile_end,
    tiles_through,
    dx,
    row_sums,
    zeros_end,
    num_rows,
    num_positions,
    num_groups,
    first_column,
    REDUCED: tl.constexpr,
    COLUMNS: tl.constexpr,
    W_COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    TOPK: tl.constexpr,
    REDUCED_IS_MINOR: tl.constexpr,
    GATHER_DY: tl.constexpr,
    GATHER_X: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA_DY: tl.constexpr,
    TMA_W: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_REDUCED: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """dx[i] = (dy[i] @ w[group of i] + low_rows[i] @ low_matrices[group of i]) * topk_weights[i], rows in expert order.

    Arrays are as in `forward_kernel`, with dy [num_rows, REDUCED] and dx [num_rows, COLUMNS]. With num_pieces [1], dy
    is the sum of that many such matrices, stored one after the other. scale, float32 [1] or None, multiplies dy.
    GATHER_DY reads row i of dy from dy[gather_indices[i]], which undoes forward's scatter. row_sums, float32 [column
    tiles, num_rows] or None, gets the sum of (dy[i] @ w) * x[i] over each tile's columns; summed over the column tiles,
    it is the gradient of topk_weights for row i. GATHER_X reads row i of x from x[gather_indices[i] // TOPK].
    """
    column_tiles: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    row_tiles = tl.load(tiles_through + num_groups - 1)

    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = tile_coordinates(tile, row_tiles, column_tiles, BAND)
        group = tl.load(tile_group + row_tile)
        start = tl.load(tile_start + row_tile)
        group_end = tl.load(tile_end + row_tile)
        rows = start + tl.arange(0, BLOCK_ROWS)
        in_group = rows < group_end
        positions, exists = token_positions(gather_indices, rows, group_end, num_positions)
        column = column_tile * BLOCK_COLUMNS
        acc = multiply_rows(
            dy,
            None,
            num_pieces,
            num_rows,
            w,
            None,
            group,
            start,
            positions if GATHER_DY else rows,
            exists if GATHER_DY else in_group,
            tl.multiple_of(first_column + column, 16),
            REDUCED,
            W_COLUMNS,
            REDUCED_IS_MINOR,
            TMA_DY,
            TMA_W,
            PRECISION,
            BLOCK_ROWS,
            BLOCK_REDUCED,
            BLOCK_COLUMNS,
        )
        if scale is not None:
            acc *= tl.load(scale)
        if low_rows is not None:
            acc = add_low_rank(
                acc,
                low_rows,
                low_matrices,
                group,
                rows,
                in_group,
                first_column + column,
                RANK,
                W_COLUMNS,
                REDUCED_IS_MINOR,
                PRECISION,
                BLOCK_COLUMNS,
            )
        if row_sums is not None:
            columns = column + tl.arange(0, BLOCK_COLUMNS)
            x_pointers = row_pointers(x, positions // TOPK if GATHER_X else rows, columns, COLUMNS)
            x_mask = (exists if GATHER_X else in_group)[:, None] & (columns < COLUMNS)[None, :]
            product = acc * tl.load(x_pointers, mask=x_mask, other=0.0).to(tl.float32)
            sums = row_sums + column_tile.to(tl.int64) * num_rows + rows
            tl.store(sums, tl.reduce(product, 1, add), mask=in_group)
        if topk_weights is not None:
            acc *= tl.load(topk_weights + positions, mask=exists, other=0.0).to(tl.float32)[:, None]
        store_tile(dx, acc, rows, in_group, column, COLUMNS, BLOCK_COLUMNS)
    zero_outside(
        dx,
        None,
        tl.load(group_starts),
        tl.load(group_ends + num_groups - 1),
        zeros_end,
        num_rows,
        COLUMNS,
        False,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
    )
