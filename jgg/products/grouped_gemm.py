"""`grouped_gemm` for checked arguments: a custom_vjp that computes y by FORWARD and gradients by DX, DW and DBIAS."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jgg.core.manual_axes import vary_over, varying_axes
from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import QuantizedArray
from jgg.core.schedule import GroupBounds, as_indices, group_bounds, group_of_rows, guarded, inverse_permutation
from jgg.launching.choice import How, is_plain_jax
from jgg.products.dbias import DBIAS, Dbias
from jgg.products.dw import DW, Dw
from jgg.products.dx import DX, Dx
from jgg.products.forward import FORWARD, Forward
from jgg.products.low_rank import Factors, LowRankTerm
from jgg.products.plain import grouped_gemm as plain


class Arrays(NamedTuple):
    """The arrays as `jgg.grouped_gemm` takes them; x and w are both quantized or neither is.

    Attributes:
      low_rank: the factors of a term beside w, which then has no gradient; None for a quantized x.
      group_offset: integer scalar or [1], index of the first group whose matrix is in w, as in `jgg.ragged_dot`.
    """

    x: jax.Array | QuantizedArray
    w: jax.Array | QuantizedArray
    group_sizes: jax.Array
    gather_indices: jax.Array | None = None
    topk_weights: jax.Array | None = None
    bias: jax.Array | None = None
    group_offset: jax.Array | None = None
    low_rank: Factors | None = None


class Hows(NamedTuple):
    """How each product is computed; each has its own configuration."""

    forward: How
    dx: How
    dw: How


def compute_grouped_gemm(problem: GroupedGemmProblem, hows: Hows, arrays: Arrays) -> jax.Array:
    """Computes y, which is differentiable in every array that is not quantized."""
    if isinstance(arrays.x, jax.Array) and not _is_plain(problem, hows.forward):
        # named out here and not inside `_compute`, where jax.debug_nans would report NaN in its rows of no group
        arrays = arrays._replace(x=checkpoint_name(arrays.x, "jgg_x"))
    return _compute(problem, hows, arrays)


def _is_plain(problem: GroupedGemmProblem, how: How) -> bool:
    """Whether a product is computed, and so differentiated, as plain JAX."""
    return problem.is_empty or is_plain_jax(how.implementation)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compute(problem: GroupedGemmProblem, hows: Hows, arrays: Arrays) -> jax.Array:
    problem, operands, factors = _operands(problem, arrays)
    if problem.is_quantized:
        return FORWARD(hows.forward, operands, problem=problem)
    if _is_plain(problem, hows.forward):
        return plain.grouped_gemm(problem, *_with_term(problem, hows, operands, factors))
    return _differentiable(problem, hows, operands, factors)


@functools.partial(jax.jit, static_argnums=(0, 1))
def compute_forward(problem: GroupedGemmProblem, how: How, arrays: Arrays) -> jax.Array:
    """Computes y by FORWARD alone, without the custom_vjp: its derivatives are computed in plain JAX."""
    problem, operands, _ = _operands(problem, arrays)
    return FORWARD(how, operands, problem=problem)


def _operands(problem: GroupedGemmProblem, arrays: Arrays) -> tuple[GroupedGemmProblem, Forward, Factors | None]:
    """FORWARD's problem, its operands without a term of low rank, and the term's factors.

    Quantized w is transposed to [E, N, K], since kernels read it along K.
    """
    x, w = arrays.x, arrays.w
    if isinstance(x, QuantizedArray) and isinstance(w, QuantizedArray):
        w = w if problem.w_layout == "enk" else w.mT
        x, w = jax.lax.stop_gradient((x, w))
        problem = problem.quantized
    axes = varying_axes(*jax.tree.leaves(arrays))
    x, w, group_sizes, gather_indices, topk_weights, bias, factors = jax.tree.map(
        functools.partial(vary_over, axes),
        (
            x,
            w,
            arrays.group_sizes,
            as_indices(arrays.gather_indices),
            arrays.topk_weights,
            arrays.bias,
            arrays.low_rank,
        ),
    )
    bounds = group_bounds(group_sizes, problem.num_rows, arrays.group_offset, problem.num_experts)
    return problem, Forward(x, w, bounds, gather_indices, topk_weights, bias), factors


def _with_term(problem: GroupedGemmProblem, hows: Hows, operands: Forward, factors: Factors | None) -> Forward:
    """The operands with x @ a of each row, [M, r] in expert order, and b; both in the dtype of x."""
    if factors is None:
        return operands
    a, b = (factor.astype(problem.dtype) for factor in factors)
    of_a = dataclasses.replace(_problems(problem, factors)[0], has_topk_weights=False)
    indices = operands.gather_indices if problem.permute_x else None
    of_rows = Forward(operands.x, a, operands.bounds, indices)
    rows = FORWARD(hows.forward._replace(config=None), of_rows, problem=of_a)
    return operands._replace(low_rank=LowRankTerm(rows, b))


def _problems(problem: GroupedGemmProblem, factors: Factors) -> tuple[GroupedGemmProblem, GroupedGemmProblem]:
    """The problems of x @ a, whose rows are in expert order, and of these rows @ b."""
    rank = factors.a.shape[1 if problem.w_layout == "enk" else 2]
    of_a = dataclasses.replace(
        problem, out_features=rank, permute_y=False, has_bias=False, out_dtype=problem.dtype, dw_dtype=factors.a.dtype
    )
    of_b = dataclasses.replace(problem, in_features=rank, permute_x=False, has_bias=False, dw_dtype=factors.b.dtype)
    return of_a, of_b


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(problem: GroupedGemmProblem, hows: Hows, operands: Forward, factors: Factors | None) -> jax.Array:
    return FORWARD(hows.forward, _with_term(problem, hows, operands, factors), problem=problem)


def _forward(
    problem: GroupedGemmProblem, hows: Hows, operands: Forward, factors: Factors | None
) -> tuple[jax.Array, tuple[Forward, Factors | None]]:
    operands = _with_term(problem, hows, operands, factors)
    return FORWARD(hows.forward, operands, problem=problem), (operands, factors)


def _backward(
    problem: GroupedGemmProblem, hows: Hows, residuals: tuple[Forward, Factors | None], dy: jax.Array
) -> tuple[Forward, Factors | None]:
    operands, factors = residuals
    x, w, bounds, gather_indices, topk_weights, bias, _ = operands
    if problem.dtype == jnp.float32:  # float32 holds the values of every dtype; 16-bit operands would round dy
        dy = dy.astype(problem.dtype)
    x_if_weighted = None if topk_weights is None else x
    term, d_factors = (None, None) if factors is None else _factors_backward(problem, hows, operands, factors, dy)
    of_dx = Dx(dy, w, bounds, x_if_weighted, gather_indices, topk_weights, term)
    dx, row_sums = DX(hows.dx, of_dx, problem=problem)
    dw: jax.Array | Any = None
    if factors is None:
        dw = DW(hows.dw, Dw(x, dy, bounds, gather_indices, topk_weights), problem=problem)
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
        how = hows.dw._replace(config=None)
        dbias = DBIAS(how, Dbias(dy, bounds, gather_indices, topk_weights), problem=problem)
        dbias = dbias.astype(bias.dtype)
    return Forward._make((dx, dw, None, None, d_topk_weights, dbias, None)), d_factors


def _factors_backward(
    problem: GroupedGemmProblem, hows: Hows, operands: Forward, factors: Factors, dy: jax.Array
) -> tuple[LowRankTerm, Factors]:
    """The term of dX, dy @ b of each row and a; and the gradients of the factors, in their dtypes."""
    x, _, bounds, gather_indices, topk_weights, _, term = operands
    assert term is not None
    of_a, of_b = _problems(problem, factors)
    of_rows = dataclasses.replace(of_b, has_topk_weights=False)
    indices = gather_indices if problem.permute_y else None
    how = hows.dx._replace(config=None)
    d_rows = DX(how, Dx(dy, term.matrices, bounds, gather_indices=indices), problem=of_rows).dx
    how = hows.dw._replace(config=None)
    da = DW(how, Dw(x, d_rows, bounds, gather_indices, topk_weights), problem=of_a)
    db = DW(how, Dw(term.rows, dy, bounds, gather_indices, topk_weights), problem=of_b)
    return LowRankTerm(d_rows, factors.a.astype(problem.dtype)), Factors(da, db)


_differentiable.defvjp(_forward, _backward)


def bias_row_sums(
    problem: GroupedGemmProblem, dy: jax.Array, bias: jax.Array, bounds: GroupBounds, gather_indices: jax.Array | None
) -> jax.Array:
    """For each row in expert order the sum of dy * bias[its expert], [M] float32, for the gradient of topk_weights."""
    experts = group_of_rows(bounds, problem.num_rows)
    in_group = experts < problem.num_experts
    experts = jnp.where(in_group, experts, 0)  # instead of letting `at` clip them, which checkify reports
    if problem.permute_y:
        dy = dy.at[guarded(gather_indices, problem.num_rows)].get(mode="fill", fill_value=0)
    sums = jnp.sum(dy.astype(jnp.float32) * bias[experts].astype(jnp.float32), axis=1)
    return jnp.where(in_group, sums, 0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def compute_dx(
    problem: GroupedGemmProblem,
    how: How,
    dy: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    gather_indices: jax.Array | None,
    topk_weights: jax.Array | None,
) -> jax.Array:
    """Computes the gradient of x by DX alone."""
    bounds = group_bounds(group_sizes, problem.num_rows)
    operands = Dx(dy, w, bounds, gather_indices=as_indices(gather_indices), topk_weights=topk_weights)
    return DX(how, operands, problem=problem).dx


@functools.partial(jax.jit, static_argnums=(0, 1))
def compute_dw(
    problem: GroupedGemmProblem,
    how: How,
    x: jax.Array,
    dy: jax.Array,
    group_sizes: jax.Array,
    gather_indices: jax.Array | None,
    topk_weights: jax.Array | None,
) -> jax.Array:
    """Computes the gradient of w by DW alone."""
    operands = Dw(x, dy, group_bounds(group_sizes, problem.num_rows), as_indices(gather_indices), topk_weights)
    return DW(how, operands, problem=problem)
