"""Launches the warp-specialized kernel, `kernels.hopper`, for forward, dX and dW."""

import math
from typing import NamedTuple

import jax

from jgg.activations import Activation
from jgg.configs.kernel_configs import KernelConfigForward
from jgg.configs.requirements import checked_tile, stored_columns
from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import Format
from jgg.core.schedule import GroupBounds, largest_first, tile_schedule
from jgg.launching.choice import Launcher
from jgg.launching.launch import Launch, bounded_rows, halves, matrices, matrix
from jgg.products.launches.activations import activation_constants
from jgg.products.launches.pieces import Pieces
from jgg.products.launches.row_tiles import (
    TILE_ROWS,
    WHOLE_PRODUCT,
    Part,
    cluster_options,
    hopper_constants,
    ring_constants,
    row_operands,
)
from jgg.products.low_rank import LowRankTerm


class Hidden(NamedTuple):
    """The activation that the kernel applies to a product; the product is the pre-activation, the result hidden.

    Attributes:
      interleaved: whether gate and up alternate in the product's columns.
      keeps: whether the product is a result too.
      stored_as: the Format of results if the operands are quantized; otherwise None.
    """

    activation: Activation
    interleaved: bool
    keeps: bool
    stored_as: Format | None = None

    @property
    def has_halves(self) -> bool:
        """Whether a tile takes columns from both halves of w, gate and up."""
        return self.activation.is_gated and not self.interleaved


def multiply_rows(
    launcher: Launcher,
    problem: GroupedGemmProblem,
    pieces: Pieces,
    w,
    bounds: GroupBounds,
    gather_indices=None,
    topk_weights=None,
    bias=None,
    *,
    gathers: bool,
    part: Part = WHOLE_PRODUCT,
    hidden: Hidden | None = None,
    low_rank: LowRankTerm | None = None,
) -> dict[str, jax.Array]:
    """Computes forward or dX: (rows[i] @ w[e] + bias[e]) * topk_weights, [M, N] or [M, K] in expert order.

    Args:
      pieces: the pieces of the rows in expert order or, if the kernel `gathers` the rows, in token order.
      part: the range of a product's columns, if `problem` describes only a range of them.
      hidden: the activation, if hidden features are wanted.

    Returns: {"y": the product, unless `hidden` does not keep it, "hidden": [M, I], if wanted}.
    """
    from jgg.kernels.hopper import hopper_kernel

    config = launcher.config
    is_forward = isinstance(config, KernelConfigForward)
    _, block_columns, step = checked_tile(problem, config)
    dtype = config.result_dtype(problem)
    columns = config.sizes(problem).columns
    schedule = tile_schedule(bounds, problem.num_rows, TILE_ROWS)
    tiles = math.ceil(len(schedule.group) / 2) * math.ceil(columns / block_columns)
    has_halves = hidden is not None and hidden.has_halves
    results = _results(columns, stored_columns(block_columns, dtype.itemsize), hidden)
    # w [E, columns, reduced] is transposed in shared memory
    is_transposed = is_forward == (problem.w_layout == "enk")
    block_features = block_columns // (1 + has_halves)
    block = (block_features, step) if is_transposed else (step, block_features)

    def right(matrices_of_experts):
        shape = matrices_of_experts.shape
        return halves(shape, block, axis=1 if is_transposed else 2) if has_halves else matrices(shape, block)

    low_descriptors = {}
    if low_rank is not None:
        low_rank = low_rank.aligned(is_transposed)
        low_left = matrix(low_rank.rows.shape, (TILE_ROWS, step), cta_axis=0)
        low_descriptors = {"low_left": low_left, "low_right": right(low_rank.matrices)}
    launch = Launch(
        operands={
            "left": pieces.rows,
            "right": w,
            "low_left": low_rank and low_rank.rows,
            "low_right": low_rank and low_rank.matrices,
            "num_pieces": pieces.num_pieces,
            "scale": pieces.scale,
            "bias": bias,
            "topk_weights": topk_weights,
            "gather_indices": None if topk_weights is None and not gathers else gather_indices,
            **row_operands(problem, part, bounds, schedule),
            "y_row": 0,
            "y_column": 0,
            **_absent(results),
        },
        descriptors={
            **({} if gathers else {"left": matrix(pieces.rows.shape, (TILE_ROWS, step), cta_axis=0)}),
            "right": right(w),
            **low_descriptors,
            **{key: bounded_rows(width, stored, cta_axis=2) for key, (width, stored) in results.items()},
        },
        outputs={key: jax.ShapeDtypeStruct((problem.num_rows, width), dtype) for key, (width, _) in results.items()},
        constants={
            "HAS_PIECES": "" if pieces.num_pieces is None else "left",
            "LOW_STEPS": 0 if low_rank is None else math.ceil(low_rank.rank / step),
            "RAGGED_M": True,
            "LEFT": 0,
            "RIGHT_IS_TRANSPOSED": is_transposed,
            "Y_GROUP_ROWS": 0,
            "Y_IS_TRANSPOSED": False,
            "BLOCK_REDUCED": step,
            **hopper_constants(problem, config, block_columns, gathers),
            **_activation(hidden),
        },
        **cluster_options(launcher.target, problem, tiles),
    )
    return launcher.run(hopper_kernel, launch)


def _results(columns: int, width: int, hidden: Hidden | None) -> dict[str, tuple[int, tuple[int, ...]]]:
    """For each result the number of its columns and the block that is stored at once, of `width` columns of a tile."""
    if hidden is None:
        return {"y": (columns, (TILE_ROWS, width))}
    results: dict[str, tuple[int, tuple[int, ...]]] = {}
    if hidden.keeps:
        results["y"] = columns, (TILE_ROWS, 2, width // 2) if hidden.has_halves else (TILE_ROWS, width)
    pair = 2 if hidden.activation.is_gated else 1
    return results | {"hidden": (columns // pair, (TILE_ROWS, width // pair))}


def multiply_row_blocks(
    launcher: Launcher,
    problem: GroupedGemmProblem,
    x,
    dy: Pieces,
    bounds: GroupBounds,
    gather_indices=None,
    *,
    dw=None,
    first_feature: int = 0,
):
    """Computes dW in the shape and layout of w and in `problem.dw_dtype`.

    Args:
      x, dy: rows in expert order. The kernel gathers the rows of one of them from token order: x with
        `problem.permute_x`, dy with `problem.permute_y`. x may have only the features from `first_feature` on, up to a
        multiple of column_parts.STEP or the last one; then only their gradient is written.
      dw: an array to write the gradient into, or None for a new array.
    """
    from jgg.kernels.hopper import hopper_kernel

    config, target = launcher.config, launcher.target
    _, block_columns, step = checked_tile(problem, config)
    left, right = (dy.rows, x) if problem.w_layout == "enk" else (x, dy.rows)
    gathered = x if problem.permute_x else dy.rows if problem.permute_y else None
    is_transposed = gathered is right  # the kernel gathers only its left operand, whose columns become result rows
    if is_transposed:
        left, right = right, left
    dtype = config.result_dtype(problem)
    width = stored_columns(block_columns, dtype.itemsize)
    stored = (width, TILE_ROWS) if is_transposed else (TILE_ROWS, width)
    left_rows = {} if gathered is left else {"left": bounded_rows(left.shape[1], (step, TILE_ROWS), cta_axis=3)}
    tiles = math.ceil(left.shape[1] / (2 * TILE_ROWS)) * math.ceil(right.shape[1] / block_columns)
    # largest groups first: if the last tile were of a large group, all clusters but one would wait for it
    groups = largest_first(bounds)
    _, w_rows, w_columns = problem.w_shape
    launch = Launch(
        operands={
            "left": left,
            "right": right,
            "num_pieces": dy.num_pieces,
            "scale": dy.scale,
            "gather_indices": None if gathered is None else gather_indices,
            **dict.fromkeys(("bias", "topk_weights", "low_left", "low_right")),
            **row_operands(problem, Part(zeroes=False), bounds),
            **dict(zip(("tile_group", "tile_start", "tile_end"), groups, strict=True)),
            "y_row": 0 if problem.w_layout == "enk" else first_feature,
            "y_column": first_feature if problem.w_layout == "enk" else 0,
            **_absent({"y"}),
        },
        descriptors={
            **left_rows,
            "right": bounded_rows(right.shape[1], (step, block_columns)),
            "y": bounded_rows(w_columns, stored, cta_axis=3 if is_transposed else 2),
        },
        outputs={"y": jax.ShapeDtypeStruct(problem.w_shape, dtype) if dw is None else dw},
        constants={
            "HAS_PIECES": "" if dy.num_pieces is None else "left" if left is dy.rows else "right",
            "LOW_STEPS": 0,
            "RAGGED_M": False,
            "LEFT": left.shape[1],
            "REDUCED": 0,
            "COLUMNS": right.shape[1],
            "RIGHT_IS_TRANSPOSED": False,
            "GATHERS": gathered is not None,
            "TOPK": problem.topk if problem.permute_x else 1,
            "Y_GROUP_ROWS": w_rows,
            "Y_IS_TRANSPOSED": is_transposed,
            "BLOCK_REDUCED": step,
            **ring_constants(config, block_columns),
            **_activation(None),
        },
        **cluster_options(target, problem, problem.num_experts * tiles),
    )
    return launcher.run(hopper_kernel, launch)["y"]


def _activation(hidden):
    if hidden is None:
        return {"ACTIVATES": False, "GATED": False, "INTERLEAVED": False, "CURVE": "", "LIMIT": 0.0, "ALPHA": 0.0}
    return {"ACTIVATES": True, **activation_constants(hidden.activation, hidden.interleaved)}


def _absent(outputs):
    """None for each result that the kernel is not to write, as operands."""
    return dict.fromkeys({"y", "hidden"} - set(outputs))
