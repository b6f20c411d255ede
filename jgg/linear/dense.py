"""The linear layer with a single matrix for all rows."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgg.core.arguments import as_precision
from jgg.core.gpu_target import current_target
from jgg.core.manual_axes import alike
from jgg.core.matrix import Matrix
from jgg.core.problem import GroupedGemmProblem
from jgg.core.schedule import GroupBounds
from jgg.launching.choice import How, is_plain_jax
from jgg.launching.dense_choice import is_faster_by_kernels
from jgg.linear.differentiable import Operands, compute
from jgg.linear.linear import Linear, Routes


def dense(
    x: jax.Array,
    matrix: Matrix,
    bias: jax.Array | None = None,
    *,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """Computes `x @ (w + a b) + bias` in the dtype of x, differentiable in x and in the trained parts of the matrix.

    Args:
      x: float [..., K].
      matrix: one of `jgg.core.matrix`, with [K, N] instead of [E, K, N].
      bias: [N], or None.
      precision: for float32, as in `jgg.grouped_gemm`; None for the setting `jax.default_matmul_precision`.
      implementation: as in `jgg.grouped_gemm`; None uses the kernels where measurements found them faster than XLA.
      batch_invariant: with implementation None, use the kernels on every GPU. The order of their sums depends on K
        alone, so the bits of a row do not depend on the number of rows.

    Returns: [..., N].
    """
    linear = dense_layer(
        x,
        matrix,
        has_bias=bias is not None,
        precision=precision,
        implementation=implementation,
        batch_invariant=batch_invariant,
    )
    operands = dense_operands(linear, x, matrix, bias)
    y = compute(linear, operands)
    return y if linear.is_plain else y.reshape(*x.shape[:-1], y.shape[-1])


def dense_layer(
    x: jax.Array,
    matrix: Matrix,
    *,
    w_layout: str = "ekn",
    has_bias: bool = False,
    out_dtype: DTypeLike | None = None,
    dw_dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
    batch_invariant: bool = False,
) -> Linear:
    """The layer for x [..., K] and a matrix [K, N] or, with "enk", [N, K].

    Its result has `out_dtype`, by default the dtype of x, and dw has `dw_dtype`, by default the dense weights' dtype.
    """
    if dw_dtype is None:
        dw_dtype = x.dtype if matrix.dense is None else matrix.dense.dtype
    in_features, out_features = matrix.shape if w_layout == "ekn" else matrix.shape[::-1]
    problem = GroupedGemmProblem(
        num_rows=x.size // max(1, in_features),
        num_experts=1,
        in_features=in_features,
        out_features=out_features,
        topk=1,
        dtype=x.dtype,
        out_dtype=jnp.dtype(x.dtype if out_dtype is None else out_dtype),
        w_layout=w_layout,
        has_bias=has_bias,
        precision=as_precision(precision),
        dw_dtype=jnp.dtype(dw_dtype),
        is_dense=True,
    )
    target = current_target()
    if implementation is None and not batch_invariant and not is_plain_jax(None):
        implementation = None if is_faster_by_kernels(problem, target, has_term=matrix.factors is not None) else "xla"
    if problem.is_symbolic:
        implementation = "xla"
    return Linear(problem, How(implementation, target))


def dense_operands(linear: Linear, x: jax.Array, matrix: Matrix, bias: jax.Array | None = None) -> Operands:
    """The operands of a `dense_layer`: all rows are in one group. Only kernels need x as a matrix [M, K].

    If one operand varies over a mesh axis, all of them are made to.
    """
    problem = linear.problem
    rows_of_group = jnp.full(1, problem.num_rows, jnp.int32)
    bounds = GroupBounds(jnp.zeros(1, jnp.int32), rows_of_group, rows_of_group)
    rows = x if linear.is_plain else x.reshape(problem.num_rows, problem.in_features)
    rows, matrix, bias = alike((rows, matrix, bias))
    return Operands(rows, matrix, Routes(bounds), bias)
