"""The loss of each row's target by the row's logits, and the logarithm of the sum of their exponentials."""

import triton
import triton.language as tl

from .tiles import add, highest

LOWEST = tl.constexpr(-3.4028234663852886e38)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def final(logits, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Logits times SCALE, and between -SOFTCAP and SOFTCAP, if that is not None, by tanh.

    They are rounded: what uses them is not contracted with a product, which `max` keeps apart.
    """
    if SCALE != 1:
        logits = tl.maximum(logits * SCALE, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    if SOFTCAP is not None:
        tanh = 2.0 / (1.0 + tl.exp2(logits * (-2.0 * LOG2_E / SOFTCAP))) - 1.0
        logits = tl.maximum(tanh * SOFTCAP, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    return logits


@triton.jit
def losses_kernel(
    logits,
    targets,
    losses,
    log_sums,
    COLUMNS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """log_sums = log(sum(exp(final(logits)))) along the columns, and losses = log_sums - final(logits[target]).

    Arrays: logits float32 [rows, COLUMNS]; targets int32, losses and log_sums float32 [rows]. The loss is NaN for a
    target outside the columns. The grid is (rows,).

    Each place of a block keeps the greatest logit of its own columns and the sum of exponentials relative to it, so
    that a row is read once. The order of additions is fixed by COLUMNS.
    """
    row = tl.program_id(0)
    first = row.to(tl.int64) * COLUMNS
    places = tl.arange(0, BLOCK_COLUMNS)
    greatest = tl.full([BLOCK_COLUMNS], LOWEST, tl.float32)
    sums = tl.full([BLOCK_COLUMNS], 0.0, tl.float32)
    for start in tl.range(0, COLUMNS, BLOCK_COLUMNS):
        columns = start + places
        x = final(tl.load(logits + first + columns, mask=columns < COLUMNS, other=float("-inf")), SCALE, SOFTCAP)
        if SOFTCAP is not None:
            x = tl.where(columns < COLUMNS, x, float("-inf"))
        above = x - greatest
        factor = tl.exp2(-tl.abs(above) * LOG2_E)  # of the smaller of the two
        sums = tl.where(above > 0, sums * factor + 1.0, sums + factor)
        greatest = tl.maximum(greatest, x)
    highest_of_row = tl.reduce(greatest, 0, highest)
    total = tl.reduce(sums * tl.exp2((greatest - highest_of_row) * LOG2_E), 0, add)
    log_sum = highest_of_row + tl.log(total)
    target = tl.load(targets + row)
    is_known = (target >= 0) & (target < COLUMNS)
    of_target = final(tl.load(logits + first + target, mask=is_known, other=float("nan")), SCALE, SOFTCAP)
    tl.store(log_sums + row, log_sum)
    tl.store(losses + row, log_sum - of_target)
