"""Stores the finished half tiles of the kernel of `hopper_fp8` or, if it has an activation, the hidden features.

A half tile is two blocks of 128 columns, which a warpgroup stores one after the other as soon as it has multiplied
them: sums and products leave no registers to keep them in. The warpgroup writes each block to its own block in shared
memory, and TMA stores it from there; TMA leaves out what lies past the end of a group or of a row.

With ACTIVATES the tile is of the pre-activation. The kernel stores the hidden features in FP8 and, if it KEEPS the
pre-activation, that too in FP8. Where it is GATED, one block is gate's and the other up's; else each makes its own
hidden features.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from . import activation, quantize
from .hopper_results import TILE_ROWS, Result

BLOCK = gl.constexpr(128)  # features that share a scale
_highest_or_nan = gluon.jit(quantize.highest_or_nan.fn)


@gluon.aggregate
class Quantized:
    """An array that is stored in FP8.

    Attributes:
      values: the values, of COLUMNS columns. scales: a pointer to their scales [rows, COLUMNS / BLOCK].
      LARGEST, POWER_OF_2: as in `kernels.quantize`.
    """

    values: Result
    scales: gl.tensor
    COLUMNS: gl.constexpr
    LARGEST: gl.constexpr
    POWER_OF_2: gl.constexpr

    @gluon.jit
    def store(self, value, warpgroup, row, end, column):
        """Quantizes and stores a block of columns from `column` on."""
        highest = gl.reduce(gl.abs(value), 1, _highest_or_nan)
        scale = quantize.scale_of(highest, self.LARGEST, self.POWER_OF_2)
        value = quantize.scaled(value, scale[:, None], self.LARGEST)
        store_block(self.values, value.to(self.values.descriptor.dtype), warpgroup, row, end, column)
        rows = row + gl.arange(0, TILE_ROWS, scale.type.layout)
        pointers = self.scales + rows.to(gl.int64) * (self.COLUMNS // BLOCK) + column // BLOCK
        gl.store(pointers, scale, mask=(rows < end) & (column < self.COLUMNS))


@gluon.jit
def store_block(result, value, warpgroup, row, end, column):
    """Stores a block of columns once the warpgroup's block in shared memory is free."""
    tma.store_wait(0)
    gl.barrier()
    result.fill(warpgroup, value)
    fence_async_shared()
    gl.barrier()
    result.store(warpgroup, row, end, column)


@gluon.aggregate
class Stored:
    """Stores tiles unchanged, to y."""

    y: Result

    @gluon.jit
    def store(self, acc0, acc1, warpgroup, row, end, column):
        """Stores the two blocks of a half tile, from `column` on."""
        store_block(self.y, acc0.to(self.y.descriptor.dtype), warpgroup, row, end, column)
        store_block(self.y, acc1.to(self.y.descriptor.dtype), warpgroup, row, end, column + BLOCK)


@gluon.aggregate
class StoredHidden:
    """Stores the hidden features of tiles of the pre-activation and, if it KEEPS them, the tiles themselves.

    Attributes:
      hidden: the hidden features. kept: the pre-activation, gate before up, or hidden again if it is not kept.
      GATED, CURVE, LIMIT, ALPHA: as in `kernels.activation`.
    """

    hidden: Quantized
    kept: Quantized
    KEEPS: gl.constexpr
    GATED: gl.constexpr
    CURVE: gl.constexpr
    LIMIT: gl.constexpr
    ALPHA: gl.constexpr

    @gluon.jit
    def store(self, acc0, acc1, warpgroup, row, end, column):
        """Stores the two blocks of a half tile, from `column` on."""
        if self.GATED:
            column = column // 2  # the first column in gate, in up and in hidden
            self.hidden.store(self.activate(acc0, acc1), warpgroup, row, end, column)
            if self.KEEPS:
                self.kept.store(acc0, warpgroup, row, end, column)
                self.kept.store(acc1, warpgroup, row, end, column + self.hidden.COLUMNS)
        else:
            for half in gl.static_range(2):
                acc = acc1 if half else acc0
                self.hidden.store(self.activate(acc, acc), warpgroup, row, end, column + half * BLOCK)
                if self.KEEPS:
                    self.kept.store(acc, warpgroup, row, end, column + half * BLOCK)

    @gluon.jit
    def activate(self, gate, up):
        return activation.activate(gate, up, self.GATED, self.CURVE, self.LIMIT, self.ALPHA)
