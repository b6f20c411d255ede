"""The terms of low rank of an expert MLP: what they add to its products, and the gradients of their factors."""

import dataclasses

import jax
import jax.numpy as jnp

from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import QuantizedArray
from jgg.experts.mlp import Mlp, Operands
from jgg.products.dw import DW, Dw
from jgg.products.dx import DX, Dx
from jgg.products.forward import FORWARD, Forward
from jgg.products.low_rank import Factors, LowRankTerm


def term_of_up(mlp: Mlp, operands: Operands) -> LowRankTerm | None:
    """What is added to the pre-activation: x @ a of each row, [M, r], and b."""
    if operands.low_rank_gate_up is None:
        return None
    a, b = _cast(operands.low_rank_gate_up, operands.x)
    of_rows = _with_a(mlp, mlp.of_up, a)
    rows = Forward(operands.x, a, mlp.bounds(operands.group_sizes), operands.gather_indices)
    return LowRankTerm(FORWARD(mlp.how, rows, problem=of_rows), b)


def term_of_down(mlp: Mlp, operands: Operands, hidden: jax.Array | QuantizedArray) -> LowRankTerm | None:
    """What is added to the rows of y before they are scaled: hidden @ a, [M, r], and b."""
    if operands.low_rank_down is None:
        return None
    a, b = _cast(operands.low_rank_down, operands.x)
    if isinstance(hidden, QuantizedArray):
        hidden = hidden.dequantize(operands.x.dtype)
    rows = Forward(hidden, a, mlp.bounds(operands.group_sizes))
    return LowRankTerm(FORWARD(mlp.how, rows, problem=_with_a(mlp, mlp.of_down, a)), b)


def term_of_z(mlp: Mlp, operands: Operands, dy: jax.Array) -> LowRankTerm | None:
    """What is added to z = dy @ down^T: dy @ b^T of each row, [M, r], and a."""
    if operands.low_rank_down is None:
        return None
    a, b = _cast(operands.low_rank_down, operands.x)
    of_rows = dataclasses.replace(mlp.transposed_down, out_features=_rank(mlp, a))
    rows = Forward(dy, b, mlp.bounds(operands.group_sizes), operands.gather_indices)
    return LowRankTerm(FORWARD(mlp.how, rows, problem=of_rows), a)


def term_of_dx(mlp: Mlp, operands: Operands, d_pre_activation: jax.Array) -> LowRankTerm | None:
    """What is added to the rows of dx: d pre-activation @ b^T, [M, r], and a."""
    if operands.low_rank_gate_up is None:
        return None
    a, b = _cast(operands.low_rank_gate_up, operands.x)
    rows = Dx(d_pre_activation, b, mlp.bounds(operands.group_sizes))
    return LowRankTerm(DX(mlp.how, rows, problem=_in_expert_order(mlp, a)).dx, a)


def gradients_of_gate_up(
    mlp: Mlp, operands: Operands, rows: jax.Array | None, term_dx: LowRankTerm | None, d_pre_activation: jax.Array
) -> Factors | None:
    """The gradients of a and b, in their dtypes.

    Args:
      rows: those of `term_of_up`.
      term_dx: the result of `term_of_dx`.
    """
    factors = operands.low_rank_gate_up
    if factors is None or rows is None or term_dx is None:
        return None
    bounds = mlp.bounds(operands.group_sizes)
    of_a = dataclasses.replace(_with_a(mlp, mlp.of_up, factors.a), dw_dtype=factors.a.dtype)
    of_b = dataclasses.replace(_in_expert_order(mlp, factors.a), dw_dtype=factors.b.dtype)
    return Factors(
        DW(mlp.how, Dw(operands.x, term_dx.rows, bounds, operands.gather_indices), problem=of_a),
        DW(mlp.how, Dw(rows, d_pre_activation, bounds), problem=of_b),
    )


def gradients_of_down(
    mlp: Mlp, operands: Operands, rows: jax.Array | None, term_z: LowRankTerm | None, hidden: jax.Array, dy: jax.Array
) -> Factors | None:
    """The gradients of a and b, in their dtypes.

    Args:
      rows: those of `term_of_down`.
      term_z: the result of `term_of_z`.
      hidden: scaled by the rows' weights if `operands.scales_hidden`.
    """
    factors = operands.low_rank_down
    if factors is None or rows is None or term_z is None:
        return None
    bounds, weights = mlp.bounds(operands.group_sizes), mlp.row_weights(operands)[:, None]

    def scaled(rows: jax.Array) -> jax.Array:
        return (weights * rows.astype(jnp.float32)).astype(rows.dtype)

    rows_of_z = term_z.rows if operands.scales_hidden else scaled(term_z.rows)
    of_a = dataclasses.replace(_with_a(mlp, mlp.of_down, factors.a), dw_dtype=factors.a.dtype)
    of_b = dataclasses.replace(mlp.transposed_down, out_features=_rank(mlp, factors.a), dw_dtype=factors.b.dtype)
    return Factors(
        DW(mlp.how, Dw(hidden, rows_of_z, bounds), problem=of_a),
        DW(mlp.how, Dw(dy, scaled(rows), bounds, operands.gather_indices), problem=of_b),
    )


def _cast(factors: Factors, x: jax.Array) -> Factors:
    return Factors(factors.a.astype(x.dtype), factors.b.astype(x.dtype))


def _rank(mlp: Mlp, a: jax.Array) -> int:
    return a.shape[1 if mlp.of_up.w_layout == "enk" else 2]


def _with_a(mlp: Mlp, problem: GroupedGemmProblem, a: jax.Array) -> GroupedGemmProblem:
    """The problem of a product with a in place of the weights."""
    return dataclasses.replace(problem, out_features=_rank(mlp, a), has_bias=False)


def _in_expert_order(mlp: Mlp, a: jax.Array) -> GroupedGemmProblem:
    """The problem of the product of rows of r features, in expert order, with b of gate and up."""
    return dataclasses.replace(mlp.of_up, in_features=_rank(mlp, a), permute_x=False, has_bias=False, num_tokens=None)
