"""Dense layers that share x, such as the queries, keys and values of attention. With LoRA, x is read once for all a.

The rows x @ a of all layers are one product, and so are the gradients of all a. The gradient of x is one product too:
the dy of all layers follow one another along the reduced axis, since a sum of separate products would be read and
written once per layer. Three layers with few rows, as in decoding, are one kernel, which adds their terms too.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgg.core.manual_axes import alike
from jgg.core.matrix import Factors, Matrix
from jgg.linear import layer
from jgg.linear.dense import dense, dense_layer, dense_operands
from jgg.linear.linear import Linear, Routes
from jgg.primitives.barrier import barrier
from jgg.products.dbias import DBIAS, Dbias
from jgg.products.dx import DX, Dx
from jgg.products.low_rank import LowRankTerm
from jgg.products.project_few import MOST_ROWS, MOST_ROWS_WITH_TERMS, PROJECT_FEW, Projected, ProjectFew

Layers = tuple[Linear, ...]
_COLUMNS = 16


class Operands(NamedTuple):
    """The arrays of several layers.

    Attributes:
      x: [M, K].
      matrices: [K, N] for each layer, with factors.
      biases: [N] or None for each layer.
      routes: all rows are in one group.
    """

    x: jax.Array
    matrices: tuple[Matrix, ...]
    biases: tuple[jax.Array | None, ...]
    routes: Routes


def dense_several(
    x: jax.Array,
    matrices: Sequence[Matrix],
    biases: Sequence[jax.Array | None],
    *,
    implementation: str | None = None,
    batch_invariant: bool = False,
) -> tuple[jax.Array, ...]:
    """Computes `dense(x, matrix, bias)` for each matrix and bias.

    Args:
      x, implementation, batch_invariant: as in `dense`.
      matrices, biases: one of each per layer.

    Returns: [..., N] for each layer.
    """
    pairs = list(zip(matrices, biases, strict=True))
    how: Any = {"implementation": implementation, "batch_invariant": batch_invariant}
    layers = tuple(dense_layer(x, matrix, has_bias=bias is not None, **how) for matrix, bias in pairs)
    if _are_few(layers, matrices, biases):
        operands = ProjectFew(x.reshape(-1, x.shape[-1]), *(matrix.dense for matrix in matrices), *biases)
        return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in _few(layers, alike(operands)))
    if any(matrix.factors is None for matrix in matrices):
        return tuple(dense(x, matrix, bias, **how) for matrix, bias in pairs)
    if _are_few_with_terms(layers, matrices, biases):
        layers = tuple(dataclasses.replace(own, how=layers[0].how) for own in layers)
    if any(own.is_plain for own in layers):
        return tuple(dense(x, matrix, bias, **how) for matrix, bias in pairs)
    each = [dense_operands(own, x, *pair) for own, pair in zip(layers, pairs, strict=True)]
    rows, own_matrices, routes, own_biases = zip(*each, strict=True)
    results = _differentiable(layers, alike(Operands(rows[0], own_matrices, own_biases, routes[0])))
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in results)


def _are_few(layers: Layers, matrices: Sequence[Matrix], biases: Sequence[jax.Array | None]) -> bool:
    """Whether PROJECT_FEW takes the layers, and kernels would also compute the first one alone."""
    problem = layers[0].problem
    has_three = _are_three(layers, matrices, biases) and 0 < problem.num_rows <= MOST_ROWS
    return has_three and all(own.factors is None and own.dense.dtype == problem.dtype for own in matrices)


def _are_few_with_terms(layers: Layers, matrices: Sequence[Matrix], biases: Sequence[jax.Array | None]) -> bool:
    """The same of layers that all have LoRA; in float32 a term takes more registers than there are."""
    problem = layers[0].problem
    is_few = problem.dtype.itemsize == 2 and 0 < problem.num_rows <= MOST_ROWS_WITH_TERMS
    return is_few and _are_three(layers, matrices, biases)


def _are_three(layers: Layers, matrices: Sequence[Matrix], biases: Sequence[jax.Array | None]) -> bool:
    """Whether there are three dense matrices, all with biases or all without, and kernels compute the first layer."""
    have_same = len({bias is None for bias in biases}) == 1
    are_dense = all(matrix.dense is not None for matrix in matrices)
    return len(layers) == 3 and have_same and are_dense and not layers[0].is_plain


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _few(layers: Layers, operands: ProjectFew) -> Projected:
    return PROJECT_FEW(layers[0].how, operands)


def _few_forward(layers: Layers, operands: ProjectFew) -> tuple[Projected, ProjectFew]:
    return _few(layers, operands), operands


def _few_backward(layers: Layers, operands: ProjectFew, gradients: Projected) -> tuple[ProjectFew]:
    def one_by_one(operands: ProjectFew) -> Projected:
        x, *arrays = operands
        pairs = zip(arrays[:3], arrays[3:6], strict=True)
        return Projected(*(dense(x, Matrix(dense=w), bias, implementation="xla") for w, bias in pairs))

    return jax.vjp(one_by_one, operands)[1](gradients)


_few.defvjp(_few_forward, _few_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(layers: Layers, operands: Operands) -> tuple[jax.Array, ...]:
    return _forward(layers, operands)[0]


class _Residuals(NamedTuple):
    """The operands with prepared matrices, and the rows x @ a [M, sum of r] of all layers side by side."""

    operands: Operands
    rows: jax.Array


def _forward(layers: Layers, operands: Operands) -> tuple[tuple[jax.Array, ...], _Residuals]:
    x, matrices, biases, routes = operands
    matrices = tuple(layer.prepared(own, matrix, keeps=True) for own, matrix in zip(layers, matrices, strict=True))
    rows = layer.rows_of_a(layers[0], x, _joined_a(matrices), routes)
    if _are_few_with_terms(layers, matrices, biases):
        low: list[Any] = [rows, *(factors.b.astype(rows.dtype) for factors in _factors(matrices))]
        few = ProjectFew(x, *(own.dense for own in matrices), *biases, *low)
        return tuple(PROJECT_FEW(layers[0].how, few)), _Residuals(operands._replace(matrices=matrices), barrier(rows))
    results = (
        layer.forward(own, x, matrix, routes, bias, rows)
        for own, matrix, bias in zip(layers, _with_joined(matrices), biases, strict=True)
    )
    y, (kept, *_) = zip(*results, strict=True)  # all keep the same rows
    return y, _Residuals(operands._replace(matrices=matrices), kept)


def _backward(layers: Layers, residuals: _Residuals, gradients: tuple[jax.Array, ...]) -> tuple[Operands]:
    """All gradients; JAX drops unused ones as dead code, together with their products."""
    (x, matrices, biases, routes), rows = residuals
    each = list(zip(layers, gradients, _factors(matrices), strict=True))
    d_rows = jnp.concatenate([layer.rows_of_b(own, dy, of_own.b, routes) for own, dy, of_own in each], axis=1)
    dx = _gradient_of_x(layers, gradients, matrices, d_rows, routes)
    joined_a = _joined_a(matrices)
    da = layer.gradient_of_a(layers[0], x, d_rows, joined_a, routes)
    d_matrices = []
    for (own, dy, of_own), joined, at in zip(each, _factors(_with_joined(matrices)), _places(matrices), strict=True):
        db = layer.gradient_of_b(own, rows, dy, joined.b, routes)[at]
        d_factors = Factors(da[:, at].astype(of_own.a.dtype), db)
        d_matrices.append(Matrix(dense=layer.weight_gradient(own, x, dy, routes), factors=d_factors))
    d_biases = tuple(
        None if bias is None else _sum_of_rows(own, dy, routes).astype(bias.dtype)
        for own, dy, bias in zip(layers, gradients, biases, strict=True)
    )
    none = Routes(bounds=None)  # type: ignore[arg-type]
    return (Operands(dx, tuple(d_matrices), d_biases, none),)


_differentiable.defvjp(_forward, _backward)


def _gradient_of_x(
    layers: Layers, gradients: tuple[jax.Array, ...], matrices: tuple[Matrix, ...], d_rows: jax.Array, routes: Routes
) -> jax.Array:
    """The sum of dy @ (w + a b)^T over the layers: the first layer's product, with everything else as its term."""
    dtype, (dy, *others) = layers[0].problem.dtype, gradients
    first, *further = (matrix.dense for matrix in matrices)
    rows, reduced = _side_by_side(*others, d_rows), _side_by_side(*further, _joined_a(matrices).astype(dtype))
    operands = Dx(dy, first[None], routes.bounds, low_rank=LowRankTerm(rows, reduced[None]))
    return DX(layers[0].how, operands, problem=layers[0].problem).dx


def _side_by_side(*arrays: jax.Array) -> jax.Array:
    """All columns, padded with zeros to a multiple of _COLUMNS, so that rows are aligned and split evenly."""
    joined = jnp.concatenate(arrays, axis=1)
    return jnp.pad(joined, ((0, 0), (0, -joined.shape[1] % _COLUMNS)))


def _sum_of_rows(own: Linear, dy: jax.Array, routes: Routes) -> jax.Array:
    return DBIAS(own.how, Dbias(dy, routes.bounds), problem=own.problem).reshape(-1)


def _factors(matrices: Sequence[Matrix]) -> tuple[Factors, ...]:
    return tuple(matrix.factors for matrix in matrices if matrix.factors is not None)


def _joined_a(matrices: Sequence[Matrix]) -> jax.Array:
    """The a of all layers side by side, [K, sum of r], in their dtype, or in float32 if their dtypes differ."""
    each = [own.a for own in _factors(matrices)]
    dtype = each[0].dtype if len({a.dtype for a in each}) == 1 else jnp.float32
    return jnp.concatenate([a.astype(dtype) for a in each], axis=1)


def _places(matrices: Sequence[Matrix]) -> list[slice]:
    """The columns of each layer's a in the joined a."""
    ends = list(itertools.accumulate(own.a.shape[1] for own in _factors(matrices)))
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _with_joined(matrices: Sequence[Matrix]) -> tuple[Matrix, ...]:
    """The matrices with the a of all layers, and with zeros in b for the other layers' a.

    This lets a layer read the rows x @ a of all layers without copying a slice. It costs nothing, since a product's
    step has more columns than all these rows.
    """
    joined, places = _joined_a(matrices), _places(matrices)
    missing = ((at.start, joined.shape[1] - at.stop) for at in places)
    return tuple(
        matrix._replace(factors=Factors(joined, jnp.pad(own.b, (pads, (0, 0)))))
        for matrix, own, pads in zip(matrices, _factors(matrices), missing, strict=True)
    )
