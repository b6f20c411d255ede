"""The warps of the sm_90 kernels that load: they fill the ring of `hopper_blocks`, one tile after another.

The docstring of `hopper` explains how they wait for the warpgroups that multiply, and how many registers they have.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from .hopper_blocks import WARPGROUP_ROWS
from .hopper_results import TILE_ROWS
from .tiles import ROW_LIMIT


@gluon.aggregate
class Gather:
    """Copies row i of left from row indices[i] // TOPK of a matrix [any, WIDTH] at `pointer`; zeros for a bad index."""

    pointer: gl.tensor
    indices: gl.tensor
    num_positions: gl.tensor
    WIDTH: gl.constexpr
    TOPK: gl.constexpr
    layout: gl.constexpr

    @gluon.jit
    def load_indices(self, row, end, ROWS: gl.constexpr):
        """The indices of rows row, row + 1, ...; -1 from `end` on."""
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, self.layout))
        return gl.load(self.indices + rows, mask=rows < end, other=-1)

    @gluon.jit
    def sources(self, indices):
        """The rows of the matrix that `indices` refer to; -1 for a bad index."""
        return gl.where((indices >= 0) & (indices < self.num_positions), indices // self.TOPK, -1)

    @gluon.jit
    def load(self, block, sources, first_row, column):
        """Begins to copy rows first_row + sources, from `column` on, to a shared block; zeros where sources is -1."""
        columns = column + gl.arange(0, block.shape[1], gl.SliceLayout(0, self.layout))
        mask = (sources >= 0)[:, None] & (columns < self.WIDTH)[None, :]
        offsets = ((first_row + sources).to(gl.int64) * self.WIDTH)[:, None] + columns[None, :]
        async_copy.async_load(block, self.pointer + offsets, mask=mask)


@gluon.jit
def make_gather(work, left, gather_indices, num_positions, TOPK: gl.constexpr):
    split: gl.constexpr = [1, 0] if work.RAGGED_M else [0, 1]
    PIECE: gl.constexpr = 128 // left.dtype.element_ty.primitive_bitwidth  # 16 bytes
    layout: gl.constexpr = gl.BlockedLayout([1, PIECE], [4, 8], [4, 1], [1, 0], [split])
    WIDTH: gl.constexpr = work.REDUCED if work.RAGGED_M else work.LEFT
    num_positions = gl.to_tensor(num_positions)  # Triton takes a 1 for a constant
    return Gather(left, gather_indices, num_positions, WIDTH, TOPK, layout)


@gluon.jit
def load_right(work, right, group, column, reduced, is_shared, full, block, RIGHT_IS_TRANSPOSED: gl.constexpr):
    """Begins to load a block of right; the two CTAs share it if both multiply by the same block."""
    if work.HALVES == 2:
        place = [group, 0, column, reduced] if RIGHT_IS_TRANSPOSED else [group, 0, reduced, column]
    else:
        place = [group, column, reduced] if RIGHT_IS_TRANSPOSED else [group, reduced, column]
    tma.async_load(right, place, full, block, multicast=True, pred=is_shared)
    tma.async_load(right, place, full, block, pred=is_shared == 0)


@gluon.jit
def as_blocks_of(descriptor, blocks, COUNT: gl.constexpr):
    """Shared memory as COUNT blocks of a TMA descriptor."""
    shape: gl.constexpr = [COUNT] + descriptor.block_type.shape  # noqa: RUF005
    return blocks.reinterpret(descriptor.dtype, shape, descriptor.layout)


@gluon.constexpr_function
def low_is_first(right, low_right):
    """Whether a tile's steps begin with the term of low rank, as those in FP8 do: see hopper_fp8.py."""
    return right.dtype != low_right.dtype


@gluon.jit
def load_low_rank(
    work,
    ring,
    low_left,
    low_right,
    place,
    column,
    stage,
    phase,
    begun,
    RIGHT_IS_TRANSPOSED: gl.constexpr,
):
    """Loads the blocks of a tile's term of low rank; place is its group, whether both CTAs share it, and its rows."""
    group, is_shared, first, second, has_second = place
    # the same bytes, as blocks of another dtype if left and right are in FP8
    lefts = as_blocks_of(low_left, ring.left, 2 * ring.STAGES)
    rights = as_blocks_of(low_right, ring.right, ring.STAGES)
    for step in gl.static_range(work.LOW_STEPS):
        reduced = step * low_left.block_type.shape[1]
        full = ring.begin(stage, phase, low_left.nbytes_per_cta, low_right.nbytes_per_cta, has_second)
        load_right(work, low_right, group, column, reduced, is_shared, full, rights.index(stage), RIGHT_IS_TRANSPOSED)
        tma.async_load(low_left, [first, reduced], full, lefts.index(2 * stage))
        tma.async_load(low_left, [second, reduced], full, lefts.index(2 * stage + 1), pred=has_second)
        if work.GATHERS:
            ring.announce_earlier(stage, begun)
            begun += 1
        stage, phase = ring.next(stage, phase)
    return stage, phase, begun


@gluon.jit
def load_for_rows(
    work,
    ring,
    left,
    right,
    low_left,
    low_right,
    gather_indices,
    num_positions,
    first_column,
    RIGHT_IS_TRANSPOSED: gl.constexpr,
    TOPK: gl.constexpr,
):
    """Loads the blocks of all tiles with RAGGED_M: left's from the tile's rows, right's from its group's matrix."""
    RIGHT_BYTES: gl.constexpr = right.nbytes_per_cta
    LEFT_BYTES: gl.constexpr = 0 if work.GATHERS else left.nbytes_per_cta
    stage = 0
    phase = 1
    begun = 0
    if work.GATHERS:
        gather = make_gather(work, left, gather_indices, num_positions, TOPK)
    LOW_IS_FIRST: gl.constexpr = work.LOW_STEPS > 0 and low_is_first(right, low_right)
    for index in range(gl.program_id(0), work.num_places(), gl.num_programs(0)):
        tile = work.at(index)
        group = work.group(tile.item)
        is_shared = group == work.group(tile.item ^ 1)  # both tiles of the cluster multiply the same block of right
        first, last = work.left_range(tile)
        has_second = first + WARPGROUP_ROWS < last
        first = work.row_of_tensor(first)
        second = first + WARPGROUP_ROWS
        place = group, is_shared, first, second, has_second
        if work.GATHERS:
            sources = gather.sources(gather.load_indices(first, last, TILE_ROWS))
            second_sources = gather.sources(gather.load_indices(second, last, TILE_ROWS))
        if LOW_IS_FIRST:
            column = first_column + tile.column // work.HALVES
            stage, phase, begun = load_low_rank(
                work, ring, low_left, low_right, place, column, stage, phase, begun, RIGHT_IS_TRANSPOSED
            )
        for step in range(work.steps(tile) - work.LOW_STEPS):
            full = ring.begin(stage, phase, LEFT_BYTES, RIGHT_BYTES, has_second)
            right_block = ring.right.index(stage)
            left_block = ring.left.index(2 * stage)
            second_block = ring.left.index(2 * stage + 1)
            reduced, left_piece = work.at_step(tile, step)
            column = first_column + tile.column // work.HALVES
            load_right(work, right, group, column, reduced, is_shared, full, right_block, RIGHT_IS_TRANSPOSED)
            if work.GATHERS:
                gather.load(left_block, sources, left_piece, reduced)
                gather.load(second_block, second_sources, left_piece, reduced)
                ring.announce_earlier(stage, begun)
                begun += 1
            else:
                tma.async_load(left, [first + left_piece, reduced], full, left_block)
                tma.async_load(left, [second + left_piece, reduced], full, second_block, pred=has_second)
            stage, phase = ring.next(stage, phase)
        if work.LOW_STEPS > 0 and not LOW_IS_FIRST:
            column = first_column + tile.column // work.HALVES
            stage, phase, begun = load_low_rank(
                work, ring, low_left, low_right, place, column, stage, phase, begun, RIGHT_IS_TRANSPOSED
            )
    if work.GATHERS:
        ring.announce_last(stage, begun)


@gluon.jit
def load_for_groups(work, ring, left, right, gather_indices, num_positions, TOPK: gl.constexpr):
    """Loads the blocks of all tiles without RAGGED_M: left's and right's come from the rows of the tile's group."""
    RIGHT_BYTES: gl.constexpr = right.nbytes_per_cta
    LEFT_BYTES: gl.constexpr = 0 if work.GATHERS else left.nbytes_per_cta
    stage = 0
    phase = 1
    begun = 0
    next_tile = work.at(gl.program_id(0))
    if work.GATHERS:
        gather = make_gather(work, left, gather_indices, num_positions, TOPK)
        indices = gather.load_indices(next_tile.start, next_tile.end, work.BLOCK_REDUCED)
    for index in range(gl.program_id(0), work.num_places(), gl.num_programs(0)):
        tile = next_tile
        next_tile = work.at(index + gl.num_programs(0))
        first, last = work.left_range(tile)
        has_second = first + WARPGROUP_ROWS < last
        first = work.row_of_tensor(first)
        second = first + WARPGROUP_ROWS
        steps = work.steps(tile)
        for step in range(steps):
            full = ring.begin(stage, phase, LEFT_BYTES, RIGHT_BYTES, has_second)
            right_block = ring.right.index(stage)
            left_block = ring.left.index(2 * stage)
            second_block = ring.left.index(2 * stage + 1)
            reduced, piece = work.at_step(tile, step)
            left_piece = piece if work.HAS_PIECES == "left" else 0
            right_piece = piece if work.HAS_PIECES == "right" else 0
            end = tile.end
            row = tile.start + reduced - end + ROW_LIMIT  # zeros from the group's end on, as in tiles.load_rows
            tma.async_load(right, [ROW_LIMIT, end + right_piece, row, tile.column], full, right_block, multicast=True)
            if work.GATHERS:
                sources = gather.sources(indices)
                # read the next step's indices before this step's rows are asked for
                is_last = step == steps - 1
                next_reduced, _ = work.at_step(tile, step + 1)
                next_row = gl.where(is_last, next_tile.start, tile.start + next_reduced)
                next_end = gl.where(is_last, next_tile.end, end)
                indices = gather.load_indices(next_row, next_end, work.BLOCK_REDUCED)
                gather.load(left_block, sources, left_piece, first)
                gather.load(second_block, sources, left_piece, second)
                ring.announce_earlier(stage, begun)
                begun += 1
            else:
                end += left_piece
                tma.async_load(left, [ROW_LIMIT, end, row, first], full, left_block)
                tma.async_load(left, [ROW_LIMIT, end, row, second], full, second_block, pred=has_second)
            stage, phase = ring.next(stage, phase)
    if work.GATHERS:
        ring.announce_last(stage, begun)


@gluon.jit
def load_blocks(
    work,
    ring,
    left,
    right,
    low_left,
    low_right,
    gather_indices,
    num_positions,
    first_column,
    RIGHT_IS_TRANSPOSED: gl.constexpr,
    TOPK: gl.constexpr,
):
    """Runs on the loading warp or, where the kernel GATHERS rows, which TMA cannot do, on four loading warps."""
    if work.RAGGED_M:
        load_for_rows(
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
        )
    else:
        load_for_groups(work, ring, left, right, gather_indices, num_positions, TOPK)
