"""dW: dw[e] = sum of topk_weights[i] * dy[i]^T x[i] over the rows i of each expert e."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.configs.kernel_configs import KernelConfigDW
from jgg.configs.tuned_configs import choose_config
from jgg.core.problem import GroupedGemmProblem
from jgg.core.schedule import GroupBounds, Rows, guarded
from jgg.launching.choice import How, Launcher
from jgg.launching.launch import PRECISIONS, Launch, bounded_rows, dy_by_tma, flat, launch_options, x_by_tma
from jgg.primitives import vmap
from jgg.primitives.partitioning import Letters
from jgg.primitives.product import Product, array_type
from jgg.products.combine import combine, expert_order
from jgg.products.launches import column_parts, hopper
from jgg.products.launches.pieces import Pieces
from jgg.products.plain import dense
from jgg.products.plain import grouped_gemm as plain
from jgg.products.plain.multilinear import outer_dot


class Dw(NamedTuple):
    """The arrays as `grouped_gemm_dw` takes them, and bounds, the rows of each group.

    With a 16-bit x, dy may have another dtype; the kernels then multiply dy as two pieces (see `launches.pieces`).
    """

    x: jax.Array
    dy: jax.Array
    bounds: GroupBounds
    gather_indices: jax.Array | None = None
    topk_weights: jax.Array | None = None


def _plain(operands: Dw, problem: GroupedGemmProblem):
    x, dy, bounds, gather_indices, topk_weights = operands
    if problem.is_dense:
        return dense.dw(problem, x, dy)
    x_rows, dy_rows = Rows(x, plain.x_rows(problem, gather_indices)), Rows(dy, plain.y_rows(problem, gather_indices))
    left, right = (dy_rows, x_rows) if problem.w_layout == "enk" else (x_rows, dy_rows)
    scales = plain.row_scales(problem, bounds, gather_indices, topk_weights)
    options = {"precision": problem.precision, "out_dtype": KernelConfigDW.result_dtype(problem)}
    return outer_dot(left, right, bounds, scales=scales, **options)


def _launch(launcher: Launcher, operands: Dw, problem: GroupedGemmProblem):
    x, dy, bounds, gather_indices, topk_weights = operands
    launcher = launcher._replace(config=choose_config(KernelConfigDW, problem, launcher.target, launcher.config))
    config = launcher.config
    scales = row_scales(topk_weights, gather_indices)
    copies_x = problem.permute_x and not config.fuse_gather
    if copies_x:
        problem = dataclasses.replace(problem, permute_x=False)
    gathers_dy = config.fuse_gather and not (
        config.kernel == "hopper" and problem.permute_x
    )  # the kernel for Hopper gathers only one operand
    if scales is not None or (problem.permute_y and not gathers_dy):
        positions = gather_indices if problem.permute_y else jnp.arange(problem.num_rows, dtype=jnp.int32)
        dy = combine(launcher, dy, positions, 1, scales)
        problem = dataclasses.replace(problem, permute_y=False)
    pieces = Pieces.of(dy, problem.dtype)
    if config.kernel == "hopper":
        multiply = _multiply_copies if copies_x else hopper.multiply_row_blocks
        return multiply(launcher, problem, x, pieces, bounds, gather_indices)
    if copies_x:
        x = expert_order(launcher, x, gather_indices, problem.topk)
    return _multiply_on_every_gpu(launcher, problem, x, pieces, bounds, gather_indices)


def _multiply_on_every_gpu(
    launcher: Launcher, problem: GroupedGemmProblem, x, pieces: Pieces, bounds: GroupBounds, gather_indices
):
    """Computes dW from x and the pieces of dy by `dw_kernel`."""
    from jgg.kernels.dw import dw_kernel

    config, target = launcher.config, launcher.target
    sides = _sides(problem, config, target)
    dy_is_left = problem.w_layout == "enk"
    tiles = problem.num_experts * math.prod(math.ceil(side[""] / side["BLOCK"]) for side in sides.values())
    descriptors = {
        side.lower(): bounded_rows(values[""], (config.block_m, values["BLOCK"]))
        for side, values in sides.items()
        if values["TMA"]
    }
    launch = Launch(
        operands={
            "left": pieces.rows if dy_is_left else x,
            "right": x if dy_is_left else pieces.rows,
            "gather_indices": gather_indices,
            "num_pieces": pieces.num_pieces,
            "scale": pieces.scale,
            "group_starts": bounds.starts,
            "group_ends": bounds.ends,
            "num_rows": problem.num_rows,
            "num_positions": problem.num_positions,
            "num_groups": problem.num_experts,
        },
        descriptors=descriptors,
        outputs={"dw": jax.ShapeDtypeStruct(problem.w_shape, config.result_dtype(problem))},
        constants={
            **{f"{name}_{side}".lstrip("_"): v for side, values in sides.items() for name, v in values.items()},
            "LEFT_HAS_PIECES": pieces.num_pieces is not None and dy_is_left,
            "PRECISION": PRECISIONS[problem.precision],
            "BAND": config.band,
            "BLOCK_ROWS": config.block_m,
        },
        **launch_options(target, problem, config, tiles),
    )
    return launcher.run(dw_kernel, launch)["dw"]


def _sides(problem, config, target):
    """The constants for the columns, gathers, TMA and block of each operand, by the kernel's names, LEFT and RIGHT."""
    x_side = {
        "": problem.in_features,
        "GATHER": problem.topk if problem.permute_x else 0,
        "TMA": config.use_tma_load_x and x_by_tma(target, problem),
        "BLOCK": config.block_k,
    }
    dy_side = {
        "": problem.out_features,
        "GATHER": int(problem.permute_y),
        "TMA": config.use_tma_load_dy and dy_by_tma(target, problem),
        "BLOCK": config.block_n,
    }
    left, right = (dy_side, x_side) if problem.w_layout == "enk" else (x_side, dy_side)
    return {"LEFT": left, "RIGHT": right}


def _multiply_copies(launcher, problem, x, dy, bounds, gather_indices):
    """Computes dW from x in token order, copying one range of features of x after the other to expert order."""

    def multiply(x, features, dw):
        rows = expert_order(launcher, x, gather_indices, problem.topk, features)
        return hopper.multiply_row_blocks(launcher, problem, rows, dy, bounds, dw=dw, first_feature=features.start)

    return column_parts.one_after_the_other(x, problem.in_features, column_parts.copied_width(problem), multiply)


def row_scales(topk_weights, gather_indices):
    """The weight of each row in expert order, zero for a row whose index is out of range; None without weights."""
    weights = flat(topk_weights)
    if weights is None or gather_indices is None:
        return weights
    return weights.at[guarded(gather_indices, len(weights))].get(mode="fill", fill_value=0)


def _merge_batch(how: How, operands: Dw, batched: Dw, problem: GroupedGemmProblem):
    batch = vmap.Batch.of(problem, operands, batched, "x", "dy")
    return batch and batch.split(vmap.more_groups(DW, how, batch, operands, batched, ("x", "dy")))


def _letters(operands: Dw, problem: GroupedGemmProblem):
    rows = {"x": ".k", "dy": ".n", "gather_indices": ".", "topk_weights": None}
    return Letters(rows, (problem.w_layout,), ("",))


DW: Product[jax.Array] = Product(
    "dw",
    Dw,
    result_types=lambda operands, problem: array_type(problem.w_shape, KernelConfigDW.result_dtype(problem)),
    plain=_plain,
    launch=_launch,
    letters=_letters,
    merge_batch=_merge_batch,
    config_type=KernelConfigDW,
)
"""dw in the shape and layout of w and in `problem.dw_dtype`; the parameter is the problem."""
