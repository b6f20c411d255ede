"""An MoE layer as a function of its parameters, shared by the layers of every framework."""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jgg.core.activations import find_activation
from jgg.core.arguments import as_array, as_mask, check_floats
from jgg.core.gpu_target import current_target
from jgg.core.manual_axes import alike
from jgg.core.matrix import Matrix
from jgg.core.quantized import QuantizedArray, QuantizedWeights, as_dense
from jgg.experts.arguments import ExpertWeights, MlpOptions, check_shapes
from jgg.experts.layer_options import check_sharding
from jgg.experts.layer_parameters import LayerParameters
from jgg.experts.mesh import check_outside_shard_map, map_tokens
from jgg.experts.moe import compute_mlp
from jgg.experts.on_device import compute_mlp_on_device
from jgg.experts.router.logits import compute_matrix_logits
from jgg.experts.router.losses import compute_load_balancing_loss, compute_router_z_loss
from jgg.experts.router.routing import (
    Routing,
    as_given_choices,
    as_selection_bias,
    compute_routing,
    with_factors,
    without_masked,
    zeroed,
)
from jgg.experts.sharding import MoESharding
from jgg.launching.choice import How
from jgg.linear.activated import activated
from jgg.linear.dense import dense
from jgg.linear.fp8 import Fp8
from jgg.linear.low_rank import beside
from jgg.linear.weights import as_matrix
from jgg.products.add_gated import ADD_GATED, AddGated

__all__ = ["Metrics", "MoELayer"]


class Metrics(NamedTuple):
    """What `MoELayer.apply` returns in addition to y.

    Attributes:
      group_sizes: int32 [E], rows per expert, from tokens that count.
      load_balancing_loss: float32 [], as `jgg.load_balancing_loss` of the tokens that count: 1 where the load is even.
      router_z_loss: float32 [], as `jgg.router_z_loss` of the tokens that count.
      overflow: int32 [], rows that found no room in the buffers of a sharded layer and added nothing to y.
      topk_indices: int32 [..., k], the experts that each token of x [..., H] went to, split over devices like x; -1 for
        tokens that do not count.
    """

    group_sizes: jax.Array
    load_balancing_loss: jax.Array
    router_z_loss: jax.Array
    overflow: jax.Array
    topk_indices: jax.Array


class _Arrays(NamedTuple):
    """The arguments of `MoELayer.apply` and its params, checked, each matrix with its adapter.

    Attributes:
      x, router_x, topk_indices, mask: as in `MoELayer.apply`, with all axes of x except the last merged.
    """

    x: jax.Array
    w_router: Matrix
    w_gate_up: Matrix
    w_down: Matrix
    b_router: jax.Array | None = None
    scale_router: jax.Array | None = None
    b_gate_up: jax.Array | None = None
    b_down: jax.Array | None = None
    w_shared_gate_up: Matrix | None = None
    w_shared_down: Matrix | None = None
    w_shared_gate: Matrix | None = None
    selection_bias: jax.Array | None = None
    router_x: jax.Array | None = None
    topk_indices: jax.Array | None = None
    mask: jax.Array | None = None

    @property
    def experts(self) -> ExpertWeights:
        """The parameters of the experts."""
        return ExpertWeights(self.w_gate_up, self.w_down, self.b_gate_up, self.b_down)


class MoELayer(LayerParameters):
    """A dropless MoE layer without its parameters: `InFeatures` and `LayerOptions`, checked.

    Computes `y[t] = sum over the chosen experts e of p[t, e] * MLP_e(x[t])`, plus the shared experts of every token.
    """

    def apply(
        self,
        params: Mapping[str, ArrayLike | QuantizedArray | QuantizedWeights],
        x: ArrayLike,
        selection_bias: ArrayLike | None = None,
        *,
        router_x: ArrayLike | None = None,
        topk_indices: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        sharding: MoESharding | None = None,
        precision: jax.lax.PrecisionLike = None,
        quantization: Fp8 | None = None,
        implementation: str | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """Returns y in the shape of x, and Metrics over all devices.

        Args:
          params: arrays of any float dtypes, with the names and shapes in `shapes` and `adapter_shapes`. The router
            computes in float32, everything else in the dtype of x. Any matrix may be a QuantizedArray, which gets no
            gradient and is dequantized to the dtype of x on use. With `quantization`, the experts' matrices stay
            quantized, and may also be the result of `Fp8.weights`. Matrices with adapters get no gradient either.
          x: [..., H].
          selection_bias: float [E] with `use_selection_bias`, else None.
          router_x: [..., H], what the router multiplies for each token of x, of any float dtype; None for x itself.
          topk_indices: integer [..., k] for the tokens of x, experts to use instead of the router's choice; -1 leaves a
            choice to the router. As in `jgg.route`, an index past the last expert adds nothing, and an expert given
            twice counts twice. The losses are computed for the experts that are used.
          mask: bool or number [...] for the tokens of x, False or 0 for tokens that do not count, such as padding; by
            default all count. Tokens that do not count go to no expert. Their y comes from the shared experts alone, or
            is zero; the router's losses ignore them, and no row is multiplied for them. They may hold anything: NaN and
            infinity reach no gradient, nor, in float32 and bfloat16, do values too large for the shared experts.
          sharding: how a mesh splits the tokens (all axes of x but the last, merged) and the experts' weights. Every
            device has the weights of the router and the shared experts.
          precision: as in `jgg.grouped_gemm`.
          implementation: as in `jgg.nnx.MoE`.
          quantization: of the experts, as in `jgg.moe_mlp`; the router and the shared experts are not quantized.
        """
        options = MlpOptions.checked(self.activation, self.interleaved, "ekn", precision, quantization, implementation)
        x = as_array("x", x)
        arrays = self._checked(params, x, selection_bias, router_x, topk_indices, mask, sharding, options)
        if sharding is None:
            y, metrics = self._apply_to_tokens(arrays, None, options)
        else:
            specs = dict.fromkeys((*self.shapes, "selection_bias"), jax.P()) | sharding.weight_specs("ekn")
            of_metrics = Metrics._make([*[jax.P()] * 4, sharding.token_spec])
            y, metrics = map_tokens(
                lambda part: self._apply_to_tokens(part, sharding, options),
                sharding,
                arrays,
                specs,
                (sharding.token_spec, of_metrics),
            )
        topk_indices = metrics.topk_indices.reshape(*x.shape[:-1], self.topk)
        return y.reshape(x.shape), metrics._replace(topk_indices=topk_indices)

    def _checked(
        self,
        params: Mapping[str, ArrayLike | QuantizedArray | QuantizedWeights],
        x: jax.Array,
        selection_bias: ArrayLike | None,
        router_x: ArrayLike | None,
        topk_indices: ArrayLike | None,
        mask: ArrayLike | None,
        sharding: MoESharding | None,
        options: MlpOptions,
    ) -> _Arrays:
        """The arguments of `apply`; raises if one is wrong."""
        check_sharding(self, sharding)
        if sharding is not None:
            check_outside_shard_map(sharding)
        if (selection_bias is None) == self.use_selection_bias:
            wanted, got = ("[E]", "None") if self.use_selection_bias else ("None", "an array")
            raise ValueError(
                f"selection_bias must be {wanted} with use_selection_bias={self.use_selection_bias}, got {got}."
            )
        if not x.shape or x.shape[-1] != self.in_features:
            raise ValueError(
                f"x must be [..., H] with H equal to in_features, {self.in_features}, got {list(x.shape)}."
            )
        if selection_bias is not None:
            selection_bias = as_selection_bias(selection_bias, self.num_experts)
        if router_x is not None:
            router_x = _as_router_x(router_x, x.shape)
        if topk_indices is not None:
            topk_indices = as_given_choices(topk_indices, "[..., k]", (*x.shape[:-1], self.topk))
            topk_indices = topk_indices.reshape(math.prod(x.shape[:-1]), self.topk)
        mask = as_mask(mask, "[...]", x.shape[:-1])
        mask = None if mask is None else mask.reshape(math.prod(x.shape[:-1]))
        named = self._checked_params(params, x.dtype)
        tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        check_floats("x", x)
        named |= {"selection_bias": selection_bias, "router_x": router_x, "topk_indices": topk_indices}
        arrays = _Arrays(tokens, **named, mask=mask)
        check_shapes(tokens, arrays.experts, options)
        return arrays

    def _checked_params(
        self, params: Mapping[str, ArrayLike | QuantizedArray | QuantizedWeights], dtype: DTypeLike
    ) -> dict[str, Any]:
        """The parameters by name, each matrix as a Matrix with its adapter; raises if one is missing or wrong."""
        named: dict[str, Any] = {}
        for name, expected in (self.shapes | self.adapter_shapes).items():
            if name in params:
                value: Any = params[name]
                is_of_experts = len(expected) == 3 and name in self.shapes
                named[name] = as_matrix(name, value) if is_of_experts else as_dense(name, value, dtype)
            if name not in params or named[name].shape != expected:
                came = list(named[name].shape) if name in params else "none"
                raise ValueError(f"{name} must be among params, with the shape {list(expected)}, got {came}.")
        for name in {"w_router", "b_router", "scale_router", *self.adapter_shapes} & named.keys():
            check_floats(name, named[name])
        matrices = {
            name: named[name] if isinstance(named[name], Matrix) else Matrix(dense=named[name])
            for name in self.shapes
            if name.startswith("w_")
        }
        with_terms = {name: beside(matrices[name], term) for name, term in self.lora.terms(named).items()}
        return {name: named[name] for name in self.shapes} | matrices | with_terms

    def _apply_to_tokens(
        self, arrays: _Arrays, sharding: MoESharding | None, options: MlpOptions
    ) -> tuple[jax.Array, Metrics]:
        """y and metrics for the tokens x [T, H]; with a sharding, x is one device's part of the tokens."""
        token_axes, how = () if sharding is None else sharding.token_axes, How(options.implementation, current_target())
        x, mask, router_x = arrays.x, arrays.mask, arrays.router_x
        # 0 times NaN is NaN, so what a masked token holds must not reach a product
        arrays = arrays._replace(x=zeroed(x, mask))
        router_x = arrays.x if router_x is None else zeroed(router_x, mask)
        of_router = arrays.w_router, arrays.b_router, options.precision, options.implementation
        logits = compute_matrix_logits(router_x, *of_router)
        routing = compute_routing(logits, arrays.selection_bias, arrays.topk_indices, how, self.router)
        if arrays.scale_router is not None:
            routing = with_factors(routing, arrays.scale_router)
        if mask is not None:
            routing = without_masked(routing, mask, self.num_experts, how)
        y, overflow = self._experts(arrays, routing, sharding, options)
        metrics = Metrics(
            jax.lax.psum(routing.group_sizes, token_axes),
            compute_load_balancing_loss(logits, routing.group_sizes, mask, self.topk, self.score, token_axes),
            compute_router_z_loss(logits, mask, token_axes),
            overflow,
            routing.topk_indices,
        )
        return self._with_shared(y, x, arrays, how, options), metrics

    def _experts(
        self, arrays: _Arrays, routing: Routing, sharding: MoESharding | None, options: MlpOptions
    ) -> tuple[jax.Array, jax.Array]:
        """The experts' y for all tokens, and the overflow."""
        tokens, weights = arrays.x, arrays.experts
        if self.scale_input:
            tokens = (tokens.astype(jnp.float32) * routing.topk_weights).astype(tokens.dtype)
            routing = routing._replace(topk_weights=jnp.ones_like(routing.topk_weights))
        if sharding is None:
            weights = weights.in_recipe(options.quantization, tokens.dtype)
            return compute_mlp(tokens, weights, routing, options), jnp.int32(0)
        return compute_mlp_on_device(tokens, weights, routing.topk_weights, routing.topk_indices, sharding, options)

    def _with_shared(self, y: jax.Array, x: jax.Array, arrays: _Arrays, how: How, options: MlpOptions) -> jax.Array:
        """The experts' y plus the shared experts' y for all tokens x [T, H]."""
        if arrays.w_shared_gate_up is None or arrays.w_shared_down is None:
            return y
        precision, implementation = options.precision, options.implementation
        multiply = functools.partial(dense, precision=precision, implementation=implementation, batch_invariant=True)
        x = _bounded(x, arrays.mask)
        pre_activation = multiply(x, arrays.w_shared_gate_up)
        hidden = activated(pre_activation, find_activation(self.activation), implementation)
        shared, gate = multiply(hidden, arrays.w_shared_down), None
        if arrays.w_shared_gate is not None:
            gate = compute_matrix_logits(x, arrays.w_shared_gate, None, precision, implementation)
        return ADD_GATED(how, alike(AddGated(y, shared, gate)))


def _bounded(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """x [T, H] with zeros for masked tokens that hold NaN, infinity or values too large for the shared experts."""
    if mask is None:
        return x
    squares = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=1)
    # the product of gate and up grows with the square of a token, and its derivative too
    return zeroed(x, mask | jnp.isfinite(jnp.square(squares)))


def _as_router_x(router_x: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    """What the router multiplies, [T, H]; raises unless it holds floats in the shape of x."""
    router_x = as_array("router_x", router_x)
    if router_x.shape != shape:
        raise ValueError(f"router_x must have the shape of x, {list(shape)}, got {list(router_x.shape)}.")
    check_floats("router_x", router_x)
    return router_x.reshape(math.prod(shape[:-1]), shape[-1])
