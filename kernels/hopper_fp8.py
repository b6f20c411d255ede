"""The kernel of x @ w in FP8 with block scales for sm_90, in Gluon; with transposed weights it is dX.

Clusters, roles, ring and barriers are as in `hopper` with RAGGED_M, whose docstring explains them. The loading warps
run the same code (`hopper_loads`). The differences:

Steps. A step covers 128 features: within it, a row of left and a 128 x 128 block of right have one scale each. A tile
is 128 rows by 256 columns; each warpgroup multiplies 64 rows of it as two blocks of 64 x 128. FP8 products keep few
bits of their sum, so each step begins a new product in 64 registers, scales it, and adds it to the block's own 64
registers of float32 sums:

    multiply_tile, in each step    block 0 @ , scale and add , block 1 @ , hand back, scale and add

A term of low rank is the tile's last steps: 64 features of 16 bits take the bytes of 128 in FP8, so they go through the
same ring, and their products are added to the sums without scales.

While a warpgroup scales and adds, the other one multiplies. Scales do not go through the ring: the warpgroups load them
a step ahead, and look up where a gathered row's scales are.

Stores. 128 registers of sums, 64 of a product and scales leave no room for a finished tile, so a tile is stored once
it is done, 128 columns at a time (`hopper_fp8_results`). The loading warps fill the ring meanwhile. Just before it
stores the tile, a warpgroup looks up where the next tile's rows are.

Shared memory. A stage has 16 KB of left and 32 KB of right, as many bytes as in 16 bits and twice the features: 192 KB
in 4 stages. Each warpgroup has another 16 KB to store from. With the barriers that is at most 229,752 bytes of 232,448.

Registers of a thread that multiplies and of one that loads: 240 and 24; 232 and 40 with gathers; 224 and 56 where an
activation follows too.

What was tried, and how fast it was, is in kernels/trials.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from .hopper_blocks import WARPGROUP_ROWS, Ring, Work, make_ring, scale_rows, skip_tile
from .hopper_fp8_results import BLOCK, Quantized, Stored, StoredHidden
from .hopper_loads import load_blocks
from .hopper_results import TILE_ROWS, make_result


@gluon.jit
def as_matrices(ring, left_dtype: gl.constexpr, right_dtype: gl.constexpr):
    """The ring's blocks as matrices with 128 bytes a row: of TILE_ROWS rows, and two of BLOCK rows a stage, transposed.

    The two dtypes have equally many bits.
    """
    STAGES: gl.constexpr = ring.STAGES
    BITS: gl.constexpr = left_dtype.primitive_bitwidth
    FEATURES: gl.constexpr = 1024 // BITS
    left_layout: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2, cga_layout=[[1, 0]])
    right_layout: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2, cga_layout=[[0, 0]], transposed=True)
    left = ring.left.reinterpret(left_dtype, [2 * STAGES, TILE_ROWS, FEATURES], left_layout)
    right = ring.right.reinterpret(right_dtype, [2 * STAGES, FEATURES, BLOCK], right_layout)
    return Ring(left, right, ring.full, ring.empty, ring.both_empty, STAGES)


@gluon.jit
def finish(
    acc, HALF: gl.constexpr, work, bias, topk_weights, gather_indices, group, first, last, column, num_positions
):
    """(acc + bias) * topk_weights for rows of the first or second block (HALF is 0 or 1) of a tile's columns."""
    if bias is not None:
        # up's columns follow all of gate's
        column = HALF * (work.COLUMNS // 2) + column // 2 if work.HALVES == 2 else column + HALF * BLOCK
        columns = column + gl.arange(0, BLOCK, gl.SliceLayout(0, acc.type.layout))
        pointers = bias + group.to(gl.int64) * work.COLUMNS + columns
        acc += gl.load(pointers, mask=columns < work.COLUMNS, other=0.0).to(gl.float32)[None, :]
    if topk_weights is not None:
        acc = scale_rows(acc, topk_weights, gather_indices, first, last, num_positions)
    return acc


@gluon.aggregate
class Scales:
    """The scales of a warpgroup's rows, and of a tile's two blocks of columns.

    Attributes:
      of_rows: pointers to each row's first scale, if the row exists. of_columns0, of_columns1: to each block's first.
    """

    of_rows: gl.tensor
    exists: gl.tensor
    of_columns0: gl.tensor
    of_columns1: gl.tensor

    @gluon.jit
    def load(self, step):
        """The scales for one step; zero for a row that does not exist."""
        row = gl.load(self.of_rows + step, mask=self.exists, other=0.0)
        return row, gl.load(self.of_columns0 + step), gl.load(self.of_columns1 + step)


@gluon.jit
def find_rows(
    work, tile, gather_indices, num_positions, WARPGROUP: gl.constexpr, TOPK: gl.constexpr, layout: gl.constexpr
):
    """A tile's group, and the row of left for each row of a warpgroup's half; -1 for a row that does not exist."""
    first, last = work.left_range(tile)
    rows = work.row_of_tensor(first + WARPGROUP * WARPGROUP_ROWS) + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, layout))
    exists = rows < last
    if work.GATHERS:
        rows = gl.load(gather_indices + rows, mask=exists, other=-1)
        exists = exists & (rows >= 0) & (rows < num_positions)
        rows = rows // TOPK
    return work.group(tile.item), gl.where(exists, rows, -1)


@gluon.jit
def find_scales(work, left_scales, right_scales, group, rows, column, RIGHT_SCALES: gl.constexpr):
    """The scales of rows of left, and of the two blocks of a group's columns from `column` on."""
    SCALES: gl.constexpr = (work.REDUCED + BLOCK - 1) // BLOCK  # of a row
    block = column // work.HALVES // BLOCK
    # the second block may lie past the last
    second = gl.minimum(block + (RIGHT_SCALES // 2 if work.HALVES == 2 else 1), RIGHT_SCALES - 1)
    of_group = right_scales + group.to(gl.int64) * (RIGHT_SCALES * SCALES)
    of_rows = left_scales + rows.to(gl.int64) * SCALES
    return Scales(of_rows, rows >= 0, of_group + block * SCALES, of_group + second * SCALES)


@gluon.jit
def multiply_block(left, right, product):
    """Begins left @ right of one step, and overwrites `product` with it."""
    product = warpgroup_mma_init(product)
    return warpgroup_mma(left, right, product, use_acc=False, is_async=True)


@gluon.jit
def multiply_tile(ring, acc0, acc1, scales, product, steps, stage, phase, WARPGROUP: gl.constexpr):
    """acc0 and acc1 plus the two blocks of 128 columns of a half tile; and the registers `product`, for the next."""
    row_scale, scale0, scale1 = scales.load(0)
    for step in range(steps):
        left = ring.left.index(2 * stage + WARPGROUP)
        mbarrier.wait(ring.full.index(stage), phase)
        product = multiply_block(left, ring.right.index(2 * stage), product)
        scale0 *= row_scale
        scale1 *= row_scale
        next_scales = scales.load(gl.minimum(step + 1, steps - 1))
        product = warpgroup_mma_wait(0, deps=[product])
        acc0 += product * scale0[:, None]
        product = multiply_block(left, ring.right.index(2 * stage + 1), product)
        product = warpgroup_mma_wait(0, deps=[product])
        ring.hand_back(stage)
        acc1 += product * scale1[:, None]
        row_scale, scale0, scale1 = next_scales
        stage, phase = ring.next(stage, phase)
    return acc0, acc1, product, stage, phase


@gluon.jit
def multiply_low_rank(ring, stage, phase, of_product: gl.constexpr, WARPGROUP: gl.constexpr, LOW_STEPS: gl.constexpr):
    """The term of low rank in the two blocks of 128 columns of a half tile, whose matrices of 16 bits are in the ring.

    It comes first: after the other steps there are not enough registers for it. of_product is the results' layout.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16], [[1, 0]])  # the same registers
    acc0 = gl.zeros([TILE_ROWS, BLOCK], gl.float32, of_product)
    acc1 = acc0
    for _ in range(LOW_STEPS):
        left = ring.left.index(2 * stage + WARPGROUP)
        mbarrier.wait(ring.full.index(stage), phase)
        low_product = multiply_block(
            left, ring.right.index(2 * stage), gl.zeros([TILE_ROWS, BLOCK], gl.float32, layout)
        )
        low_product = warpgroup_mma_wait(0, deps=[low_product])
        acc0 += gl.convert_layout(low_product, of_product)
        low_product = multiply_block(left, ring.right.index(2 * stage + 1), low_product)
        low_product = warpgroup_mma_wait(0, deps=[low_product])
        ring.hand_back(stage)
        acc1 += gl.convert_layout(low_product, of_product)
        stage, phase = ring.next(stage, phase)
    return acc0, acc1, stage, phase


@gluon.jit
def multiply_tiles(
    WARPGROUP: gl.constexpr,
    work,
    ring,
    low_left,
    results,
    left_scales,
    right_scales,
    bias,
    topk_weights,
    gather_indices,
    num_positions,
    first_column,
    RIGHT_SCALES: gl.constexpr,
    TOPK: gl.constexpr,
):
    """Multiplies and stores one half of each of a CTA's tiles; runs on one of its two multiplying warpgroups."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32], [[1, 0]])
    blocks = ring
    ring = as_matrices(blocks, blocks.left.dtype, blocks.right.dtype)
    product = gl.zeros([TILE_ROWS, BLOCK], gl.float32, layout)
    stage = 0
    phase = 0
    next_tile = work.at(gl.program_id(0))
    next_group, next_rows = find_rows(work, next_tile, gather_indices, num_positions, WARPGROUP, TOPK, layout)
    for index in range(gl.program_id(0), work.num_places(), gl.num_programs(0)):
        tile, group, rows = next_tile, next_group, next_rows
        first, last = work.left_range(tile)
        first += WARPGROUP * WARPGROUP_ROWS
        steps = work.steps(tile)
        if first < last:
            column = tile.column
            scales = find_scales(work, left_scales, right_scales, group, rows, first_column + column, RIGHT_SCALES)
            if work.LOW_STEPS > 0:
                low = as_matrices(blocks, low_left.dtype, low_left.dtype)
                acc0, acc1, stage, phase = multiply_low_rank(low, stage, phase, layout, WARPGROUP, work.LOW_STEPS)
            else:
                acc0 = gl.zeros([TILE_ROWS, BLOCK], gl.float32, layout)
                acc1 = acc0
            acc0, acc1, product, stage, phase = multiply_tile(
                ring, acc0, acc1, scales, product, steps - work.LOW_STEPS, stage, phase, WARPGROUP
            )
            # here, because these loads take about as long as storing the tile does
            next_tile = work.at(index + gl.num_programs(0))
            next_group, next_rows = find_rows(work, next_tile, gather_indices, num_positions, WARPGROUP, TOPK, layout)
            first = work.row_of_tensor(first)
            acc0 = finish(acc0, 0, work, bias, topk_weights, gather_indices, group, first, last, column, num_positions)
            acc1 = finish(acc1, 1, work, bias, topk_weights, gather_indices, group, first, last, column, num_positions)
            results.store(acc0, acc1, WARPGROUP, first, last, column)
        else:
            next_tile = work.at(index + gl.num_programs(0))
            next_group, next_rows = find_rows(work, next_tile, gather_indices, num_positions, WARPGROUP, TOPK, layout)
            stage, phase = skip_tile(ring, steps, stage, phase)
    tma.store_wait(0)


@gluon.jit
def hopper_fp8_kernel(
    left,
    left_scales,
    right,
    right_scales,
    low_left,
    low_right,
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
    hidden,
    hidden_scales,
    kept,
    kept_scales,
    zeros_end,
    num_rows,
    num_positions,
    num_groups,
    first_column,
    REDUCED: gl.constexpr,
    COLUMNS: gl.constexpr,
    RIGHT_SCALES: gl.constexpr,
    BAND: gl.constexpr,
    BLOCK_COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    GATHERS: gl.constexpr,
    TOPK: gl.constexpr,
    LOW_STEPS: gl.constexpr,
    ACTIVATES: gl.constexpr,
    GATED: gl.constexpr,
    CURVE: gl.constexpr,
    LIMIT: gl.constexpr,
    ALPHA: gl.constexpr,
    LARGEST: gl.constexpr,
    POWER_OF_2: gl.constexpr,
):
    """y[i] = (left[i] @ right[group of i] + bias) * topk_weights; with ACTIVATES, hidden = activation(y) instead.

    Arrays: left [num_rows, REDUCED] and right [groups, columns, REDUCED] are FP8; both are TMA descriptors, but left is
    a pointer where the kernel GATHERS. left_scales [num_rows, REDUCED / BLOCK] and right_scales [groups, RIGHT_SCALES,
    REDUCED / BLOCK], rounded up, are float32. hidden [num_rows, hidden features] and kept [num_rows, COLUMNS], the
    pre-activation or None, are FP8, with a scale for each BLOCK features of a row; scales of rows without a group are
    not written. The first LOW_STEPS of a tile's steps multiply low_left and low_right, of 16 bits and without scales.
    Others are as in `hopper_kernel`.
    """
    count = gl.load(tiles_through + num_groups - 1)
    cta = gl.inline_asm("mov.u32 $0, %cluster_ctarank;", "=r", [], gl.int32, is_pure=True)
    nothing = gl.to_tensor(0)
    HALVES: gl.constexpr = 2 if ACTIVATES and GATED else 1
    work = Work(
        tile_group,
        tile_start,
        tile_end,
        count,
        cta,
        nothing,
        nothing,
        gl.to_tensor(1),
        gl.to_tensor(num_rows),
        "",
        True,
        0,
        REDUCED,
        COLUMNS,
        HALVES,
        BAND,
        BLOCK,
        BLOCK_COLUMNS,
        GATHERS,
        0,
        LOW_STEPS,
    )
    ring = make_ring(work, left, right, STAGES)
    if ACTIVATES:
        KEEPS: gl.constexpr = kept is not None
        of_hidden = Quantized(make_result(hidden, False), hidden_scales, COLUMNS // HALVES, LARGEST, POWER_OF_2)
        of_kept = of_hidden
        if KEEPS:
            of_kept = Quantized(make_result(kept, False), kept_scales, COLUMNS, LARGEST, POWER_OF_2)
        results = StoredHidden(of_hidden, of_kept, KEEPS, GATED, CURVE, LIMIT, ALPHA)
    else:
        results = Stored(make_result(y, False))
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (
                    0,
                    work,
                    ring,
                    low_left,
                    results,
                    left_scales,
                    right_scales,
                    bias,
                    topk_weights,
                    gather_indices,
                    num_positions,
                    first_column,
                    RIGHT_SCALES,
                    TOPK,
                ),
            ),
            (
                multiply_tiles,
                (
                    1,
                    work,
                    ring,
                    low_left,
                    results,
                    left_scales,
                    right_scales,
                    bias,
                    topk_weights,
                    gather_indices,
                    num_positions,
                    first_column,
                    RIGHT_SCALES,
                    TOPK,
                ),
            ),
            (
                load_blocks,
                (work, ring, left, right, low_left, low_right, gather_indices, num_positions, first_column, True, TOPK),
            ),
        ],
        [4, 4 if GATHERS else 1],
        [224, 56] if GATHERS and ACTIVATES else [232, 40] if GATHERS else [240, 24],
    )
    first, last = gl.load(group_starts), gl.load(group_ends + num_groups - 1)
    if ACTIVATES:
        results.hidden.values.zero_rows(first, last, zeros_end, COLUMNS // HALVES)
        if KEEPS:
            results.kept.values.zero_rows(first, last, zeros_end, COLUMNS)
    else:
        results.y.zero_rows(first, last, zeros_end, COLUMNS)
    tma.store_wait(0)
