"""The sum of each group's rows, which is the gradient of a bias."""

import triton
import triton.language as tl

from .tiles import add, ceil_div, row_pointers, token_positions


@triton.jit
def group_sums_kernel(
    rows,
    positions,
    scales,
    group_starts,
    group_ends,
    sums,
    num_rows,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """sums[g] = sum over the rows i of group g of scales[i] * rows[positions[i]], in float32, block after block.

    Arrays: rows [num_rows, COLUMNS], positions and scales [num_rows] or None, group_starts and group_ends [groups],
    sums [groups, COLUMNS]; a position outside [0, num_rows) adds nothing. The grid is (groups, COLUMNS /
    BLOCK_COLUMNS), rounded up.
    """
    group = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    group_start = tl.load(group_starts + group)
    group_end = tl.load(group_ends + group)
    acc = tl.full([BLOCK_COLUMNS], 0.0, tl.float32)
    for step in tl.range(0, ceil_div(group_end - group_start, BLOCK_ROWS)):
        own = group_start + step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        position, exists = token_positions(positions, own, group_end, num_rows)
        mask = exists[:, None] & (columns < COLUMNS)[None, :]
        value = tl.load(row_pointers(rows, position, columns, COLUMNS), mask=mask, other=0.0).to(tl.float32)
        if scales is not None:
            value *= tl.load(scales + own, mask=exists, other=0.0).to(tl.float32)[:, None]
        acc += tl.reduce(value, 0, add)
    tl.store(sums + group.to(tl.int64) * COLUMNS + columns, acc, mask=columns < COLUMNS)
