"""The expert MLP of a mixture-of-experts layer: one custom_vjp that keeps x and the pre-activation."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jgg.activations import ActivationLike
from jgg.core.arguments import as_array
from jgg.core.manual_axes import vary_over, varying_axes
from jgg.core.quantized import QuantizedArray, QuantizedWeights
from jgg.core.schedule import as_indices, inverse_permutation, saturated_int32
from jgg.experts import low_rank
from jgg.experts.arguments import ExpertWeights, MlpOptions, checked_routing, checked_terms, checked_weights, with_terms
from jgg.experts.in_dtype import InDtype
from jgg.experts.in_fp8 import InFp8
from jgg.experts.mlp import Mlp, Operands, problems
from jgg.fp8 import Fp8
from jgg.launching.choice import how_of
from jgg.low_rank import LowRank
from jgg.primitives.barrier import barrier
from jgg.products.combine import COMBINE, Combine
from jgg.products.dbias import DBIAS, Dbias
from jgg.products.dw import DW, Dw
from jgg.products.grouped_gemm import bias_row_sums
from jgg.products.plain import grouped_gemm as plain
from jgg.router.routing import Routing


def moe_mlp(
    x: ArrayLike,
    w_gate_up: ArrayLike | QuantizedArray | QuantizedWeights,
    w_down: ArrayLike | QuantizedArray | QuantizedWeights,
    routing: Routing,
    *,
    activation: ActivationLike = "swiglu",
    interleaved: bool = False,
    b_gate_up: ArrayLike | None = None,
    b_down: ArrayLike | None = None,
    low_rank_gate_up: LowRank | None = None,
    low_rank_down: LowRank | None = None,
    w_layout: str = "enk",
    precision: jax.lax.PrecisionLike = None,
    quantization: Fp8 | None = None,
    implementation: str | None = None,
    spare_sms: int = 0,
    expected_rows: int | None = None,
    residual_names: Mapping[str, str] | None = None,
) -> jax.Array:
    """Applies the MLPs of each token's experts to the token, and adds up the results with the routing's weights.

    Computes `y[t] = sum over j of topk_weights[t, j] * MLP_e(x[t])` with e the token's j-th expert and, for "swiglu",
    `MLP_e(x) = (silu(x @ gate_e) * (x @ up_e)) @ down_e`. Differentiable in x, the weights, the biases and
    `routing.topk_weights`.

    For the backward pass it keeps, beside its arguments, the pre-activation [M, 2 * I] and 8 bytes a row: neither the
    gathered x, nor the activation, nor the down product. `jax.checkpoint` policies know the pre-activation as
    "jgg_pre_activation" and x as "jgg_x".

    Weights may have another float dtype than x, as when parameters are float32 and tokens bfloat16. They are cast to
    the dtype of x once for both passes, and policies know what was cast as "jgg_weights"; their gradients are stored in
    the dtype of the weights, from the float32 sums.

    Shapes: T tokens, H features, I hidden features of an expert, E experts, k choices, M = T * k.

    Args:
      x: [T, H].
      w_gate_up: gate and up side by side: [E, 2 * I, H] or, with `w_layout="ekn"`, [E, H, 2 * I]; for an activation
        that is not gated, I instead of 2 * I. w_gate_up and w_down are each float32, bfloat16 or float16.
      w_down: [E, H, I] or, with `w_layout="ekn"`, [E, I, H]. w_gate_up and w_down may each be a QuantizedArray, which
        gets no gradient and, without `quantization`, is dequantized to the dtype of x first. With `quantization`, they
        may also be the result of `Fp8.weights`.
      routing: the Routing of the T tokens that `route` returns. Its gather_indices may also be fewer than M: choices
        that they do not name add nothing. They may be None if k is 1 and x is in expert order; then y is too.
      activation: "swiglu", "geglu", "geglu_tanh", "reglu" or "clamped_swiglu", which are gated; "ungated_silu",
        "ungated_gelu", "ungated_gelu_tanh", "ungated_relu" or "ungated_relu_squared", which are not; an Activation; or
        a function such as `jax.nn.silu` for `function(gate) * up`. One function object is traced once; a new lambda in
        each call is traced in each call.
      interleaved: the features of w_gate_up are gate 0, up 0, gate 1, up 1, ... rather than side by side.
      b_gate_up: [E, 2 * I], added to the product with w_gate_up.
      b_down: [E, H], added to the product with w_down.
      low_rank_gate_up, low_rank_down: LoRA's terms beside w_gate_up and w_down, each a `jgg.LowRank` in `w_layout` with
        gate and up as w_gate_up has them. The weights beside a term get no gradient, and no time is spent on one.
      w_layout, precision, implementation: as in `grouped_gemm`; "xla" is differentiable in forward mode too.
      quantization: a `jgg.Fp8`, the recipe for products in FP8; None for the dtype of x. Kernels multiply in FP8 on
        GPUs of compute capability 8.9 and newer, with H and I multiples of 16; elsewhere quantized operands are
        dequantized first. Quantized products have gradients, but no second or forward-mode derivatives.
      spare_sms: multiprocessors that the last product of the backward pass, the gradient of w_gate_up, leaves idle. A
        collective that takes the gradient of x can then run beside it rather than after it.
      expected_rows: about how many of the M rows will belong to an expert, if that is far fewer than M; kernels are
        chosen for this number. None means M.
      residual_names: other names of "x", "pre_activation" and "weights" for `jax.checkpoint` policies, such as
        {"pre_activation": "mlp"}.

    Returns: y [T, H] in the dtype of x.

    Raises:
      ValueError: shapes disagree, or an option is none of those listed.
      TypeError: a dtype is unsupported, or an argument is not the array, Routing, int or flag that it must be.
    """
    options = MlpOptions.checked(
        activation=activation,
        interleaved=interleaved,
        w_layout=w_layout,
        precision=precision,
        quantization=quantization,
        implementation=implementation,
        residual_names=residual_names,
        spare_sms=spare_sms,
        expected_rows=expected_rows,
    )
    x = as_array("x", x)
    weights = checked_weights(x, w_gate_up, w_down, b_gate_up, b_down, options)
    terms = checked_terms(low_rank_gate_up, low_rank_down, weights.w_gate_up, weights.w_down, options.w_layout)
    weights = with_terms(weights, terms)
    return compute_mlp(x, weights, checked_routing(x, routing, weights.w_gate_up.shape[0]), options)


def compute_mlp(x: jax.Array, weights: ExpertWeights, routing: Routing, options: MlpOptions) -> jax.Array:
    """`moe_mlp` of checked arguments."""
    up, down = problems(x, weights, routing, options)
    described = (
        up,
        down,
        how_of(up, options.implementation),
        options.activation,
        options.interleaved,
        options.spare_sms,
        options.names,
    )
    recipe = options.quantization
    mlp = InDtype(*described) if recipe is None else InFp8(*described, recipe=recipe)
    operands = Operands(
        x=x,
        w_gate_up=weights.w_gate_up,
        w_down=weights.w_down,
        b_gate_up=weights.b_gate_up,
        b_down=weights.b_down,
        quantized_gate_up=weights.quantized_gate_up,
        quantized_down=weights.quantized_down,
        low_rank_gate_up=weights.low_rank_gate_up,
        low_rank_down=weights.low_rank_down,
        topk_weights=routing.topk_weights,
        group_sizes=saturated_int32(routing.group_sizes),
        gather_indices=as_indices(routing.gather_indices),
    )
    if not mlp.is_plain:
        # named before `_compute`: inside it, jax_debug_nans would check what is named, and report rows of no expert
        operands = operands._replace(x=checkpoint_name(operands.x, mlp.names.x))
    axes = varying_axes(*jax.tree.leaves(operands))
    return _compute(mlp, jax.tree.map(lambda array: vary_over(axes, array), operands))


@functools.partial(jax.jit, static_argnums=0)
def _compute(mlp: Mlp, operands: Operands) -> jax.Array:
    return (_plain_mlp if mlp.is_plain else _mlp)(mlp, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(mlp: Mlp, operands: Operands) -> jax.Array:
    operands = mlp.prepared(operands, keeps=False)
    hidden = mlp.up(operands, keeps=False, term=low_rank.term_of_up(mlp, operands)).hidden
    return mlp.down(operands, hidden, low_rank.term_of_down(mlp, operands, hidden))


class _KeptRows(NamedTuple):
    """The rows [M, r] of the terms of low rank; None where there is no term."""

    up: jax.Array | None
    down: jax.Array | None


def _forward(mlp: Mlp, operands: Operands) -> tuple[jax.Array, tuple[Operands, Any, _KeptRows]]:
    operands = mlp.prepared(operands, keeps=True)
    term_up = low_rank.term_of_up(mlp, operands)
    activated = mlp.up(operands, keeps=True, term=term_up)
    term_down = low_rank.term_of_down(mlp, operands, activated.hidden)
    y = mlp.down(operands, activated.hidden, term_down)
    rows = _KeptRows(term_up and term_up.rows, term_down and term_down.rows)
    kept, rows = jax.tree.map(lambda array: checkpoint_name(array, mlp.names.pre_activation), (activated.kept, rows))
    return y, (mlp.kept_for_backward(operands), kept, rows)


def _down_backward(
    mlp: Mlp, operands: Operands, hidden: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None, jax.Array | float]:
    """dw_down, db_down if there is a b_down, and what b_down adds to the sums of the router's gradient."""
    gather_indices, b_down, bounds = operands.gather_indices, operands.b_down, mlp.bounds(operands.group_sizes)
    hidden, dy = barrier((hidden, dy))  # rows of dy are copied when z is no longer needed
    if b_down is None:
        return DW(mlp.how, Dw(dy, hidden, bounds, gather_indices), problem=mlp.transposed_down), None, 0.0
    weights = mlp.row_weights(operands)
    dy_rows = dy
    if gather_indices is not None:
        dy_rows = COMBINE(mlp.how, Combine(dy, plain.x_rows(mlp.of_up, gather_indices)), topk=1)
    dw_down = DW(mlp.how, Dw(hidden, dy_rows, bounds, topk_weights=weights), problem=mlp.weighted_down)
    db_down = DBIAS(mlp.how, Dbias(dy_rows, bounds, topk_weights=weights), problem=mlp.weighted_down)
    return dw_down, db_down.astype(b_down.dtype), bias_row_sums(mlp.of_down, dy_rows, b_down, bounds, None)


@jax.named_scope("jgg.moe_mlp.backward")
def _backward(mlp: Mlp, residuals: tuple[Operands, Any, _KeptRows], dy: jax.Array) -> tuple[Operands]:
    """All gradients; those that nobody asks for are dropped as dead code, with their products."""
    operands, kept, rows = residuals
    operands, dy = mlp.restored(operands, dy)
    x, b_gate_up, topk_weights, gather_indices = (
        operands.x,
        operands.b_gate_up,
        operands.topk_weights,
        operands.gather_indices,
    )
    bounds = mlp.bounds(operands.group_sizes)

    dy = dy.astype(x.dtype)
    term_z = low_rank.term_of_z(mlp, operands, dy)
    gradients = mlp.activation_backward(operands, kept, dy, term_z)
    d_low_rank_down = low_rank.gradients_of_down(mlp, operands, rows.down, term_z, gradients.hidden, dy)
    dw_down, db_down, sums = _down_backward(mlp, operands, gradients.hidden, dy)
    d_weights = gradients.row_sums + sums
    # runs one product after the other, the largest last, when memory that only the others need is free again
    rows_of_dx, d_pre_activation, dw_down = barrier((gradients.rows_of_dx, gradients.d_pre_activation, dw_down))
    term_dx = low_rank.term_of_dx(mlp, operands, d_pre_activation)
    d_low_rank_gate_up = low_rank.gradients_of_gate_up(mlp, operands, rows.up, term_dx, d_pre_activation)
    dx = mlp.dx(operands, rows_of_dx, term_dx)
    d_pre_activation, dx, x = barrier((d_pre_activation, dx, x))  # nor are rows of x copied early
    dw_gate_up = DW(mlp.how_sparing, Dw(x, d_pre_activation, bounds, gather_indices), problem=mlp.of_up)
    db_gate_up = None
    if b_gate_up is not None:
        db_gate_up = DBIAS(mlp.how_sparing, Dbias(d_pre_activation, bounds, gather_indices), problem=mlp.of_up)
        db_gate_up = db_gate_up.astype(b_gate_up.dtype)

    if gather_indices is not None:
        row_of = inverse_permutation(gather_indices, topk_weights.size)
        # a choice without a row has no gradient
        d_weights = jnp.where(row_of >= 0, d_weights[jnp.maximum(row_of, 0)], 0)
    d_weights = d_weights.reshape(topk_weights.shape).astype(topk_weights.dtype)
    return (
        Operands(
            dx,
            dw_gate_up,
            dw_down,
            db_gate_up,
            db_down,
            d_weights,
            None,
            None,
            low_rank_gate_up=d_low_rank_gate_up,
            low_rank_down=d_low_rank_down,
        ),
    )


_mlp.defvjp(_forward, _backward)


def _plain_mlp(mlp: Mlp, operands: Operands) -> jax.Array:
    """The MLP in plain JAX, differentiable to any order: each block of rows is added to its tokens."""
    x, w_gate_up, w_down, b_gate_up, b_down, topk_weights, group_sizes, gather_indices, *_ = operands
    bounds = mlp.bounds(group_sizes)
    term = low_rank.term_of_up(mlp, operands)
    pre_activation = plain.grouped_gemm(mlp.of_up, x, w_gate_up, bounds, gather_indices, None, b_gate_up, term)
    hidden = mlp.activation(pre_activation, mlp.interleaved).astype(x.dtype)
    term = low_rank.term_of_down(mlp, operands, hidden)
    return plain.grouped_gemm(mlp.combined_down, hidden, w_down, bounds, gather_indices, topk_weights, b_down, term)
