"""The forward product: y[i] = (x[i] @ w[e] + bias[e]) * topk_weights, for the rows i of each expert e."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgg.configs.kernel_configs import KernelConfigForward
from jgg.configs.tuned_configs import choose_config
from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import BLOCK, values_and_scales
from jgg.core.schedule import GroupBounds, tile_schedule
from jgg.launching.choice import How, Launcher
from jgg.launching.launch import (
    PRECISIONS,
    Launch,
    flat,
    launch_options,
    matrices,
    matrix,
    tile_operands,
    w_block,
    w_by_tma,
    x_by_tma,
)
from jgg.primitives import vmap
from jgg.primitives.partitioning import Letters
from jgg.primitives.product import Product
from jgg.products import hopper as warp_specialized
from jgg.products import hopper_fp8 as warp_specialized_fp8
from jgg.products.combine import expert_order, gather, sum_by_token, token_order
from jgg.products.plain import grouped_gemm as plain
from jgg.products.terms import Terms


class Forward(NamedTuple):
    """Arrays as `grouped_gemm` has them, and bounds: the rows of each group.

    In FP8, x is a QuantizedArray and w a QuantizedArray or ToQuantize.
    """

    x: Any
    w: Any
    bounds: GroupBounds
    gather_indices: jax.Array | None = None
    topk_weights: jax.Array | None = None
    bias: jax.Array | None = None


def _plain(operands: Forward, problem: GroupedGemmProblem):
    return [plain.grouped_gemm(problem, *operands)]


def _launch(launcher: Launcher, operands: Forward, problem: GroupedGemmProblem):
    """With combine_y the product is made a part of its columns after the other, each added up by token."""
    product = problem
    if problem.combine_y:
        product = dataclasses.replace(problem, combine_y=False, has_topk_weights=False)
    launcher, x, product = choose(launcher, operands, product)
    if not problem.combine_y:
        return [_multiply_rows(launcher, operands._replace(x=x), product)]
    _, w, bounds, gather_indices, topk_weights, bias = operands
    read_at = gather_indices if product.permute_x else None

    def multiply(x, columns):
        part = dataclasses.replace(product, out_features=len(columns))
        own_bias = None if bias is None else bias[:, columns.start : columns.stop]
        own = Forward(x, w, bounds, read_at, None, own_bias)
        return _multiply_rows(launcher, own, part, columns.start, zeroes=False)

    return [sum_by_token(launcher, problem, multiply, x, problem.out_features, bounds, gather_indices, topk_weights)]


def choose(
    launcher: Launcher, operands: Forward, problem: GroupedGemmProblem
) -> tuple[Launcher, Any, GroupedGemmProblem]:
    """The launcher with a configuration, x, and the problem: with x in expert order if the kernel does not gather."""
    x = operands.x
    launcher = launcher._replace(config=choose_config(KernelConfigForward, problem, launcher.target, launcher.config))
    if problem.permute_x and not launcher.config.fuse_gather:
        x = jax.tree.map(lambda part: expert_order(launcher, part, operands.gather_indices, problem.topk), x)
        problem = dataclasses.replace(problem, permute_x=False)
    return launcher, x, problem


def _multiply_rows(
    launcher: Launcher, operands: Forward, problem: GroupedGemmProblem, first_column: int = 0, zeroes: bool = True
):  # fmt: skip
    """y [M, N], of w's columns from the first on; rows of no group are zeros, if it `zeroes` them, or not written."""
    config = launcher.config
    scatter_after = problem.permute_y and (config.warp_specialized or not config.fuse_scatter)
    if scatter_after:
        problem = dataclasses.replace(problem, permute_y=False)
    operands = operands._replace(topk_weights=flat(operands.topk_weights))
    if not config.warp_specialized:
        y = _multiply_plainly(launcher, operands, problem, first_column, zeroes)
    elif problem.is_fp8:
        y = warp_specialized_fp8.multiply_rows(
            launcher, problem, *operands, first_column=first_column, zeroes=zeroes
        )["y"]  # fmt: skip
    else:
        x, w, bounds, gather_indices, topk_weights, bias = operands
        y = warp_specialized.multiply_rows(
            launcher, problem, Terms(x), w, bounds, gather_indices, topk_weights, bias,
            gathers=problem.permute_x, first_column=first_column, zeroes=zeroes,
        )["y"]  # fmt: skip
    return token_order(launcher, y, operands.gather_indices) if scatter_after else y


def _multiply_plainly(
    launcher: Launcher, operands: Forward, problem: GroupedGemmProblem, first_column: int, zeroes: bool
):  # fmt: skip
    """By the kernel of every GPU."""
    from jgg.kernels.forward import forward_kernel

    (x, x_scales), (w, w_scales) = map(values_and_scales, operands[:2])
    _, _, bounds, gather_indices, topk_weights, bias = operands
    config, target = launcher.config, launcher.target
    if problem.is_fp8 and config.block_k != BLOCK:
        raise ValueError(f"block_k of {config.op} must be {BLOCK} in FP8, got {config.block_k}.")
    schedule = tile_schedule(bounds, problem.num_rows, config.block_m)
    column_tiles = math.ceil(problem.out_features / config.block_n)
    tma_x = config.use_tma_load_x and x_by_tma(target, problem)
    tma_w = config.use_tma_load_w and w_by_tma(target, w)
    descriptors = {
        **({"x": matrix(x.shape, (config.block_m, config.block_k))} if tma_x else {}),
        **({"w": matrices(w.shape, w_block(problem, config))} if tma_w else {}),
    }
    launch = Launch(
        operands={
            "x": x,
            "x_scales": x_scales,
            "w": w,
            "w_scales": w_scales,
            "bias": bias,
            "topk_weights": topk_weights,
            "gather_indices": gather_indices,
            **tile_operands(bounds, schedule),
            "zeros_end": problem.num_rows if zeroes else 0,
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
    return launcher.run(forward_kernel, launch)["y"]


def _merge_batch(how: How, operands: Forward, batched: Forward, problem: GroupedGemmProblem):
    batch = vmap.Batch.of(problem, operands, batched, "x")
    if batch is None or (batched.bias and not batched.w):
        return None
    return (_more_groups if batched.w else _more_rows)(how, batch, operands, batched)


def _more_groups(how, batch, operands, batched):
    (y,) = vmap.more_groups(FORWARD, how, batch, operands, batched, ("x", "w"))
    if batch.problem.combine_y:
        return batch.split([y])
    written = batch.in_group
    if batch.problem.permute_y:
        positions = batch.positions_in_groups()
        at = jnp.where(positions < 0, len(positions), positions)
        written = jnp.zeros_like(written).at[at].set(True, mode="drop")
    return batch.split([vmap.where_rows(written, y)])


def _more_rows(how, batch, operands, batched):
    problem = batch.problem
    bounds, _, row_at = batch.merged_order()
    writes_permuted = problem.permute_y or problem.combine_y
    topk = problem.topk if problem.permute_x else 1
    rows = vmap.flat(operands.x)
    x, write, in_place = batch.read_in_order(problem.permute_x, writes_permuted, row_at, rows, gather(how, topk))
    all_rows = dataclasses.replace(
        batch.all_rows(),
        topk=problem.topk if problem.permute_x or problem.combine_y else 1,
        permute_x=in_place,
        permute_y=not problem.combine_y,
    )
    weights = batch.topk_weights if writes_permuted else batch.row_weights()
    return batch.split(
        FORWARD(how, Forward(x, operands.w, bounds, write, weights, operands.bias), problem=all_rows)
    )  # fmt: skip


def _letters(operands: Forward, problem: GroupedGemmProblem):
    rows = {"x": ".k", "w": problem.w_layout, "gather_indices": ".", "topk_weights": None, "bias": "en"}
    return Letters(rows, (".n",), ("ek",))


FORWARD = Product(
    "forward",
    Forward,
    result_types=lambda operands, problem: [(problem.y_shape, problem.out_dtype)],
    plain=_plain,
    launch=_launch,
    letters=_letters,
    merge_batch=_merge_batch,
    config_type=KernelConfigForward,
)
"""[y of `problem.y_shape`]; its parameter is the problem."""
