"""Computes arrays of M rows one range of columns at a time, since whole arrays would take much memory."""

import math

import jax

from jgg.core.gpu_target import Target
from jgg.core.problem import GroupedGemmProblem

STEP = 256  # a part begins at a multiple of this, the width of the widest tiles
# The fewest columns of a part: each part loads the same rows again, which wider parts make cheap. And the fewest tiles
# per multiprocessor, so that few multiprocessors are idle during the last tiles.
_MIN_WIDTH = 512
_MIN_TILES = 10  # tiles of 128 rows and 256 columns


def ranges(num_columns: int, width: int) -> list[range]:
    """The parts of the columns, in order; each but the last has `width` columns."""
    return [range(first, min(first + width, num_columns)) for first in range(0, num_columns, width)]


def after[Operands, Result](operands: Operands, result: Result) -> tuple[Operands, Result]:
    """The operands of a part and the result so far, which is None before the first part."""
    # without the barrier XLA would begin all parts before it ends the first
    return (operands, result) if result is None else jax.lax.optimization_barrier((operands, result))


def summed_width(target: Target, problem: GroupedGemmProblem, num_columns: int) -> int:
    """The number of columns of a part of a product [M, num_columns] whose rows are added up by token."""
    # in the memory of w, as the gradient of w needs that much anyway
    fitting = max(1, math.prod(problem.w_shape) // problem.num_rows)
    least = max(_MIN_WIDTH, _MIN_TILES * target.num_sms * 128 * STEP // problem.rows_of_groups)
    most = min(math.ceil(num_columns / fitting), max(1, num_columns // least))
    tiles = math.ceil(num_columns / STEP)
    equal = [count for count in range(2, most + 1) if tiles % count == 0]  # equal parts share a kernel
    return _whole_steps(math.ceil(num_columns / max(equal, default=most)))


def copied_width(problem: GroupedGemmProblem) -> int:
    """The number of features of a part of x that is copied for dW: half as many as dy has, but at least _MIN_WIDTH."""
    return _whole_steps(max(_MIN_WIDTH, problem.out_features // 2))


def _whole_steps(columns: int) -> int:
    return math.ceil(columns / STEP) * STEP
