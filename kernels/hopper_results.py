"""What the kernel of `hopper` does with a finished tile: it stores it, and what an activation makes of it.

A warpgroup keeps a finished half tile in registers, in 16 bits, in quarters of its columns, and stores one after the
other in the course of the next tile (`Pending`). By way of shared memory, neighbouring threads get neighbouring
elements to store.

With ACTIVATES the tile is of the pre-activation, and what hidden features a quarter makes are stored with it, so that
an activation needs no pass over memory. Gate and up of a hidden feature are in the same quarter, and after their way
through shared memory the same thread's:

    GATED    INTERLEAVED    a tile of 256 columns                         a quarter
    no                      256 columns of w                              64 of them
    yes      no             128 of gate, and the same 128 of up           32 of gate, and the same 32 of up
    yes      yes            128 pairs of neighbours                       32 pairs
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import activation

TILE_ROWS = gl.constexpr(128)  # of a CTA's output tile; also rows of a tensor, of which each CTA has half
PARTS = gl.constexpr(4)  # of a finished tile, stored at even distances in the course of the next


@gluon.aggregate
class Results:
    """Where the results go, as the kernel's arguments say.

    Attributes:
      y, hidden: pointers; any where there is none, which HAS_Y and ACTIVATES say.
      GATED, INTERLEAVED, CURVE, LIMIT, ALPHA: as in `kernels.activation`.
    """

    y: gl.tensor
    hidden: gl.tensor
    HAS_Y: gl.constexpr
    ACTIVATES: gl.constexpr
    GATED: gl.constexpr
    INTERLEAVED: gl.constexpr
    CURVE: gl.constexpr
    LIMIT: gl.constexpr
    ALPHA: gl.constexpr


@gluon.aggregate
class Pending:
    """A finished half tile in four parts.

    Attributes:
      row: its first. rows: how many there are. column: its first.
      offset: of the element of y in its first row and y's first column.
    """

    part0: gl.tensor
    part1: gl.tensor
    part2: gl.tensor
    part3: gl.tensor
    row: gl.tensor
    rows: gl.tensor
    column: gl.tensor
    offset: gl.tensor

    @gluon.jit
    def store(self, results, work, PART: gl.constexpr):
        if PART == 0:
            value = self.part0
        elif PART == 1:
            value = self.part1
        elif PART == 2:
            value = self.part2
        else:
            value = self.part3
        WIDTH: gl.constexpr = value.shape[1]
        if results.ACTIVATES:
            PAIR: gl.constexpr = 2 if results.GATED else 1
            column = self.column // PAIR + PART * (WIDTH // PAIR)
            store_activated(results, value, self.row, self.rows, column, work.COLUMNS // PAIR)
        else:
            y, column = results.y + self.offset, self.column + PART * WIDTH
            store_rows(y, value, self.rows, column, work.COLUMNS, work.Y_ROW_STRIDE, work.Y_COLUMN_STRIDE)

    @gluon.jit
    def store_all(self, results, work):
        for part in gl.static_range(PARTS):
            self.store(results, work, part)


@gluon.jit
def make_pending(work, value, row, rows, column, offset):
    if work.HALVES == 2:  # a part has columns of both
        width: gl.constexpr = value.shape[1] // (2 * PARTS)
        value = value.reshape([TILE_ROWS, 2, PARTS, width]).permute((0, 2, 1, 3))
        value = value.reshape([TILE_ROWS, 2 * PARTS * width])
    left, right = split_columns(value)
    part0, part1 = split_columns(left)
    part2, part3 = split_columns(right)
    return Pending(part0, part1, part2, part3, row, rows, column, offset)


@gluon.jit
def split_columns(value):
    """The left and the right half of a matrix's columns."""
    rows: gl.constexpr = value.shape[0]
    columns: gl.constexpr = value.shape[1]
    return value.reshape([rows, 2, columns // 2]).permute((0, 2, 1)).split()


@gluon.constexpr_function
def row_major(columns, own):
    """The layout of a matrix [TILE_ROWS, columns] of which a thread has `own` neighbours of a row at a time."""
    threads = columns // own
    return gl.BlockedLayout([1, own], [32 // threads, threads], [4, 1], [1, 0], [[1, 0]])


@gluon.constexpr_function
def row_major_pair(columns, own, interleaved):
    """The same of two such matrices: [TILE_ROWS, columns, 2] if they are interleaved, else [TILE_ROWS, 2, columns]."""
    threads = columns // own
    if interleaved:
        return gl.BlockedLayout([1, own, 2], [32 // threads, threads, 1], [4, 1, 1], [2, 1, 0], [[1, 0, 0]])
    return gl.BlockedLayout([1, 2, own], [32 // threads, 1, threads], [4, 1, 1], [2, 1, 0], [[1, 0, 0]])


@gluon.jit
def store_rows(
    y, value, rows, column, COLUMNS: gl.constexpr, ROW_STRIDE: gl.constexpr, COLUMN_STRIDE: gl.constexpr
):  # fmt: skip
    """Stores value [TILE_ROWS, columns] from y[column * COLUMN_STRIDE] on, by way of shared memory."""
    if COLUMN_STRIDE == 1:
        # as many elements as a thread stores at once
        layout: gl.constexpr = row_major(value.shape[1], 128 // value.dtype.primitive_bitwidth)
    else:
        gl.static_assert(ROW_STRIDE == 1)
        layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1], [[1, 0]])
    store_block(y, gl.convert_layout(value, layout), rows, column, COLUMNS, ROW_STRIDE, COLUMN_STRIDE)


@gluon.jit
def store_block(
    y, value, rows, column, COLUMNS: gl.constexpr, ROW_STRIDE: gl.constexpr, COLUMN_STRIDE: gl.constexpr
):  # fmt: skip
    """Stores value [TILE_ROWS, columns] as it lies in registers."""
    layout: gl.constexpr = value.type.layout
    row = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    mask = (row < rows)[:, None] & (columns < COLUMNS)[None, :]
    pointers = y + (row * ROW_STRIDE)[:, None] + (columns * COLUMN_STRIDE)[None, :]
    gl.store(pointers, value, mask=mask)


@gluon.jit
def split_pair(value, OWN: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Gate and up of a part [TILE_ROWS, 2 * columns], by way of shared memory."""
    columns: gl.constexpr = value.shape[1] // 2
    pair_layout: gl.constexpr = row_major_pair(columns, OWN, INTERLEAVED)
    if INTERLEAVED:
        pair = gl.convert_layout(value.reshape([TILE_ROWS, columns, 2]), pair_layout)
    else:
        pair = gl.convert_layout(value.reshape([TILE_ROWS, 2, columns]), pair_layout).permute((0, 2, 1))
    gate, up = pair.split()
    layout: gl.constexpr = row_major(columns, OWN)
    return gl.convert_layout(gate, layout, assert_trivial=True), gl.convert_layout(up, layout, assert_trivial=True)


@gluon.jit
def store_activated(results, value, row, rows, column, COLUMNS: gl.constexpr):
    """Stores a part of the pre-activation, if that is a result, and its hidden features, COLUMNS in all, from a row and
    a column of these on."""
    OWN: gl.constexpr = 4 if results.INTERLEAVED else 8
    row = row.to(gl.int64)
    if results.GATED:
        gate, up = split_pair(value, OWN, results.INTERLEAVED)
        WIDTH: gl.constexpr = 2 * COLUMNS
        y = results.y + row * WIDTH
        if results.HAS_Y and results.INTERLEAVED:
            wide: gl.constexpr = row_major(value.shape[1], 2 * OWN)
            pairs = gl.convert_layout(gl.join(gate, up).reshape(value.shape), wide, assert_trivial=True)
            store_block(y, pairs, rows, 2 * column, WIDTH, WIDTH, 1)
        elif results.HAS_Y:
            store_block(y, gate, rows, column, COLUMNS, WIDTH, 1)
            store_block(y + COLUMNS, up, rows, column, COLUMNS, WIDTH, 1)
    else:
        gate = gl.convert_layout(value, row_major(value.shape[1], OWN))
        up = gate
        if results.HAS_Y:
            store_block(results.y + row * COLUMNS, gate, rows, column, COLUMNS, COLUMNS, 1)
    hidden = activation.activate(
        gate.to(gl.float32), up.to(gl.float32), results.GATED, results.CURVE, results.LIMIT, results.ALPHA
    )
    store_block(results.hidden + row * COLUMNS, hidden.to(gate.dtype), rows, column, COLUMNS, COLUMNS, 1)


@gluon.jit
def zero_rows(y, first, last, COLUMNS: gl.constexpr):
    """Writes zeros to rows first, ..., last - 1 of y."""
    zeros = gl.zeros([TILE_ROWS, 64], y.dtype.element_ty, row_major(64, 8))
    for strip in range(gl.program_id(0), (last - first + TILE_ROWS - 1) // TILE_ROWS, gl.num_programs(0)):
        row = first + strip * TILE_ROWS
        for column in range(0, COLUMNS, 64):
            store_rows(y + row.to(gl.int64) * COLUMNS, zeros, last - row, column, COLUMNS, COLUMNS, 1)
