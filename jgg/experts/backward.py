"""The backward pass of the expert MLP: gradients from what the forward pass kept."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgg.core.matrix import Factors, Matrix
from jgg.core.quantized import QuantizedArray
from jgg.core.schedule import between_groups, inverse_permutation
from jgg.experts.fp8_exchange import beside_quantization, sent
from jgg.experts.mlp import MoeMlp, Operands
from jgg.linear import layer
from jgg.linear.linear import Routes, Rows
from jgg.primitives.barrier import barrier
from jgg.products.activate import ACTIVATE_BACKWARD, ActivateBackward, ActivationGradients, Hidden
from jgg.products.combine import COMBINE, Combine, dense_rows
from jgg.products.dbias import DBIAS, Dbias, bias_row_sums
from jgg.products.plain import rows as plain


class Kept(NamedTuple):
    """What the forward pass computes for the backward pass.

    Attributes:
      pre_activation: [M, 2 * I] or, quantized, [M, 2, I]; None without a backward pass.
      rows_up, rows_down: x @ a and hidden @ a, [M, r]; None without factors.
    """

    pre_activation: jax.Array | QuantizedArray | None
    rows_up: jax.Array | None
    rows_down: jax.Array | None


def _restored(mlp: MoeMlp, operands: Operands, dy: jax.Array) -> tuple[Operands, jax.Array]:
    """What the backward pass reads.

    The barrier keeps XLA from dequantizing weights once for both passes, which would keep them dense. Only scales are
    behind it: XLA copies whatever a barrier takes out of the stacked weights of all layers.
    """
    gate_up, down = operands.gate_up, operands.down
    if mlp.up.recipe is None and (gate_up.is_quantized or down.is_quantized):
        scales = [matrix.straight and matrix.straight.scales for matrix in (gate_up, down)]
        (scales_up, scales_down), dy = barrier((scales, dy))
        gate_up, down = gate_up.with_scales(scales_up), down.with_scales(scales_down)
    gate_up, down = layer.restored(mlp.up, gate_up), layer.restored(mlp.down, down)
    return operands._replace(gate_up=gate_up, down=down), dy


def _activation_backward(
    mlp: MoeMlp, operands: Operands, routes: Routes, weights: jax.Array, kept: Kept, dy: Rows
) -> tuple[ActivationGradients, jax.Array | None]:
    """The gradient of the pre-activation, hidden features, and the sums that the router's gradient needs.

    With weights p and z = dy @ down^T: d hidden = p * z and dp = hidden . z, so no product has to be kept. Also returns
    the rows dy @ b of w_down's factors, or None.
    """
    down = operands.down.of_transposed_layer
    if operands.exchange is not None:
        dy, down = beside_quantization(mlp.transposed_down, dy, down)
    z, d_rows = layer.forward(mlp.transposed_down, dy, down, routes)
    stored_as = mlp.transposed_down.row_format
    in_group = between_groups(routes.bounds, mlp.up.problem.num_rows) if stored_as is None else None
    activated = ActivateBackward(kept.pre_activation, z, weights, in_group)
    hidden = Hidden(mlp.activation, mlp.interleaved, stored_as=stored_as)
    gradients = ACTIVATE_BACKWARD(mlp.how, activated, hidden=hidden, scale_hidden=operands.scales_hidden)
    return gradients, d_rows


def _factors_of_down(
    mlp: MoeMlp,
    operands: Operands,
    routes: Routes,
    weights: jax.Array,
    kept: Kept,
    d_rows: jax.Array | None,
    hidden: jax.Array,
    dy: Rows,
) -> Factors | None:
    """The gradients of w_down's factors, computed by the transposed layer, whose x is dy in token order.

    Args:
      d_rows: dy @ b.
      hidden: scaled by the rows' weights if `operands.scales_hidden`.
    """
    if kept.rows_down is None or d_rows is None:
        return None

    def scaled(rows: jax.Array) -> jax.Array:
        return (weights[:, None] * rows.astype(jnp.float32)).astype(rows.dtype)

    d_rows = d_rows if operands.scales_hidden else scaled(d_rows)
    matrix, rows = operands.down.of_transposed_layer, scaled(kept.rows_down)
    d_factors = layer.factor_gradients(mlp.transposed_down, dy, hidden, matrix, routes, d_rows, rows)
    return Matrix(factors=d_factors).of_transposed_layer.factors


def _down_backward(
    mlp: MoeMlp, b_down: jax.Array | None, routes: Routes, weights: jax.Array, hidden: jax.Array, dy: Rows
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | float]:
    """dw_down, db_down if there is a b_down, and what b_down adds to the sums for the router's gradient."""
    hidden, dy = barrier((hidden, dy))  # rows of dy are copied when z is no longer needed
    if b_down is None:
        return layer.weight_gradient(mlp.transposed_down, dy, hidden, routes), None, 0.0
    dtype = mlp.up.problem.dtype
    if routes.gather_indices is None:
        dy_rows = dense_rows(mlp.how, dy, dtype)
    else:
        at = plain.x_rows(mlp.up.problem, routes.gather_indices)
        assert at is not None
        dy_rows = COMBINE(mlp.how, Combine(dy, at), topk=1, dtype=dtype)
    bounds = routes.bounds
    dw_down = layer.weight_gradient(mlp.weighted_down, hidden, dy_rows, Routes(bounds, topk_weights=weights))
    db_down = DBIAS(mlp.how, Dbias(dy_rows, bounds, topk_weights=weights), problem=mlp.weighted_down.problem)
    return dw_down, db_down.astype(b_down.dtype), bias_row_sums(mlp.down.problem, dy_rows, b_down, bounds, None)


@jax.named_scope("jgg.moe_mlp.backward")
def compute_gradients(mlp: MoeMlp, residuals: tuple[Operands, Kept], dy: jax.Array) -> tuple[Operands]:
    """All gradients; JAX drops unused ones as dead code, together with their products."""
    operands, kept = residuals
    operands, dy = _restored(mlp, operands, dy)
    x, b_gate_up, topk_weights, routes = operands.x, operands.b_gate_up, operands.topk_weights, mlp.routes(operands)
    weights = plain.row_scales(mlp.up.problem, routes.bounds, routes.gather_indices, topk_weights)
    assert weights is not None

    dy, exchange = dy.astype(mlp.up.problem.dtype), operands.exchange
    dy_rows = dy if exchange is None else sent(mlp.transposed_down, dy, exchange)
    gradients, d_rows_down = _activation_backward(mlp, operands, routes, weights, kept, dy_rows)
    d_factors_down = _factors_of_down(mlp, operands, routes, weights, kept, d_rows_down, gradients.hidden, dy_rows)
    dw_down, db_down, sums = _down_backward(mlp, operands.b_down, routes, weights, gradients.hidden, dy_rows)
    d_weights = gradients.row_sums + sums
    # runs one product after the other, the largest last, when memory that only the others need is free again
    d_pre_activation, quantized, dw_down = barrier((gradients.d_pre_activation, gradients.quantized, dw_down))
    (dx, _), d_rows_up = layer.dx(mlp.up, d_pre_activation, operands.gate_up, routes, quantized_dy=quantized)
    rows = kept.rows_up, d_rows_up
    d_factors_up = layer.factor_gradients(mlp.up, x, d_pre_activation, operands.gate_up, routes, *rows)
    d_pre_activation, dx, x = barrier((d_pre_activation, dx, x))  # nor are rows of x copied early
    dw_gate_up = layer.weight_gradient(mlp.sparing_up, x, d_pre_activation, routes)
    db_gate_up = None
    if b_gate_up is not None:
        of_bias = Dbias(d_pre_activation, routes.bounds, routes.gather_indices)
        db_gate_up = DBIAS(mlp.sparing_up.how, of_bias, problem=mlp.up.problem).astype(b_gate_up.dtype)

    if routes.gather_indices is not None:
        row_of = inverse_permutation(routes.gather_indices, topk_weights.size)
        # a choice without a row has no gradient
        d_weights = jnp.where(row_of >= 0, d_weights[jnp.maximum(row_of, 0)], 0)
    d_weights = d_weights.reshape(topk_weights.shape).astype(topk_weights.dtype)
    d_gate_up, d_down = Matrix(dense=dw_gate_up, factors=d_factors_up), Matrix(dense=dw_down, factors=d_factors_down)
    none: Any = None  # integers have no gradient
    gradients_of = Operands(
        x=dx if exchange is None else exchange.back(dx),
        gate_up=d_gate_up,
        down=d_down,
        b_gate_up=db_gate_up,
        b_down=db_down,
        topk_weights=d_weights,
        group_sizes=none,
        gather_indices=none,
    )
    return (gradients_of,)
