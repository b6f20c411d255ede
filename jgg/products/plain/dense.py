"""Dense products in plain JAX: of rows x [..., K] and one matrix, [K, N] or [N, K] by the problem's layout.

A matrix or bias may also have an axis of size 1 in front, like those of one group.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jgg.core.problem import GroupedGemmProblem
from jgg.products.low_rank import LowRankTerm


def forward(
    problem: GroupedGemmProblem, x: jax.Array, w: jax.Array, low_rank: LowRankTerm | None, bias: jax.Array | None
) -> jax.Array:
    """`x @ w`, plus a low-rank term's rows times its matrix, plus the bias; each is rounded to `problem.out_dtype`."""
    y = _multiply(problem, x, w)
    if low_rank is not None:
        y = y + _multiply(problem, low_rank.rows, low_rank.matrices)
    return y if bias is None else y + jnp.broadcast_to(bias.reshape(-1).astype(y.dtype), y.shape)


def dx(problem: GroupedGemmProblem, dy: jax.Array, w: jax.Array, low_rank: LowRankTerm | None) -> jax.Array:
    """`dy @ w^T`, plus a low-rank term's rows times its matrix transposed, in `problem.dtype`."""
    w_features = 1 if problem.w_layout == "ekn" else 0
    product = _dot(problem, dy, w, dy.ndim - 1, w_features)
    if low_rank is not None:
        product = product + _dot(problem, low_rank.rows, low_rank.matrices, dy.ndim - 1, w_features)
    return product


def dw(problem: GroupedGemmProblem, x: jax.Array, dy: jax.Array) -> jax.Array:
    """The sum over all rows of x^T dy [1, K, N] or dy^T x [1, N, K], in `problem.dw_dtype`."""
    left, right = (x, dy) if problem.w_layout == "ekn" else (dy, x)
    dtype = problem.dtype if problem.dw_dtype is None else problem.dw_dtype
    wider = dtype if jnp.dtype(dtype).itemsize > problem.dtype.itemsize else None
    numbers = (((0,), (0,)), ((), ()))
    product = jax.lax.dot_general(left, right, numbers, precision=problem.precision, preferred_element_type=wider)
    return product[None].astype(dtype)


def _multiply(problem: GroupedGemmProblem, x: jax.Array, w: jax.Array) -> jax.Array:
    """x times a matrix. One row is multiplied as two: alone, XLA for GPUs writes its products with w to memory."""
    w_features = 0 if problem.w_layout == "ekn" else 1
    rows = x.size // max(1, x.shape[-1])
    if rows != 1:
        return _dot(problem, x, w, x.ndim - 1, w_features, problem.out_dtype)
    two = jnp.pad(x.reshape(1, x.shape[-1]), ((0, 1), (0, 0)))
    return _dot(problem, two, w, 1, w_features, problem.out_dtype)[:1].reshape(*x.shape[:-1], -1)


def _dot(
    problem: GroupedGemmProblem, rows: jax.Array, w: jax.Array, axis: int, w_axis: int, dtype: np.dtype | None = None
) -> jax.Array:
    dtype = problem.dtype if dtype is None else dtype
    wider = dtype if dtype != problem.dtype else None
    w = (w if w.ndim == 2 else w[0]).astype(problem.dtype)
    numbers = (((axis,), (w_axis,)), ((), ()))
    return jax.lax.dot_general(rows, w, numbers, precision=problem.precision, preferred_element_type=wider)
