"""Computes grouped_gemm in plain differentiable JAX on every platform, by the products of `plain.multilinear`."""

from typing import Any

import jax
import jax.numpy as jnp

from jgg.core.problem import GroupedGemmProblem
from jgg.core.schedule import GroupBounds, Rows, between_groups, guarded
from jgg.products.plain.multilinear import rows_dot


def grouped_gemm(
    problem: GroupedGemmProblem, x, w, bounds: GroupBounds, gather_indices, topk_weights, bias, low_rank=None
):
    """y of `problem.y_shape`, differentiable to any order in x, w, topk_weights and bias.

    w may have another float dtype than x; each matrix is then rounded to the dtype of x where it is multiplied.
    """
    options = {
        "scales": row_scales(problem, bounds, gather_indices, topk_weights),
        "write_at": y_rows(problem, gather_indices),
        "adds": problem.combine_y,
        "shape": problem.y_shape,
        "transpose_w": problem.w_layout == "enk",
        "precision": problem.precision,
        "out_dtype": problem.out_dtype if low_rank is None else jnp.float32,
    }
    rows, w_dtype = Rows(x, x_rows(problem, gather_indices)), None if problem.is_quantized else problem.dtype
    y = rows_dot(rows, w, bounds, bias=bias, w_dtype=w_dtype, **options)
    if low_rank is None:
        return y
    return (y + rows_dot(Rows(low_rank.rows), low_rank.matrices, bounds, **options)).astype(problem.out_dtype)


def x_rows(problem: GroupedGemmProblem, gather_indices) -> jax.Array | Any:
    """For each row in expert order the row of x, past the end for a bad index; None if x is in expert order."""
    return _tokens(problem, gather_indices) if problem.permute_x else None


def _tokens(problem, gather_indices):
    return guarded(gather_indices, problem.num_positions) // problem.topk


def y_rows(problem: GroupedGemmProblem, gather_indices) -> jax.Array | Any:
    """For each row in expert order the row of y, past the end for a bad index; None if y is in expert order."""
    if problem.combine_y:
        return _tokens(problem, gather_indices)
    return guarded(gather_indices, problem.num_rows) if problem.permute_y else None


def row_scales(problem: GroupedGemmProblem, bounds: GroupBounds, gather_indices, topk_weights) -> jax.Array | Any:
    """The weight of each row, float32 [M], zero for a bad index and for a row of no group; None without weights."""
    if topk_weights is None:
        return None
    scales = topk_weights.reshape(-1)
    if gather_indices is not None:
        at = guarded(gather_indices, problem.num_positions)
        scales = scales.at[at].get(mode="fill", fill_value=0)
    # jax.debug_nans also reports a NaN that is only kept for a derivative and reaches no result
    return jnp.where(between_groups(bounds, problem.num_rows), scales, 0).astype(jnp.float32)
