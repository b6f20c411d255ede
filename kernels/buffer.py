"""An array whose rows something else will write, but for the last."""

import triton
import triton.language as tl

from .tiles import zero_outside


@triton.jit
def clear_kernel(
    first, y, num_rows, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):  # fmt: skip
    """Writes zeros to the rows of y [num_rows, COLUMNS] from `first` on, int32 [1] of at least 0, and no other row."""
    first = tl.minimum(tl.load(first), num_rows)
    zero_outside(y, None, first - first, first, num_rows, num_rows, COLUMNS, False, BLOCK_ROWS, BLOCK_COLUMNS)
