"""Launches the warp-specialized kernel, `kernels.hopper`, for forward, dX and dW."""

import math
from collections.abc import Iterable

import jax

from jgg.core.schedule import largest_first
from jgg.launching.choice import Launcher
from jgg.launching.launch import Launch, Tma, bounded_rows
from jgg.launching.requirements import checked_tile, stored_columns
from jgg.products.launches.activations import Activated, Hidden
from jgg.products.launches.clusters import (
    TILE_ROWS,
    Blocks,
    cluster_options,
    hidden_constants,
    launch_of_rows,
    ring_constants,
)
from jgg.products.launches.operands import OuterProduct, Part, RowProduct, row_operands
from jgg.products.launches.pieces import Pieces


def multiply(launcher: Launcher, product: RowProduct) -> jax.Array:
    """Computes y [M, N] or dx [M, K] in expert order."""
    from jgg.kernels.hopper import hopper_kernel

    return launcher.run(hopper_kernel, _launch_of_rows(launcher, product, None))["y"]


def multiply_and_activate(launcher: Launcher, product: RowProduct, hidden: Hidden) -> Activated:
    """Computes the hidden features [M, I] and, if `hidden` keeps it, the product that is the pre-activation."""
    from jgg.kernels.hopper import hopper_kernel

    results = launcher.run(hopper_kernel, _launch_of_rows(launcher, product, hidden))
    return Activated(results["hidden"], results.get("y"))


def _launch_of_rows(launcher: Launcher, product: RowProduct, hidden: Hidden | None) -> Launch:
    problem, config, pieces, w = product.problem, product.config, product.rows, product.w
    assert isinstance(pieces, Pieces) and isinstance(w, jax.Array)
    _, block_columns, step = checked_tile(problem, config)
    dtype, columns = config.result_dtype(problem), config.sizes(problem).columns
    results = _results(columns, stored_columns(block_columns, dtype.itemsize), hidden)
    return launch_of_rows(
        launcher.target,
        product,
        pieces.rows,
        w,
        Blocks(block_columns, step, low_step=step),
        hidden,
        operands={
            "num_pieces": pieces.num_pieces,
            "scale": pieces.scale,
            "y_row": 0,
            "y_column": 0,
            **_absent(results),
        },
        results={key: bounded_rows(width, stored, cta_axis=2) for key, (width, stored) in results.items()},
        outputs={key: jax.ShapeDtypeStruct((problem.num_rows, width), dtype) for key, (width, _) in results.items()},
        constants={
            "HAS_PIECES": "" if pieces.num_pieces is None else "left",
            "RAGGED_M": True,
            "LEFT": 0,
            "RIGHT_IS_TRANSPOSED": product.reduced_is_minor,
            "Y_GROUP_ROWS": 0,
            "Y_IS_TRANSPOSED": False,
            "BLOCK_REDUCED": step,
            "INTERLEAVED": hidden is not None and hidden.interleaved,
        },
    )


def _results(columns: int, width: int, hidden: Hidden | None) -> dict[str, tuple[int, tuple[int, ...]]]:
    """For each result the number of its columns and the block that is stored at once, of `width` columns of a tile."""
    if hidden is None:
        return {"y": (columns, (TILE_ROWS, width))}
    results: dict[str, tuple[int, tuple[int, ...]]] = {}
    if hidden.keeps:
        results["y"] = columns, (TILE_ROWS, 2, width // 2) if hidden.has_halves else (TILE_ROWS, width)
    pair = 2 if hidden.activation.is_gated else 1
    return results | {"hidden": (columns // pair, (TILE_ROWS, width // pair))}


def multiply_dw(launcher: Launcher, product: OuterProduct, dw: jax.Array | None = None) -> jax.Array:
    """Computes dw, or that part of it for which x has features; the kernel gathers the rows of x or of dy, if any.

    Args:
      dw: an array to write the gradient into, or None for a new array.
    """
    from jgg.kernels.hopper import hopper_kernel

    problem, config, x, dy = product.problem, product.config, product.x, product.dy
    _, block_columns, step = checked_tile(problem, config)
    left, right = product.sides
    gathered = x if problem.permute_x else dy.rows if problem.permute_y else None
    is_transposed = gathered is right  # the kernel gathers only its left operand, whose columns become result rows
    if is_transposed:
        left, right = right, left
    dtype = config.result_dtype(problem)
    tiles = math.ceil(left.shape[1] / (2 * TILE_ROWS)) * math.ceil(right.shape[1] / block_columns)
    # largest groups first: if the last tile were of a large group, all clusters but one would wait for it
    groups = largest_first(product.bounds)
    _, w_rows, w_columns = problem.w_shape
    first_place = (0, product.first_feature)
    y_row, y_column = first_place if problem.w_layout == "enk" else first_place[::-1]
    launch = Launch(
        operands={
            "left": left,
            "right": right,
            "num_pieces": dy.num_pieces,
            "scale": dy.scale,
            "gather_indices": None if gathered is None else product.gather_indices,
            **dict.fromkeys(("bias", "topk_weights", "low_left", "low_right")),
            **row_operands(problem, Part(zeroes=False), product.bounds),
            **dict(zip(("tile_group", "tile_start", "tile_end"), groups, strict=True)),
            "y_row": y_row,
            "y_column": y_column,
            **_absent({"y"}),
        },
        descriptors={
            **({} if gathered is left else {"left": bounded_rows(left.shape[1], (step, TILE_ROWS), cta_axis=3)}),
            "right": bounded_rows(right.shape[1], (step, block_columns)),
            "y": _dw_tma(w_columns, stored_columns(block_columns, dtype.itemsize), is_transposed),
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
            "INTERLEAVED": False,
            **ring_constants(config, block_columns),
            **hidden_constants(None),
        },
        **cluster_options(launcher.target, problem, problem.num_experts * tiles),
    )
    return launcher.run(hopper_kernel, launch)["y"]


def _dw_tma(columns: int, width: int, is_transposed: bool) -> Tma:
    """Descriptor of dw, where a tile is stored in blocks of `width` of its columns, which may be rows of dw."""
    block = (width, TILE_ROWS) if is_transposed else (TILE_ROWS, width)
    return bounded_rows(columns, block, cta_axis=3 if is_transposed else 2)


def _absent(outputs: Iterable[str]) -> dict[str, None]:
    """None for each result that the kernel is not to write, as operands."""
    return dict.fromkeys({"y", "hidden"} - set(outputs))
