"""Ragged-M main loop and the forward kernel: y rows = x rows @ w[group]^T, scaled, biased, gathered and scattered.

In FP8, x and w come with scales, as `jgg.core.quantized` explains. A step covers BLOCK features: within it, a row of x
has one scale, and each BLOCK columns of w have one. FP8 products keep few bits of their sum, so each step begins a new
product, which is scaled and added in float32. The same holds where only x has scales; its values are converted to the
dtype of w. If only w has scales, it is dequantized on loading, with the bits that a pass before the product would
give it; a step covers no more features than a scale does.

Dequantizing takes longer than multiplying, so a tile should have all rows of its group. With W_IS_LEFT the kernel
computes y^T = w^T x^T: Hopper's tensor cores take the left operand from registers, where w is dequantized, and x from
shared memory, so that a tile may have 128 rows and w never goes through shared memory in the dtype of x. Otherwise both
operands come from registers, tiles have few rows, and `places` says how features keep their order.
"""

import triton
import triton.language as tl

from .places import for_threads, for_threads_of_x
from .quantize import BLOCK
from .tiles import row_pointers, store_tile, tile_coordinates, token_positions, zero_outside
from .weights import load_packed_weight, load_row_scales, load_scaled_weight, load_weight, load_weight_scales


@triton.jit
def multiply_rows(
    x,
    x_scales,
    num_pieces,
    num_rows,
    w,
    w_scales,
    group,
    start,
    rows,
    exists,
    column,
    REDUCED: tl.constexpr,
    W_COLUMNS: tl.constexpr,
    REDUCED_IS_MINOR: tl.constexpr,
    TMA_X: tl.constexpr,
    TMA_W: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_REDUCED: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    SCALED_REDUCED: tl.constexpr = 0,
    SCALED_COLUMNS: tl.constexpr = 0,
    PRODUCTS: tl.constexpr = 1,
    W_IS_LEFT: tl.constexpr = False,
):
    """The main loop: float32 x[rows] @ w[group] for one tile.

    With TMA_X the rows are start, start + 1, ...; rows past the group's end belong to other groups and are not stored.
    Without TMA_X they are `rows`, and a row that does not exist is zero. With num_pieces [1], x is the sum of that many
    matrices of num_rows rows, stored one after the other. x_scales and w_scales are None unless x or w is quantized; a
    scale of w is of SCALED_REDUCED features and SCALED_COLUMNS columns. Scales of a packed w are bytes. PRODUCTS is as
    in `places`, or 1 where features stay in their places. W_IS_LEFT needs 64 columns or more and operands of 16 bits.
    """
    is_packed: tl.constexpr = w_scales is not None and w_scales.dtype.element_ty == tl.uint8
    acc = tl.full([BLOCK_COLUMNS, BLOCK_ROWS] if W_IS_LEFT else [BLOCK_ROWS, BLOCK_COLUMNS], 0.0, tl.float32)
    padded: tl.constexpr = (REDUCED + BLOCK_REDUCED - 1) // BLOCK_REDUCED * BLOCK_REDUCED
    for step in tl.range(0, REDUCED if num_pieces is None else padded * tl.load(num_pieces), BLOCK_REDUCED):
        k = step if num_pieces is None else step % padded
        piece = 0 if num_pieces is None else step // padded * num_rows
        if TMA_X:
            x_block = x.load([start + piece, k])
        else:
            reduced = k + tl.arange(0, BLOCK_REDUCED)
            mask = exists[:, None] & (reduced < REDUCED)[None, :]
            x_block = tl.load(row_pointers(x, rows + piece, reduced, REDUCED), mask=mask, other=0.0)
        if is_packed:
            w_block = load_packed_weight(
                w,
                w_scales,
                group,
                k,
                column,
                x_block.dtype,
                REDUCED,
                W_COLUMNS,
                REDUCED_IS_MINOR,
                TMA_W,
                BLOCK_REDUCED,
                BLOCK_COLUMNS,
                PRODUCTS,
            )
        elif w_scales is not None and x_scales is None:
            w_block = load_scaled_weight(
                w,
                w_scales,
                group,
                k,
                column,
                x_block.dtype,
                REDUCED,
                W_COLUMNS,
                REDUCED_IS_MINOR,
                TMA_W,
                BLOCK_REDUCED,
                BLOCK_COLUMNS,
                SCALED_REDUCED,
                SCALED_COLUMNS,
                PRODUCTS,
            )
        else:
            w_block = load_weight(
                w, group, k, column, REDUCED, W_COLUMNS, REDUCED_IS_MINOR, TMA_W, BLOCK_REDUCED, BLOCK_COLUMNS
            )
        if x_scales is not None and w_scales is None:
            x_block = x_block.to(w_block.dtype)
        if PRODUCTS > 1:
            SHARE: tl.constexpr = 32 // x_block.dtype.primitive_bitwidth
            x_block = for_threads_of_x(x_block, PRODUCTS, SHARE)
            if not is_packed:
                w_block = for_threads(w_block, PRODUCTS, SHARE)
        if W_IS_LEFT:
            acc = tl.dot(w_block.T, x_block.T, acc, input_precision=PRECISION)
            # Triton leaves a product of a left operand in registers running into the next step, and lets the next loads
            # overwrite the x that it reads; that acc is used here makes it wait
            acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1)
        elif x_scales is None:
            acc = tl.dot(x_block, w_block, acc, input_precision=PRECISION)
        else:
            tl.static_assert(BLOCK_REDUCED == BLOCK)
            scales = load_row_scales(x_scales, rows, exists, k, REDUCED, BLOCK_REDUCED)
            if w_scales is not None:
                scales *= load_weight_scales(
                    w_scales,
                    group,
                    k,
                    column,
                    REDUCED,
                    W_COLUMNS,
                    REDUCED_IS_MINOR,
                    SCALED_REDUCED,
                    SCALED_COLUMNS,
                    BLOCK_COLUMNS,
                )
            acc += tl.dot(x_block, w_block, input_precision=PRECISION) * scales
    return acc.T if W_IS_LEFT else acc


@triton.jit
def add_low_rank(
    acc,
    low_rows,
    low_matrices,
    group,
    rows,
    in_group,
    column,
    RANK: tl.constexpr,
    W_COLUMNS: tl.constexpr,
    REDUCED_IS_MINOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    W_IS_LEFT: tl.constexpr = False,
):
    """acc + low_rows[rows] @ low_matrices[group], float32; low_rows [any, RANK] are in expert order.

    W_IS_LEFT says that `multiply_rows` left acc transposed in the registers, and so adds to it there.
    """
    BLOCK_RANK: tl.constexpr = min(64, max(16, triton.next_power_of_2(RANK)))
    for k in tl.range(0, RANK, BLOCK_RANK):
        reduced = k + tl.arange(0, BLOCK_RANK)
        mask = in_group[:, None] & (reduced < RANK)[None, :]
        block = tl.load(row_pointers(low_rows, rows, reduced, RANK), mask=mask, other=0.0)
        matrix = load_weight(
            low_matrices, group, k, column, RANK, W_COLUMNS, REDUCED_IS_MINOR, False, BLOCK_RANK, BLOCK_COLUMNS
        )
        if W_IS_LEFT:
            acc = tl.dot(matrix.T, block.T, acc.T, input_precision=PRECISION).T
        else:
            acc = tl.dot(block, matrix, acc, input_precision=PRECISION)
    return acc


@triton.jit
def forward_kernel(
    x,
    x_scales,
    w,
    w_scales,
    low_rows,
    low_matrices,
    bias,
    topk_weights,
    gather_indices,
    group_starts,
    group_ends,
    tile_group,
    tile_start,
    tile_end,
    tiles_through,
    y,
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
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA_X: tl.constexpr,
    TMA_W: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_REDUCED: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    SCALED_REDUCED: tl.constexpr,
    SCALED_COLUMNS: tl.constexpr,
    PRODUCTS: tl.constexpr,
    W_IS_LEFT: tl.constexpr,
):
    """y[i] = (x[i] @ w[group of i] + bias[group of i]) * topk_weights[i]; a tile has rows of one group.

    Arrays: x [num_rows or tokens, REDUCED]; w [groups, W_COLUMNS, REDUCED] or with the last two axes exchanged; bias
    [groups, COLUMNS]; topk_weights [num_positions]; gather_indices [num_rows], bad outside [0, num_positions); y
    [num_rows, COLUMNS]; group_starts and group_ends [groups]; the tile schedule's tile_group, tile_start, tile_end and
    tiles_through. Only COLUMNS columns of w are multiplied, from first_column on, a multiple of 16. bias, topk_weights
    and gather_indices may be None; with TMA_X and TMA_W, x and w are TMA descriptors. A quantized x has
    x_scales [rows of x, REDUCED / BLOCK], a quantized w w_scales [groups, W_COLUMNS / SCALED_COLUMNS, REDUCED /
    SCALED_REDUCED], laid out as w is, rounded up; others have None. A packed w and its scales are bytes, and w has
    REDUCED / 2 of them for a column.
    GATHER reads row i from x[gather_indices[i] // TOPK]; SCATTER writes it to y[gather_indices[i]].
    low_rows [num_rows, RANK], in expert order, times low_matrices, laid out as w is, are added unless they are None.
    PRODUCTS and W_IS_LEFT are as in `multiply_rows`.
    Rows of y without a group become zeros; after the last group, only those before zeros_end.
    """
    column_tiles: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    row_tiles = tl.load(tiles_through + num_groups - 1)

    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = tile_coordinates(tile, row_tiles, column_tiles, BAND)
        group = tl.load(tile_group + row_tile)
        start = tl.load(tile_start + row_tile)
        group_end = tl.load(tile_end + row_tile)
        rows = start + tl.arange(0, BLOCK_ROWS)
        positions, exists = token_positions(gather_indices, rows, group_end, num_positions)
        column = column_tile * BLOCK_COLUMNS
        acc = multiply_rows(
            x,
            x_scales,
            None,
            num_rows,
            w,
            w_scales,
            group,
            start,
            positions // TOPK if GATHER else rows,
            exists if GATHER else rows < group_end,
            tl.multiple_of(first_column + column, 16),
            REDUCED,
            W_COLUMNS,
            REDUCED_IS_MINOR,
            TMA_X,
            TMA_W,
            PRECISION,
            BLOCK_ROWS,
            BLOCK_REDUCED,
            BLOCK_COLUMNS,
            SCALED_REDUCED,
            SCALED_COLUMNS,
            PRODUCTS,
            W_IS_LEFT,
        )
        if low_rows is not None:
            acc = add_low_rank(
                acc,
                low_rows,
                low_matrices,
                group,
                rows,
                rows < group_end,
                first_column + column,
                RANK,
                W_COLUMNS,
                REDUCED_IS_MINOR,
                PRECISION,
                BLOCK_COLUMNS,
                W_IS_LEFT,
            )
        if bias is not None:
            columns = column + tl.arange(0, BLOCK_COLUMNS)
            acc += tl.load(bias + group * COLUMNS + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)[None, :]
        if topk_weights is not None:
            acc *= tl.load(topk_weights + positions, mask=exists, other=0.0).to(tl.float32)[:, None]
        if SCATTER:
            store_tile(y, acc, positions, exists, column, COLUMNS, BLOCK_COLUMNS)
        else:
            store_tile(y, acc, rows, rows < group_end, column, COLUMNS, BLOCK_COLUMNS)
    zero_outside(
        y,
        gather_indices,
        tl.load(group_starts),
        tl.load(group_ends + num_groups - 1),
        zeros_end,
        num_rows,
        COLUMNS,
        SCATTER,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
    )
