"""The kernel of a symmetric product for sm_90: the roles, the ring and the pipeline of `hopper`, which explains them.

A cluster computes a block [256, 256] on or below the diagonal, 128 rows in each of its two CTAs. It is stored in parts
[64, 64]: those below the diagonal twice, straight and transposed at their mirror image, those on it once, with their
elements below the diagonal at both places, and those above it not. So the result is symmetric to the last bit. TMA
leaves out what lies past the last row or column of a matrix.

The matrix that is added comes through the ring too. After the steps that multiply come PARTS more, each with a part of
the tile, [64, 64] for each multiplying warpgroup, instead of left's blocks, so its loads are under way while the
tensor cores work. What is stored transposed needs a second block of 8 KB for each warpgroup: with 4 stages of 48 KB a
CTA takes 229,672 bytes of shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .hopper import as_matrices, multiply_tile
from .hopper_blocks import WARPGROUP_ROWS, make_ring, skip_tile
from .hopper_results import PARTS, TILE_ROWS, matrix_layout, part_of, split_columns, split_parts


@gluon.aggregate
class Tile:
    """A CTA's tile: its matrix, and its first row and column; there are no such rows for a tile past the last.

    Attributes:
      is_below: whether the cluster's block lies below the diagonal, so that it has none of its elements.
    """

    group: gl.tensor
    row: gl.tensor
    column: gl.tensor
    is_below: gl.tensor


@gluon.aggregate
class Work:
    """The blocks to compute, those of one matrix after those of another; `hopper_blocks.Work` is like it.

    Attributes:
      row_tiles, column_tiles: the num_tiles blocks of a matrix, int32 [num_tiles] each.
      cta: which of the cluster's two CTAs this is, 0 or 1.
    """

    row_tiles: gl.tensor
    column_tiles: gl.tensor
    num_groups: gl.tensor
    num_tiles: gl.tensor
    cta: gl.tensor
    SIZE: gl.constexpr
    REDUCED: gl.constexpr
    BLOCK_REDUCED: gl.constexpr
    BLOCK_COLUMNS: gl.constexpr
    HAS_ADD: gl.constexpr
    RAGGED_M: gl.constexpr  # rows of left are rows of the result
    GATHERS: gl.constexpr

    @gluon.jit
    def num_places(self):
        return self.num_groups * self.num_tiles

    @gluon.jit
    def at(self, place):
        """This CTA's tile of the block at `place`; a tile without rows if there is none."""
        exists = place < self.num_places()
        group = place // self.num_tiles
        within = place - group * self.num_tiles
        row_tile = gl.load(self.row_tiles + within, mask=exists, other=0)
        column_tile = gl.load(self.column_tiles + within, mask=exists, other=0)
        row = gl.where(exists, 2 * row_tile + self.cta, self.SIZE) * TILE_ROWS
        return Tile(group, row, column_tile * self.BLOCK_COLUMNS, row_tile != column_tile)

    @gluon.jit
    def steps(self):
        """How many steps of the ring multiply; PARTS more follow if a matrix is added."""
        return (self.REDUCED + self.BLOCK_REDUCED - 1) // self.BLOCK_REDUCED

    @gluon.jit
    def row_of_tensor(self, row):
        """The row at which a cluster's tensor must begin so that this CTA's half begins at `row`."""
        return row - self.cta * WARPGROUP_ROWS


@gluon.aggregate
class Result:
    """The array that TMA stores to, and two blocks for each warpgroup: of a part of a tile, and of that transposed."""

    descriptor: tma.tensor_descriptor
    blocks: gl.shared_memory_descriptor

    @gluon.jit
    def fill(self, warpgroup, value, TRANSPOSED: gl.constexpr):
        layout: gl.constexpr = matrix_layout(self.descriptor.layout, TRANSPOSED)
        block = self.blocks.index(2 * warpgroup + TRANSPOSED)
        block.reinterpret(self.descriptor.dtype, value.shape, layout).store(value)

    @gluon.jit
    def mirror(self, warpgroup, value):
        """Writes elements of a part on the diagonal above it too; the part and its transpose are in their blocks."""
        layout: gl.constexpr = matrix_layout(self.descriptor.layout, False)
        straight = self.blocks.index(2 * warpgroup).reinterpret(self.descriptor.dtype, value.shape, layout)
        mirrored = self.blocks.index(2 * warpgroup + 1).reinterpret(self.descriptor.dtype, value.shape, layout)
        HALF: gl.constexpr = value.shape[1] // 2
        left, right = split_columns(value)
        straight.slice(0, HALF, 1).store(lower_half(left, mirrored.slice(0, HALF, 1), 0))
        straight.slice(HALF, HALF, 1).store(lower_half(right, mirrored.slice(HALF, HALF, 1), HALF))

    @gluon.jit
    def store(self, warpgroup, group, row, column, TRANSPOSED: gl.constexpr):
        tma.async_store(self.descriptor, [group, row, column], self.blocks.index(2 * warpgroup + TRANSPOSED))


@gluon.jit
def lower_half(value, mirrored, FIRST: gl.constexpr):
    """Columns of a part, from FIRST on, on and below the diagonal, and those of its transpose above."""
    layout: gl.constexpr = value.type.layout
    rows = gl.arange(0, value.shape[0], gl.SliceLayout(1, layout)) % WARPGROUP_ROWS  # the other CTA has as many
    columns = FIRST + gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    return gl.where(rows[:, None] >= columns[None, :], value, mirrored.load(layout))


@gluon.jit
def make_result(descriptor):
    shape: gl.constexpr = [4] + descriptor.block_type.shape  # noqa: RUF005
    return Result(descriptor, gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout))


@gluon.aggregate
class Pending:
    """A finished half tile in four parts of its columns.

    Attributes:
      row, column: where it begins in the result. cta: this CTA.
    """

    part0: gl.tensor
    part1: gl.tensor
    part2: gl.tensor
    part3: gl.tensor
    group: gl.tensor
    row: gl.tensor
    column: gl.tensor
    cta: gl.tensor

    @gluon.jit
    def store(self, result, warpgroup, PART: gl.constexpr):
        """Stores a part, once TMA has read the one before from shared memory."""
        value = part_of(self, PART)
        tma.store_wait(0)
        gl.barrier()
        column = self.column + PART * value.shape[1]
        result.fill(warpgroup, value, False)
        result.fill(warpgroup, value, True)
        if column == self.row:
            gl.barrier()
            result.mirror(warpgroup, value)
        fence_async_shared()
        gl.barrier()
        # TMA adds the number of this CTA's first row in the tensor [TILE_ROWS, ...] to the coordinate
        of_cta = self.cta * WARPGROUP_ROWS
        if column <= self.row:
            result.store(warpgroup, self.group, self.row - of_cta, column, False)
        if column < self.row:
            result.store(warpgroup, self.group, column - of_cta, self.row, True)

    @gluon.jit
    def store_all(self, result, warpgroup):
        for part in gl.static_range(PARTS):
            self.store(result, warpgroup, part)


@gluon.aggregate
class Terms:
    """The factors of the product, of the matrix that is added and of the identity."""

    scale: gl.tensor
    add_scale: gl.tensor
    diagonal: gl.tensor


@gluon.jit
def add_part(value, ring, factor, stage, phase, WARPGROUP: gl.constexpr):
    """A part of a half tile plus the same part of the added matrix, which is in the ring."""
    mbarrier.wait(ring.full.index(stage), phase)
    added = ring.left.index(2 * stage + WARPGROUP).load(value.type.layout)
    fence_async_shared()  # TMA writes to the block next
    gl.barrier()
    ring.hand_back(stage)
    stage, phase = ring.next(stage, phase)
    return value + factor * added.to(gl.float32), stage, phase


@gluon.jit
def finish(acc, work, ring, terms, tile, row, stage, phase, WARPGROUP: gl.constexpr):
    """A half tile that begins at `row`, from its product acc, float32. It must take acc's registers.

    The next tile's product writes over acc, so acc lives on: registers would spill if the result had its own.
    """
    layout: gl.constexpr = acc.type.layout
    acc *= terms.scale
    if work.HAS_ADD:
        part0, part1, part2, part3 = split_parts(acc)
        part0, stage, phase = add_part(part0, ring, terms.add_scale, stage, phase, WARPGROUP)
        part1, stage, phase = add_part(part1, ring, terms.add_scale, stage, phase, WARPGROUP)
        part2, stage, phase = add_part(part2, ring, terms.add_scale, stage, phase, WARPGROUP)
        part3, stage, phase = add_part(part3, ring, terms.add_scale, stage, phase, WARPGROUP)
        acc = gl.convert_layout(join_columns(join_columns(part0, part1), join_columns(part2, part3)), layout)
    if not tile.is_below:
        rows = work.row_of_tensor(row) + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, layout))
        columns = tile.column + gl.arange(0, work.BLOCK_COLUMNS, gl.SliceLayout(0, layout))
        acc += gl.where(rows[:, None] == columns[None, :], terms.diagonal, 0.0)
    return acc, stage, phase


@gluon.jit
def join_columns(left, right):
    """The matrix whose columns are those of left and then those of right."""
    rows: gl.constexpr = left.shape[0]
    columns: gl.constexpr = left.shape[1]
    return gl.join(left, right).permute((0, 2, 1)).reshape([rows, 2 * columns])


@gluon.jit
def make_pending(value, group, row, column, cta):
    part0, part1, part2, part3 = split_parts(value)
    return Pending(part0, part1, part2, part3, group, row, column, cta)


@gluon.jit
def multiply_tiles(WARPGROUP: gl.constexpr, work, ring, result, terms):
    """Multiplies and stores one half of each of a CTA's tiles; runs on one of its two multiplying warpgroups."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, work.BLOCK_COLUMNS, 16], [[1, 0]])
    dtype: gl.constexpr = result.descriptor.dtype
    terms = Terms(gl.load(terms), gl.load(terms + 1), gl.load(terms + 2))
    ring = as_matrices(work, ring, True)
    acc = gl.zeros([TILE_ROWS, work.BLOCK_COLUMNS], gl.float32, layout)
    nothing = gl.to_tensor(work.SIZE)  # the row of a tile that TMA leaves out
    pending = make_pending(acc.to(dtype), gl.to_tensor(0), nothing, nothing, work.cta)
    stage = 0
    phase = 0
    tile = work.at(gl.program_id(0))
    for index in range(gl.program_id(0), work.num_places(), gl.num_programs(0)):
        next_index = index + gl.num_programs(0)
        row = tile.row + WARPGROUP * WARPGROUP_ROWS
        if row < work.SIZE:
            own = tile
            acc, stage, phase, tile = multiply_tile(
                work, ring, acc, pending, result, work.steps(), stage, phase, next_index, WARPGROUP
            )
            acc, stage, phase = finish(acc, work, ring, terms, own, row, stage, phase, WARPGROUP)
            pending = make_pending(acc.to(dtype), own.group, row, own.column, work.cta)
        else:
            tile = work.at(next_index)
            stage, phase = skip_tile(ring, work.steps() + (PARTS if work.HAS_ADD else 0), stage, phase)
    pending.store_all(result, WARPGROUP)
    tma.store_wait(0)


@gluon.jit
def load_tiles(work, ring, left, right, add):
    """Loads the blocks of all tiles; runs on the loading warp."""
    LEFT_BYTES: gl.constexpr = left.nbytes_per_cta
    stage = 0
    phase = 1
    for index in range(gl.program_id(0), work.num_places(), gl.num_programs(0)):
        tile = work.at(index)
        has_second = tile.row + WARPGROUP_ROWS < work.SIZE
        first = work.row_of_tensor(tile.row)
        second = first + WARPGROUP_ROWS
        for step in range(work.steps()):
            full = ring.begin(stage, phase, LEFT_BYTES, right.nbytes_per_cta, has_second)
            reduced = step * work.BLOCK_REDUCED
            place = [tile.group, tile.column, reduced]
            tma.async_load(right, place, full, ring.right.index(stage), multicast=True)
            tma.async_load(left, [tile.group, first, reduced], full, ring.left.index(2 * stage))
            tma.async_load(left, [tile.group, second, reduced], full, ring.left.index(2 * stage + 1), pred=has_second)
            stage, phase = ring.next(stage, phase)
        if work.HAS_ADD:
            for part in range(PARTS):
                full = ring.begin(stage, phase, LEFT_BYTES, 0, has_second)
                column = tile.column + part * work.BLOCK_REDUCED
                tma.async_load(add, [tile.group, first, column], full, ring.left.index(2 * stage))
                tma.async_load(add, [tile.group, second, column], full, ring.left.index(2 * stage + 1), pred=has_second)
                stage, phase = ring.next(stage, phase)


@gluon.jit
def hopper_symmetric_kernel(
    left,
    right,
    add,
    terms,
    row_tiles,
    column_tiles,
    y,
    num_groups,
    num_tiles,
    SIZE: gl.constexpr,
    REDUCED: gl.constexpr,
    BLOCK_REDUCED: gl.constexpr,
    BLOCK_COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """y[g] = terms[0] * left[g] @ right[g]^T + terms[1] * add[g] + terms[2] * I, all of them symmetric.

    Arrays: left, right [num_groups, SIZE, REDUCED]; add [num_groups, SIZE, SIZE] or None; y like add. They are TMA
    descriptors of 16-bit floats, whose rows are multiples of 16 bytes; add has the dtype of left. terms is float32 [3].
    row_tiles and column_tiles, int32 [num_tiles], are the blocks [2 * TILE_ROWS, BLOCK_COLUMNS] of a matrix.
    """
    cta = gl.inline_asm("mov.u32 $0, %cluster_ctarank;", "=r", [], gl.int32, is_pure=True)
    work = Work(
        row_tiles,
        column_tiles,
        gl.to_tensor(num_groups),
        gl.to_tensor(num_tiles),
        cta,
        SIZE,
        REDUCED,
        BLOCK_REDUCED,
        BLOCK_COLUMNS,
        add is not None,
        True,
        False,
    )
    ring = make_ring(work, left, right, STAGES)
    result = make_result(y)
    gl.warp_specialize(
        [
            (multiply_tiles, (0, work, ring, result, terms)),
            (multiply_tiles, (1, work, ring, result, terms)),
            (load_tiles, (work, ring, left, right, add)),
        ],
        [4, 1],
        [240, 24],  # registers of a thread that multiplies and of one that loads
    )
