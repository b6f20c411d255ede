"""What the dW kernel, and that of the gradient of the bias, is launched with; `call` as in `kernels`."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jgg.config import KernelConfigDW
from jgg.implementations import hopper, parts
from jgg.implementations.combining import combine
from jgg.implementations.launch import PRECISIONS, Launch, bounded_rows, dy_by_tma, flat, launch_options, x_by_tma
from jgg.implementations.terms import Terms
from jgg.problem import GroupedGemmProblem
from jgg.schedule import GroupBounds
from jgg.target import Target
from jgg.tuned_configs import choose_config


def backward_dw(
    call, target: Target, problem: GroupedGemmProblem, config: KernelConfigDW | None,
    x, dy, bounds: GroupBounds, gather_indices, topk_weights, with_bias: bool,
):  # fmt: skip
    """[dw in the shape and layout of w] and, `with_bias`, the gradient of the bias, [E, N] float32.

    dy may be of another dtype than a 16-bit x, of which the kernel then multiplies two terms.
    """
    config = choose_config("dw", problem, target, config)
    scales = None if topk_weights is None else _row_scales(topk_weights, gather_indices)
    dbias = []
    if with_bias:
        dbias = [_group_sums(call, dy, gather_indices if problem.permute_y else None, scales, bounds)]
    copies_x = problem.permute_x and not config.fuse_gather
    if copies_x:
        problem = dataclasses.replace(problem, permute_x=False)
    gathers_dy = config.fuse_gather and not (config.warp_specialized and problem.permute_x)  # which gathers one of them
    if scales is not None or (problem.permute_y and not gathers_dy):
        positions = gather_indices if problem.permute_y else jnp.arange(problem.num_rows, dtype=jnp.int32)
        dy = combine(call, dy, positions, 1, scales)
        problem = dataclasses.replace(problem, permute_y=False)
    dy = Terms.of(dy, problem.dtype)
    if config.warp_specialized:
        compute = _dw_of_copies if copies_x else hopper.multiply_row_blocks
        return [compute(call, target, problem, config, x, dy, bounds, gather_indices), *dbias]
    if copies_x:
        x = combine(call, x, gather_indices // problem.topk, 1)
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
    dy_is_left = problem.w_layout == "enk"
    sides = {"LEFT": dy_side, "RIGHT": x_side} if dy_is_left else {"LEFT": x_side, "RIGHT": dy_side}
    tiles = problem.num_experts * math.prod(math.ceil(side[""] / side["BLOCK"]) for side in sides.values())
    descriptors = {
        side.lower(): bounded_rows(values[""], (config.block_m, values["BLOCK"]))
        for side, values in sides.items()
        if values["TMA"]
    }
    launch = Launch(
        operands={
            "left": dy.rows if dy_is_left else x,
            "right": x if dy_is_left else dy.rows,
            "gather_indices": gather_indices,
            "num_terms": dy.count,
            "scale": dy.scale,
            "group_starts": bounds.starts,
            "group_ends": bounds.ends,
            "num_rows": problem.num_rows,
            "num_positions": problem.num_positions,
            "num_groups": problem.num_experts,
        },
        descriptors=descriptors,
        outputs={"dw": jax.ShapeDtypeStruct(problem.w_shape, problem.dtype)},
        constants={
            **{f"{name}_{side}".lstrip("_"): v for side, values in sides.items() for name, v in values.items()},
            "LEFT_HAS_TERMS": dy.count is not None and dy_is_left,
            "PRECISION": PRECISIONS[problem.precision],
            "BAND": config.band,
            "BLOCK_ROWS": config.block_m,
        },
        **launch_options(target, problem, config, tiles),
    )
    return [call("backward_dw_kernel", launch)["dw"], *dbias]


def _dw_of_copies(call, target, problem, config, x, dy, bounds, gather_indices):
    """dW of x in token order, which is copied in expert order a part of its features after the other."""
    tokens = gather_indices // problem.topk

    def multiply(x, features, dw):
        rows = combine(call, x[:, features.start : features.stop], tokens, 1)
        return hopper.multiply_row_blocks(
            call, target, problem, config, rows, dy, bounds, dw=dw, first_feature=features.start
        )  # fmt: skip

    return parts.one_after_the_other(x, problem.in_features, parts.copied_width(problem), multiply)


def _group_sums(call, rows, positions, scales, bounds):
    """Sums of each group's rows, float32 [E, N]; positions and scales, [M], of its rows or None."""
    num_rows, columns = rows.shape
    block_columns = min(128, max(16, 1 << (columns - 1).bit_length()))
    num_groups = len(bounds.starts)
    launch = Launch(
        operands={
            "rows": rows,
            "positions": positions,
            "scales": scales,
            "group_starts": bounds.starts,
            "group_ends": bounds.ends,
            "num_rows": num_rows,
        },
        outputs={"sums": jax.ShapeDtypeStruct((num_groups, columns), jnp.float32)},
        constants={"COLUMNS": columns, "BLOCK_ROWS": 64, "BLOCK_COLUMNS": block_columns},
        grid=(num_groups, math.ceil(columns / block_columns)),
        flops=rows.size,
        bytes_accessed=rows.size * rows.dtype.itemsize,
    )
    return call("group_sums_kernel", launch)["sums"]


def _row_scales(topk_weights, gather_indices):
    """The weight of each row in expert order; zero for a bad index."""
    if gather_indices is None:
        return flat(topk_weights)
    return (
        flat(topk_weights)
        .at[jnp.where(gather_indices < 0, len(gather_indices), gather_indices)]
        .get(mode="fill", fill_value=0)
    )
