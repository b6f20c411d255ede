"""dX: dx[i] = (dy[i] @ w[e]^T) * topk_weights, and what the gradient of topk_weights is made of."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.configs.kernel_configs import KernelConfigDX
from jgg.configs.tuned_configs import choose_config
from jgg.core.problem import GroupedGemmProblem
from jgg.core.schedule import GroupBounds, Rows, between_groups, tile_schedule
from jgg.launching.choice import How, Launcher
from jgg.launching.launch import (
    PRECISIONS,
    Launch,
    dy_by_tma,
    flat,
    launch_options,
    matrices,
    matrix,
    tile_operands,
    w_block,
    w_by_tma,
)
from jgg.primitives import vmap
from jgg.primitives.partitioning import Letters
from jgg.primitives.product import Product
from jgg.products import hopper as warp_specialized
from jgg.products.combine import combine, gather, sum_by_token, token_order
from jgg.products.plain import grouped_gemm as plain
from jgg.products.plain.multilinear import row_dots, rows_dot
from jgg.products.terms import Terms


class Dx(NamedTuple):
    """Arrays as `grouped_gemm_dx` has them, bounds: the rows of each group, and x where its row sums are asked for.

    dy may be of another dtype than 16-bit w and x, of which the kernels then multiply two terms.
    """

    dy: jax.Array
    w: jax.Array
    bounds: GroupBounds
    x: jax.Array | None = None
    gather_indices: jax.Array | None = None
    topk_weights: jax.Array | None = None


def _result_types(operands: Dx, problem: GroupedGemmProblem):
    row_sums = [] if operands.x is None else [((problem.num_rows,), jnp.float32)]
    return [(problem.x_shape, problem.dtype), *row_sums]


def _plain(operands: Dx, problem: GroupedGemmProblem):
    dy, w, bounds, x, gather_indices, topk_weights = operands
    rows, x_at = Rows(dy, plain.y_rows(problem, gather_indices)), plain.x_rows(problem, gather_indices)
    dot = {"transpose_w": problem.w_layout == "ekn", "precision": problem.precision}
    dx = rows_dot(
        rows, w, bounds, scales=plain.row_scales(problem, bounds, gather_indices, topk_weights), write_at=x_at,
        adds=x_at is not None, shape=problem.x_shape, out_dtype=problem.dtype, **dot,
    )  # fmt: skip
    return [dx] if x is None else [dx, row_dots(Rows(x, x_at), rows, w, bounds, **dot)]


def _launch(launcher: Launcher, operands: Dx, problem: GroupedGemmProblem):
    """Without row sums, dx of tokens is made a part of its columns after the other, each added up by token."""
    dy, x, bounds, gather_indices = operands.dy, operands.x, operands.bounds, operands.gather_indices
    launcher = launcher._replace(config=choose_config(KernelConfigDX, problem, launcher.target, launcher.config))
    if problem.permute_y and not launcher.config.fuse_gather:
        dy = combine(launcher, dy, gather_indices, 1)
        problem = dataclasses.replace(problem, permute_y=False)
    terms = Terms.of(dy, problem.dtype)

    def multiply(rows, columns):
        part = dataclasses.replace(problem, in_features=len(columns))
        return _multiply_rows(launcher, terms._replace(rows=rows), operands, part, columns.start, zeroes=False)[0]

    if problem.permute_x and x is None:
        return [sum_by_token(launcher, problem, multiply, terms.rows, problem.in_features, bounds, gather_indices)]
    dx, row_sums = _multiply_rows(launcher, terms, operands, problem)
    if problem.permute_x:
        dx = token_order(launcher, dx, gather_indices, problem.topk, problem.num_positions)
    return [dx] if x is None else [dx, row_sums]


def _multiply_rows(
    launcher: Launcher, terms: Terms, operands: Dx, problem: GroupedGemmProblem, first_column: int = 0,
    zeroes: bool = True,
):  # fmt: skip
    """dx [M, K], of dy's terms and w's columns from the first on, and the row sums or None.

    Rows of dx that are of no group are zeros, if it `zeroes` them, or not written.
    """
    _, w, bounds, x, gather_indices, topk_weights = operands
    config, target = launcher.config, launcher.target
    if config.warp_specialized:
        dx = warp_specialized.multiply_rows(
            launcher, problem, terms, w, bounds, gather_indices,
            gathers=problem.permute_y, first_column=first_column, zeroes=zeroes,
        )["y"]  # fmt: skip
        return dx, None
    from jgg.kernels.dx import dx_kernel

    schedule = tile_schedule(bounds, problem.num_rows, config.block_m)
    column_tiles = math.ceil(problem.in_features / config.block_k)
    tma_dy = config.use_tma_load_dy and dy_by_tma(target, problem)
    tma_w = config.use_tma_load_w and w_by_tma(target, w)
    descriptors = {
        **({"dy": matrix(terms.rows.shape, (config.block_m, config.block_n))} if tma_dy else {}),
        **({"w": matrices(w.shape, w_block(problem, config))} if tma_w else {}),
    }
    outputs = {"dx": jax.ShapeDtypeStruct((problem.num_rows, problem.in_features), problem.dtype)}
    if x is not None:
        outputs["row_sums"] = jax.ShapeDtypeStruct((column_tiles, problem.num_rows), jnp.float32)
    launch = Launch(
        operands={
            "dy": terms.rows,
            "num_terms": terms.num_terms,
            "scale": terms.scale,
            "w": w,
            "x": x,
            "topk_weights": flat(topk_weights),
            "gather_indices": gather_indices,
            **tile_operands(bounds, schedule),
            "zeros_end": problem.num_rows if zeroes else 0,
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
    results = launcher.run(dx_kernel, launch)
    if x is None:
        return results["dx"], None
    # the kernel leaves the sums of rows outside every group unwritten
    row_sums = jnp.where(between_groups(bounds, problem.num_rows), results["row_sums"], 0)
    return results["dx"], jnp.sum(row_sums, axis=0)


def _merge_batch(how: How, operands: Dx, batched: Dx, problem: GroupedGemmProblem):
    batch = vmap.Batch.of(problem, operands, batched, "x", "dy")
    if batch is None:
        return None
    return (_more_groups if batched.w else _more_rows)(how, batch, operands, batched)


def _more_groups(how, batch, operands, batched):
    dx, *row_sums = vmap.more_groups(DX, how, batch, operands, batched, ("dy", "w", "x"))
    # with permute_x each token adds up its rows, among which indices of -1 leave those of no group out
    if not batch.problem.permute_x:
        dx = vmap.where_rows(batch.in_group, dx)
    return batch.split([dx, *(vmap.where_rows(batch.in_group, sums) for sums in row_sums)])


def _more_rows(how, batch, operands, batched):
    problem = batch.problem
    bounds, place, row_at = batch.merged_order()
    dy, write, in_place = batch.read_in_order(
        problem.permute_y, problem.permute_x, row_at, vmap.flat(operands.dy), gather(how, 1)
    )
    topk = problem.topk if problem.permute_x else 1
    all_rows = dataclasses.replace(batch.all_rows(), topk=topk, permute_x=True, permute_y=in_place)
    weights = batch.topk_weights if problem.permute_x else batch.row_weights()
    merged = Dx(dy, operands.w, bounds, vmap.flat(operands.x), write, weights)
    dx, *row_sums = DX(how, merged, problem=all_rows)
    return batch.split([dx, *(sums[place] for sums in row_sums)])


def _letters(operands: Dx, problem: GroupedGemmProblem):
    rows = {"dy": ".n", "w": problem.w_layout, "x": ".k", "gather_indices": ".", "topk_weights": None}
    return Letters(rows, (".k", "."), ("en", "enk"))


DX = Product(
    "dx",
    Dx,
    result_types=_result_types,
    plain=_plain,
    launch=_launch,
    letters=_letters,
    merge_batch=_merge_batch,
    config_type=KernelConfigDX,
)
"""[dx in the shape of x] and, with x, each row's sum of (dy @ w) * x in expert order, [M] float32."""
