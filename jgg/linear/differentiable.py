"""`grouped_gemm` for checked arguments: one linear layer with a custom_vjp, and its three products separately."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jgg.core.manual_axes import alike
from jgg.core.matrix import Matrix
from jgg.core.schedule import as_indices, group_bounds, guarded, inverse_permutation
from jgg.linear import layer
from jgg.linear.linear import Linear, Routes, Rows
from jgg.products.dbias import DBIAS, Dbias, bias_row_sums
from jgg.products.dw import DW, Dw
from jgg.products.dx import DX, Dx


class Arrays(NamedTuple):
    """The arrays as `jgg.grouped_gemm` takes them; x and the matrix are either both quantized or both not.

    Attributes:
      group_offset: integer scalar or [1], index of the first group whose matrix is in w, as in `jgg.ragged_dot`.
    """

    x: Rows
    matrix: Matrix
    group_sizes: jax.Array
    gather_indices: jax.Array | None = None
    topk_weights: jax.Array | None = None
    bias: jax.Array | None = None
    group_offset: jax.Array | None = None


class Order(NamedTuple):
    """Which rows belong to which expert and where they are, as in `jgg.grouped_gemm`."""

    group_sizes: jax.Array
    gather_indices: jax.Array | None
    topk_weights: jax.Array | None


class Operands(NamedTuple):
    """The arrays of one linear layer."""

    x: Rows
    matrix: Matrix
    routes: Routes
    bias: jax.Array | None = None


def compute_grouped_gemm(linear: Linear, arrays: Arrays) -> jax.Array:
    """Computes y, differentiable in every array that is not quantized."""
    if isinstance(arrays.x, jax.Array) and not linear.is_plain:
        # named out here and not inside `_compute`, where jax.debug_nans would report NaN in its rows of no group
        arrays = arrays._replace(x=checkpoint_name(arrays.x, "jgg_x"))
    return _compute(linear, arrays)


@functools.partial(jax.jit, static_argnums=0)
def _compute(linear: Linear, arrays: Arrays) -> jax.Array:
    return compute(linear, _operands(linear, arrays))


def compute(linear: Linear, operands: Operands) -> jax.Array:
    """Computes one layer, with derivatives from products or, if the layer is plain, from JAX."""
    if linear.is_plain or not isinstance(operands.x, jax.Array):
        return layer.forward(linear, *operands)[0]
    return _differentiable(linear, operands)


@functools.partial(jax.jit, static_argnums=0)
def compute_forward(linear: Linear, arrays: Arrays) -> jax.Array:
    """Computes y without the custom_vjp: its derivatives are computed in plain JAX."""
    return layer.forward(linear, *_operands(linear, arrays))[0]


def _operands(linear: Linear, arrays: Arrays) -> Operands:
    """The operands, with the bounds of the groups; if one varies over a mesh axis, all are made to."""
    arrays = arrays._replace(gather_indices=as_indices(arrays.gather_indices))
    if not isinstance(arrays.x, jax.Array):
        arrays = arrays._replace(x=jax.lax.stop_gradient(arrays.x), matrix=jax.lax.stop_gradient(arrays.matrix))
    x, matrix, group_sizes, gather_indices, topk_weights, bias, group_offset = alike(arrays)
    bounds = group_bounds(group_sizes, linear.problem.num_rows, group_offset, linear.problem.num_experts)
    return Operands(x, matrix, Routes(bounds, gather_indices, topk_weights), bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(linear: Linear, operands: Operands) -> jax.Array:
    x, matrix, routes, bias = operands
    return layer.forward(linear, x, layer.prepared(linear, matrix, keeps=False), routes, bias)[0]


class _Residuals(NamedTuple):
    """The operands with a prepared matrix, and the rows x @ a, or None."""

    operands: Operands
    rows: jax.Array | None


def _forward(linear: Linear, operands: Operands) -> tuple[jax.Array, _Residuals]:
    x, matrix, routes, bias = operands
    matrix = layer.prepared(linear, matrix, keeps=True)
    y, rows = layer.forward(linear, x, matrix, routes, bias)
    return y, _Residuals(operands._replace(matrix=layer.kept(linear, matrix)), rows)


def _backward(linear: Linear, residuals: _Residuals, dy: jax.Array) -> tuple[Operands]:
    """All gradients; JAX drops unused ones as dead code, together with their products."""
    (x, matrix, routes, bias), rows = residuals
    assert isinstance(x, jax.Array)
    problem, (bounds, gather_indices, topk_weights) = linear.problem, routes
    if problem.dtype == jnp.float32:  # float32 holds the values of every dtype; 16-bit operands would round dy
        dy = dy.astype(problem.dtype)
    matrix = layer.restored(linear, matrix)
    (dx, row_sums), d_rows = layer.dx(linear, dy, matrix, routes, x=None if topk_weights is None else x)
    d_matrix = layer.gradients(linear, x, dy, matrix, routes, rows, d_rows)
    d_topk_weights = dbias = None
    if topk_weights is not None:
        assert row_sums is not None  # x was given
        if bias is not None:
            row_sums += bias_row_sums(problem, dy, bias, bounds, gather_indices)
        if gather_indices is not None:
            at = guarded(inverse_permutation(gather_indices), len(row_sums))
            row_sums = row_sums.at[at].get(mode="fill", fill_value=0)
        d_topk_weights = row_sums.reshape(topk_weights.shape).astype(topk_weights.dtype)
    if bias is not None:
        dbias = DBIAS(linear.how, Dbias(dy, bounds, gather_indices, topk_weights), problem=problem)
        dbias = dbias.reshape(bias.shape).astype(bias.dtype)
    d_routes = Routes(bounds=None, topk_weights=d_topk_weights)  # type: ignore[arg-type]
    return (Operands(dx, d_matrix, d_routes, dbias),)


_differentiable.defvjp(_forward, _backward)


def _routes(linear: Linear, order: Order) -> Routes:
    bounds = group_bounds(order.group_sizes, linear.problem.num_rows)
    return Routes(bounds, as_indices(order.gather_indices), order.topk_weights)


@functools.partial(jax.jit, static_argnums=0)
def compute_dx(linear: Linear, dy: jax.Array, w: jax.Array, order: Order) -> jax.Array:
    """Computes the gradient of x by DX alone."""
    operands = Dx(dy, w, **_routes(linear, order)._asdict())
    return DX(linear.how, operands, linear.configs.dx, problem=linear.problem).dx


@functools.partial(jax.jit, static_argnums=0)
def compute_dw(linear: Linear, x: jax.Array, dy: jax.Array, order: Order) -> jax.Array:
    """Computes the gradient of w by DW alone."""
    operands = Dw(x, dy, *_routes(linear, order))
    return DW(linear.how, operands, linear.configs.dw, problem=linear.problem)
