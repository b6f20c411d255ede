"""The expert MLP of a mixture-of-experts layer: one custom_vjp that keeps x and the pre-activation."""

import functools
from collections.abc import Mapping

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jgg.core.activations import ActivationLike
from jgg.core.arguments import as_array
from jgg.core.manual_axes import alike
from jgg.core.quantized import QuantizedArray, QuantizedWeights
from jgg.core.schedule import as_indices, saturated_int32
from jgg.experts.arguments import ExpertWeights, MlpOptions, check_shapes, checked_routing, expert_weights
from jgg.experts.backward import Kept, compute_gradients
from jgg.experts.exchange import Arrival
from jgg.experts.fp8_exchange import beside_quantization, sends_fp8, sent
from jgg.experts.mlp import MoeMlp, Operands
from jgg.experts.router.routing import Routing
from jgg.linear import layer
from jgg.linear.fp8 import Fp8, named
from jgg.linear.low_rank import LowRank
from jgg.products.activate import Hidden


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
    """Applies each token's experts to it and sums their results, weighted by the routing.

    Computes `y[t] = sum over j of topk_weights[t, j] * MLP_e(x[t])` with e the token's j-th expert and, for "swiglu",
    `MLP_e(x) = (silu(x @ gate_e) * (x @ up_e)) @ down_e`. Differentiable in x, the weights, the biases and
    `routing.topk_weights`.

    For the backward pass it keeps its arguments, the pre-activation [M, 2 * I] and 8 bytes per row. It does not keep
    the gathered x, the activation or the down product. `jax.checkpoint` policies know the pre-activation as
    "jgg_pre_activation" and x as "jgg_x".

    Weights may have a different float dtype than x, for example float32 parameters with bfloat16 tokens. They are cast
    to the dtype of x once for both passes, and policies know the cast weights as "jgg_weights". Their gradients are
    summed in float32 and stored in the dtype of the weights.

    Shapes: T tokens, H features, I hidden features of an expert, E experts, k choices, M = T * k.

    Args:
      x: [T, H].
      w_gate_up: gate and up side by side: [E, 2 * I, H] or, with `w_layout="ekn"`, [E, H, 2 * I]; for an activation
        that is not gated, I instead of 2 * I. w_gate_up and w_down are each float32, bfloat16 or float16.
      w_down: [E, H, I] or, with `w_layout="ekn"`, [E, I, H]. w_gate_up and w_down may each be a QuantizedArray, which
        gets no gradient and, without `quantization`, is dequantized to the dtype of x first. With `quantization`, they
        may also be the result of `Fp8.weights`.
      routing: the Routing that `route` returns for the T tokens. It may have fewer than M gather_indices; choices
        that they do not name add nothing. They may be None if k is 1 and x is in expert order; y is then too.
      activation: "swiglu", "geglu", "geglu_tanh", "reglu" or "clamped_swiglu", which are gated; "ungated_silu",
        "ungated_gelu", "ungated_gelu_tanh", "ungated_relu" or "ungated_relu_squared", which are not; an Activation; or
        a function such as `jax.nn.silu` for `function(gate) * up`. A function object is traced once, but a new
        lambda in each call is traced each time.
      interleaved: the features of w_gate_up are gate 0, up 0, gate 1, up 1, ... rather than side by side.
      b_gate_up: [E, 2 * I], added to the product with w_gate_up.
      b_down: [E, H], added to the product with w_down.
      low_rank_gate_up, low_rank_down: LoRA terms added to w_gate_up and w_down, each a `jgg.LowRank` in `w_layout` with
        gate and up in the order of w_gate_up. Weights with a term get no gradient, and no time is spent on one.
      w_layout, precision, implementation: as in `grouped_gemm`; "xla" is differentiable in forward mode too.
      quantization: a `jgg.Fp8`, the recipe for products in FP8; None for the dtype of x. Kernels multiply in FP8 on
        GPUs of compute capability 8.9 and newer, with H and I multiples of 16; elsewhere quantized operands are
        dequantized first. Quantized products have gradients, but no second or forward-mode derivatives.
      spare_sms: multiprocessors that the last product of the backward pass, the gradient of w_gate_up, leaves idle. A
        collective that takes the gradient of x can then run at the same time rather than afterwards.
      expected_rows: roughly how many of the M rows belong to any expert, if far fewer than M; kernels are chosen for
        this number. None means M.
      residual_names: new names for "x", "pre_activation" and "weights" in `jax.checkpoint` policies, such as
        {"pre_activation": "mlp"}.

    Returns: y [T, H] in the dtype of x.

    Raises:
      ValueError: shapes disagree, or an option is not one of those listed.
      TypeError: a dtype is unsupported, or an argument is not the array, Routing, int or flag that it must be.
    """
    given = activation, interleaved, w_layout, precision, quantization, implementation, residual_names
    options = MlpOptions.checked(*given, spare_sms, expected_rows)
    x = as_array("x", x)
    weights = expert_weights(w_gate_up, w_down, b_gate_up, b_down, low_rank_gate_up, low_rank_down, options.w_layout)
    weights = weights.in_recipe(options.quantization, x.dtype)
    check_shapes(x, weights, options)
    return compute_mlp(x, weights, checked_routing(x, routing, weights.gate_up.shape[0]), options)


def compute_mlp(
    x: jax.Array,
    weights: ExpertWeights,
    routing: Routing,
    options: MlpOptions,
    arrival: Arrival | None = None,
) -> jax.Array:
    """`moe_mlp` for checked arguments.

    Args:
      arrival: what arrives for x [T, H], this device's tokens, and its exchange; `routing` then routes what arrives.
        With a recipe, x and dy are quantized before they are sent to other devices; y and dx come back in x's dtype.
    """
    mlp = MoeMlp.of(x, weights, routing, options)
    exchange = None if arrival is None else arrival.exchange
    in_fp8 = exchange if sends_fp8(exchange, mlp.up) else None
    if arrival is not None and in_fp8 is None:
        x = arrival.rows
    if not mlp.is_plain and in_fp8 is None:
        # named before `_compute`: inside it, jax_debug_nans would check what is named, and report rows of no expert
        x = checkpoint_name(x, mlp.names.x)
    operands = Operands(
        x=x,
        **weights._asdict(),
        topk_weights=routing.topk_weights,
        group_sizes=saturated_int32(routing.group_sizes),
        gather_indices=as_indices(routing.gather_indices),
        exchange=in_fp8,
    )
    y = _compute(mlp, alike(operands))
    return y if exchange is None or in_fp8 is not None else exchange.back(y)


@functools.partial(jax.jit, static_argnums=0)
def _compute(mlp: MoeMlp, operands: Operands) -> jax.Array:
    return (_plain_mlp if mlp.is_plain else _mlp)(mlp, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(mlp: MoeMlp, operands: Operands) -> jax.Array:
    return _forward_pass(mlp, _prepared(mlp, operands, keeps=False), keeps=False)[0]


def _prepared(mlp: MoeMlp, operands: Operands, keeps: bool) -> Operands:
    """What the forward pass reads."""
    if operands.exchange is not None:
        assert isinstance(operands.x, jax.Array)
        x = sent(mlp.up, operands.x, operands.exchange)
        operands = operands._replace(x=jax.tree.map(lambda part: named(part, mlp.names.x), x))
    gate_up = layer.prepared(mlp.up, operands.gate_up, keeps=keeps, name=mlp.names.weights)
    down = layer.prepared(mlp.down, operands.down, keeps=keeps, name=mlp.names.weights)
    return operands._replace(gate_up=gate_up, down=down)


def _forward_pass(mlp: MoeMlp, operands: Operands, keeps: bool) -> tuple[jax.Array, Kept]:
    x, gate_up = operands.x, operands.gate_up
    if operands.exchange is not None:
        x, gate_up = beside_quantization(mlp.up, x, gate_up)
    hidden, routes = Hidden(mlp.activation, mlp.interleaved, keeps), mlp.routes(operands)
    activated, rows_up = layer.forward_activated(mlp.up, x, gate_up, routes, operands.b_gate_up, hidden)
    routes = routes._replace(topk_weights=operands.topk_weights)
    y, rows_down = layer.forward(mlp.combined_down, activated.hidden, operands.down, routes, operands.b_down)
    if operands.exchange is not None:
        y = operands.exchange.back(y)
    return y, Kept(activated.kept, rows_up, rows_down)


def _forward(mlp: MoeMlp, operands: Operands) -> tuple[jax.Array, tuple[Operands, Kept]]:
    operands = _prepared(mlp, operands, keeps=True)
    y, kept = _forward_pass(mlp, operands, keeps=True)
    kept = jax.tree.map(lambda array: checkpoint_name(array, mlp.names.pre_activation), kept)
    gate_up, down = layer.kept(mlp.up, operands.gate_up), layer.kept(mlp.down, operands.down)
    return y, (operands._replace(gate_up=gate_up, down=down), kept)


_mlp.defvjp(_forward, compute_gradients)


def _plain_mlp(mlp: MoeMlp, operands: Operands) -> jax.Array:
    """The MLP in plain JAX, differentiable to any order: each block of rows is added to its tokens."""
    routes = mlp.routes(operands)
    pre_activation, _ = layer.forward(mlp.up, operands.x, operands.gate_up, routes, operands.b_gate_up)
    hidden = mlp.activation(pre_activation, mlp.interleaved).astype(mlp.up.problem.dtype)
    routes = routes._replace(topk_weights=operands.topk_weights)
    return layer.forward(mlp.combined_down, hidden, operands.down, routes, operands.b_down)[0]
