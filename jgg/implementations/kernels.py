"""What the forward and the dX kernel are launched with, for any way of calling one.

`call` is `triton.call` or `interpret.call`: it takes a kernel's name and a `Launch` and returns the outputs.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jgg.config import KernelConfigDX, KernelConfigForward
from jgg.implementations import hopper
from jgg.implementations.combining import combine, sum_by_token
from jgg.implementations.launch import (
    PRECISIONS,
    Launch,
    dy_by_tma,
    flat,
    launch_options,
    matrices,
    matrix,
    tile_operands,
    w_by_tma,
    x_by_tma,
)
from jgg.implementations.terms import Terms
from jgg.problem import GroupedGemmProblem
from jgg.schedule import GroupBounds, between_groups, inverse_permutation, tile_schedule
from jgg.target import Target
from jgg.tuned_configs import choose_config


def forward(
    call, target: Target, problem: GroupedGemmProblem, config: KernelConfigForward | None,
    x, w, bounds: GroupBounds, gather_indices, topk_weights, bias,
):  # fmt: skip
    """[y of `problem.y_shape`]."""
    product = problem
    if problem.combine_y:
        product = dataclasses.replace(problem, combine_y=False, has_topk_weights=False)
    config = choose_config("forward", product, target, config)
    if product.permute_x and not config.fuse_gather:
        x = combine(call, x, gather_indices // product.topk, 1)
        product = dataclasses.replace(product, permute_x=False)
    if not problem.combine_y:
        return [_forward_rows(call, target, product, config, x, w, bounds, gather_indices, topk_weights, bias)]
    read_at = gather_indices if product.permute_x else None

    def multiply(x, columns):
        part = dataclasses.replace(product, out_features=len(columns))
        own_bias = None if bias is None else bias[:, columns.start : columns.stop]
        return _forward_rows(call, target, part, config, x, w, bounds, read_at, None, own_bias, columns.start)

    columns = problem.out_features
    return [sum_by_token(call, target, problem, multiply, x, columns, bounds, gather_indices, topk_weights)]


def _forward_rows(
    call, target, problem, config, x, w, bounds, gather_indices, topk_weights, bias, first_column=0
):  # fmt: skip
    """y [M, N], of w's columns from the first on."""
    scatter_after = problem.permute_y and (config.warp_specialized or not config.fuse_scatter)
    if scatter_after:
        problem = dataclasses.replace(problem, permute_y=False)
    if config.warp_specialized:
        y = hopper.multiply_rows(
            call, "forward", target, problem, config,
            Terms(x), w, bounds, gather_indices, flat(topk_weights), bias,
            gathers=problem.permute_x, first_column=first_column,
        )  # fmt: skip
        return combine(call, y, inverse_permutation(gather_indices), 1) if scatter_after else y
    schedule = tile_schedule(bounds, problem.num_rows, config.block_m)
    column_tiles = math.ceil(problem.out_features / config.block_n)
    tma_x = config.use_tma_load_x and x_by_tma(target, problem)
    tma_w = config.use_tma_load_w and w_by_tma(target, w)
    descriptors = {
        **({"x": matrix(x.shape, (config.block_m, config.block_k))} if tma_x else {}),
        **({"w": matrices(w.shape, _w_block(problem, config))} if tma_w else {}),
    }
    launch = Launch(
        operands={
            "x": x,
            "w": w,
            "bias": bias,
            "topk_weights": flat(topk_weights),
            "gather_indices": gather_indices,
            **tile_operands(bounds, schedule),
            "num_rows": problem.num_rows,
            "num_positions": problem.num_positions,
            "first_column": first_column,
        },
        descriptors=descriptors,
        outputs={"y": jax.ShapeDtypeStruct(problem.y_shape, problem.out_dtype)},
        constants={
            "REDUCED": problem.in_features,
            "COLUMNS": problem.out_features,
            "W_COLUMNS": w.shape[1 if problem.w_layout == "enk" else 2],
            "TOPK": problem.topk,
            "REDUCED_IS_MINOR": problem.w_layout == "enk",
            "GATHER": problem.permute_x,
            "SCATTER": problem.permute_y,
            "PRECISION": PRECISIONS[problem.precision],
            "TMA_X": tma_x,
            "TMA_W": tma_w,
            "BAND": config.band,
            "BLOCK_ROWS": config.block_m,
            "BLOCK_REDUCED": config.block_k,
            "BLOCK_COLUMNS": config.block_n,
        },
        **launch_options(target, problem, config, len(schedule.group) * column_tiles),
    )
    y = call("forward_kernel", launch)["y"]
    return combine(call, y, inverse_permutation(gather_indices), 1) if scatter_after else y


def backward_dx(
    call, target: Target, problem: GroupedGemmProblem, config: KernelConfigDX | None,
    dy, w, x, bounds: GroupBounds, gather_indices, topk_weights,
):  # fmt: skip
    """[dx in the shape of x] and, with x, each row's sum of (dy @ w) * x in expert order, [M] float32.

    dy may be of another dtype than 16-bit w and x, of which the kernel then multiplies two terms.
    """
    config = choose_config("dx", problem, target, config)
    if problem.permute_y and not config.fuse_gather:
        dy = combine(call, dy, gather_indices, 1)
        problem = dataclasses.replace(problem, permute_y=False)

    terms = Terms.of(dy, problem.dtype)

    def multiply(rows, columns):
        own, part = terms._replace(rows=rows), dataclasses.replace(problem, in_features=len(columns))
        return _dx_rows(call, target, part, config, own, w, x, bounds, gather_indices, topk_weights, columns.start)[0]

    if problem.permute_x and x is None:
        return [sum_by_token(call, target, problem, multiply, terms.rows, problem.in_features, bounds, gather_indices)]
    dx, row_sums = _dx_rows(call, target, problem, config, terms, w, x, bounds, gather_indices, topk_weights)
    if problem.permute_x:
        dx = combine(call, dx, inverse_permutation(gather_indices, problem.num_positions), problem.topk)
    return [dx] if x is None else [dx, row_sums]


def _dx_rows(
    call, target, problem, config, terms, w, x, bounds, gather_indices, topk_weights, first_column=0
):  # fmt: skip
    """dx [M, K], of dy's terms and w's columns from the first on, and the row sums or None."""
    if config.warp_specialized:
        dx = hopper.multiply_rows(
            call, "dx", target, problem, config,
            terms, w, bounds, gather_indices, gathers=problem.permute_y, first_column=first_column,
        )  # fmt: skip
        return dx, None
    schedule = tile_schedule(bounds, problem.num_rows, config.block_m)
    column_tiles = math.ceil(problem.in_features / config.block_k)
    tma_dy = config.use_tma_load_dy and dy_by_tma(target, problem)
    tma_w = config.use_tma_load_w and w_by_tma(target, w)
    descriptors = {
        **({"dy": matrix(terms.rows.shape, (config.block_m, config.block_n))} if tma_dy else {}),
        **({"w": matrices(w.shape, _w_block(problem, config))} if tma_w else {}),
    }
    outputs = {"dx": jax.ShapeDtypeStruct((problem.num_rows, problem.in_features), problem.dtype)}
    if x is not None:
        outputs["row_sums"] = jax.ShapeDtypeStruct((column_tiles, problem.num_rows), jnp.float32)
    launch = Launch(
        operands={
            "dy": terms.rows,
            "num_terms": terms.count,
            "scale": terms.scale,
            "w": w,
            "x": x,
            "topk_weights": flat(topk_weights),
            "gather_indices": gather_indices,
            **tile_operands(bounds, schedule),
            "num_rows": problem.num_rows,
            "num_positions": problem.num_positions,
            "first_column": first_column,
            **({} if x is not None else {"row_sums": None}),
        },
        descriptors=descriptors,
        outputs=outputs,
        constants={
            "REDUCED": problem.out_features,
            "COLUMNS": problem.in_features,
            "W_COLUMNS": w.shape[2 if problem.w_layout == "enk" else 1],
            "TOPK": problem.topk,
            "REDUCED_IS_MINOR": problem.w_layout == "ekn",
            "GATHER_DY": problem.permute_y,
            "GATHER_X": problem.permute_x,
            "PRECISION": PRECISIONS[problem.precision],
            "TMA_DY": tma_dy,
            "TMA_W": tma_w,
            "BAND": config.band,
            "BLOCK_ROWS": config.block_m,
            "BLOCK_REDUCED": config.block_n,
            "BLOCK_COLUMNS": config.block_k,
        },
        **launch_options(target, problem, config, len(schedule.group) * column_tiles),
    )
    results = call("backward_dx_kernel", launch)
    if x is None:
        return results["dx"], None
    # the kernel leaves the sums of rows outside every group unwritten
    row_sums = jnp.where(between_groups(bounds, problem.num_rows), results["row_sums"], 0)
    return results["dx"], jnp.sum(row_sums, axis=0)


def _w_block(problem, config):
    return (config.block_n, config.block_k) if problem.w_layout == "enk" else (config.block_k, config.block_n)
