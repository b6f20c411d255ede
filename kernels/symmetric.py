"""The kernel of a symmetric product, left[g] @ right[g]^T: it computes the half below the diagonal."""

import triton
import triton.language as tl

from .tiles import load_block, row_pointers


@triton.jit
def symmetric_kernel(
    left,
    right,
    add,
    terms,
    row_tiles,
    column_tiles,
    y,
    num_groups,
    num_tiles,
    SIZE: tl.constexpr,
    REDUCED: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA_LEFT: tl.constexpr,
    TMA_RIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_REDUCED: tl.constexpr,
):
    """y[g] = terms[0] * left[g] @ right[g]^T + terms[1] * add[g] + terms[2] * I, all of them symmetric.

    Arrays: left, right [num_groups, SIZE, REDUCED]; add, y [num_groups, SIZE, SIZE], add or None; terms float32 [3];
    row_tiles, column_tiles int32 [num_tiles], the tiles of one matrix. With TMA_LEFT and TMA_RIGHT, left and right are
    TMA descriptors. What a tile has on the diagonal and below is stored at its place, and what it has below,
    transposed, at its mirror image too. So y is symmetric to the last bit. The product itself need not be where left
    and right differ, since after rounding they do not quite commute.
    """
    for tile in tl.range(tl.program_id(0), num_groups * num_tiles, tl.num_programs(0), flatten=True):
        group = tile // num_tiles
        row = tl.load(row_tiles + tile - group * num_tiles) * BLOCK_ROWS
        column = tl.load(column_tiles + tile - group * num_tiles) * BLOCK_COLUMNS
        acc = tl.full([BLOCK_ROWS, BLOCK_COLUMNS], 0.0, tl.float32)
        for step in tl.range(0, REDUCED, BLOCK_REDUCED):
            left_block = load_block(left, group, row, step, SIZE, REDUCED, TMA_LEFT, BLOCK_ROWS, BLOCK_REDUCED)
            right_block = load_block(right, group, column, step, SIZE, REDUCED, TMA_RIGHT, BLOCK_COLUMNS, BLOCK_REDUCED)
            acc = tl.dot(left_block, right_block.T, acc, input_precision=PRECISION)

        rows, columns = row + tl.arange(0, BLOCK_ROWS), column + tl.arange(0, BLOCK_COLUMNS)
        exists = (rows < SIZE)[:, None] & (columns < SIZE)[None, :]
        matrix = group.to(tl.int64) * (SIZE * SIZE)  # int64: all matrices may have more than 2**31 elements
        acc *= tl.load(terms)
        if add is not None:
            added = tl.load(row_pointers(add + matrix, rows, columns, SIZE), mask=exists, other=0.0)
            acc += tl.load(terms + 1) * added.to(tl.float32)
        acc += tl.where(rows[:, None] == columns[None, :], tl.load(terms + 2), 0.0)
        value = acc.to(y.dtype.element_ty)
        straight = row_pointers(y + matrix, rows, columns, SIZE)
        mirrored = row_pointers(y + matrix, columns, rows, SIZE)
        # below the diagonal, masks of whole rows: where rows are aligned, stores are of 16 bytes
        is_below = column + BLOCK_COLUMNS <= row if SIZE % 16 == 0 else False
        if is_below:
            tl.store(straight, value, mask=(rows < SIZE)[:, None])
            tl.store(mirrored, value.T, mask=(rows < SIZE)[None, :])
        else:
            last = tl.where(rows < SIZE, rows, -1)  # the column of each row that is on the diagonal
            tl.store(straight, value, mask=columns[None, :] <= last[:, None])
            tl.store(mirrored, value.T, mask=columns[:, None] < last[None, :])
