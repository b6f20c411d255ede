"""Both main loops for sm_90 in Gluon: warp-specialised, in clusters of two multiprocessors.

Each of the two multiprocessors (CTAs) computes an output tile [128, BLOCK_COLUMNS] of left @ right, with left the rows
of x or dy (ragged M) or, for dW, their columns (ragged K). One warp loads blocks by TMA, or four do where rows of left
have to be gathered, while two warpgroups multiply 64 rows each. The two tiles have the same columns; where they are of
one group too, the block of the right operand is loaded once for both. Warpgroups whose rows lie past the group's end
rest. A warpgroup keeps a finished tile in registers and stores it in four parts in the course of its next one, so that
the tensor cores do not wait for stores.

Gluon sees a cluster as one program: a tensor of 128 rows has 64 in each CTA. Scalars that follow from Work.cta differ
between the two.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from . import tiles

TILE_ROWS = gl.constexpr(128)  # of a CTA's output tile; also rows of a tensor, of which each CTA has half
WARPGROUP_ROWS = gl.constexpr(64)  # of a tile
PARTS = gl.constexpr(4)  # of a finished tile, stored at even distances in the course of the next
ROW_LIMIT = gl.constexpr(2**30)  # as in tiles.py
LOOKUP_PART = gl.constexpr(1)  # with which the warpgroups look the next one up while they multiply
LAG = gl.constexpr(2)  # steps whose gathered rows are on their way while the next step's are asked for
tile_coordinates = gluon.jit(tiles.tile_coordinates.fn)


@gluon.aggregate
class Tile:
    """Where an output tile of a CTA is.

    Attributes:
      item: its row tile or group. left_tile: its place among left's columns, 0 with RAGGED_M. column: its first.
      start, end: its row tile's or group's first row and one past its group's last; zeros for a tile past the last.
    """

    item: gl.tensor
    left_tile: gl.tensor
    column: gl.tensor
    start: gl.tensor
    end: gl.tensor


@gluon.aggregate
class Work:
    """The tiles to multiply, in the order in which clusters take them.

    With RAGGED_M there are `count` row tiles, of which a cluster takes two that are neighbours, left are their rows and
    right is a group's weights; otherwise there are `count` groups, whose rows are the reduced axis, and LEFT is the
    number of left's columns. Their tiles take as long as they have rows; clusters take turns forwards and backwards, so
    that all end at about the same time if the largest groups come first.

    Attributes:
      groups, starts, ends: of each row tile its group, its first row and one past its group's last; or, without
        RAGGED_M, the same of each group in the order in which they are taken.
      cta: which of the cluster's two this is.
      y_block: where y's first matrix begins, times Y_BLOCK_STRIDE, by which the compiler knows that rows are aligned.
      terms: how many matrices one after the other, each of num_rows rows, add up to the operand that HAS_TERMS, "left"
        or "right"; "" for neither. The steps of a tile run over the terms, one after the other.
    """

    groups: gl.tensor
    starts: gl.tensor
    ends: gl.tensor
    count: gl.tensor
    cta: gl.tensor
    y_block: gl.tensor
    terms: gl.tensor
    num_rows: gl.tensor
    HAS_TERMS: gl.constexpr
    RAGGED_M: gl.constexpr
    LEFT: gl.constexpr
    REDUCED: gl.constexpr
    COLUMNS: gl.constexpr
    BAND: gl.constexpr
    BLOCK_REDUCED: gl.constexpr
    BLOCK_COLUMNS: gl.constexpr
    GATHERS: gl.constexpr
    Y_BLOCK_STRIDE: gl.constexpr
    Y_GROUP_STRIDE: gl.constexpr
    Y_ROW_STRIDE: gl.constexpr
    Y_COLUMN_STRIDE: gl.constexpr

    @gluon.jit
    def num_tiles(self):
        """Of a cluster: two output tiles each."""
        column_tiles: gl.constexpr = (self.COLUMNS + self.BLOCK_COLUMNS - 1) // self.BLOCK_COLUMNS
        left_tiles: gl.constexpr = (self.LEFT + 2 * TILE_ROWS - 1) // (2 * TILE_ROWS)
        return self.row_tile_pairs() * column_tiles if self.RAGGED_M else self.count * left_tiles * column_tiles

    @gluon.jit
    def num_places(self):
        """Of tiles in their order; those past the last tile complete the last turn of all clusters."""
        clusters = gl.num_programs(0)
        return self.num_tiles() if self.RAGGED_M else (self.num_tiles() + clusters - 1) // clusters * clusters

    @gluon.jit
    def row_tile_pairs(self):
        return (self.count + 1) // 2

    @gluon.jit
    def at(self, place):
        """This CTA's of a cluster's tiles; one without rows past the last."""
        column_tiles: gl.constexpr = (self.COLUMNS + self.BLOCK_COLUMNS - 1) // self.BLOCK_COLUMNS
        if self.RAGGED_M:
            pair, column_tile = tile_coordinates(place, self.row_tile_pairs(), column_tiles, self.BAND)
            item = 2 * pair + self.cta
            rank = item
            left_tile = gl.to_tensor(0)
            exists = (place < self.num_tiles()) & (item < self.count)
        else:
            left_tiles: gl.constexpr = (self.LEFT + 2 * TILE_ROWS - 1) // (2 * TILE_ROWS)
            clusters = gl.num_programs(0)
            turn = place // clusters
            tile = gl.where(turn % 2 == 0, place, (2 * turn + 1) * clusters - 1 - place)
            exists = tile < self.num_tiles()
            rank = tile // (left_tiles * column_tiles)
            within = tile - rank * left_tiles * column_tiles
            pair, column_tile = tile_coordinates(within, left_tiles, column_tiles, self.BAND)
            left_tile = gl.where(exists, 2 * pair + self.cta, self.LEFT)
            item = gl.load(self.groups + rank, mask=exists, other=0)
        start = gl.load(self.starts + rank, mask=exists, other=0)
        end = gl.load(self.ends + rank, mask=exists, other=0)
        return Tile(item, left_tile, column_tile * self.BLOCK_COLUMNS, start, end)

    @gluon.jit
    def left_range(self, tile):
        """The tile's first row of the output, and one past the last there is."""
        if self.RAGGED_M:
            return tile.start, tile.end
        else:
            return tile.left_tile * TILE_ROWS, gl.to_tensor(self.LEFT)

    @gluon.jit
    def group(self, row_tile):
        """Of a row tile; of one past the last, the last's."""
        return gl.load(self.groups + gl.minimum(row_tile, self.count - 1))

    @gluon.jit
    def row_of_tensor(self, row):
        """The row of left or y at which a tensor must begin for this CTA's part of it to begin at `row`."""
        return row - self.cta * WARPGROUP_ROWS

    @gluon.jit
    def steps_of_term(self, tile):
        size = self.REDUCED if self.RAGGED_M else tile.end - tile.start
        return gl.maximum((size + self.BLOCK_REDUCED - 1) // self.BLOCK_REDUCED, 1)

    @gluon.jit
    def steps(self, tile):
        steps = self.steps_of_term(tile)
        if self.HAS_TERMS != "":
            steps = steps * self.terms
        return steps

    @gluon.jit
    def at_step(self, tile, step):
        """Where a step begins along the reduced axis, and the row at which its term of the operand begins."""
        row = 0
        if self.HAS_TERMS != "":
            steps = self.steps_of_term(tile)
            row = (step // steps) * self.num_rows
            step = step % steps
        return step * self.BLOCK_REDUCED, row


@gluon.aggregate
class Ring:
    """Buffers between the loading warps and the warpgroups, STAGES steps deep.

    Attributes:
      left: two blocks a stage, one for each warpgroup. right: one, the same in both CTAs.
      full: barriers of loaded stages, at which CTA 0's loading warp arrives too. empty: of stages that this CTA's
        warpgroups have multiplied; both_empty: that both CTAs' have, for which only CTA 0 waits.
    """

    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    both_empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def next(self, stage, phase):
        """The stage after this one, and the parity of its barriers."""
        wraps = stage == self.STAGES - 1
        return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)

    @gluon.jit
    def before(self, stage, STEPS: gl.constexpr):
        """The stage of so many steps earlier."""
        return gl.where(stage < STEPS, stage + self.STAGES - STEPS, stage - STEPS)

    @gluon.jit
    def await_empty(self, stage, phase):
        mbarrier.wait(self.empty.index(stage), phase)
        mbarrier.wait(self.both_empty.index(stage), phase)

    @gluon.jit
    def hand_back(self, stage, pred=True):
        mbarrier.arrive(self.empty.index(stage), pred=pred)
        mbarrier.arrive(self.both_empty.index(stage), pred=pred)

    @gluon.jit
    def announce(self, stage, pred):
        """Tells the warpgroups that the rows gathered for a stage are there."""
        fence_async_shared()
        mbarrier.arrive(self.full.index(stage), pred=pred)


@gluon.jit
def make_ring(work, left, right, STAGES: gl.constexpr):
    if work.GATHERS:
        shape: gl.constexpr = [TILE_ROWS, work.BLOCK_REDUCED] if work.RAGGED_M else [work.BLOCK_REDUCED, TILE_ROWS]
        split: gl.constexpr = [1, 0] if work.RAGGED_M else [0, 1]
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2, cga_layout=[split])
        left_blocks = gl.allocate_shared_memory(left.dtype.element_ty, [2 * STAGES] + shape, layout)  # noqa: RUF005
    else:
        shape: gl.constexpr = left.block_type.shape
        left_blocks = gl.allocate_shared_memory(left.dtype, [2 * STAGES] + shape, left.layout)  # noqa: RUF005
    ring = Ring(
        left_blocks,
        gl.allocate_shared_memory(right.dtype, [STAGES] + right.block_type.shape, right.layout),  # noqa: RUF005
        mbarrier.allocate_mbarrier(batch=STAGES),
        mbarrier.allocate_mbarrier(batch=STAGES),
        mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True),
        STAGES,
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(stage), count=3 if work.GATHERS else 2)
        mbarrier.init(ring.empty.index(stage), count=2)
        mbarrier.init(ring.both_empty.index(stage), count=2)
    fence_async_shared()
    return ring


@gluon.aggregate
class Gather:
    """left, whose row i is row indices[i] // TOPK of the matrix [any, WIDTH] at `pointer`; zeros for a bad index."""

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
        """The matrix's rows that rows of those indices are; -1 for a bad index."""
        return gl.where((indices >= 0) & (indices < self.num_positions), indices // self.TOPK, -1)

    @gluon.jit
    def load(self, block, sources, first_row, column):
        """Begins to copy columns column, column + 1, ... of those rows, counted from first_row, to a shared block."""
        columns = column + gl.arange(0, block.shape[1], gl.SliceLayout(0, self.layout))
        mask = (sources >= 0)[:, None] & (columns < self.WIDTH)[None, :]
        pointers = self.pointer + ((first_row + sources).to(gl.int64) * self.WIDTH)[:, None] + columns[None, :]
        async_copy.async_load(block, pointers, mask=mask)


@gluon.jit
def load_blocks(
    work, ring, left, right, gather_indices, num_positions, first_column, RIGHT_IS_TURNED: gl.constexpr,
    TOPK: gl.constexpr,
):  # fmt: skip
    """The loading warp or, where the kernel GATHERS, which TMA cannot do for rows, the four loading warps."""
    RIGHT_BYTES: gl.constexpr = right.nbytes_per_cta
    LEFT_BYTES: gl.constexpr = 0 if work.GATHERS else left.nbytes_per_cta
    stage = 0
    phase = 1
    begun = 0
    if work.GATHERS:
        split: gl.constexpr = [1, 0] if work.RAGGED_M else [0, 1]
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], [split])
        WIDTH: gl.constexpr = work.REDUCED if work.RAGGED_M else work.LEFT
        gather = Gather(left, gather_indices, num_positions, WIDTH, TOPK, layout)
    next_tile = work.at(gl.program_id(0))
    if work.GATHERS and not work.RAGGED_M:
        indices = gather.load_indices(next_tile.start, next_tile.end, work.BLOCK_REDUCED)
    for index in range(gl.program_id(0), work.num_places(), gl.num_programs(0)):
        tile = next_tile
        next_tile = work.at(index + gl.num_programs(0))
        if work.RAGGED_M:
            group = work.group(tile.item)
            is_shared = group == work.group(tile.item ^ 1)  # the right operand's, with the cluster's other tile
        first, last = work.left_range(tile)
        has_second = first + WARPGROUP_ROWS < last
        first = work.row_of_tensor(first)
        second = first + WARPGROUP_ROWS
        if work.GATHERS and work.RAGGED_M:
            sources = gather.sources(gather.load_indices(first, last, TILE_ROWS))
            second_sources = gather.sources(gather.load_indices(second, last, TILE_ROWS))
        steps = work.steps(tile)
        for step in range(steps):
            ring.await_empty(stage, phase)
            full = ring.full.index(stage)
            # CTA 0 waited for both CTAs' warpgroups: without its arrival those of CTA 1 could get a ring's length ahead
            mbarrier.arrive(full, from_cta=0)
            mbarrier.expect(full, RIGHT_BYTES + 2 * LEFT_BYTES, pred=has_second)
            mbarrier.expect(full, RIGHT_BYTES + LEFT_BYTES, pred=has_second == 0)
            right_block = ring.right.index(stage)
            left_block = ring.left.index(2 * stage)
            second_block = ring.left.index(2 * stage + 1)
            reduced, term = work.at_step(tile, step)
            left_term = term if work.HAS_TERMS == "left" else 0
            right_term = term if work.HAS_TERMS == "right" else 0
            if work.RAGGED_M:
                column = first_column + tile.column
                place = [group, column, reduced] if RIGHT_IS_TURNED else [group, reduced, column]
                tma.async_load(right, place, full, right_block, multicast=True, pred=is_shared)
                tma.async_load(right, place, full, right_block, pred=is_shared == 0)
                if work.GATHERS:
                    gather.load(left_block, sources, left_term, reduced)
                    gather.load(second_block, second_sources, left_term, reduced)
                else:
                    tma.async_load(left, [first + left_term, reduced], full, left_block)
                    tma.async_load(left, [second + left_term, reduced], full, second_block, pred=has_second)
            else:
                end = tile.end
                row = tile.start + reduced - end + ROW_LIMIT  # zeros from the group's end on, as in tiles.load_rows
                place = [ROW_LIMIT, end + right_term, row, tile.column]
                tma.async_load(right, place, full, right_block, multicast=True)
                if work.GATHERS:
                    sources = gather.sources(indices)
                    # the next step's, before this step's rows are asked for
                    is_last = step == steps - 1
                    next_reduced, _ = work.at_step(tile, step + 1)
                    next_row = gl.where(is_last, next_tile.start, tile.start + next_reduced)
                    next_end = gl.where(is_last, next_tile.end, end)
                    indices = gather.load_indices(next_row, next_end, work.BLOCK_REDUCED)
                    gather.load(left_block, sources, left_term, first)
                    gather.load(second_block, sources, left_term, second)
                else:
                    end += left_term
                    tma.async_load(left, [ROW_LIMIT, end, row, first], full, left_block)
                    tma.async_load(left, [ROW_LIMIT, end, row, second], full, second_block, pred=has_second)
            if work.GATHERS:
                async_copy.commit_group()
                async_copy.wait_group(LAG)
                ring.announce(ring.before(stage, LAG), begun >= LAG)
                begun += 1
            stage, phase = ring.next(stage, phase)
    if work.GATHERS:
        async_copy.wait_group(0)
        for earlier in gl.static_range(LAG):
            ring.announce(ring.before(stage, LAG - earlier), begun >= LAG - earlier)


@gluon.aggregate
class Pending:
    """A finished half tile in four parts of its columns, to be stored from y[offset + column] on, `rows` rows of it."""

    part0: gl.tensor
    part1: gl.tensor
    part2: gl.tensor
    part3: gl.tensor
    offset: gl.tensor
    rows: gl.tensor
    column: gl.tensor

    @gluon.jit
    def store(self, y, work, PART: gl.constexpr):
        if PART == 0:
            value = self.part0
        elif PART == 1:
            value = self.part1
        elif PART == 2:
            value = self.part2
        else:
            value = self.part3
        column = self.column + PART * value.shape[1]
        store_rows(y, value, self.offset, self.rows, column, work.COLUMNS, work.Y_ROW_STRIDE, work.Y_COLUMN_STRIDE)

    @gluon.jit
    def store_all(self, y, work):
        for part in gl.static_range(PARTS):
            self.store(y, work, part)


@gluon.jit
def store_rows(
    y, value, offset, rows, column, COLUMNS: gl.constexpr, ROW_STRIDE: gl.constexpr, COLUMN_STRIDE: gl.constexpr
):  # fmt: skip
    """Stores value [TILE_ROWS, columns] from y[offset] on, by way of shared memory so that neighbours go at once."""
    if COLUMN_STRIDE == 1:
        own: gl.constexpr = 128 // value.dtype.primitive_bitwidth  # elements that a thread stores at once
        threads: gl.constexpr = value.shape[1] // own
        layout: gl.constexpr = gl.BlockedLayout([1, own], [32 // threads, threads], [4, 1], [1, 0], [[1, 0]])
    else:
        gl.static_assert(ROW_STRIDE == 1)
        layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1], [[1, 0]])
    row = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    mask = (row < rows)[:, None] & (columns < COLUMNS)[None, :]
    pointers = (y + offset) + (row * ROW_STRIDE)[:, None] + (columns * COLUMN_STRIDE)[None, :]
    gl.store(pointers, gl.convert_layout(value, layout), mask=mask)


@gluon.jit
def split_columns(value):
    """The left and the right half of a matrix's columns."""
    rows: gl.constexpr = value.shape[0]
    columns: gl.constexpr = value.shape[1]
    return value.reshape([rows, 2, columns // 2]).permute((0, 2, 1)).split()


@gluon.jit
def make_pending(value, offset, rows, column):
    left, right = split_columns(value)
    part0, part1 = split_columns(left)
    part2, part3 = split_columns(right)
    return Pending(part0, part1, part2, part3, offset, rows, column)


@gluon.jit
def as_matrices(work, ring, RIGHT_IS_TURNED: gl.constexpr):
    """The ring with its blocks as the matrices [TILE_ROWS, BLOCK_REDUCED] and [BLOCK_REDUCED, BLOCK_COLUMNS].

    Of all at once, as Triton takes seconds to analyse a view of each block where it is multiplied.
    """
    STAGES: gl.constexpr = ring.STAGES
    left_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2, cga_layout=[[1, 0]], transposed=not work.RAGGED_M)
    right_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2, cga_layout=[[0, 0]], transposed=RIGHT_IS_TURNED)
    left = ring.left.reinterpret(ring.left.dtype, [2 * STAGES, TILE_ROWS, work.BLOCK_REDUCED], left_layout)
    right = ring.right.reinterpret(ring.right.dtype, [STAGES, work.BLOCK_REDUCED, work.BLOCK_COLUMNS], right_layout)
    return Ring(left, right, ring.full, ring.empty, ring.both_empty, STAGES)


@gluon.jit
def multiply_steps(ring, acc, first, end, stage, phase, WARPGROUP: gl.constexpr):
    """Begins acc + left @ right of a tile's steps; two may be on their way when it returns."""
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
def multiply_tile(work, ring, acc, pending, y, steps, stage, phase, next_index, WARPGROUP: gl.constexpr):
    """The product of a half tile, float32, and the tile after it; the one before is stored meanwhile.

    The first step writes over acc: products with zeros in its 128 registers took some 1.5% longer.
    """
    acc = warpgroup_mma_init(acc)
    for part in gl.static_range(PARTS):
        acc, stage, phase = multiply_steps(
            ring, acc, part * steps // PARTS, (part + 1) * steps // PARTS, stage, phase, WARPGROUP
        )
        pending.store(y, work, part)
        if part == LOOKUP_PART:
            next_tile = work.at(next_index)  # here, as loads and divisions take longer than a warpgroup may rest
    acc = warpgroup_mma_wait(0, deps=[acc])
    ring.hand_back(ring.before(stage, 2), steps > 1)
    ring.hand_back(ring.before(stage, 1))
    return acc, stage, phase, next_tile


@gluon.jit
def skip_tile(ring, steps, stage, phase):
    """Hands back the blocks of a tile in which this warpgroup has no rows."""
    for _ in range(steps):
        mbarrier.wait(ring.full.index(stage), phase)
        ring.hand_back(stage)
        stage, phase = ring.next(stage, phase)
    return stage, phase


@gluon.jit
def finish(acc, work, scale, bias, topk_weights, gather_indices, group, start, end, column, num_positions):
    """(acc * scale + bias) * topk_weights of rows start, start + 1, ... of a group."""
    layout: gl.constexpr = acc.type.layout
    if scale is not None:
        acc *= gl.load(scale)
    if bias is not None:
        columns = column + gl.arange(0, work.BLOCK_COLUMNS, gl.SliceLayout(0, layout))
        pointers = bias + group.to(gl.int64) * work.COLUMNS + columns
        acc += gl.load(pointers, mask=columns < work.COLUMNS, other=0.0).to(gl.float32)[None, :]
    if topk_weights is not None:
        positions = start + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, layout))
        exists = positions < end
        if gather_indices is not None:
            positions = gl.load(gather_indices + positions, mask=exists, other=-1)
            exists = exists & (positions >= 0) & (positions < num_positions)
        acc *= gl.load(topk_weights + positions, mask=exists, other=0.0).to(gl.float32)[:, None]
    return acc


@gluon.jit
def multiply_tiles(
    WARPGROUP: gl.constexpr, work, ring, y, scale, bias, topk_weights, gather_indices, num_positions,
    RIGHT_IS_TURNED: gl.constexpr,
):  # fmt: skip
    """One of the two warpgroups of a CTA."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, work.BLOCK_COLUMNS, 16], [[1, 0]])
    zeros = gl.zeros([TILE_ROWS, work.BLOCK_COLUMNS], y.dtype.element_ty, layout)
    nothing = gl.to_tensor(0)
    pending = make_pending(zeros, nothing.to(gl.int64), nothing, nothing)
    ring = as_matrices(work, ring, RIGHT_IS_TURNED)
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
                work, ring, acc, pending, y, steps, stage, phase, next_index, WARPGROUP
            )
            first = work.row_of_tensor(first)
            offset = first.to(gl.int64) * work.Y_ROW_STRIDE + work.y_block.to(gl.int64) * work.Y_BLOCK_STRIDE
            if work.RAGGED_M:
                group = work.group(item)
            else:
                offset += item.to(gl.int64) * work.Y_GROUP_STRIDE
                group = item
            acc = finish(
                acc, work, scale, bias, topk_weights, gather_indices, group, first, last, column, num_positions
            )
            pending = make_pending(acc.to(y.dtype.element_ty), offset, last - first, column)
        else:
            tile = work.at(next_index)
            stage, phase = skip_tile(ring, steps, stage, phase)
    pending.store_all(y, work)


@gluon.jit
def zero_rows(y, first, last, COLUMNS: gl.constexpr):
    """Writes zeros to rows first, ..., last - 1 of y."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], [[1, 0]])
    zeros = gl.zeros([TILE_ROWS, 64], y.dtype.element_ty, layout)
    for strip in range(gl.program_id(0), (last - first + TILE_ROWS - 1) // TILE_ROWS, gl.num_programs(0)):
        row = first + strip * TILE_ROWS
        for column in range(0, COLUMNS, 64):
            store_rows(y, zeros, row.to(gl.int64) * COLUMNS, last - row, column, COLUMNS, COLUMNS, 1)


@gluon.jit
def hopper_kernel(
    left, right, bias, topk_weights, gather_indices, num_terms, scale, group_starts, group_ends,
    tile_group, tile_start, tile_end, tiles_through, y, num_rows, num_positions, num_groups, first_column, y_block,
    HAS_TERMS: gl.constexpr, RAGGED_M: gl.constexpr, LEFT: gl.constexpr, REDUCED: gl.constexpr, COLUMNS: gl.constexpr,
    RIGHT_IS_TURNED: gl.constexpr, BAND: gl.constexpr,
    BLOCK_REDUCED: gl.constexpr, BLOCK_COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    GATHERS: gl.constexpr, TOPK: gl.constexpr,
    Y_BLOCK_STRIDE: gl.constexpr, Y_GROUP_STRIDE: gl.constexpr, Y_ROW_STRIDE: gl.constexpr,
    Y_COLUMN_STRIDE: gl.constexpr,
):  # fmt: skip
    """y[i] = (left[i] @ right[group of i] + bias) * topk_weights with RAGGED_M, else y[g] = left[rows]^T @ right[rows].

    Arrays: with RAGGED_M, left [num_rows, REDUCED], right [groups, REDUCED, columns] or with the last two exchanged
    (RIGHT_IS_TURNED), of which COLUMNS from first_column on are multiplied, all others as in `forward_kernel`, with
    zeros in rows of y that are of no group. Otherwise left [rows, LEFT], right [rows, COLUMNS], tile_group [num_groups]
    the groups in the order to take them, tile_start and tile_end their rows, and y[g] is a [LEFT, COLUMNS] matrix of
    the strides given, from element y_block * Y_BLOCK_STRIDE on. left and right are TMA descriptors; 16-bit floats, rows
    of a multiple of 16 bytes. Where the kernel GATHERS, left is a pointer instead, to rows of which row
    gather_indices[i] // TOPK is left's row i. The operand that HAS_TERMS is num_terms [1] matrices of num_rows rows,
    one after the other, whose sum times scale, float32 [1] or None, is meant.
    """
    count = gl.load(tiles_through + num_groups - 1) if RAGGED_M else gl.to_tensor(num_groups)
    terms = gl.to_tensor(1) if num_terms is None else gl.load(num_terms)
    cta = gl.inline_asm("mov.u32 $0, %cluster_ctarank;", "=r", [], gl.int32, is_pure=True)
    work = Work(
        tile_group, tile_start, tile_end, count, cta, gl.to_tensor(y_block), terms, gl.to_tensor(num_rows), HAS_TERMS,
        RAGGED_M, LEFT, REDUCED, COLUMNS, BAND, BLOCK_REDUCED, BLOCK_COLUMNS, GATHERS,
        Y_BLOCK_STRIDE, Y_GROUP_STRIDE, Y_ROW_STRIDE, Y_COLUMN_STRIDE,
    )  # fmt: skip
    ring = make_ring(work, left, right, STAGES)
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (0, work, ring, y, scale, bias, topk_weights, gather_indices, num_positions, RIGHT_IS_TURNED),
            ),
            (
                multiply_tiles,
                (1, work, ring, y, scale, bias, topk_weights, gather_indices, num_positions, RIGHT_IS_TURNED),
            ),
            (
                load_blocks,
                (work, ring, left, right, gather_indices, num_positions, first_column, RIGHT_IS_TURNED, TOPK),
            ),
        ],
        [4, 4 if GATHERS else 1],
        # registers of a thread that multiplies and of one that loads; more of the latter where it has more to compute
        [224, 56]
        if GATHERS and (HAS_TERMS != "" or not RAGGED_M)
        else ([232, 40] if GATHERS or HAS_TERMS != "" else [240, 24]),
    )
    if RAGGED_M:
        zero_rows(y, gl.to_tensor(0), gl.load(group_starts), COLUMNS)
        zero_rows(y, gl.load(group_ends + num_groups - 1), gl.to_tensor(num_rows), COLUMNS)
