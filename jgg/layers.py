"""An MoE layer as a function of its parameters: what the layers of every framework share."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.typing import ArrayLike, DTypeLike

from jgg.activations import ActivationLike, find_activation
from jgg.core.arguments import as_arrays, as_dtype, as_flag, as_int, as_precision, check_instance
from jgg.core.problem import DTYPES
from jgg.core.quantized import QuantizedArray, dense_weights
from jgg.experts.moe import moe_mlp
from jgg.fp8 import Fp8, check_quantization
from jgg.launching.choice import check_implementation
from jgg.router.logits import router_logits
from jgg.router.losses import load_balancing_loss, router_z_loss
from jgg.router.routing import Routing, check_counts, check_scores, route
from jgg.sharding import MoESharding, check_interleaved, map_tokens, moe_mlp_on_device

expert_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))
dense_init = jax.nn.initializers.lecun_normal()


class Metrics(NamedTuple):
    """What `MoELayer.apply` returns beside y.

    Attributes:
      group_sizes: int32 [E], rows that the router gave each expert.
      load_balancing_loss: float32 [], as `jgg.load_balancing_loss`: 1 where the load is even.
      router_z_loss: float32 [], as `jgg.router_z_loss`.
      overflow: int32 [], rows that found no room in the buffers of a sharded layer and added nothing to y.
    """

    group_sizes: jax.Array
    load_balancing_loss: jax.Array
    router_z_loss: jax.Array
    overflow: jax.Array


@dataclasses.dataclass(frozen=True)
class MoELayer:
    """Sizes and options of an MoE layer, dropless.

    Computes `y[t] = sum over the chosen experts e of p[t, e] * MLP_e(x[t])`, plus the shared experts of every token.

    Args:
      in_features: H, of x and y.
      hidden_features: I, of each expert.
      num_experts: E.
      topk: k, experts per token.
      score, normalize, scale, num_groups, topk_groups: of the router, as in `jgg.route`.
      use_selection_bias: the router chooses by scores plus a bias that is no parameter; see
        `jgg.update_selection_bias`.
      scale_input: p scales x before the expert instead of its result (Llama-4); needs topk 1.
      activation: of the experts, as in `jgg.moe_mlp`.
      interleaved: the features of w_gate_up are gate 0, up 0, gate 1, up 1, ... rather than side by side.
      use_bias: each expert's products have biases.
      use_router_bias: the router's logits have a bias.
      shared_features: hidden features of the shared experts, taken together; 0 for none.
      use_shared_gate: the shared experts' result is scaled by a sigmoid of one more projection of x.
    """

    in_features: int
    hidden_features: int
    num_experts: int
    topk: int
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    use_selection_bias: bool = False
    scale_input: bool = False
    activation: ActivationLike = "swiglu"
    interleaved: bool = False
    use_bias: bool = False
    use_router_bias: bool = False
    shared_features: int = 0
    use_shared_gate: bool = False

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
        check_counts(*(plain[name] for name in ("num_experts", "topk", "num_groups", "topk_groups")))
        _, plain["scale"] = check_scores(self.score, plain["normalize"], self.scale)
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        if self.scale_input and self.topk != 1:
            raise ValueError(f"scale_input needs topk to be 1, got {self.topk}.")
        if self.use_shared_gate and not self.shared_features:
            raise ValueError("use_shared_gate needs shared_features to be 1 or more, got 0.")
        find_activation(self.activation)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters by name. Biases begin with "b_", experts have three axes or are biases [E, features]."""
        hidden, inner, experts, shared = (
            self.in_features, self.hidden_features, self.num_experts, self.shared_features,
        )  # fmt: skip
        halves = 2 if find_activation(self.activation).is_gated else 1
        shapes: dict[str, tuple[int, ...]] = {"w_router": (hidden, experts)}
        if self.use_router_bias:
            shapes["b_router"] = (experts,)
        shapes["w_gate_up"], shapes["w_down"] = (experts, hidden, halves * inner), (experts, inner, hidden)
        if self.use_bias:
            shapes["b_gate_up"], shapes["b_down"] = (experts, halves * inner), (experts, hidden)
        if shared:
            shapes["w_shared_gate_up"], shapes["w_shared_down"] = (hidden, halves * shared), (shared, hidden)
        if self.use_shared_gate:
            shapes["w_shared_gate"] = (hidden, 1)
        return shapes

    def apply(
        self, params: Mapping[str, ArrayLike | QuantizedArray], x: ArrayLike, selection_bias: ArrayLike | None = None,
        *, sharding: MoESharding | None = None, precision: jax.lax.PrecisionLike = None,
        quantization: Fp8 | None = None, implementation: str | None = None,
    ) -> tuple[jax.Array, Metrics]:  # fmt: skip
        """Returns y in the shape of x, and Metrics over all devices.

        Args:
          params: arrays of `shapes`, those of the experts in the dtype of x. The router computes in float32. A
            QuantizedArray gets no gradient; but for experts with `quantization` and without a sharding, it is
            dequantized to the dtype of x first.
          x: [..., H].
          selection_bias: float [E] with `use_selection_bias`, else None.
          sharding: how a mesh splits the tokens, all but the last axis of x together, and the experts' weights. The
            router and the shared experts have their weights on every device.
          precision, implementation: as in `jgg.grouped_gemm`.
          quantization: of the experts, as in `jgg.moe_mlp`; the router and the shared experts are not quantized.
        """
        given = {**params, "x": x, "selection_bias": selection_bias}
        quantized = {}
        if quantization is not None and sharding is None:
            names = ("w_gate_up", "w_down")
            quantized = {name: given.pop(name) for name in names if isinstance(params.get(name), QuantizedArray)}
        arrays = as_arrays(dense_weights("x", x, given), may_be_none=("selection_bias",)) | quantized
        tokens: jax.Array = arrays["x"]
        shape = tokens.shape
        if sharding is not None:
            check_instance("sharding", sharding, MoESharding, "a jgg.sharding.MoESharding or None")
        if (selection_bias is None) == self.use_selection_bias:
            wanted, got = ("[E]", "None") if self.use_selection_bias else ("None", "an array")
            raise ValueError(
                f"selection_bias must be {wanted} with use_selection_bias={self.use_selection_bias}, got {got}."
            )
        if not shape or shape[-1] != self.in_features:
            raise ValueError(f"x must be [..., H] with H equal to in_features, {self.in_features}, got {list(shape)}.")
        for name, expected in self.shapes.items():
            if name not in params or arrays[name].shape != expected:
                came = list(arrays[name].shape) if name in params else "none"
                raise ValueError(f"{name} must be among params, with the shape {list(expected)}, got {came}.")
        arrays["x"] = tokens.reshape(math.prod(shape[:-1]), shape[-1])
        arrays = {name: array for name, array in arrays.items() if array is not None}
        apply = functools.partial(
            self._apply_to_tokens, sharding=sharding, precision=precision, quantization=quantization,
            implementation=implementation,
        )  # fmt: skip
        if sharding is None:
            y, metrics = apply(arrays)
        else:
            specs = dict.fromkeys([*params, "selection_bias"], jax.P()) | sharding.weight_specs("ekn")
            y, metrics = map_tokens(apply, sharding, arrays, specs, (sharding.token_spec, jax.P()))
        return y.reshape(shape), metrics

    def _apply_to_tokens(
        self, arrays: dict[str, jax.Array], *, sharding: MoESharding | None, precision: jax.lax.PrecisionLike,
        quantization: Fp8 | None, implementation: str | None,
    ) -> tuple[jax.Array, Metrics]:  # fmt: skip
        """y and metrics of tokens x [T, H]; with a sharding, of a device's part of them."""
        tokens, token_axes = arrays["x"], () if sharding is None else sharding.token_axes
        bias = arrays["b_router"] if self.use_router_bias else None
        logits = router_logits(tokens, arrays["w_router"], bias, precision=precision, implementation=implementation)
        routing = route(
            logits, self.topk, score=self.score, normalize=self.normalize, scale=self.scale,
            selection_bias=arrays.get("selection_bias"), num_groups=self.num_groups, topk_groups=self.topk_groups,
            implementation=implementation,
        )  # fmt: skip
        options = {"precision": precision, "quantization": quantization, "implementation": implementation}
        y, overflow = self._experts(arrays, routing, sharding, **options)
        metrics = Metrics(
            jax.lax.psum(routing.group_sizes, token_axes),
            load_balancing_loss(logits, routing.topk_indices, score=self.score, axis_name=token_axes),
            router_z_loss(logits, axis_name=token_axes),
            overflow,
        )
        return y + self._shared(arrays, tokens, precision) if self.shared_features else y, metrics

    def _experts(
        self, arrays: dict[str, jax.Array], routing: Routing, sharding: MoESharding | None, **options: Any
    ) -> tuple[jax.Array, jax.Array]:
        """The experts' y of all tokens, and the overflow."""
        tokens = arrays["x"]
        if self.scale_input:
            tokens = (tokens.astype(jnp.float32) * routing.topk_weights).astype(tokens.dtype)
            routing = routing._replace(topk_weights=jnp.ones_like(routing.topk_weights))
        names = ("w_gate_up", "w_down", "b_gate_up", "b_down")
        options |= {name: arrays[name] for name in names if name in arrays}
        options |= {"activation": self.activation, "interleaved": self.interleaved, "w_layout": "ekn"}
        if sharding is None:
            return moe_mlp(tokens, routing=routing, **options), jnp.int32(0)
        options |= {"topk_weights": routing.topk_weights, "topk_indices": routing.topk_indices}
        return moe_mlp_on_device(tokens, sharding=sharding, **options)

    def _shared(self, params: dict[str, jax.Array], tokens: jax.Array, precision: jax.lax.PrecisionLike) -> jax.Array:
        activation = find_activation(self.activation)
        # of the three, since some that name a dtype would round float32 to it
        dot = functools.partial(jnp.dot, precision=as_precision(precision))
        y = dot(activation(dot(tokens, params["w_shared_gate_up"])).astype(tokens.dtype), params["w_shared_down"])
        return y * jax.nn.sigmoid(dot(tokens, params["w_shared_gate"])) if self.use_shared_gate else y


def check_layer(
    layer: MoELayer, *, sharding: MoESharding | None, precision: jax.lax.PrecisionLike, quantization: Fp8 | None,
    implementation: str | None, dtype: DTypeLike | None, param_dtype: DTypeLike, **inits: Initializer,
) -> None:  # fmt: skip
    """Raises where a framework's layer has an option that `MoELayer.apply` or its parameters would not take.

    Args:
      dtype: of the computation, or None.
      inits: initializers by the names of their arguments.
    """
    as_precision(precision)
    check_quantization(quantization)
    check_implementation(implementation)
    if dtype is not None:
        as_dtype("dtype", dtype, DTYPES)
    as_dtype("param_dtype", param_dtype)
    for name, init in inits.items():
        check_instance(name, init, Callable, "a function")
    if sharding is not None:
        check_instance("sharding", sharding, MoESharding, "a jgg.sharding.MoESharding or None")
        check_interleaved(layer.interleaved, layer.activation, sharding)
