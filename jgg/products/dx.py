"""dX: dx[i] = (dy[i] @ w[e]^T) * topk_weights, and row sums, from which the gradient of topk_weights is made."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgg.core.problem import GroupedGemmProblem
from jgg.core.schedule import GroupBounds, Rows
from jgg.launching.choice import How, Launcher
from jgg.launching.kernel_configs import KernelConfigDX
from jgg.launching.launch import flat
from jgg.primitives import vmap
from jgg.primitives.operation import Operation, array_type
from jgg.primitives.partitioning import Letters
from jgg.products.combine import Combine, Place, combine, gather, positions_of_tokens, token_order
from jgg.products.launches import column_parts, every_gpu, hopper
from jgg.products.launches.operands import RowProduct
from jgg.products.launches.pieces import Pieces
from jgg.products.launches.plans import plan_dx
from jgg.products.low_rank import LowRankTerm
from jgg.products.plain import dense
from jgg.products.plain import rows as plain
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


def _result_types(operands: Dx, problem: GroupedGemmProblem) -> DxResults:
    row_sums = None if operands.x is None else array_type((problem.num_rows,), jnp.float32)
    return DxResults(array_type(problem.x_shape, problem.dtype), row_sums)


def _plain(operands: Dx, problem: GroupedGemmProblem) -> DxResults:
    dy, w, bounds, x, gather_indices, topk_weights, low_rank = operands
    if problem.is_dense:
        return DxResults(dense.dx(problem, dy, w, low_rank))
    x_at = plain.x_rows(problem, gather_indices)
    factors, out_dtype = [(Rows(dy, plain.y_rows(problem, gather_indices)), w)], problem.dtype
    if low_rank is not None:  # added in float32
        factors, out_dtype = [*factors, (Rows(low_rank.rows), low_rank.matrices)], jnp.dtype(jnp.float32)
    dot = {"transpose_w": problem.w_layout == "ekn", "precision": problem.precision}
    scales = plain.row_scales(problem, bounds, gather_indices, topk_weights)
    options = {"scales": scales, "write_at": x_at, "adds": x_at is not None, "shape": problem.x_shape, **dot}
    terms = (rows_dot(rows, matrices, bounds, out_dtype=out_dtype, **options) for rows, matrices in factors)
    dx = functools.reduce(jnp.add, terms).astype(problem.dtype)
    if x is None:
        return DxResults(dx)
    sums = (row_dots(Rows(x, x_at), rows, matrices, bounds, **dot) for rows, matrices in factors)
    return DxResults(dx, functools.reduce(jnp.add, sums))


def _launch(
    launcher: Launcher, operands: Dx, problem: GroupedGemmProblem, config: KernelConfigDX | None = None
) -> DxResults:
    dy, gather_indices = operands.dy, operands.gather_indices
    if operands.low_rank is not None and dy.dtype != problem.dtype:  # kernels would scale the term as they scale dy
        return _add_term(functools.partial(_launch, launcher), operands, problem)
    plan = plan_dx(problem, launcher.target, sums_rows=operands.x is not None, config=config)
    if plan.copies_dy:
        assert gather_indices is not None
        dy = combine(launcher, Combine(dy, gather_indices), topk=1)
    product = RowProduct(
        plan.problem,
        plan.config,
        Pieces.of(dy, problem.dtype),
        operands.w,
        operands.bounds,
        gather_indices,
        flat(operands.topk_weights),
        low_rank=operands.low_rank,
    )
    dx: Any = None
    if plan.part_columns is None:
        dx, row_sums = _multiply(launcher, product, operands.x)
        if plan.adds_up:
            dx = token_order(launcher, dx, gather_indices, problem.topk, problem.num_positions)
        return DxResults(dx, row_sums)
    positions = positions_of_tokens(problem, operands.bounds, gather_indices)
    for columns in column_parts.ranges(problem.in_features, plan.part_columns):
        product, dx = product.after(dx)
        part = Combine(_multiply(launcher, product.of_columns(columns))[0], positions)
        dx = combine(launcher, part, problem.topk, Place(dx, columns.start, problem.in_features))
    return DxResults(dx)


def _multiply(
    launcher: Launcher, product: RowProduct, x: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Computes dx [M, K] in expert order and, with x, row sums."""
    if product.config.kernel == "hopper":
        return hopper.multiply(launcher, product), None
    return every_gpu.multiply_dx(launcher, product, x)


def _merge_batch(
    how: How, operands: Dx, batched: Dx, problem: GroupedGemmProblem, config: KernelConfigDX | None = None
) -> DxResults | None:
    compute = functools.partial(DX, how, config=config)
    batch = vmap.Batch.of(problem, operands, batched, "x", "dy")
    if batch is None or operands.low_rank is not None:
        return None
    if batched.w:
        return _more_groups(compute, batch, operands, batched)
    return _more_rows(compute, how, batch, operands)


def _more_groups(compute: Callable[..., DxResults], batch: vmap.Batch, operands: Dx, batched: Dx) -> DxResults:
    dx, row_sums = vmap.more_groups(compute, batch, operands, batched)
    # with permute_x the rows of each token are added up; indices of -1 leave out rows of no group
    if not batch.problem.permute_x:
        dx = vmap.where_rows(batch.in_group, dx)
    if row_sums is not None:
        row_sums = vmap.where_rows(batch.in_group, row_sums)
    return batch.split(DxResults(dx, row_sums))


def _more_rows(compute: Callable[..., DxResults], how: How, batch: vmap.Batch, operands: Dx) -> DxResults:
    problem = batch.problem
    bounds, place, row_at = batch.merged_order()
    dy, write, in_place = batch.read_in_order(
        problem.permute_y, problem.permute_x, row_at, vmap.flat(operands.dy), gather(how, 1)
    )
    topk = problem.topk if problem.permute_x else 1
    all_rows = dataclasses.replace(problem.repeated(batch.size), topk=topk, permute_x=True, permute_y=in_place)
    weights = batch.topk_weights if problem.permute_x else batch.row_weights()
    merged = Dx(dy, operands.w, bounds, vmap.flat(operands.x), write, weights)
    dx, row_sums = compute(merged, problem=all_rows)
    return batch.split(DxResults(dx, None if row_sums is None else row_sums[place]))


def _several(how: How, operands: Dx, problem: GroupedGemmProblem) -> DxResults:
    """Computes dX apart from its term of low rank, since devices would each add the term."""
    return _add_term(functools.partial(DX, how), operands, problem)


def _add_term(compute: Callable[..., DxResults], operands: Dx, problem: GroupedGemmProblem) -> DxResults:
    """Computes dX and its term of low rank one after the other, and adds them."""
    low_rank = operands.low_rank
    assert low_rank is not None
    dx, row_sums = compute(operands._replace(low_rank=None), problem=problem)
    of_term = dataclasses.replace(problem, out_features=low_rank.rank, permute_y=False)
    term = operands._replace(dy=low_rank.rows, w=low_rank.matrices, low_rank=None)
    of_term_dx, of_term_sums = compute(term, problem=of_term)
    if row_sums is not None and of_term_sums is not None:
        row_sums += of_term_sums
    return DxResults(dx + of_term_dx, row_sums)


def _letters(operands: Dx, problem: GroupedGemmProblem) -> Letters | None:
    if operands.low_rank is not None:
        return None
    rows = {"dy": ".n", "w": problem.w_layout, "x": ".k", "gather_indices": ".", "topk_weights": None}
    return Letters(rows, (".k", "."), ("en", "enk"))


DX: Operation[DxResults] = Operation(
    "dx",
    Dx,
    result_types=_result_types,
    plain=_plain,
    launch=_launch,
    vmap=_merge_batch,
    mesh=_letters,
    several=_several,
)
"""The gradient of x and the row sums, as DxResults; the parameter is the problem."""
