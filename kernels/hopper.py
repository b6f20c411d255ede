"""The kernel of forward, dX and dW for sm_90, in Gluon: warp-specialized, in clusters of two multiprocessors.

It computes left @ right. With RAGGED_M (forward, dX), left has rows of x or dy, and right the weights of their group.
Without RAGGED_M (dW), left and right have columns of x and dy, and the rows of a group are the reduced axis. Each of a
cluster's two multiprocessors (CTAs) computes an output tile [128, BLOCK_COLUMNS]. The two tiles have the same columns;
if they also have the same group, as they always do without RAGGED_M, a block of right is loaded once for both.

Roles. A CTA has three warpgroups, of 128 threads:

    multiply_tiles, twice   each multiplies 64 rows of the tile and has TMA store them
    load_blocks             one warp loads blocks by TMA; where rows of left have to be gathered, which TMA cannot do,
                            four warps load, and the gathered rows come by cp.async

A warpgroup whose rows all lie past the end (of the group, or of left's columns) skips the tile: it only hands back the
blocks.

Pipelines. Between the loading warps and the multiplying warpgroups lies a ring of STAGES stages in shared memory
(`Ring`). A stage holds the blocks of one step of BLOCK_REDUCED along the reduced axis: one of left for each multiplying
warpgroup, and one of right for both. It has three barriers:

    barrier      arrivals     who arrives                                               who waits
    full         2, or 3      the CTA's loading warp, which says how many bytes TMA     the multiplying warpgroups
                 if GATHERS   will bring; CTA 0's loading warp; if the kernel
                              GATHERS, the CTA's loading warps when the rows are there
    empty        2            the CTA's multiplying warpgroups, done with the stage     the CTA's loading warps
    both_empty   2 a CTA      both CTAs' multiplying warpgroups, at a barrier in CTA 0  CTA 0's loading warps

CTA 0 waits for both CTAs because it loads the shared block of right into the memory of both. It arrives at both CTAs'
full barriers because CTA 1 must not run ahead of that wait: while their tiles are of two groups, CTA 1 loads all it
needs by itself, and could get a ring's length ahead and arrive at both_empty twice for one turn of CTA 0.

Timeline of a tile with 8 steps and 4 stages, from left to right; ' marks the next tile:

    multiply_tiles begins the product of step    0   1   2   3   4   5   6   7
        hands back the stage of step                     0   1   2   3   4   5   6,7
        stores a part of the tile before             0       1       2       3
        looks up where the next tile is                      x
        finishes: scale, bias, weights, rounding                                 x
    load_blocks then loads step                          4   5   6   7   0'  1'  2',3'

When a product begins, the one before it may still run, and the one before that is done, so that its stage is handed
back. A finished tile stays in registers; its four parts are stored at even distances in the course of the next tile, so
that the tensor cores do not wait for stores. Loading warps that gather ask for the rows of a step, then wait for the
rows of LAG steps before and announce those at the full barrier.

Registers. Each thread of the three warpgroups begins with 168 registers, 64,512 of the multiprocessor's 65,536. The
warpgroups then exchange them in eights: 8 less for each of the two that multiply is 16 more for the one that loads. A
thread that multiplies holds 192: 128 for the float32 sums of a [64, 256] half tile, and 64 for the finished half tile
in 16 bits (64 and 64 with 128 columns and a float32 result). Of a half tile with 256 columns and a float32 result, as
dW has for float32 weights, it holds one half, and stores the other at once. What the loading warps must hold decides
the rest:

    multiply   load
    240        24     coordinates of blocks, for TMA
    232        40     the rows to gather for a tile and their addresses; or the piece of an operand that a step takes
    224        56     both; or, to gather for dW, other rows at each step and the next step's indices, read ahead

No register of a loading warp that gathers may spill: to read it back would wait for all rows that were asked for.

Shared memory. With the default tiles, of 256 columns in steps of 64, a stage has 16 KB of left and 32 KB of right: 192
KB in 4 stages, and as much in 6 stages with 128 columns. dW takes 8 stages of steps of 32 where it can: as two products
at a time hold their stages, that leaves six half stages for loads that are under way instead of two whole ones. Each
warpgroup also has a block of 8 KB to store a part from, and one of at most 8 KB for that part's hidden features, or a
second for parts that are stored at once. With the barriers that is 213,288 bytes (112 more with 8 stages), or up to
229,672 with those, of the 232,448 that a multiprocessor lets a CTA have.

Gluon sees a cluster as one program: a tensor of 128 rows has 64 in each CTA. Scalars that follow from Work.cta differ
between the two. What was tried with this kernel, and how fast each was, is in kernels/trials.md.
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
from .hopper_loads import load_blocks
from .hopper_results import (
    PARTS,
    TILE_ROWS,
    Results,
    columns_held,
    columns_of_a_run,
    make_pending,
    make_result,
    split_columns,
)

LOOKUP_PART = gl.constexpr(1)  # after storing this part, the warpgroups look up the next tile


@gluon.jit
def as_matrices(work, ring, RIGHT_IS_TRANSPOSED: gl.constexpr):
    """The ring with its blocks as the matrices [TILE_ROWS, BLOCK_REDUCED] and [BLOCK_REDUCED, BLOCK_COLUMNS].

    All blocks are viewed at once: Triton takes seconds to analyse a view of each block where it is multiplied.
    """
    STAGES: gl.constexpr = ring.STAGES
    left_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2, cga_layout=[[1, 0]], transposed=not work.RAGGED_M)
    right_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2, cga_layout=[[0, 0]], transposed=RIGHT_IS_TRANSPOSED)
    left = ring.left.reinterpret(ring.left.dtype, [2 * STAGES, TILE_ROWS, work.BLOCK_REDUCED], left_layout)
    right = ring.right.reinterpret(ring.right.dtype, [STAGES, work.BLOCK_REDUCED, work.BLOCK_COLUMNS], right_layout)
    return Ring(left, right, ring.full, ring.empty, ring.both_empty, STAGES)


@gluon.jit
def multiply_steps(ring, acc, first, end, stage, phase, WARPGROUP: gl.constexpr):
    """Begins acc + left @ right for steps first to end - 1; two products may still run when it returns."""
    for step in range(first, end):
        acc = warpgroup_mma_wait(1, deps=[acc])
        ring.hand_back(ring.before(stage, 2), step >= 2)
        left = ring.left.index(2 * stage + WARPGROUP)
        right = ring.right.index(stage)
        mbarrier.wait(ring.full.index(stage), phase)
        acc = warpgroup_mma(left, right, acc, use_acc=step > 0, is_async=True)
        stage, phase = ring.next(stage, phase)
    return acc, stage, phase


@gluon.jit
def multiply_tile(work, ring, acc, pending, results, steps, stage, phase, next_index, WARPGROUP: gl.constexpr):
    """The product of a half tile, float32, and the next tile; the tile before is stored meanwhile.

    The first step writes over acc: products with zeros in its 128 registers took some 1.5% longer.
    """
    acc = warpgroup_mma_init(acc)
    for part in gl.static_range(PARTS):
        acc, stage, phase = multiply_steps(
            ring, acc, part * steps // PARTS, (part + 1) * steps // PARTS, stage, phase, WARPGROUP
        )
        pending.store(results, WARPGROUP, part)
        if part == LOOKUP_PART:
            next_tile = work.at(next_index)  # here, as its loads and divisions take longer than a warpgroup may pause
    acc = warpgroup_mma_wait(0, deps=[acc])
    ring.hand_back(ring.before(stage, 2), steps > 1)
    ring.hand_back(ring.before(stage, 1))
    return acc, stage, phase, next_tile


@gluon.jit
def finish(
    acc, work, scale, bias, topk_weights, gather_indices, group, start, end, column, num_positions, RUN: gl.constexpr
):
    """(acc * scale + bias) * topk_weights for rows start, start + 1, ... of a group."""
    layout: gl.constexpr = acc.type.layout
    if scale is not None:
        acc *= gl.load(scale)
    if bias is not None:
        columns = gl.arange(0, work.BLOCK_COLUMNS, gl.SliceLayout(0, layout))
        WIDTH: gl.constexpr = work.COLUMNS // work.HALVES
        half = columns // RUN % work.HALVES
        within = column // work.HALVES + columns // (RUN * work.HALVES) * RUN + columns % RUN
        pointers = bias + group.to(gl.int64) * work.COLUMNS + half * WIDTH + within
        acc += gl.load(pointers, mask=within < WIDTH, other=0.0).to(gl.float32)[None, :]
    if topk_weights is not None:
        acc = scale_rows(acc, topk_weights, gather_indices, start, end, num_positions)
    return acc


@gluon.jit
def multiply_tiles(
    WARPGROUP: gl.constexpr,
    work,
    ring,
    results,
    scale,
    bias,
    topk_weights,
    gather_indices,
    num_positions,
    RIGHT_IS_TRANSPOSED: gl.constexpr,
):
    """Multiplies and stores one half of each of a CTA's tiles; runs on one of its two multiplying warpgroups."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, work.BLOCK_COLUMNS, 16], [[1, 0]])
    dtype: gl.constexpr = results.y.descriptor.dtype
    HELD: gl.constexpr = columns_held(dtype, work.BLOCK_COLUMNS)
    RUN: gl.constexpr = columns_of_a_run(work.BLOCK_COLUMNS, work.HALVES, RIGHT_IS_TRANSPOSED)
    nothing = gl.to_tensor(0)  # a tile that ends before it begins
    pending = make_pending(gl.zeros([TILE_ROWS, HELD], dtype, layout), nothing, nothing, nothing, RUN)
    ring = as_matrices(work, ring, RIGHT_IS_TRANSPOSED)
    acc = gl.zeros([TILE_ROWS, work.BLOCK_COLUMNS], gl.float32, layout)
    stage = 0
    phase = 0
    tile = work.at(gl.program_id(0))
    for index in range(gl.program_id(0), work.num_places(), gl.num_programs(0)):
        next_index = index + gl.num_programs(0)
        steps = work.steps(tile)
        first, last = work.left_range(tile)
        first += WARPGROUP * WARPGROUP_ROWS
        if first < last:
            item = tile.item
            column = tile.column
            acc, stage, phase, tile = multiply_tile(
                work, ring, acc, pending, results, steps, stage, phase, next_index, WARPGROUP
            )
            first = work.row_of_tensor(first)
            group = work.group(item) if work.RAGGED_M else item
            acc = finish(
                acc, work, scale, bias, topk_weights, gather_indices, group, first, last, column, num_positions, RUN
            )
            row, end, column = work.place_of_result(item, first, last, column, results.y.TRANSPOSED)
            value = acc.to(dtype)
            if HELD < work.BLOCK_COLUMNS:
                at_once, value = split_columns(value)
                make_pending(at_once, row, end, column, RUN).store_all(results, WARPGROUP)
                if results.y.TRANSPOSED:
                    row += HELD
                else:
                    column += HELD
            pending = make_pending(value, row, end, column, RUN)
        else:
            tile = work.at(next_index)
            stage, phase = skip_tile(ring, steps, stage, phase)
    pending.store_all(results, WARPGROUP)
    tma.store_wait(0)


@gluon.jit
def hopper_kernel(
    left,
    right,
    low_left,
    low_right,
    bias,
    topk_weights,
    gather_indices,
    num_pieces,
    scale,
    group_starts,
    group_ends,
    tile_group,
    tile_start,
    tile_end,
    tiles_through,
    y,
    hidden,
    zeros_end,
    num_rows,
    num_positions,
    num_groups,
    first_column,
    y_row,
    y_column,
    HAS_PIECES: gl.constexpr,
    LOW_STEPS: gl.constexpr,
    RAGGED_M: gl.constexpr,
    LEFT: gl.constexpr,
    REDUCED: gl.constexpr,
    COLUMNS: gl.constexpr,
    RIGHT_IS_TRANSPOSED: gl.constexpr,
    BAND: gl.constexpr,
    BLOCK_REDUCED: gl.constexpr,
    BLOCK_COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    GATHERS: gl.constexpr,
    TOPK: gl.constexpr,
    Y_GROUP_ROWS: gl.constexpr,
    Y_IS_TRANSPOSED: gl.constexpr,
    ACTIVATES: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    CURVE: gl.constexpr,
    LIMIT: gl.constexpr,
    ALPHA: gl.constexpr,
):
    """y[i] = (left[i] @ right[group of i] + bias) * topk_weights with RAGGED_M, else y[g] = left[rows]^T @ right[rows].

    Arrays with RAGGED_M: left [num_rows, REDUCED]; right [groups, REDUCED, columns] or with the last two axes exchanged
    (RIGHT_IS_TRANSPOSED), whose COLUMNS columns from first_column on are multiplied; others as in `forward_kernel`.
    Rows of y without a group become zeros. Arrays without RAGGED_M: left [rows, LEFT]; right [rows, COLUMNS];
    tile_group [num_groups], the groups in the order to take them; tile_start and tile_end, where their rows begin and
    end. Then y[g] has Y_GROUP_ROWS rows, and the result [LEFT, COLUMNS], or transposed if Y_IS_TRANSPOSED, is stored in
    it from row y_row and column y_column on. left and right are 16-bit floats. left, right, y and hidden are TMA
    descriptors, whose rows are multiples of 16 bytes. Where the kernel GATHERS, left is a pointer instead, and row
    gather_indices[i] // TOPK there is left's row i. After the steps of left and right come LOW_STEPS more, of low_left
    [num_rows, rank], in expert order, and low_right, laid out as right is, with rank in place of REDUCED; both are TMA
    descriptors. With num_pieces [1], the operand that HAS_PIECES names is the sum of that many matrices of num_rows
    rows, stored one after the other. scale, float32 [1] or None, multiplies the product.

    With ACTIVATES, which needs RAGGED_M, y is the pre-activation, or None where it is not kept, and hidden [num_rows,
    hidden features] is stored too, as `hopper_results` explains.
    """
    count = gl.load(tiles_through + num_groups - 1) if RAGGED_M else gl.to_tensor(num_groups)
    pieces = gl.to_tensor(1) if num_pieces is None else gl.load(num_pieces)
    cta = gl.inline_asm("mov.u32 $0, %cluster_ctarank;", "=r", [], gl.int32, is_pure=True)
    HALVES: gl.constexpr = 2 if ACTIVATES and GATED and not INTERLEAVED else 1
    work = Work(
        tile_group,
        tile_start,
        tile_end,
        count,
        cta,
        gl.to_tensor(y_row),
        gl.to_tensor(y_column),
        pieces,
        gl.to_tensor(num_rows),
        HAS_PIECES,
        RAGGED_M,
        LEFT,
        REDUCED,
        COLUMNS,
        HALVES,
        BAND,
        BLOCK_REDUCED,
        BLOCK_COLUMNS,
        GATHERS,
        Y_GROUP_ROWS,
        LOW_STEPS,
    )
    ring = make_ring(work, left, right, STAGES)
    # what registers cannot hold is stored at once, a part while TMA still reads the part before
    SLOTS: gl.constexpr = 1 if y is None else BLOCK_COLUMNS // columns_held(y.dtype, BLOCK_COLUMNS)
    of_first = make_result(hidden if y is None else y, Y_IS_TRANSPOSED, SLOTS)
    of_second = of_first if y is None or hidden is None else make_result(hidden, False)
    results = Results(of_first, of_second, y is not None, ACTIVATES, GATED, INTERLEAVED, CURVE, LIMIT, ALPHA)
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (0, work, ring, results, scale, bias, topk_weights, gather_indices, num_positions, RIGHT_IS_TRANSPOSED),
            ),
            (
                multiply_tiles,
                (1, work, ring, results, scale, bias, topk_weights, gather_indices, num_positions, RIGHT_IS_TRANSPOSED),
            ),
            (
                load_blocks,
                (
                    work,
                    ring,
                    left,
                    right,
                    low_left,
                    low_right,
                    gather_indices,
                    num_positions,
                    first_column,
                    RIGHT_IS_TRANSPOSED,
                    TOPK,
                ),
            ),
        ],
        [4, 4 if GATHERS else 1],
        # registers of a thread that multiplies and of one that loads
        [224, 56]
        if GATHERS and (HAS_PIECES != "" or not RAGGED_M or LOW_STEPS)
        else ([232, 40] if GATHERS or HAS_PIECES != "" else [240, 24]),
    )
    if RAGGED_M:
        first, last = gl.load(group_starts), gl.load(group_ends + num_groups - 1)
        if y is not None:
            results.y.zero_rows(first, last, zeros_end, COLUMNS)
        if ACTIVATES:
            results.hidden.zero_rows(first, last, zeros_end, COLUMNS // 2 if GATED else COLUMNS)
        tma.store_wait(0)
