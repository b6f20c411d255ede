"""The sum of two matrices, the second one's rows times a gate: y + sigmoid(gate) * added."""

import triton
import triton.language as tl

from .score import sigmoid


@triton.jit
def add_gated_kernel(
    y,
    added,
    gate,
    total,
    COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """total = y + sigmoid(gate)[:, None] * added, rounded once; the grid is (rows, column blocks).

    Arrays: y, added and total [rows, COLUMNS]; gate float32 [rows, 1], or None for a factor of 1.
    """
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = columns < COLUMNS
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(y + row * COLUMNS + columns, mask=mask, other=0.0).to(tl.float32)
    more = tl.load(added + row * COLUMNS + columns, mask=mask, other=0.0).to(tl.float32)
    if gate is not None:
        more *= sigmoid(tl.load(gate + row))
    tl.store(total + row * COLUMNS + columns, (value + more).to(total.dtype.element_ty), mask=mask)
