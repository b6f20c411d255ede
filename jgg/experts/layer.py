"""An MoE layer as a function of its parameters, shared by the layers of every framework."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.typing import ArrayLike, DTypeLike

from jgg.core.activations import find_activation
from jgg.core.arguments import as_array, as_flag, as_int, as_mask, check_floats
from jgg.core.choices import OF_EXPERTS, OF_MOE
from jgg.core.gpu_target import current_target
from jgg.core.manual_axes import alike
from jgg.core.matrix import Matrix
from jgg.core.quantized import QuantizedArray, QuantizedWeights, as_dense
from jgg.experts.arguments import ExpertWeights, MlpOptions, check_shapes
from jgg.experts.layer_options import InFeatures, LayerOptions, check_sharding
from jgg.experts.mesh import check_outside_shard_map, map_tokens
from jgg.experts.moe import compute_mlp
from jgg.experts.on_device import compute_mlp_on_device
from jgg.experts.router.logits import compute_matrix_logits
from jgg.experts.router.losses import compute_load_balancing_loss, compute_router_z_loss
from jgg.experts.router.options import RouterOptions
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
from jgg.linear.lora import Lora, adapter_init, target_of
from jgg.linear.low_rank import LowRank, beside
from jgg.linear.weights import as_matrix
from jgg.products.add_gated import ADD_GATED, AddGated

__all__ = ["LayerOptions", "Metrics", "MoELayer", "dense_init", "expert_init"]

expert_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))
dense_init = jax.nn.initializers.lecun_normal()


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


@dataclasses.dataclass(unsafe_hash=True)
class MoELayer(LayerOptions, InFeatures):
    """A dropless MoE layer without its parameters: `InFeatures` and `LayerOptions`, checked.

    Computes `y[t] = sum over the chosen experts e of p[t, e] * MLP_e(x[t])`, plus the shared experts of every token.
    """

    def __post_init__(self) -> None:
        plain: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            if field.type is int:
                least = 0 if field.name == "shared_features" else 1
                plain[field.name] = as_int(field.name, getattr(self, field.name), least)
            elif field.type is bool:
                plain[field.name] = as_flag(field.name, getattr(self, field.name))
        if plain["topk"] > plain["num_experts"]:
            raise ValueError(f"topk must be between 1 and num_experts, {self.num_experts}, got {self.topk}.")
        plain |= self.router._asdict()
        if self.normalize is None:  # which stays, for `dataclasses.replace` with another topk
            del plain["normalize"]
        lora = self.lora.checked((*OF_EXPERTS, *OF_MOE))
        if not plain["shared_features"] and any("shared" in target for target in lora.targets):
            raise ValueError(f"shared_features must be 1 or more for lora_targets {lora.targets}, got 0.")
        plain |= lora.of_a_layer
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        if self.scale_input and self.topk != 1:
            raise ValueError(f"scale_input needs topk to be 1, got {self.topk}.")
        if self.use_shared_gate and not self.shared_features:
            raise ValueError("use_shared_gate needs shared_features to be 1 or more, got 0.")
        find_activation(self.activation)

    def __setattr__(self, name: str, value: object) -> None:
        """Sets a field once. `frozen=True` would do so too, but Linen's fields cannot come from a frozen dataclass."""
        if name in vars(self):
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, options: LayerOptions, in_features: int) -> Self:
        """The layer with these options."""
        named = {field.name: getattr(options, field.name) for field in dataclasses.fields(LayerOptions)}
        return cls(in_features, **named)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters by name. Names of biases begin with "b_"; experts' matrices have three axes."""
        hidden, inner, experts, shared = (
            self.in_features,
            self.hidden_features,
            self.num_experts,
            self.shared_features,
        )
        halves = 2 if find_activation(self.activation).is_gated else 1
        shapes: dict[str, tuple[int, ...]] = {"w_router": (hidden, experts)}
        if self.use_router_bias:
            shapes["b_router"] = (experts,)
        if self.use_router_scale:
            shapes["scale_router"] = (experts,)
        shapes["w_gate_up"], shapes["w_down"] = (experts, hidden, halves * inner), (experts, inner, hidden)
        if self.use_bias:
            shapes["b_gate_up"], shapes["b_down"] = (experts, halves * inner), (experts, hidden)
        if shared:
            shapes["w_shared_gate_up"], shapes["w_shared_down"] = (hidden, halves * shared), (shared, hidden)
        if self.use_shared_gate:
            shapes["w_shared_gate"] = (hidden, 1)
        return shapes

    @property
    def router(self) -> RouterOptions:
        """The options of the router."""
        named = {name: getattr(self, name) for name in RouterOptions._fields}
        return RouterOptions.checked(self.num_experts, **named)

    @property
    def lora(self) -> Lora:
        """The options of the LoRA adapters."""
        return Lora.of_layer(self)

    @property
    def without_adapters(self) -> Self:
        """The same layer without its LoRA adapters; it ignores their arrays in params."""
        return dataclasses.replace(self, lora_rank=None, lora_alpha=None)

    @property
    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the LoRA adapters by name; `shapes` does not include these parameters."""
        return self.lora.shapes(self.shapes)

    def initializers(
        self,
        kernel_init: Initializer,
        router_init: Initializer,
        bias_init: Initializer,
        sharding: MoESharding | None,
    ) -> dict[str, Initializer]:
        """The initializers of parameters by name; with a sharding they create arrays already split."""
        inits: dict[str, Initializer] = {"scale_router": jax.nn.initializers.ones}
        for name, shape in self.shapes.items():
            init = bias_init if name.startswith("b_") else kernel_init if len(shape) == 3 else router_init
            inits.setdefault(name, init)
        return inits if sharding is None else {name: sharding.split_init(init, name) for name, init in inits.items()}

    def adapter_initializers(self, params: Mapping[str, Any], sharding: MoESharding | None) -> dict[str, Initializer]:
        """The initializers of these params' adapters by name, like `initializers`."""
        inits = {name: adapter_init(name, params[target_of(name)]) for name in self.adapter_shapes}
        return inits if sharding is None else {name: sharding.split_init(init, name) for name, init in inits.items()}

    def adapters(self, params: Mapping[str, jax.Array]) -> dict[str, LowRank]:
        """Returns the experts' LoRA adapters by the names of their matrices, as in `jgg.hf.Adapter`.

        Args:
          params: arrays by the names in `adapter_shapes`.
        """
        return self.lora.of(dict(zip(OF_EXPERTS, OF_EXPERTS, strict=True))).terms(params)

    def merge_adapters(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns params with each LoRA adapter merged and b set to zero: the same layer, up to rounding.

        Args:
          params: arrays by the names in `shapes` and `adapter_shapes`. Matrices with adapters may not be quantized.

        Raises: as `jgg.LowRank.merge`.
        """
        return self.lora.merge(params)

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
