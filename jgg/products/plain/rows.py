"""Which rows of x and y a row in expert order reads and writes in plain JAX, and how it is scaled."""

import jax
import jax.numpy as jnp

from jgg.core.problem import GroupedGemmProblem
from jgg.core.schedule import GroupBounds, between_groups, guarded


def x_rows(problem: GroupedGemmProblem, gather_indices: jax.Array | None) -> jax.Array | None:
    """For each row in expert order the row of x, past the end for a bad index; None if x is in expert order."""
    return _tokens(problem, gather_indices) if problem.permute_x else None


def _tokens(problem: GroupedGemmProblem, gather_indices: jax.Array | None) -> jax.Array:
    assert gather_indices is not None  # a problem that permutes has some
    return guarded(gather_indices, problem.num_positions) // problem.topk


def y_rows(problem: GroupedGemmProblem, gather_indices: jax.Array | None) -> jax.Array | None:
    """For each row in expert order the row of y, past the end for a bad index; None if y is in expert order."""
    if problem.combine_y:
        return _tokens(problem, gather_indices)
    if not problem.permute_y:
        return None
    assert gather_indices is not None
    return guarded(gather_indices, problem.num_rows)


def row_scales(
    problem: GroupedGemmProblem,
    bounds: GroupBounds,
    gather_indices: jax.Array | None,
    topk_weights: jax.Array | None,
) -> jax.Array | None:
    """The weight of each row, float32 [M], zero for a bad index and for a row of no group; None without weights."""
    if topk_weights is None:
        return None
    scales = topk_weights.reshape(-1)
    if gather_indices is not None:
        at = guarded(gather_indices, problem.num_positions)
        scales = scales.at[at].get(mode="fill", fill_value=0)
    # jax.debug_nans also reports a NaN that is only kept for a derivative and reaches no result
    return jnp.where(between_groups(bounds, problem.num_rows), scales, 0).astype(jnp.float32)
