"""The expert MLP of a mixture-of-experts layer: one custom_vjp that keeps x and the pre-activation."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jgg.activations import ActivationLike
from jgg.core.arguments import as_array
from jgg.core.manual_axes import vary_over, varying_axes
from jgg.core.quantized import QuantizedArray
from jgg.core.schedule import as_indices, between_groups, inverse_permutation, saturated_int32
from jgg.experts import in_fp8 as moe_fp8
from jgg.experts.arguments import ExpertWeights, MlpOptions, checked_routing, checked_weights
from jgg.experts.mlp import Mlp, Operands, problems
from jgg.fp8 import Fp8, QuantizedWeights
from jgg.launching.choice import how_of, is_plain_jax
from jgg.products.activate import ACTIVATE_BACKWARD, ActivateBackward
from jgg.products.combine import COMBINE, Combine
from jgg.products.dbias import DBIAS, Dbias
from jgg.products.dw import DW, Dw
from jgg.products.dx import DX, Dx
from jgg.products.forward import FORWARD, Forward
from jgg.products.grouped_gemm import bias_row_sums
from jgg.products.plain import grouped_gemm as plain
from jgg.products.up import UP
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
    w_layout: str = "enk",
    precision: jax.lax.PrecisionLike = None,
    quantization: Fp8 | None = None,
    implementation: str | None = None,
    spare_sms: int = 0,
    expected_rows: int | None = None,
    residual_names: Mapping[str, str] | None = None,
) -> jax.Array:
    """Each token through the MLPs of its experts, added up with the routing's weights.

    Computes `y[t] = sum over j of topk_weights[t, j] * MLP_e(x[t])` with e the token's j-th expert and, for "swiglu",
    `MLP_e(x) = (silu(x @ gate_e) * (x @ up_e)) @ down_e`. Differentiable in x, the weights, the biases and
    `routing.topk_weights`.

    For the backward pass it keeps, beside its arguments, the pre-activation [M, 2 * I] and 8 bytes a row: neither the
    gathered x, nor the activation, nor the down product. `jax.checkpoint` policies know the pre-activation as
    "jgg_pre_activation" and x as "jgg_x".

    Shapes: T tokens, H features, I hidden features of an expert, E experts, k choices, M = T * k.

    Args:
      x: [T, H].
      w_gate_up: gate and up side by side: [E, 2 * I, H] or, with `w_layout="ekn"`, [E, H, 2 * I]; for an activation
        that is not gated, I instead of 2 * I.
      w_down: [E, H, I] or, with `w_layout="ekn"`, [E, I, H]. Either may be a QuantizedArray, which gets no gradient and
        without `quantization` is dequantized to the dtype of x first; or, with it, what `Fp8.weights` made.
      routing: of the T tokens, by `route`. Its gather_indices may also be fewer than M: choices that they do not name
        add nothing. They may be None if k is 1 and x is in expert order already; y is then too.
      activation: "swiglu", "geglu", "geglu_tanh", "reglu" or "clamped_swiglu", which are gated; "ungated_silu",
        "ungated_gelu", "ungated_gelu_tanh", "ungated_relu" or "ungated_relu_squared", which are not; an Activation; or
        a function such as `jax.nn.silu` for `function(gate) * up`. One function object is traced once; a new lambda in
        each call is traced in each call.
      interleaved: the features of w_gate_up are gate 0, up 0, gate 1, up 1, ... rather than side by side.
      b_gate_up: [E, 2 * I], added to the first product.
      b_down: [E, H], added to the second.
      w_layout, precision, implementation: as in `grouped_gemm`; "xla" is differentiable in forward mode too.
      quantization: a `jgg.Fp8` to multiply in FP8 what it says; None for the dtype of x. On GPUs of compute capability
        8.9 and newer, with H and I multiples of 16; elsewhere what is quantized is dequantized first. It has
        gradients, but no second or forward-mode derivatives.
      spare_sms: multiprocessors that the last product of the backward pass, the gradient of w_gate_up, leaves idle. A
        collective that takes the gradient of x can then run beside it rather than after it.
      expected_rows: about how many of the rows will be of an expert, where there is room for many more: kernels are
        chosen for as many.
      residual_names: other names of "x" and "pre_activation" for `jax.checkpoint` policies, such as
        {"pre_activation": "mlp"}.

    Returns: y [T, H] in the dtype of x.

    Raises:
      ValueError: shapes disagree, or an option is none of those listed.
      TypeError: a dtype is unsupported, those of x and the weights differ, or what must be an array, a Routing, an int
        or a flag is none.
    """
    options = MlpOptions.checked(
        activation=activation, interleaved=interleaved, w_layout=w_layout, precision=precision,
        quantization=quantization, implementation=implementation, residual_names=residual_names, spare_sms=spare_sms,
        expected_rows=expected_rows,
    )  # fmt: skip
    x = as_array("x", x)
    weights = checked_weights(x, w_gate_up, w_down, b_gate_up, b_down, options)
    return compute_mlp(x, weights, checked_routing(x, routing, weights.w_gate_up.shape[0]), options)


def compute_mlp(x: jax.Array, weights: ExpertWeights, routing: Routing, options: MlpOptions) -> jax.Array:
    """`moe_mlp` of checked arguments."""
    up, down = problems(x, weights, routing, options)
    how = how_of(up, options.implementation)
    mlp = Mlp(
        up, down, how, options.activation, options.interleaved, options.quantization, options.spare_sms,
        options.x_name, options.pre_activation_name,
    )  # fmt: skip
    operands = Operands(
        x=x,
        w_gate_up=weights.w_gate_up,
        w_down=weights.w_down,
        b_gate_up=weights.b_gate_up,
        b_down=weights.b_down,
        quantized_gate_up=weights.quantized_gate_up,
        quantized_down=weights.quantized_down,
        topk_weights=routing.topk_weights,
        group_sizes=saturated_int32(routing.group_sizes),
        gather_indices=as_indices(routing.gather_indices),
    )
    axes = varying_axes(*jax.tree.leaves(operands))
    is_empty = up.is_empty or down.is_empty
    is_plain = is_empty or (options.quantization is None and is_plain_jax(how.implementation))
    return _compute(mlp, is_plain, jax.tree.map(lambda array: vary_over(axes, array), operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(mlp: Mlp, operands: Operands) -> jax.Array:
    (hidden,) = _up(mlp, operands, keeps=False)
    return _down(mlp, operands, hidden)


def _forward(mlp: Mlp, operands: Operands) -> tuple[jax.Array, tuple[Operands, Any]]:
    kept, hidden = _up(mlp, operands, keeps=True)
    kept = jax.tree.map(lambda array: checkpoint_name(array, mlp.pre_activation_name), kept)
    y = _down(mlp, operands, hidden)
    operands = moe_fp8.kept_for_backward(mlp, operands._replace(x=checkpoint_name(operands.x, mlp.x_name)))
    return y, (operands, kept)


def _up(mlp: Mlp, operands: Operands, keeps: bool) -> list[Any]:
    """The pre-activation, if it `keeps` that, and the hidden features; [M, 2 * I] and [M, I] in expert order."""
    if mlp.quantization is not None:
        return moe_fp8.up(mlp, operands, keeps)
    x, w, bounds = operands.x, operands.w_gate_up, mlp.bounds(operands.group_sizes)
    of_up = Forward(x, w, bounds, operands.gather_indices, bias=operands.b_gate_up)
    return UP(mlp.how, of_up, problem=mlp.up, keeps=keeps, **mlp.activation_options)


def _down(mlp: Mlp, operands: Operands, hidden: Any) -> jax.Array:
    if mlp.quantization is not None:
        return moe_fp8.down(mlp, operands, hidden)
    w, bounds = operands.w_down, mlp.bounds(operands.group_sizes)
    of_down = Forward(hidden, w, bounds, operands.gather_indices, operands.topk_weights, operands.b_down)
    (y,) = FORWARD(mlp.how, of_down, problem=mlp.combined_down)
    return y


def _activation_backward(mlp: Mlp, operands: Operands, kept: Any, dy: jax.Array) -> list[Any]:
    """d pre-activation, what dX multiplies of it, hidden, and the sums that the router's gradient is made of.

    With weights p and z = dy @ down^T: d hidden = p * z and dp = hidden . z, so that no product need be kept.
    """
    bounds, indices = mlp.bounds(operands.group_sizes), operands.gather_indices
    weights = plain.row_scales(mlp.up, indices, operands.topk_weights)
    # the gradient of b_down is the sum of scaled rows of dy, so that hidden must not be scaled then
    options = mlp.activation_options | {"scale_hidden": operands.b_down is None}
    if mlp.quantization is not None:
        return moe_fp8.activation_backward(mlp, operands, kept, dy, weights, options)
    (z,) = FORWARD(mlp.how, Forward(dy, operands.w_down, bounds, indices), problem=mlp.transposed_down)
    in_group = between_groups(bounds, mlp.up.num_rows)
    d_pre, *others = ACTIVATE_BACKWARD(mlp.how, ActivateBackward(kept, z, weights, in_group), **options)
    return [d_pre, d_pre, *others]


def _dx(mlp: Mlp, operands: Operands, d_pre_activation: Any) -> jax.Array:
    if mlp.quantization is not None:
        return moe_fp8.dx(mlp, operands, d_pre_activation)
    bounds = mlp.bounds(operands.group_sizes)
    of_dx = Dx(d_pre_activation, operands.w_gate_up, bounds, gather_indices=operands.gather_indices)
    (dx,) = DX(mlp.how, of_dx, problem=mlp.up)
    return dx


@jax.named_scope("jgg.moe_mlp.backward")
def _backward(mlp: Mlp, residuals: tuple[Operands, Any], dy: jax.Array) -> tuple[Operands]:
    operands, kept = residuals
    x, b_gate_up, b_down, topk_weights = operands.x, operands.b_gate_up, operands.b_down, operands.topk_weights
    gather_indices, bounds = operands.gather_indices, mlp.bounds(operands.group_sizes)

    dy = dy.astype(x.dtype)
    d_pre_activation, of_dx, hidden, d_weights = _activation_backward(mlp, operands, kept, dy)
    hidden, dy = jax.lax.optimization_barrier((hidden, dy))  # rows of dy are copied when z is no longer needed
    if b_down is None:
        (dw_down,) = DW(mlp.how, Dw(dy, hidden, bounds, gather_indices), problem=mlp.transposed_down)
        db_down = None
    else:
        weights = plain.row_scales(mlp.up, gather_indices, topk_weights)
        dy_rows = dy
        if gather_indices is not None:
            (dy_rows,) = COMBINE(mlp.how, Combine(dy, plain.x_rows(mlp.up, gather_indices)), topk=1)
        (dw_down,) = DW(mlp.how, Dw(hidden, dy_rows, bounds, topk_weights=weights), problem=mlp.weighted_down)
        (db_down,) = DBIAS(mlp.how, Dbias(dy_rows, bounds, topk_weights=weights), problem=mlp.weighted_down)
        db_down = db_down.astype(b_down.dtype)
        d_weights += bias_row_sums(mlp.down, dy_rows, b_down, bounds, None)
    # one product after the other, that of most memory last: what only those before need is free by then
    of_dx, d_pre_activation, dw_down = jax.lax.optimization_barrier((of_dx, d_pre_activation, dw_down))
    dx = _dx(mlp, operands, of_dx)
    d_pre_activation, dx, x = jax.lax.optimization_barrier((d_pre_activation, dx, x))  # nor are rows of x copied early
    (dw_gate_up,) = DW(mlp.how_sparing, Dw(x, d_pre_activation, bounds, gather_indices), problem=mlp.up)
    db_gate_up = None
    if b_gate_up is not None:
        (db_gate_up,) = DBIAS(mlp.how_sparing, Dbias(d_pre_activation, bounds, gather_indices), problem=mlp.up)
        db_gate_up = db_gate_up.astype(b_gate_up.dtype)

    if gather_indices is not None:
        row_of = inverse_permutation(gather_indices, topk_weights.size)
        # a choice without a row has no gradient
        d_weights = jnp.where(row_of >= 0, d_weights[jnp.maximum(row_of, 0)], 0)
    d_weights = d_weights.reshape(topk_weights.shape).astype(topk_weights.dtype)
    return (Operands(dx, dw_gate_up, dw_down, db_gate_up, db_down, d_weights, None, None),)


_mlp.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compute(mlp: Mlp, is_plain: bool, operands: Operands) -> jax.Array:
    return (_plain_mlp if is_plain else _mlp)(mlp, operands)


def _plain_mlp(mlp: Mlp, operands: Operands) -> jax.Array:
    """The same in plain JAX, differentiable to any order: each block of rows is added to its tokens."""
    x, w_gate_up, w_down, b_gate_up, b_down, topk_weights, group_sizes, gather_indices, *_ = operands
    bounds = mlp.bounds(group_sizes)
    pre_activation = plain.grouped_gemm(mlp.up, x, w_gate_up, bounds, gather_indices, None, b_gate_up)
    hidden = mlp.activation(pre_activation, mlp.interleaved).astype(x.dtype)
    return plain.grouped_gemm(mlp.combined_down, hidden, w_down, bounds, gather_indices, topk_weights, b_down)
