"""Products by groups of rows for arrays with any number of axes, each reduced to one of two matrix products."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.export
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgg.core.manual_axes import alike
from jgg.core.matrix import Matrix
from jgg.core.problem import GroupedGemmProblem
from jgg.core.problem_checks import check_problem
from jgg.core.schedule import Rows, between_groups, group_bounds, saturated_int32
from jgg.launching.choice import How, how_of, is_plain_jax
from jgg.linear.differentiable import Arrays, compute_grouped_gemm
from jgg.linear.linear import Linear
from jgg.products.dw import DW, Dw
from jgg.products.dx import DX, Dx
from jgg.products.forward import FORWARD, Forward
from jgg.products.plain.multilinear import outer_dot

_Axes = Sequence[int]
_Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def contract_dense(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    numbers: jax.lax.RaggedDotDimensionNumbers,
    outer: _Axes,
    *,
    group_offset: jax.Array | None,
    precision: jax.lax.PrecisionLike,
    out_dtype: DTypeLike,
    implementation: str | None,
) -> jax.Array:
    """The product for a free ragged dimension; a row is one index into it and the free dimensions after it."""
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    free = other_axes(lhs, lhs_contracted, lhs_batch)
    columns = other_axes(rhs, rhs_contracted, rhs_batch, numbers.rhs_group_dimensions)
    # in the order of rhs: where the orders differ, lhs is transposed rather than rhs
    order = sorted(range(len(rhs_contracted)), key=rhs_contracted.__getitem__)
    lhs_contracted, rhs_contracted = (tuple(axes[i] for i in order) for axes in (lhs_contracted, rhs_contracted))
    contracted_is_minor = tuple(rhs_contracted[-1:]) > columns[-1:]
    minor = (columns, rhs_contracted) if contracted_is_minor else (rhs_contracted, columns)
    rows = free[len(outer) :]
    operands = (
        _merge_axes(lhs, [lhs_batch, outer], [rows, lhs_contracted]),
        _merge_axes(rhs, [rhs_batch], [numbers.rhs_group_dimensions, *minor]),
        _sizes_of_rows(group_sizes, [lhs.shape[axis] for axis in rows], [lhs_batch, outer]),
    )
    function = functools.partial(
        _multiply_rows,
        group_offset=group_offset,
        w_layout="enk" if contracted_is_minor else "ekn",
        precision=precision,
        out_dtype=out_dtype,
        implementation=implementation,
    )
    out = _over_batches(function, group_sizes, lhs_batch, outer, None)(*operands)
    return out.reshape([lhs.shape[axis] for axis in (*lhs_batch, *free)] + [rhs.shape[axis] for axis in columns])


def contract_ragged(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    numbers: jax.lax.RaggedDotDimensionNumbers,
    outer: _Axes,
    *,
    precision: jax.lax.PrecisionLike,
    out_dtype: DTypeLike,
    implementation: str | None,
) -> jax.Array:
    """The product for a contracted ragged dimension: the sum over each group's rows."""
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    free, columns = other_axes(lhs, lhs_contracted, lhs_batch), other_axes(rhs, rhs_contracted, rhs_batch)
    lhs_rows, rhs_rows = (axes[len(outer) :] for axes in (lhs_contracted, rhs_contracted))
    operands = (
        _merge_axes(lhs, [lhs_batch, outer], [lhs_rows, free]),
        _merge_axes(rhs, [rhs_batch, rhs_contracted[: len(outer)]], [rhs_rows, columns]),
        _sizes_of_rows(group_sizes, [lhs.shape[axis] for axis in lhs_rows], [lhs_batch, outer]),
    )
    # computed in a dtype that holds the result's values; float32 if results are summed below
    dtype = jnp.dtype(jnp.float32) if outer else _common_dtype(lhs.dtype, rhs.dtype, out_dtype)
    function = functools.partial(_sum_over_rows, dtype=dtype, precision=precision, implementation=implementation)
    out = _over_batches(function, group_sizes, lhs_batch, outer, 0)(*operands)
    if outer:
        out = jnp.sum(out, axis=1 if lhs_batch else 0)
    if lhs_batch:
        out = jnp.moveaxis(out, 0, 1)
    shape = [lhs.shape[axis] for axis in (*lhs_batch, *free)] + [rhs.shape[axis] for axis in columns]
    return out.astype(out_dtype).reshape([out.shape[0], *shape])


def other_axes(array: jax.Array, *used: _Axes) -> tuple[int, ...]:
    """The axes of an array that are not used, in order."""
    return tuple(axis for axis in range(array.ndim) if not any(axis in axes for axes in used))


def _merge_axes(array: jax.Array, optional: Sequence[_Axes], parts: Sequence[_Axes]) -> jax.Array:
    """The array with the axes of each part merged into one, in order; an optional part without axes is left out."""
    parts = [*filter(None, optional), *parts]
    merged = [math.prod(array.shape[axis] for axis in axes) for axes in parts]
    return jnp.transpose(array, [*itertools.chain(*parts)]).reshape(merged)


def _sizes_of_rows(group_sizes: jax.Array, shape: Sequence[int], leading: Sequence[_Axes]) -> jax.Array:
    """Group sizes counted in rows, where a row is one index into all dimensions of `shape`.

    The given group_sizes count only along the first dimension. Their leading axes are merged like the axes of lhs.
    """
    num_ragged, *others = shape
    if others:
        group_sizes = jnp.clip(saturated_int32(group_sizes), 0, num_ragged) * math.prod(others)
    if group_sizes.ndim == 1:
        return group_sizes
    lengths = iter(group_sizes.shape)
    merged = [math.prod(next(lengths) for _ in axes) for axes in leading if axes]
    return group_sizes.reshape([*merged, group_sizes.shape[-1]])


def _over_batches(
    function: _Product, group_sizes: jax.Array, batch: _Axes, outer: _Axes, rhs_of_outer: int | None
) -> _Product:
    """Maps function(lhs, rhs, group_sizes) over the batch axis and over the outer axis, which rhs may lack."""
    of_sizes = None if group_sizes.ndim == 1 else 0
    if outer:
        function = jax.vmap(function, (0, rhs_of_outer, of_sizes))
    return jax.vmap(function, (0, 0, of_sizes)) if batch else function


def _multiply_rows(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    group_offset: jax.Array | None,
    w_layout: str,
    precision: jax.lax.PrecisionLike,
    out_dtype: DTypeLike,
    implementation: str | None,
) -> jax.Array:
    """Multiplies the rows of lhs [m, k] by rhs [g, k, n] or, with w_layout "enk", [g, n, k]; returns [m, n]."""
    dtype = _common_dtype(lhs.dtype, rhs.dtype)
    x, w = _converted(lhs, dtype, group_sizes, group_offset, rhs.shape[0]), rhs.astype(dtype)
    problem = check_problem(
        x=x,
        w=w,
        group_sizes=group_sizes,
        group_offset=group_offset,
        w_layout=w_layout,
        precision=precision,
        out_dtype=out_dtype,
    )
    arrays = Arrays(x, Matrix(dense=w), group_sizes, group_offset=group_offset)
    return compute_grouped_gemm(Linear(problem, how_of(problem, implementation)), arrays)


def _sum_over_rows(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    dtype: DTypeLike,
    precision: jax.lax.PrecisionLike,
    implementation: str | None,
) -> jax.Array:
    """Sums outer products of the rows of lhs [k, m] and rhs [k, n] by group, in `dtype`; returns [g, m, n]."""
    lhs, rhs = (_converted(rows, dtype, group_sizes) for rows in (lhs, rhs))
    problem = check_problem(x=lhs, dy=rhs, group_sizes=group_sizes, w_layout="ekn", precision=precision)
    return _outer_products(problem, how_of(problem, implementation), lhs, rhs, group_sizes)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _outer_products(
    problem: GroupedGemmProblem, how: How, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    lhs, rhs, group_sizes = alike((lhs, rhs, group_sizes))
    operands = Dw(lhs, rhs, group_bounds(group_sizes, problem.num_rows))
    if problem.is_empty or is_plain_jax(how.implementation):
        return outer_dot(Rows(lhs), Rows(rhs), operands.bounds, precision=problem.precision, out_dtype=problem.dtype)
    return _differentiable(problem, how, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(problem: GroupedGemmProblem, how: How, operands: Dw) -> jax.Array:
    return DW(how, operands, problem=problem)


def _backward(problem: GroupedGemmProblem, how: How, operands: Dw, ct: jax.Array) -> tuple[Dw]:
    """The gradients: with ct as the weights, DX applied to rhs gives d lhs, and FORWARD applied to lhs gives d rhs."""
    lhs, rhs, bounds, *_ = operands
    d_lhs = DX(how, Dx(rhs, ct, bounds), problem=problem).dx
    d_rhs = FORWARD(how, Forward(lhs, ct, bounds), problem=problem)
    return (Dw(x=d_lhs, dy=d_rhs, bounds=None),)  # type: ignore[arg-type]


_differentiable.defvjp(
    lambda problem, how, operands: (_differentiable(problem, how, operands), operands),
    _backward,
)


def _converted(
    rows: jax.Array,
    dtype: DTypeLike,
    group_sizes: jax.Array,
    group_offset: jax.Array | None = None,
    num_groups: int | None = None,
) -> jax.Array:
    """Rows converted to a dtype. If they have another one, rows of no group become zeros.

    Otherwise jax.debug_nans would report a NaN in such rows.
    """
    if rows.dtype == dtype:
        return rows
    if jax.export.is_symbolic_dim(group_sizes.shape[0]):  # `check_problem` will refuse it
        return rows.astype(dtype)
    bounds = group_bounds(group_sizes, rows.shape[0], group_offset, num_groups)
    return jnp.where(between_groups(bounds, rows.shape[0])[:, None], rows, 0).astype(dtype)


def _common_dtype(*dtypes: DTypeLike) -> DTypeLike:
    """The common dtype if all are equal, otherwise float32, which holds the values of all."""
    return dtypes[0] if all(dtype == dtypes[0] for dtype in dtypes) else jnp.dtype(jnp.float32)
