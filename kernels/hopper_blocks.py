"""The tiles of the sm_90 kernels, and the ring of blocks that they are multiplied from.

The docstring of `hopper` explains how they work together; `hopper_loads` fills the ring, and `hopper_fp8` multiplies
the same blocks in FP8.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from . import tiles
from .hopper_results import TILE_ROWS

WARPGROUP_ROWS = gl.constexpr(64)  # rows of a tile that one warpgroup multiplies
LAG = gl.constexpr(2)  # steps whose gathered rows are on their way while the next step's are asked for
tile_coordinates = gluon.jit(tiles.tile_coordinates.fn)


@gluon.aggregate
class Tile:
    """Where an output tile of a CTA is.

    Attributes:
      item: the row tile or, without RAGGED_M, the group. left_tile: which tile of left's columns; 0 with RAGGED_M.
      column: the tile's first column. start, end: the first row of the row tile or group, and one past the last row of
        the group; zeros for a tile past the last.
    """

    item: gl.tensor
    left_tile: gl.tensor
    column: gl.tensor
    start: gl.tensor
    end: gl.tensor


@gluon.aggregate
class Work:
    """The tiles to multiply, in the order in which clusters take them.

    With RAGGED_M there are `count` row tiles, and a cluster takes two neighbours at a time; left has their rows, and
    right the weights of their groups. Without RAGGED_M there are `count` groups, whose rows are the reduced axis, and
    LEFT is the number of left's columns. The time of such a tile grows with its group's rows; clusters take turns
    forwards and backwards, so that all end at about the same time if the largest groups come first.

    Attributes:
      groups, starts, ends: the group of each row tile, its first row, and one past the last row of its group; without
        RAGGED_M, the same for each group in the order in which groups are taken.
      cta: which of the cluster's two CTAs this is, 0 or 1.
      y_row, y_column: without RAGGED_M, where the result begins in each matrix of y, which has Y_GROUP_ROWS rows.
      pieces: how many matrices of num_rows rows, stored one after the other, add up to the operand that HAS_PIECES
        names: "left", "right" (only without RAGGED_M) or "" for neither. A tile's steps run over one piece after the
        other.
      LOW_STEPS: how many of a tile's steps are of a term of low rank: the last, or in FP8 the first.
      HALVES: 2 where half of a tile's columns are gate's and half are up's, each from column // 2 on; else 1.
    """

    groups: gl.tensor
    starts: gl.tensor
    ends: gl.tensor
    count: gl.tensor
    cta: gl.tensor
    y_row: gl.tensor
    y_column: gl.tensor
    pieces: gl.tensor
    num_rows: gl.tensor
    HAS_PIECES: gl.constexpr
    RAGGED_M: gl.constexpr
    LEFT: gl.constexpr
    REDUCED: gl.constexpr
    COLUMNS: gl.constexpr
    HALVES: gl.constexpr
    BAND: gl.constexpr
    BLOCK_REDUCED: gl.constexpr
    BLOCK_COLUMNS: gl.constexpr
    GATHERS: gl.constexpr
    Y_GROUP_ROWS: gl.constexpr
    LOW_STEPS: gl.constexpr

    @gluon.jit
    def num_tiles(self):
        """The number of pairs of output tiles; a cluster computes one pair at a time."""
        column_tiles: gl.constexpr = (self.COLUMNS + self.BLOCK_COLUMNS - 1) // self.BLOCK_COLUMNS
        left_tiles: gl.constexpr = (self.LEFT + 2 * TILE_ROWS - 1) // (2 * TILE_ROWS)
        return self.row_tile_pairs() * column_tiles if self.RAGGED_M else self.count * left_tiles * column_tiles

    @gluon.jit
    def num_places(self):
        """The number of places in the order of pairs; places past the last pair complete the clusters' last turn."""
        clusters = gl.num_programs(0)
        return self.num_tiles() if self.RAGGED_M else (self.num_tiles() + clusters - 1) // clusters * clusters

    @gluon.jit
    def row_tile_pairs(self):
        return (self.count + 1) // 2

    @gluon.jit
    def at(self, place):
        """This CTA's tile of the pair at `place`; a tile without rows if there is none."""
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
        """The tile's first output row, and one past its group's last row or, without RAGGED_M, left's last column."""
        if self.RAGGED_M:
            return tile.start, tile.end
        else:
            return tile.left_tile * TILE_ROWS, gl.to_tensor(self.LEFT)

    @gluon.jit
    def group(self, row_tile):
        """The group of a row tile; past the last row tile, the group of the last."""
        return gl.load(self.groups + gl.minimum(row_tile, self.count - 1))

    @gluon.jit
    def row_of_tensor(self, row):
        """The row of left or y at which a cluster's tensor must begin so that this CTA's half begins at `row`."""
        return row - self.cta * WARPGROUP_ROWS

    @gluon.jit
    def place_of_result(self, item, first, last, column, TRANSPOSED: gl.constexpr):
        """Where a tile is stored in y: its first row, one past the last row of its group in y, and its first column."""
        if self.RAGGED_M:
            return first, last, column
        row = self.y_row + item * self.Y_GROUP_ROWS
        if TRANSPOSED:
            return row + column, row + self.COLUMNS, self.y_column + first
        else:
            return row + first, row + last, self.y_column + column

    @gluon.jit
    def steps_of_piece(self, tile):
        size = self.REDUCED if self.RAGGED_M else tile.end - tile.start
        return gl.maximum((size + self.BLOCK_REDUCED - 1) // self.BLOCK_REDUCED, 1)

    @gluon.jit
    def steps(self, tile):
        steps = self.steps_of_piece(tile)
        if self.HAS_PIECES != "":
            steps = steps * self.pieces
        return steps + self.LOW_STEPS

    @gluon.jit
    def at_step(self, tile, step):
        """Where a step begins along the reduced axis, and the row at which its piece of the operand begins."""
        row = 0
        if self.HAS_PIECES != "":
            steps = self.steps_of_piece(tile)
            row = (step // steps) * self.num_rows
            step = step % steps
        return step * self.BLOCK_REDUCED, row


@gluon.aggregate
class Ring:
    """Buffers between the loading warps and the warpgroups, STAGES steps deep.

    Attributes:
      left: two blocks a stage, one for each warpgroup. right: one block a stage, in each CTA.
      full, empty, both_empty: a barrier a stage. A stage is full once it is loaded, empty once this CTA's warpgroups
        have multiplied it, both_empty once both CTAs' have. The docstring of `hopper` says who arrives and who waits.
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
        """The stage that was used STEPS steps earlier."""
        return gl.where(stage < STEPS, stage + self.STAGES - STEPS, stage - STEPS)

    @gluon.jit
    def await_empty(self, stage, phase):
        """Waits until a stage may be filled; only CTA 0 waits at both_empty."""
        mbarrier.wait(self.empty.index(stage), phase)
        mbarrier.wait(self.both_empty.index(stage), phase)

    @gluon.jit
    def hand_back(self, stage, pred=True):
        mbarrier.arrive(self.empty.index(stage), pred=pred)
        mbarrier.arrive(self.both_empty.index(stage), pred=pred)

    @gluon.jit
    def begin(self, stage, phase, LEFT_BYTES: gl.constexpr, RIGHT_BYTES: gl.constexpr, has_second):
        """Waits until a stage is empty, tells its full barrier the bytes TMA will bring, and returns the barrier."""
        self.await_empty(stage, phase)
        full = self.full.index(stage)
        # CTA 0 waited for both CTAs' warpgroups: without its arrival, CTA 1 could get a ring's length ahead of that
        mbarrier.arrive(full, from_cta=0)
        mbarrier.expect(full, RIGHT_BYTES + 2 * LEFT_BYTES, pred=has_second)
        mbarrier.expect(full, RIGHT_BYTES + LEFT_BYTES, pred=has_second == 0)
        return full

    @gluon.jit
    def announce(self, stage, pred):
        """Tells the warpgroups that the rows gathered for a stage are there."""
        fence_async_shared()
        mbarrier.arrive(self.full.index(stage), pred=pred)

    @gluon.jit
    def announce_earlier(self, stage, begun):
        """Ends this step's group of gathers and announces the group LAG steps before; `begun` counts earlier steps."""
        async_copy.commit_group()
        async_copy.wait_group(LAG)
        self.announce(self.before(stage, LAG), begun >= LAG)

    @gluon.jit
    def announce_last(self, stage, begun):
        """Waits for the gathers of the last LAG of `begun` steps and announces them; `stage` follows the last one's."""
        async_copy.wait_group(0)
        for earlier in gl.static_range(LAG):
            self.announce(self.before(stage, LAG - earlier), begun >= LAG - earlier)


@gluon.jit
def make_ring(work, left, right, STAGES: gl.constexpr):
    if work.GATHERS:
        shape: gl.constexpr = [TILE_ROWS, work.BLOCK_REDUCED] if work.RAGGED_M else [work.BLOCK_REDUCED, TILE_ROWS]
        split: gl.constexpr = [1, 0] if work.RAGGED_M else [0, 1]
        layout: gl.constexpr = gl.NVMMASharedLayout(
            128, left.dtype.element_ty.primitive_bitwidth, 2, cga_layout=[split]
        )
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
        mbarrier.init(ring.both_empty.index(stage), count=2)  # of each CTA: 4 in all
    fence_async_shared()
    return ring


@gluon.jit
def skip_tile(ring, steps, stage, phase):
    """Hands back the blocks of a tile in which this warpgroup has no rows."""
    for _ in range(steps):
        mbarrier.wait(ring.full.index(stage), phase)
        ring.hand_back(stage)
        stage, phase = ring.next(stage, phase)
    return stage, phase


@gluon.jit
def scale_rows(acc, topk_weights, gather_indices, start, end, num_positions):
    """acc with row i times topk_weights[p], where p is start + i or gather_indices[start + i]; zero for a bad index."""
    positions = start + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, acc.type.layout))
    exists = positions < end
    if gather_indices is not None:
        positions = gl.load(gather_indices + positions, mask=exists, other=-1)
        exists = exists & (positions >= 0) & (positions < num_positions)
    return acc * gl.load(topk_weights + positions, mask=exists, other=0.0).to(gl.float32)[:, None]
