"""dX: dx[i] = (dy[i] @ w[e]^T) * topk_weights, and row sums, from which the gradient of topk_weights is made."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.configs.kernel_configs import KernelConfigDX
from jgg.configs.tuned_configs import choose_config
from jgg.core.problem import GroupedGemmProblem
from jgg.core.schedule import GroupBounds, Rows, between_groups
from jgg.launching.choice import How, Launcher
from jgg.launching.launch import dy_by_tma, flat
from jgg.primitives import vmap
from jgg.primitives.partitioning import Letters
from jgg.primitives.product import Product, array_type
from jgg.products.combine import combine, gather, sum_by_token, token_order
from jgg.products.launches import hopper, row_tiles
from jgg.products.launches.pieces import Pieces
from jgg.products.launches.row_tiles import WHOLE_PRODUCT, Part
from jgg.products.low_rank import LowRankTerm
from jgg.products.plain import dense
from jgg.products.plain import grouped_gemm as plain
from jgg.products.plain.multilinear import row_dots, rows_dot


class Dx(NamedTuple):
    """The arrays as `grouped_gemm_dx` takes them, bounds, the rows of each group, and x if row sums are wanted.

    With 16-bit w and x, dy may have another dtype; the kernels then multiply dy as two pieces (see `launches.pieces`).
    """

    dy: jax.Array
    w: jax.Array
    bounds: GroupBounds
    x: jax.Array | None = None
    gather_indices: jax.Array | None = None
    topk_weights: jax.Array | None = None
    low_rank: LowRankTerm | None = None


class DxResults(NamedTuple):
    """The gradient of x and, where x is given, row sums, from which the gradient of topk_weights is made.

    Attributes:
      dx: in the shape of x.
      row_sums: float32 [M], for each row in expert order the sum of (dy @ w) * x; None without x.
    """

    dx: jax.Array
    row_sums: jax.Array | None = None


def _result_types(operands: Dx, problem: GroupedGemmProblem):
    row_sums = None if operands.x is None else array_type((problem.num_rows,), jnp.float32)
    return DxResults(array_type(problem.x_shape, problem.dtype), row_sums)


def _plain(operands: Dx, problem: GroupedGemmProblem):
    dy, w, bounds, x, gather_indices, topk_weights, low_rank = operands
    if problem.is_dense:
        return DxResults(dense.dx(problem, dy, w, low_rank))
    x_at = plain.x_rows(problem, gather_indices)
    factors, out_dtype = [(Rows(dy, plain.y_rows(problem, gather_indices)), w)], problem.dtype
    if low_rank is not None:  # added in float32
        factors, out_dtype = [*factors, (Rows(low_rank.rows), low_rank.matrices)], jnp.float32
    dot = {"transpose_w": problem.w_layout == "ekn", "precision": problem.precision}
    scales = plain.row_scales(problem, bounds, gather_indices, topk_weights)
    options = {"scales": scales, "write_at": x_at, "adds": x_at is not None, "shape": problem.x_shape, **dot}
    terms = (rows_dot(rows, matrices, bounds, out_dtype=out_dtype, **options) for rows, matrices in factors)
    dx = functools.reduce(jnp.add, terms).astype(problem.dtype)
    if x is None:
        return DxResults(dx)
    sums = (row_dots(Rows(x, x_at), rows, matrices, bounds, **dot) for rows, matrices in factors)
    return DxResults(dx, functools.reduce(jnp.add, sums))


def _launch(launcher: Launcher, operands: Dx, problem: GroupedGemmProblem):
    """Launches dX; for tokens without row sums one range of columns after the other, each range added up by token."""
    dy, x, bounds, gather_indices = operands.dy, operands.x, operands.bounds, operands.gather_indices
    if operands.low_rank is not None and dy.dtype != problem.dtype:  # kernels would scale the term as they scale dy
        return _add_term(functools.partial(_launch, launcher._replace(config=None)), operands, problem)
    launcher = launcher._replace(config=choose_config(KernelConfigDX, problem, launcher.target, launcher.config))
    if problem.permute_y and not launcher.config.fuse_gather:
        dy = combine(launcher, dy, gather_indices, 1)
        problem = dataclasses.replace(problem, permute_y=False)
    pieces = Pieces.of(dy, problem.dtype)

    def multiply(rows, columns):
        part_of_product = dataclasses.replace(problem, in_features=len(columns))
        own_pieces, part = pieces._replace(rows=rows), Part(columns.start, zeroes=False)
        return _multiply_rows(launcher, own_pieces, operands, part_of_product, part).dx

    if problem.permute_x and x is None:
        dx = sum_by_token(launcher, problem, multiply, pieces.rows, problem.in_features, bounds, gather_indices)
        return DxResults(dx)
    dx, row_sums = _multiply_rows(launcher, pieces, operands, problem)
    if problem.permute_x:
        dx = token_order(launcher, dx, gather_indices, problem.topk, problem.num_positions)
    return DxResults(dx, row_sums)


def _multiply_rows(
    launcher: Launcher, pieces: Pieces, operands: Dx, problem: GroupedGemmProblem, part: Part = WHOLE_PRODUCT
) -> DxResults:
    """Computes dx [M, K] from the pieces of dy, and row sums; `problem` and `part` may describe a range of columns."""
    _, w, bounds, x, gather_indices, topk_weights, low_rank = operands
    config, target = launcher.config, launcher.target
    if config.kernel == "hopper":
        dx = hopper.multiply_rows(
            launcher,
            problem,
            pieces,
            w,
            bounds,
            gather_indices,
            gathers=problem.permute_y,
            part=part,
            low_rank=low_rank,
        )["y"]
        return DxResults(dx)
    from jgg.kernels.dx import dx_kernel

    outputs = {"dx": jax.ShapeDtypeStruct((problem.num_rows, problem.in_features), problem.dtype)}
    if x is not None:
        column_tiles = math.ceil(problem.in_features / config.block_k)
        outputs["row_sums"] = jax.ShapeDtypeStruct((column_tiles, problem.num_rows), jnp.float32)
    own = {
        "num_pieces": pieces.num_pieces,
        "scale": pieces.scale,
        "x": x,
        "topk_weights": flat(topk_weights),
        "gather_indices": gather_indices,
        **({} if x is not None else {"row_sums": None}),
    }
    rows = row_tiles.Rows("dy", pieces.rows, config.use_tma_load_dy and dy_by_tma(target, problem))
    results = row_tiles.multiply(
        launcher,
        dx_kernel,
        problem,
        part,
        rows,
        w,
        bounds,
        own,
        outputs,
        low_rank=low_rank,
        GATHER_DY=problem.permute_y,
        GATHER_X=problem.permute_x,
    )
    if x is None:
        return DxResults(results["dx"])
    # the kernel leaves the sums of rows outside every group unwritten
    row_sums = jnp.where(between_groups(bounds, problem.num_rows), results["row_sums"], 0)
    return DxResults(results["dx"], jnp.sum(row_sums, axis=0))


def _merge_batch(how: How, operands: Dx, batched: Dx, problem: GroupedGemmProblem):
    batch = vmap.Batch.of(problem, operands, batched, "x", "dy")
    if batch is None or operands.low_rank is not None:
        return None
    return (_more_groups if batched.w else _more_rows)(how, batch, operands, batched)


def _more_groups(how, batch, operands, batched):
    dx, row_sums = vmap.more_groups(DX, how, batch, operands, batched, ("dy", "w", "x"))
    # with permute_x the rows of each token are added up; indices of -1 leave out rows of no group
    if not batch.problem.permute_x:
        dx = vmap.where_rows(batch.in_group, dx)
    if row_sums is not None:
        row_sums = vmap.where_rows(batch.in_group, row_sums)
    return batch.split(DxResults(dx, row_sums))


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
    dx, row_sums = DX(how, merged, problem=all_rows)
    return batch.split(DxResults(dx, None if row_sums is None else row_sums[place]))


def _several(how: How, operands: Dx, problem: GroupedGemmProblem):
    """Computes dX apart from its term of low rank, since devices would each add the term."""
    compute = lambda operands, problem: DX(how._replace(config=None), operands, problem=problem)  # noqa: E731
    return _add_term(compute, operands, problem)


def _add_term(compute: Callable[[Dx, GroupedGemmProblem], DxResults], operands: Dx, problem: GroupedGemmProblem):
    """Computes dX and its term of low rank one after the other, and adds them."""
    low_rank = operands.low_rank
    assert low_rank is not None
    dx, row_sums = compute(operands._replace(low_rank=None), problem)
    of_term = dataclasses.replace(problem, out_features=low_rank.rank, permute_y=False)
    term = operands._replace(dy=low_rank.rows, w=low_rank.matrices, low_rank=None)
    of_term_dx, of_term_sums = compute(term, of_term)
    if row_sums is not None and of_term_sums is not None:
        row_sums += of_term_sums
    return DxResults(dx + of_term_dx, row_sums)


def _letters(operands: Dx, problem: GroupedGemmProblem):
    if operands.low_rank is not None:
        return None
    rows = {"dy": ".n", "w": problem.w_layout, "x": ".k", "gather_indices": ".", "topk_weights": None}
    return Letters(rows, (".k", "."), ("en", "enk"))


DX: Product[DxResults] = Product(
    "dx",
    Dx,
    result_types=_result_types,
    plain=_plain,
    launch=_launch,
    letters=_letters,
    several=_several,
    merge_batch=_merge_batch,
    config_type=KernelConfigDX,
)
"""The gradient of x and the row sums, as DxResults; the parameter is the problem."""
