"""Helpers that the kernels share: tile order, rows of a group, bounded loads and stores, zero fill.

Only `tl` builtins are used (`tl.full`, not `tl.zeros`; `tl.reduce`, not `tl.sum`): the rest of `triton.language` is
itself made of jitted functions, which Triton's interpreter cannot call once Triton was imported to compile.
"""

import triton
import triton.language as tl

# TMA descriptors are made on the host (`jgg.launching.launch`). One descriptor of rows serves all groups, although each
# access must end with its group: before the axes of rows and columns come two axes, where an access has the coordinates
# ROW_LIMIT and rows_end. On the axis of rows it has row - rows_end + ROW_LIMIT, and the hardware leaves out rows that
# reach ROW_LIMIT there. Modulo 2**64 bytes, the offsets of the three coordinates add up to the offset of `row`.
# Source: the ragged descriptors of Triton's own kernels, triton.tools.ragged_tma.
ROW_LIMIT = tl.constexpr(2**30)


@triton.jit
def ceil_div(numerator, denominator):
    return (numerator + denominator - 1) // denominator


@triton.jit
def add(left, right):
    return left + right


@triton.jit
def highest(left, right):
    return tl.maximum(left, right)


@triton.jit
def tile_coordinates(tile, row_tiles, column_tiles, BAND: tl.constexpr):
    """The row tile and column tile of a tile.

    Tiles run down a band of BAND row tiles, column after column, so that the L2 cache serves the band's rows and a
    column's weights more than once.
    """
    band = tile // (BAND * column_tiles)
    within = tile - band * BAND * column_tiles
    height = tl.minimum(row_tiles - band * BAND, BAND)
    return band * BAND + within % height, within // height


@triton.jit
def token_positions(gather_indices, rows, rows_end, num_positions):
    """Each row's position in token order, and whether it exists: not from rows_end on, and not with a bad index."""
    exists = rows < rows_end
    positions = rows
    if gather_indices is not None:
        positions = tl.load(gather_indices + rows, mask=exists, other=-1)
        exists = exists & (positions >= 0) & (positions < num_positions)
    return positions, exists


@triton.jit
def load_rows(descriptor, row, rows_end, column, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Rows [row, row + BLOCK_ROWS) as [BLOCK_ROWS, BLOCK_COLUMNS]; zero from rows_end on."""
    block = descriptor.load([ROW_LIMIT, rows_end, row - rows_end + ROW_LIMIT, column])
    return block.reshape(BLOCK_ROWS, BLOCK_COLUMNS)


@triton.jit
def row_pointers(pointer, rows, columns, COLUMNS: tl.constexpr):
    """Pointers to [rows, columns] of a row-major matrix of COLUMNS columns."""
    # int64: a matrix may hold more than 2**31 elements
    return pointer + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]


@triton.jit
def load_block(
    matrices,
    group,
    row,
    column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """A block of one of several matrices [ROWS, COLUMNS]; zero past its last row and its last column."""
    if TMA:
        block = matrices.load([group, row, column]).reshape(BLOCK_ROWS, BLOCK_COLUMNS)
    else:
        rows, columns = row + tl.arange(0, BLOCK_ROWS), column + tl.arange(0, BLOCK_COLUMNS)
        mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
        matrix = matrices + group.to(tl.int64) * (ROWS * COLUMNS)
        block = tl.load(row_pointers(matrix, rows, columns, COLUMNS), mask=mask, other=0.0)
    return block


@triton.jit
def store_tile(y, value, rows, exists, column, COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Stores [rows, BLOCK_COLUMNS] to the rows that exist, in the dtype of y."""
    columns = column + tl.arange(0, BLOCK_COLUMNS)
    mask = exists[:, None] & (columns < COLUMNS)[None, :]
    tl.store(row_pointers(y, rows, columns, COLUMNS), value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def zero_outside(
    y,
    gather_indices,
    first_row,
    last_row,
    zeros_end,
    num_rows,
    COLUMNS: tl.constexpr,
    SCATTER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Writes zeros to the rows of y that belong to no group: those before first_row and from last_row to zeros_end."""
    column_tiles: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    tiles_before = ceil_div(first_row, BLOCK_ROWS)
    tiles = (tiles_before + ceil_div(zeros_end - last_row, BLOCK_ROWS)) * column_tiles
    zeros = tl.full([BLOCK_ROWS, BLOCK_COLUMNS], 0.0, tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        row_tile = tile // column_tiles
        is_before = row_tile < tiles_before
        start = tl.where(is_before, row_tile * BLOCK_ROWS, last_row + (row_tile - tiles_before) * BLOCK_ROWS)
        rows_end = tl.where(is_before, first_row, zeros_end)
        rows = start + tl.arange(0, BLOCK_ROWS)
        exists = rows < rows_end
        if SCATTER:
            rows, exists = token_positions(gather_indices, rows, rows_end, num_rows)
        column = (tile % column_tiles) * BLOCK_COLUMNS
        store_tile(y, zeros, rows, exists, column, COLUMNS, BLOCK_COLUMNS)
