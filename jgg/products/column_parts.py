"""Arrays of M rows in parts of their columns, one after the other, since whole they are large beside all others."""

import math
from collections.abc import Callable

import jax

from jgg.core.gpu_target import Target
from jgg.core.problem import GroupedGemmProblem

STEP = 256  # of a part's first column: a column of the widest tiles
# A part has enough columns that what is loaded for each again costs little, and enough tiles for each multiprocessor
# that the last ones leave few of them idle.
_MIN_WIDTH = 512
_MIN_TILES = 10  # of 128 rows and 256 columns

Compute = Callable[[jax.Array, range, jax.Array | None], jax.Array]


def one_after_the_other(rows: jax.Array, num_columns: int, width: int, compute: Compute) -> jax.Array:
    """The result of all parts.

    Args:
      rows: what each is computed from.
      width: columns of a part.
      compute: (rows, columns, result) -> the result with what belongs to that range of columns, result None at first.
    """
    result = compute(rows, range(min(width, num_columns)), None)
    for first in range(width, num_columns, width):
        # else XLA might begin with all parts before it ends any
        rows, result = jax.lax.optimization_barrier((rows, result))
        result = compute(rows, range(first, min(first + width, num_columns)), result)
    return result


def summed_width(target: Target, problem: GroupedGemmProblem, num_columns: int) -> int:
    """Columns of a part of a product [M, num_columns] whose rows are added up by token.

    If that is enough columns it takes no more memory than w, as the gradient of w does anyway.
    """
    fitting = max(1, math.prod(problem.w_shape) // problem.num_rows)
    least = max(_MIN_WIDTH, _MIN_TILES * target.num_sms * 128 * STEP // problem.rows_of_groups)
    most = min(math.ceil(num_columns / fitting), max(1, num_columns // least))
    tiles = math.ceil(num_columns / STEP)
    equal = [count for count in range(2, most + 1) if tiles % count == 0]  # which share a kernel
    return _whole_steps(math.ceil(num_columns / max(equal, default=most)))


def copied_width(problem: GroupedGemmProblem) -> int:
    """Features of a part of x that is copied for dW: if that is enough, it takes half as much memory as dy."""
    return _whole_steps(max(_MIN_WIDTH, problem.out_features // 2))


def _whole_steps(columns):
    return math.ceil(columns / STEP) * STEP
