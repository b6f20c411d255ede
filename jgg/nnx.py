"""Flax NNX layers; `import jgg.nnx` needs Flax (`pip install 'jgg[flax]'`)."""

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import InitVar
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jgg.core.arguments import as_dtype, as_flag, check, check_instance
from jgg.core.quantized import QuantizedArray, block_of, is_quantized, values_and_scales
from jgg.experts.layer import MoELayer
from jgg.experts.layer_options import InFeatures, LayerOptions, check_layer
from jgg.experts.layer_parameters import dense_init, expert_init
from jgg.experts.sharding import MoESharding
from jgg.linear.fp8 import Fp8
from jgg.linear.low_rank import LowRank


class SelectionBias(nnx.Variable[jax.Array]):
    """A router's selection bias, which optimizers leave alone; see `jgg.update_selection_bias`."""


class Frozen(nnx.Variable[Any]):
    """A matrix that is not trained, such as a `jgg.QuantizedArray`; it replaces a layer's `nnx.Param`.

    `nnx.grad` and optimizers leave it alone, because they only take an `nnx.Param`. `nnx.state` includes it, and so do
    checkpoints. `load_params` makes one of each QuantizedArray that it gets.

    Examples:
      >>> import jgg, jgg.nnx
      >>> from flax import nnx
      >>> layer = jgg.nnx.MoE(64, 128, num_experts=8, topk=2, rngs=nnx.Rngs(0))
      >>> layer.w_down = jgg.nnx.Frozen(jgg.quantize_weights(layer.w_down[...]))
      >>> list(nnx.state(layer, nnx.Param))
      ['w_gate_up', 'w_router']
    """


def sow(module: nnx.Module, values: Mapping[str, object]) -> None:
    """Sows intermediates of a module, each in a tuple of one, where `nnx.capture` collects them."""
    # where nobody captures, sow of Flax 0.12.10 and older would keep them in the module itself
    for name, value in values.items() if hasattr(module, "__captures__") else ():
        module.sow(nnx.Intermediate, name, value)


class _SignatureOfInit:
    """Gives a class the signature that `inspect.signature` finds; NNX's metaclass hides the one of `__init__`."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        init = inspect.signature(owner.__init__)  # type: ignore[misc]
        return init.replace(parameters=list(init.parameters.values())[1:], return_annotation=inspect.Signature.empty)


@dataclasses.dataclass(eq=False, repr=False)
class MoE(LayerOptions, InFeatures, nnx.Module):
    """A mixture-of-experts layer, dropless, with the routers, experts and shared experts of today's models.

    Computes `y[t] = sum over the chosen experts e of p[t, e] * MLP_e(x[t])`, by default with
    `MLP_e(x) = (silu(x @ gate_e) * (x @ up_e)) @ down_e`, and p the router's top-k weights. The router computes in
    float32. Matrices that are not trained may each be a `jgg.QuantizedArray`, in a `Frozen` variable.

    Examples:
      >>> import jax, jgg.nnx
      >>> from flax import nnx
      >>> layer = jgg.nnx.MoE(64, 128, num_experts=8, topk=2, rngs=nnx.Rngs(0))
      >>> layer(jax.numpy.ones((2, 16, 64))).shape
      (2, 16, 64)

      With LoRA, the adapters are `nnx.LoRAParam`, so gradients and optimizers can select them:

      >>> layer = jgg.nnx.MoE(64, 128, num_experts=8, topk=2, lora_rank=4, rngs=nnx.Rngs(0))
      >>> loss = lambda layer, x: (layer(x) ** 2).sum()
      >>> adapters = nnx.DiffState(0, nnx.LoRAParam)
      >>> gradients = nnx.grad(loss, argnums=adapters)(layer, jax.numpy.ones((16, 64)))
      >>> list(gradients)
      ['w_down_lora_a', 'w_down_lora_b', 'w_gate_up_lora_a', 'w_gate_up_lora_b']

    Args:
      in_features: H, features of x and y.
      hidden_features, num_experts, topk and options from score to lora_targets: as in `jgg.layers.LayerOptions`.
      dtype: dtype of the computation, which x is cast to; by default the promoted dtype of x and all parameters except
        the router's and the adapters. Parameters and their gradients keep their own dtypes.
      param_dtype: dtype of the parameters.
      lora_param_dtype: dtype of the LoRA adapters and of their gradients, whatever the dtype of other parameters.
        Products round the adapters to the dtype of the computation.
      precision: as in `jgg.grouped_gemm`.
      quantization: a `jgg.Fp8` to compute the experts' products in FP8; None for the dtype of the computation.
      kernel_init: initializer of the experts, w_gate_up [E, H, 2 * I] and w_down [E, I, H].
      router_init: initializer of w_router [H, E] and of all other matrices (the shared experts').
      bias_init: initializer of the biases.
      kernel_metadata: metadata of w_gate_up and w_down, such as their sharding.
      sharding: how the layer is split over a mesh, a `jgg.sharding.MoESharding`. Parameters are created already
        sharded; the tokens of x are split over `sharding.token_axes`.
      implementation: as in `jgg.grouped_gemm`, also for the shared experts; by default a table of measurements decides
        which of their products the kernels compute.
      rngs: random number generators; the stream "params" is used.
    """

    __signature__ = _SignatureOfInit()

    _: dataclasses.KW_ONLY
    dtype: DTypeLike | None = None
    param_dtype: InitVar[DTypeLike] = jnp.float32
    lora_param_dtype: InitVar[DTypeLike] = jnp.float32
    precision: jax.lax.PrecisionLike = None
    quantization: Fp8 | None = None
    kernel_init: InitVar[Initializer] = expert_init
    router_init: InitVar[Initializer] = dense_init
    bias_init: InitVar[Initializer] = nnx.initializers.zeros
    kernel_metadata: InitVar[Mapping[str, object] | None] = None
    sharding: MoESharding | None = None
    implementation: str | None = None
    rngs: InitVar[nnx.Rngs]

    def __post_init__(
        self,
        param_dtype: DTypeLike,
        lora_param_dtype: DTypeLike,
        kernel_init: Initializer,
        router_init: Initializer,
        bias_init: Initializer,
        kernel_metadata: Mapping[str, object] | None,
        rngs: nnx.Rngs,
    ) -> None:
        layer = self.layer
        inits = {"kernel_init": kernel_init, "router_init": router_init, "bias_init": bias_init}
        check_layer(layer, self, {"param_dtype": param_dtype, "lora_param_dtype": lora_param_dtype}, inits)
        for name, option in vars(layer).items():  # as plain numbers, where an array was given for one
            setattr(self, name, option)
        by_name = layer.initializers(kernel_init, router_init, bias_init, self.sharding)
        for name, shape in layer.shapes.items():
            metadata = cast(dict[str, Any], kernel_metadata or {}) if len(shape) == 3 else {}
            setattr(self, name, nnx.Param(by_name[name](rngs.params(), shape, param_dtype), **metadata))
        by_name = layer.adapter_initializers({name: self._value(name) for name in layer.shapes}, self.sharding)
        for name, shape in layer.adapter_shapes.items():
            setattr(self, name, nnx.LoRAParam(by_name[name](rngs.params(), shape, lora_param_dtype)))
        if self.use_selection_bias:
            init = nnx.initializers.zeros
            init = init if self.sharding is None else self.sharding.split_init(init, "selection_bias")
            self.selection_bias = SelectionBias(init(jax.random.key(0), (self.num_experts,), jnp.float32))

    @property
    def layer(self) -> MoELayer:
        """The layer as a function of its parameters."""
        return MoELayer.of(self, self.in_features)

    def __call__(
        self,
        x: jax.Array,
        topk_indices: jax.Array | None = None,
        mask: jax.Array | None = None,
        *,
        router_x: jax.Array | None = None,
        adapters: bool = True,
        quantized: bool = True,
    ) -> jax.Array:
        """Applies the layer to x [..., H]; the result has the shape of x and the dtype of the computation.

        Sows intermediates, which `nnx.capture(layer, nnx.Intermediate)` collects, each in a tuple of one. They are
        the fields of `jgg.layers.Metrics`:

        - "group_sizes", int32 [E]: rows that the router gave each expert;
        - "load_balancing_loss", float32 []: 1 where the load is even;
        - "router_z_loss", float32 [];
        - "overflow", int32 []: rows that found no room in the buffers of a sharded layer;
        - "topk_indices", int32 [..., k]: the experts that each token went to.

        Args:
          topk_indices: integer [..., k], experts to use instead of the router's choice, such as an earlier call sowed;
            -1 leaves a choice to the router. As in `jgg.route`, an index past the last expert adds nothing, and an
            expert given twice counts twice.
          mask: bool or number [...], False or 0 for the tokens of x that do not count, such as padding; by default all
            count. Tokens that do not count go to no expert and cost no expert's time. Their result comes from the
            shared experts alone, or is zero. "group_sizes" and the losses leave them out, and their "topk_indices" are
            -1. They may hold anything, even NaN: none of it reaches a gradient of parameters or other tokens.
          router_x: [..., H], what the router multiplies for each token of x; by default x itself.
          adapters: whether to use the LoRA adapters; False computes the layer without them.
          quantized: whether to use the layer's `quantization`, if it has one. False multiplies in the dtype of the
            computation, for example for inference with few tokens.
        """
        layer = self.layer if as_flag("adapters", adapters) else self.layer.without_adapters
        params = {name: self._value(name) for name in layer.shapes}
        own = [array for name, array in params.items() if not (name.endswith("_router") or is_quantized(array))]
        x = jnp.asarray(x, dtypes.canonicalize_dtype(x, *own, dtype=self.dtype))
        selection_bias = self.selection_bias[...] if self.use_selection_bias else None
        params |= {name: self._value(name) for name in layer.adapter_shapes}
        y, metrics = layer.apply(
            params,
            x,
            selection_bias,
            router_x=router_x,
            topk_indices=topk_indices,
            mask=mask,
            sharding=self.sharding,
            precision=self.precision,
            quantization=self.quantization if as_flag("quantized", quantized) else None,
            implementation=self.implementation,
        )
        sow(self, metrics._asdict())
        return y

    def adapters(self) -> dict[str, LowRank]:
        """Returns the experts' LoRA adapters by the names of their matrices, as in `jgg.hf.Adapter`."""
        layer = self.layer
        return layer.adapters({name: self._value(name) for name in layer.adapter_shapes})

    def merge_adapters(self) -> None:
        """Merges each LoRA adapter into its matrix, and sets its b to zero: the layer stays the same, up to rounding.

        Examples:
          >>> import jgg.nnx
          >>> from flax import nnx
          >>> layer = jgg.nnx.MoE(64, 128, num_experts=8, topk=2, lora_rank=4, rngs=nnx.Rngs(0))
          >>> layer.w_down_lora_b[...] += 0.1  # instead of training
          >>> layer.merge_adapters()
          >>> float(abs(layer.w_down_lora_b[...]).max())
          0.0

        Raises: TypeError: a matrix with an adapter is a QuantizedArray. Nothing is merged then.
        """
        layer = self.layer
        params = {name: self._value(name) for name in layer.shapes | layer.adapter_shapes}
        merged = layer.merge_adapters(params)
        for name in params:
            if merged[name] is not params[name]:
                getattr(self, name).set_value(merged[name])

    def _value(self, name: str) -> Any:
        variable = getattr(self, name)
        check_instance(name, variable, nnx.Variable, "an nnx.Variable, such as jgg.nnx.Frozen for a QuantizedArray")
        return variable.get_value()


def load_params(layer: MoE, params: Mapping[str, np.ndarray | jax.Array | QuantizedArray]) -> None:
    """Sets all parameters of a layer and its selection bias; each keeps its dtype and sharding.

    Arrays in host memory, such as `jgg.hf.from_hf` returns, are cast there. Each device then gets its own shard only. A
    QuantizedArray stays unchanged, in a `Frozen` variable. If something is wrong, nothing is set.

    Examples:
      >>> import jax, jax.numpy as jnp, jgg.nnx
      >>> from flax import nnx
      >>> sizes = {"in_features": 64, "hidden_features": 128, "num_experts": 8, "topk": 2}
      >>> trained = jgg.nnx.MoE(**sizes, rngs=nnx.Rngs(0))
      >>> layer = jgg.nnx.MoE(**sizes, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(1))
      >>> params = nnx.state(trained, (nnx.Param, jgg.nnx.SelectionBias))
      >>> jgg.nnx.load_params(layer, nnx.to_pure_dict(params))
      >>> layer.w_down.dtype
      dtype(bfloat16)

    Args:
      layer: the layer, which may be from `nnx.eval_shape`: then the parameters are created here, split by the layer's
        `sharding`.
      params: arrays of floats by name: the names in `jgg.layers.MoELayer.shapes`, and "selection_bias" [E] if the
        router has one. Matrices may each be a QuantizedArray. LoRA adapters missing from params stay unchanged, but a
        layer from `nnx.eval_shape` has none to keep, so it needs them all.

    Raises:
      ValueError: a name is missing or unexpected, a shape is wrong, or devices would share a block.
      TypeError: the layer is not a `MoE`, or a value in params is not an array of floats, or not a QuantizedArray where
        the layer has one.
    """
    check_instance("layer", layer, MoE, "a jgg.nnx.MoE")
    check_instance("params", params, Mapping, "a dict of arrays by name")
    adapters = layer.layer.adapter_shapes
    names = [*layer.layer.shapes, *(["selection_bias"] if layer.use_selection_bias else []), *adapters]
    for name in names:
        stays = name in adapters and isinstance(layer._value(name), jax.Array)
        check(stays or name in params, f"params must have {', '.join(names)}, got none of the name {name!r}.")
    placements: dict[str, jax.sharding.Sharding | None] = {}
    for name, array in params.items():
        check(name in names, f"params must have {', '.join(names)} and nothing else, got {name!r} too.")
        value = layer._value(name)
        _check_kind(name, array, value)
        shape = list(value.shape)
        check(list(array.shape) == shape, f"{name} must have the layer's shape {shape}, got {list(array.shape)}.")
        placements[name] = placement = _placement(name, values_and_scales(value)[0], layer.sharding)
        if isinstance(placement, jax.NamedSharding) and layer.sharding is not None:
            layer.sharding.check_split(name, array, placement.spec)
    for name, array in params.items():
        variable, placement = getattr(layer, name), placements[name]
        if isinstance(array, QuantizedArray):
            setattr(layer, name, Frozen(jax.device_put(array, placement), **variable.get_metadata()))
        else:
            variable.set_value(jax.device_put(array.astype(variable.get_value().dtype), placement))


def _check_kind(name: str, array: np.ndarray | jax.Array | QuantizedArray, value: object) -> None:
    """Raises if an array cannot replace a layer's value; a QuantizedArray can replace any matrix."""
    if isinstance(value, QuantizedArray):
        check_instance(name, array, QuantizedArray, "a QuantizedArray, as the layer's is")
    elif not (name.startswith("w_") and isinstance(array, QuantizedArray)):
        check_instance(name, array, np.ndarray | jax.Array, "a NumPy or JAX array")
    if isinstance(array, QuantizedArray):
        block_of(array, f"{name}.")
    else:
        as_dtype(f"the dtype of {name}", array.dtype)


def _placement(
    name: str, value: jax.Array | jax.ShapeDtypeStruct, sharding: MoESharding | None
) -> jax.sharding.Sharding | None:
    """The devices that a parameter is committed to, or will be in an abstract layer; None if JAX chooses them."""
    if isinstance(value, jax.Array):
        return value.sharding if value.committed else None
    if value.sharding is None and sharding is not None:
        return sharding.named(sharding.weight_specs("ekn").get(name, jax.P()))
    return value.sharding
