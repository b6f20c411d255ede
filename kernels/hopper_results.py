"""Stores the finished tiles of the kernel of `hopper` and, if it has an activation, the hidden features.

A warpgroup keeps a finished half tile in registers, in 16 bits, as four quarters of its columns. It stores one quarter
after the other in the course of the next tile (`Pending`): it writes the quarter to its own block in shared memory, and
TMA stores that block while the warpgroup goes on. TMA leaves out what lies past the end of a group or of a row.

With ACTIVATES the tile is of the pre-activation. The hidden features of each quarter are computed and stored with it,
so that the activation needs no pass over memory. Gate and up of a hidden feature are in the same quarter and thread:

    GATED    INTERLEAVED    a tile of 256 columns                         a quarter
    no                      256 columns of w                              64 of them
    yes      no             128 of gate, and the same 128 of up           32 of gate, and the same 32 of up
    yes      yes            128 pairs of neighbours                       32 pairs

If w is [E, N, K], a tile that is not INTERLEAVED has all its columns of gate before those of up. If w is [E, K, N],
gate and up take turns after 64 columns: where TMA swizzles for wgmma, an access loads at most 128 bytes of a row, and
the rows of both halves, before it loads the next 128 bytes.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from . import activation
from .tiles import ROW_LIMIT

TILE_ROWS = gl.constexpr(128)  # rows of a CTA's output tile; also rows of a tensor, half of them in each CTA
PARTS = gl.constexpr(4)  # parts of a finished tile, stored at even distances in the course of the next tile


@gluon.aggregate
class Result:
    """An array that TMA stores to.

    Attributes:
      descriptor: a descriptor by `jgg.launching.launch.bounded_rows`, whose accesses each name the row at which they
        end. If it has five axes, an access stores to both halves of a row, gate and up.
      blocks: SLOTS blocks in shared memory for each warpgroup, which it takes in turns.
      TRANSPOSED: whether rows of a tile are columns of the result.
    """

    descriptor: tma.tensor_descriptor
    blocks: gl.shared_memory_descriptor
    TRANSPOSED: gl.constexpr
    SLOTS: gl.constexpr

    @gluon.jit
    def fill(self, warpgroup, value, slot=0):
        """Writes a part of a tile to one of the warpgroup's blocks."""
        layout: gl.constexpr = matrix_layout(self.descriptor.layout, self.TRANSPOSED)
        # where a block holds both halves of a row, they are two rows of its matrix
        columns: gl.constexpr = value.shape[1] if self.TRANSPOSED else self.descriptor.block_shape[-1]
        shape: gl.constexpr = [value.shape[0] * value.shape[1] // columns, columns]
        block = self.blocks.index(warpgroup * self.SLOTS + slot).reinterpret(self.descriptor.dtype, shape, layout)
        block.store(value.reshape(shape))

    @gluon.jit
    def store(self, warpgroup, row, end, column, slot=0):
        """Begins to store a block of the warpgroup at a row and a column of the array, leaving out rows from `end`."""
        if len(self.descriptor.block_shape) == 5:
            place = [ROW_LIMIT, end, row - end + ROW_LIMIT, 0, column]
        else:
            place = [ROW_LIMIT, end, row - end + ROW_LIMIT, column]
        tma.async_store(self.descriptor, place, self.blocks.index(warpgroup * self.SLOTS + slot))

    @gluon.jit
    def zero_rows(self, first, last, end, COLUMNS: gl.constexpr):
        """Begins to write zeros to the rows before `first` and from `last` to `end`; all threads of a CTA take part."""
        WIDTH: gl.constexpr = self.descriptor.block_shape[-1]
        columns: gl.constexpr = row_size(self.descriptor.block_shape)
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0], [[1, 0]])
        self.fill(0, gl.zeros([TILE_ROWS, columns], self.descriptor.dtype, layout))
        fence_async_shared()
        gl.barrier()
        strips_before = (first + TILE_ROWS - 1) // TILE_ROWS
        strips = strips_before + (end - last + TILE_ROWS - 1) // TILE_ROWS
        for strip in range(gl.program_id(0), strips, gl.num_programs(0)):
            is_before = strip < strips_before
            row = gl.where(is_before, strip * TILE_ROWS, last + (strip - strips_before) * TILE_ROWS)
            row_end = gl.where(is_before, first, end)
            for column in range(0, COLUMNS * WIDTH // columns, WIDTH):
                self.store(0, row, row_end, column)


@gluon.constexpr_function
def row_size(block_shape):
    """The number of elements in a row of a block."""
    return math.prod(block_shape[3:])


@gluon.jit
def make_result(descriptor, TRANSPOSED: gl.constexpr, SLOTS: gl.constexpr = 1):
    shape: gl.constexpr = [2 * SLOTS] + descriptor.block_type.shape  # noqa: RUF005
    return Result(descriptor, gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout), TRANSPOSED, SLOTS)


@gluon.constexpr_function
def matrix_layout(layout, transposed):
    """The layout of a descriptor's block, seen as a matrix."""
    return gl.NVMMASharedLayout(
        layout.swizzle_byte_width, layout.element_bitwidth, 2, transposed=transposed, cga_layout=[[1, 0]]
    )


@gluon.aggregate
class Results:
    """The arrays that a kernel stores.

    Attributes:
      y, hidden: y is stored if HAS_Y, and hidden if ACTIVATES; the one that is not stored is the other again.
      GATED, INTERLEAVED, CURVE, LIMIT, ALPHA: as in `kernels.activation`.
    """

    y: Result
    hidden: Result
    HAS_Y: gl.constexpr
    ACTIVATES: gl.constexpr
    GATED: gl.constexpr
    INTERLEAVED: gl.constexpr
    CURVE: gl.constexpr
    LIMIT: gl.constexpr
    ALPHA: gl.constexpr

    @gluon.jit
    def fill(self, warpgroup, value, slot):
        """Writes a part of a tile and its hidden features to the warpgroup's blocks once TMA has read them."""
        tma.store_wait(self.y.SLOTS - 1)
        gl.barrier()
        if self.ACTIVATES:  # the hidden features first: in the other order registers spill
            self.hidden.fill(warpgroup, self.activate(value))
        if self.HAS_Y:
            self.y.fill(warpgroup, value, slot)
        fence_async_shared()
        gl.barrier()

    @gluon.jit
    def store(self, warpgroup, row, end, column, slot):
        """Begins to store the blocks; `column` is the part's first column, counted over gate's and up's."""
        PAIR: gl.constexpr = 2 if self.GATED else 1
        if self.HAS_Y:
            self.y.store(warpgroup, row, end, column if self.INTERLEAVED else column // PAIR, slot)
        if self.ACTIVATES:
            self.hidden.store(warpgroup, row, end, column // PAIR)

    @gluon.jit
    def activate(self, value):
        """The hidden features of a part of the pre-activation."""
        if not self.GATED:
            gate, up = value, value
        elif self.INTERLEAVED:
            gate, up = value.reshape([TILE_ROWS, value.shape[1] // 2, 2]).split()
        else:
            gate, up = split_columns(value)
        hidden = activation.activate(
            gate.to(gl.float32), up.to(gl.float32), self.GATED, self.CURVE, self.LIMIT, self.ALPHA
        )
        return hidden.to(value.dtype)


@gluon.aggregate
class Pending:
    """A finished half tile in four parts.

    Attributes:
      row, column: where it begins in y; where y has gate and up in halves, gate's and up's columns both count.
      end: one past the last row of y that may be stored.
    """

    part0: gl.tensor
    part1: gl.tensor
    part2: gl.tensor
    part3: gl.tensor
    row: gl.tensor
    end: gl.tensor
    column: gl.tensor

    @gluon.jit
    def store(self, results, warpgroup, PART: gl.constexpr):
        value = part_of(self, PART)
        SLOT: gl.constexpr = PART % results.y.SLOTS
        results.fill(warpgroup, value, SLOT)
        FIRST: gl.constexpr = PART * value.shape[1]  # the part's first among the tile's columns
        row, column = self.row, self.column
        if results.y.TRANSPOSED:
            results.store(warpgroup, row + FIRST, self.end, column, SLOT)
        else:
            results.store(warpgroup, row, self.end, column + FIRST, SLOT)

    @gluon.jit
    def store_all(self, results, warpgroup):
        """Stores all parts; TMA may not have read the last one from shared memory yet."""
        for part in gl.static_range(PARTS):
            self.store(results, warpgroup, part)


@gluon.constexpr_function
def columns_held(dtype, block_columns):
    """How many columns of a finished half tile registers have room for: 256 of 16 bits, or 128 of 32 bits."""
    return min(block_columns, 4096 // dtype.primitive_bitwidth)


@gluon.constexpr_function
def columns_of_a_run(block_columns, halves, right_is_transposed):
    """How many of a tile's columns are gate's before up's follow, and up's before gate's do; all without halves."""
    return block_columns if halves == 1 else block_columns // 2 if right_is_transposed else 64


@gluon.jit
def make_pending(value, row, end, column, RUN: gl.constexpr):
    """Splits a finished half tile into parts; unless a RUN is all of its columns, gate's and up's take turns."""
    if value.shape[1] > RUN:  # give each part columns of both
        turns: gl.constexpr = value.shape[1] // (2 * RUN)
        width: gl.constexpr = value.shape[1] // (2 * PARTS)
        value = value.reshape([TILE_ROWS, turns, 2, PARTS // turns, width]).permute((0, 1, 3, 2, 4))
        value = value.reshape([TILE_ROWS, 2 * PARTS * width])
    part0, part1, part2, part3 = split_parts(value)
    return Pending(part0, part1, part2, part3, row, end, column)


@gluon.jit
def split_columns(value):
    """The left and the right half of a matrix's columns."""
    rows: gl.constexpr = value.shape[0]
    columns: gl.constexpr = value.shape[1]
    return value.reshape([rows, 2, columns // 2]).permute((0, 2, 1)).split()


@gluon.jit
def split_parts(value):
    """The four quarters of a matrix's columns."""
    left, right = split_columns(value)
    part0, part1 = split_columns(left)
    part2, part3 = split_columns(right)
    return part0, part1, part2, part3


@gluon.jit
def part_of(pending, PART: gl.constexpr):
    """One of the four parts of a finished half tile."""
    if PART == 0:
        value = pending.part0
    elif PART == 1:
        value = pending.part1
    elif PART == 2:
        value = pending.part2
    else:
        value = pending.part3
    return value
