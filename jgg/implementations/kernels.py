"""What each kernel is launched with, for any way of calling one.

`call` is `triton.call` or `interpret.call`: it takes a kernel's name and a `Launch` and returns the outputs.
"""

import dataclasses
import logging
import math

import jax
import jax.numpy as jnp

from jgg.config import KernelConfigDW, KernelConfigDX, KernelConfigForward, heuristic_config
from jgg.implementations import hopper, parts
from jgg.implementations.launch import Launch, bounded_rows, matrices, matrix, tile_operands
from jgg.problem import GroupedGemmProblem
from jgg.schedule import GroupBounds, inverse_permutation, tile_schedule
from jgg.target import Target
from jgg.tuned_configs import choose_config
from jgg.warp_specialization import why_not

_logger = logging.getLogger("jgg")

_PRECISIONS = {
    jax.lax.Precision.DEFAULT: "tf32",
    jax.lax.Precision.HIGH: "tf32x3",
    jax.lax.Precision.HIGHEST: "ieee",
}


def forward(
    call, target: Target, problem: GroupedGemmProblem, config: KernelConfigForward | None,
    x, w, bounds: GroupBounds, gather_indices, topk_weights, bias,
):  # fmt: skip
    """[y of `problem.y_shape`]."""
    product = problem
    if problem.combine_y:
        product = dataclasses.replace(problem, combine_y=False, has_topk_weights=False)
    config = _choose("forward", product, target, config)
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

    return [_sum_by_token(call, target, problem, multiply, x, problem.out_features, gather_indices, topk_weights)]


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
            x, w, bounds, gather_indices, _flat(topk_weights), bias,
            gathers=problem.permute_x, first_column=first_column,
        )  # fmt: skip
        return combine(call, y, inverse_permutation(gather_indices), 1) if scatter_after else y
    schedule = tile_schedule(bounds, problem.num_rows, config.block_m)
    column_tiles = math.ceil(problem.out_features / config.block_n)
    tma_x = config.use_tma_load_x and _x_by_tma(target, problem)
    tma_w = config.use_tma_load_w and _w_by_tma(target, w)
    descriptors = {
        **({"x": matrix(x.shape, (config.block_m, config.block_k))} if tma_x else {}),
        **({"w": matrices(w.shape, _w_block(problem, config))} if tma_w else {}),
    }
    launch = Launch(
        operands={
            "x": x,
            "w": w,
            "bias": bias,
            "topk_weights": _flat(topk_weights),
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
            "PRECISION": _PRECISIONS[problem.precision],
            "TMA_X": tma_x,
            "TMA_W": tma_w,
            "BAND": config.band,
            "BLOCK_ROWS": config.block_m,
            "BLOCK_REDUCED": config.block_k,
            "BLOCK_COLUMNS": config.block_n,
        },
        **_launch_options(target, problem, config, len(schedule.group) * column_tiles),
    )
    y = call("forward_kernel", launch)["y"]
    return combine(call, y, inverse_permutation(gather_indices), 1) if scatter_after else y


def backward_dx(
    call, target: Target, problem: GroupedGemmProblem, config: KernelConfigDX | None,
    dy, w, x, bounds: GroupBounds, gather_indices, topk_weights,
):  # fmt: skip
    """[dx in the shape of x] and, with x, each row's sum of (dy @ w) * x in expert order, [M] float32."""
    config = _choose("dx", problem, target, config)
    if problem.permute_y and not config.fuse_gather:
        dy = combine(call, dy, gather_indices, 1)
        problem = dataclasses.replace(problem, permute_y=False)

    def multiply(dy, columns):
        part = dataclasses.replace(problem, in_features=len(columns))
        return _dx_rows(call, target, part, config, dy, w, x, bounds, gather_indices, topk_weights, columns.start)[0]

    if problem.permute_x and x is None:
        return [_sum_by_token(call, target, problem, multiply, dy, problem.in_features, gather_indices)]
    dx, row_sums = _dx_rows(call, target, problem, config, dy, w, x, bounds, gather_indices, topk_weights)
    if problem.permute_x:
        dx = combine(call, dx, inverse_permutation(gather_indices, problem.num_positions), problem.topk)
    return [dx] if x is None else [dx, row_sums]


def _dx_rows(
    call, target, problem, config, dy, w, x, bounds, gather_indices, topk_weights, first_column=0
):  # fmt: skip
    """dx [M, K], of w's columns from the first on, and the row sums or None."""
    if config.warp_specialized:
        dx = hopper.multiply_rows(
            call, "dx", target, problem, config,
            dy, w, bounds, gather_indices, gathers=problem.permute_y, first_column=first_column,
        )  # fmt: skip
        return dx, None
    schedule = tile_schedule(bounds, problem.num_rows, config.block_m)
    column_tiles = math.ceil(problem.in_features / config.block_k)
    tma_dy = config.use_tma_load_dy and _dy_by_tma(target, problem)
    tma_w = config.use_tma_load_w and _w_by_tma(target, w)
    descriptors = {
        **({"dy": matrix(dy.shape, (config.block_m, config.block_n))} if tma_dy else {}),
        **({"w": matrices(w.shape, _w_block(problem, config))} if tma_w else {}),
    }
    outputs = {"dx": jax.ShapeDtypeStruct((problem.num_rows, problem.in_features), problem.dtype)}
    if x is not None:
        outputs["row_sums"] = jax.ShapeDtypeStruct((column_tiles, problem.num_rows), jnp.float32)
    launch = Launch(
        operands={
            "dy": dy,
            "w": w,
            "x": x,
            "topk_weights": _flat(topk_weights),
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
            "PRECISION": _PRECISIONS[problem.precision],
            "TMA_DY": tma_dy,
            "TMA_W": tma_w,
            "BAND": config.band,
            "BLOCK_ROWS": config.block_m,
            "BLOCK_REDUCED": config.block_n,
            "BLOCK_COLUMNS": config.block_k,
        },
        **_launch_options(target, problem, config, len(schedule.group) * column_tiles),
    )
    results = call("backward_dx_kernel", launch)
    if x is None:
        return results["dx"], None
    row = jnp.arange(problem.num_rows, dtype=jnp.int32)
    in_groups = (row >= bounds.starts[0]) & (row < bounds.ends[-1])
    # the kernel leaves the sums of rows outside every group unwritten
    return results["dx"], jnp.sum(jnp.where(in_groups, results["row_sums"], 0), axis=0)


def backward_dw(
    call, target: Target, problem: GroupedGemmProblem, config: KernelConfigDW | None,
    x, dy, bounds: GroupBounds, gather_indices, topk_weights, with_bias: bool,
):  # fmt: skip
    """[dw in the shape and layout of w] and, `with_bias`, the gradient of the bias, [E, N] float32."""
    config = _choose("dw", problem, target, config)
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
    if config.warp_specialized:
        compute = _dw_of_copies if copies_x else hopper.multiply_row_blocks
        return [compute(call, target, problem, config, x, dy, bounds, gather_indices), *dbias]
    if copies_x:
        x = combine(call, x, gather_indices // problem.topk, 1)
    x_side = {
        "": problem.in_features,
        "GATHER": problem.topk if problem.permute_x else 0,
        "TMA": config.use_tma_load_x and _x_by_tma(target, problem),
        "BLOCK": config.block_k,
    }
    dy_side = {
        "": problem.out_features,
        "GATHER": int(problem.permute_y),
        "TMA": config.use_tma_load_dy and _dy_by_tma(target, problem),
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
            "left": dy if dy_is_left else x,
            "right": x if dy_is_left else dy,
            "gather_indices": gather_indices,
            "group_starts": bounds.starts,
            "group_ends": bounds.ends,
            "num_positions": problem.num_positions,
            "num_groups": problem.num_experts,
        },
        descriptors=descriptors,
        outputs={"dw": jax.ShapeDtypeStruct(problem.w_shape, problem.dtype)},
        constants={
            **{f"{name}_{side}".lstrip("_"): v for side, values in sides.items() for name, v in values.items()},
            "PRECISION": _PRECISIONS[problem.precision],
            "BAND": config.band,
            "BLOCK_ROWS": config.block_m,
        },
        **_launch_options(target, problem, config, tiles),
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


def _choose(op, problem, target, config):
    """The configuration given, or one that is tuned or chosen for the problem; one that can run."""
    config = config or choose_config(op, problem, target)
    if not config.warp_specialized:
        return config
    reason = why_not(op, problem, target)
    if reason is None:
        return config
    _logger.info("The warp-specialised kernel is not used for this %s: %s", op, reason)
    return heuristic_config(op, problem, target)


def combine(call, rows, positions, topk: int, scales=None, *, y=None, first_column: int = 0, y_columns=None):
    """The weighted sum of each token's rows, in float32: y [T, N] in the dtype of rows.

    Args:
      rows: [M, N].
      positions: int32 [T * topk], a token's rows; one outside [0, M) adds nothing. With topk 1 this gathers rows.
      scales: float [T * topk], or None for 1.
      y: what to write the sums into, from `first_column` on; or None for an array of y_columns, by default N, that has
        nothing but the sums.
    """
    num_tokens, columns = len(positions) // topk, rows.shape[1]
    if y is None:
        y = jax.ShapeDtypeStruct((num_tokens, y_columns or columns), rows.dtype)
    block_rows, block_columns = 16, min(256, max(16, 1 << (columns - 1).bit_length()))
    launch = Launch(
        operands={
            "rows": rows,
            "positions": positions,
            "scales": scales,
            "num_tokens": num_tokens,
            "num_rows": rows.shape[0],
            "first_column": first_column,
        },
        outputs={"y": y},
        constants={
            "COLUMNS": columns,
            "Y_COLUMNS": y.shape[1],
            "TOPK": topk,
            "BLOCK_ROWS": block_rows,
            "BLOCK_COLUMNS": block_columns,
        },
        grid=(math.ceil(num_tokens / block_rows), math.ceil(columns / block_columns)),
        flops=rows.size,
        bytes_accessed=(rows.size + num_tokens * columns) * rows.dtype.itemsize,
    )
    return call("combine_kernel", launch)["y"]


def _sum_by_token(call, target, problem, multiply, rows, num_columns, gather_indices, scales=None):
    """The sums of each token's rows of a product, [T, columns], a part of the columns after the other.

    Args:
      multiply: (rows, columns) -> that range of the product's columns, [M, columns].
    """
    positions, scales = inverse_permutation(gather_indices, problem.num_positions), _flat(scales)

    def add_up(rows, columns, y):
        products = multiply(rows, columns)
        return combine(
            call, products, positions, problem.topk, scales, y=y, first_column=columns.start, y_columns=num_columns
        )  # fmt: skip

    return parts.one_after_the_other(rows, num_columns, parts.summed_width(target, problem, num_columns), add_up)


def _w_block(problem, config):
    return (config.block_n, config.block_k) if problem.w_layout == "enk" else (config.block_k, config.block_n)


def _launch_options(target, problem, config, tiles):
    return {
        "grid": (max(1, min(tiles, target.num_sms * config.programs_per_sm)),),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "flops": problem.flops,
        "bytes_accessed": problem.bytes_accessed,
    }


def _tma_can(target, dtype, row_length):
    """Whether TMA can reach rows of that many elements: their stride must be a multiple of 16 bytes."""
    return target.has_tma and row_length * dtype.itemsize % 16 == 0


def _x_by_tma(target, problem):
    return not problem.permute_x and _tma_can(target, problem.dtype, problem.in_features)


def _dy_by_tma(target, problem):
    return not problem.permute_y and _tma_can(target, problem.dtype, problem.out_features)


def _w_by_tma(target, w):
    return _tma_can(target, w.dtype, w.shape[2])


def _row_scales(topk_weights, gather_indices):
    """The weight of each row in expert order; zero for a bad index."""
    if gather_indices is None:
        return _flat(topk_weights)
    return (
        _flat(topk_weights)
        .at[jnp.where(gather_indices < 0, len(gather_indices), gather_indices)]
        .get(mode="fill", fill_value=0)
    )


def _flat(topk_weights):
    return None if topk_weights is None else topk_weights.reshape(-1)
