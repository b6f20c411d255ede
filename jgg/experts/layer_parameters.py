"""The parameters of an MoE layer: names, shapes, initial values, and the adapters among them."""

import dataclasses
from collections.abc import Mapping
from typing import Self

import jax
from jax.nn.initializers import Initializer

from jgg.core.activations import find_activation
from jgg.core.arguments import as_flag, as_int
from jgg.core.choices import OF_EXPERTS, OF_MOE
from jgg.core.quantized import QuantizedArray
from jgg.experts.layer_options import InFeatures, LayerOptions
from jgg.experts.router.options import RouterOptions
from jgg.experts.sharding import MoESharding
from jgg.linear.lora import Lora, adapter_init, target_of
from jgg.linear.low_rank import LowRank

expert_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))
dense_init = jax.nn.initializers.lecun_normal()


@dataclasses.dataclass(unsafe_hash=True)
class LayerParameters(LayerOptions, InFeatures):
    """The options of an MoE layer, checked, and the names, shapes and initializers of its parameters."""

    def __post_init__(self) -> None:
        plain: dict[str, int] = {}
        for field in dataclasses.fields(self):
            if field.type is int:
                least = 0 if field.name == "shared_features" else 1
                plain[field.name] = as_int(field.name, getattr(self, field.name), least)
            elif field.type is bool:
                plain[field.name] = as_flag(field.name, getattr(self, field.name))
        if plain["topk"] > plain["num_experts"]:
            raise ValueError(f"topk must be between 1 and num_experts, {self.num_experts}, got {self.topk}.")
        of_router = self.router._asdict()
        if self.normalize is None:  # which stays, for `dataclasses.replace` with another topk
            del of_router["normalize"]
        lora = self.lora.checked((*OF_EXPERTS, *OF_MOE))
        if not plain["shared_features"] and any("shared" in target for target in lora.targets):
            raise ValueError(f"shared_features must be 1 or more for lora_targets {lora.targets}, got 0.")
        for name, value in (plain | of_router | lora.of_a_layer).items():
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

    def adapter_initializers(
        self, params: Mapping[str, jax.Array | QuantizedArray], sharding: MoESharding | None
    ) -> dict[str, Initializer]:
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
