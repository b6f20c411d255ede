"""Flax Linen layers; `import jgg.linen` needs Flax (`pip install 'jgg[flax]'`)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import dtypes
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jgg.core.arguments import as_flag, check
from jgg.core.quantized import QuantizedArray, block_of, is_quantized
from jgg.experts.layer import MoELayer
from jgg.experts.layer_options import LayerOptions, check_layer
from jgg.experts.layer_parameters import dense_init, expert_init
from jgg.experts.sharding import MoESharding
from jgg.linear.fp8 import Fp8


class MoE(nn.Module, LayerOptions):
    """A dropless mixture-of-experts layer: `jgg.nnx.MoE` for Linen, with the same parameters and results.

    A selection bias is the variable "selection_bias" of the collection "router". Initializers may be wrapped in
    `nn.with_partitioning`.

    Matrices in the "params" of `apply` may each be a `jgg.QuantizedArray`. Its gradient is zeros in FP8, and so is the
    gradient of a matrix with a LoRA adapter. To skip these gradients, differentiate only in the other parameters. With
    parameters in MXFP4 this is the only way, as `jax.grad` refuses bytes. Adapters are "params" too, named as in
    `jgg.nnx.MoE`. To train only them, mask the optimizer by `"_lora_" in name`, or differentiate only in them.
    `jgg.layers.MoELayer.merge_adapters` merges them.

    Examples:
      >>> import jax, jgg.linen
      >>> layer = jgg.linen.MoE(hidden_features=128, num_experts=8, topk=2)
      >>> x = jax.numpy.ones((2, 16, 64))
      >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
      (2, 16, 64)

    Args:
      hidden_features, num_experts, topk and options from score to lora_targets: as in `jgg.layers.LayerOptions`.
      dtype: dtype of the computation, which x is cast to; by default the promoted dtype of x and all parameters except
        the router's and the adapters. Parameters and their gradients keep their own dtypes.
      param_dtype: dtype of the parameters.
      precision: as in `jgg.grouped_gemm`.
      implementation: as in `jgg.nnx.MoE`.
      quantization: as in `jgg.nnx.MoE`.
      kernel_init, router_init, bias_init: initializers, as in `jgg.nnx.MoE`.
      sharding, lora_param_dtype: as in `jgg.nnx.MoE`.
    """

    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: jax.lax.PrecisionLike = None
    kernel_init: Initializer = expert_init
    router_init: Initializer = dense_init
    bias_init: Initializer = nn.initializers.zeros
    implementation: str | None = None
    sharding: MoESharding | None = None
    quantization: Fp8 | None = None
    lora_param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        super().__post_init__()
        dtypes = {"param_dtype": self.param_dtype, "lora_param_dtype": self.lora_param_dtype}
        inits = {name: getattr(self, name) for name in ("kernel_init", "router_init", "bias_init")}
        check_layer(MoELayer.of(self, in_features=1), self, dtypes, inits)

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        topk_indices: jax.Array | None = None,
        mask: jax.Array | None = None,
        *,
        router_x: jax.Array | None = None,
        adapters: bool = True,
    ) -> jax.Array:
        """Applies the layer to x [..., H]; the result has the shape of x and the dtype of the computation.

        Sows into the collection "intermediates", which `apply(..., mutable="intermediates")` returns, each in a tuple
        of one. They are the fields of `jgg.layers.Metrics`:

        - "group_sizes", int32 [E]: rows that the router gave each expert;
        - "load_balancing_loss", float32 []: 1 where the load is even;
        - "router_z_loss", float32 [];
        - "overflow", int32 []: rows that found no room in the buffers of a sharded layer;
        - "topk_indices", int32 [..., k]: the experts that each token went to.

        Args:
          topk_indices, mask, router_x, adapters: as in `jgg.nnx.MoE`.
        """
        uses_adapters, layer = as_flag("adapters", adapters), MoELayer.of(self, x.shape[-1])
        inits = layer.initializers(self.kernel_init, self.router_init, self.bias_init, self.sharding)
        params: dict[str, jax.Array | QuantizedArray] = {}
        for name, shape in layer.shapes.items():
            packed = self._packed(name, shape)
            params[name] = self.param(name, inits[name], shape, self.param_dtype) if packed is None else packed
        inits = layer.adapter_initializers(params, self.sharding)
        of_adapters: dict[str, jax.Array | QuantizedArray] = {
            name: self.param(name, inits[name], shape, self.lora_param_dtype)
            for name, shape in layer.adapter_shapes.items()
        }
        selection_bias = None
        if layer.use_selection_bias:
            shape = (layer.num_experts,)
            selection_bias = self.variable("router", "selection_bias", jnp.zeros, shape, jnp.float32).value
        own = [array for name, array in params.items() if not (name.endswith("_router") or is_quantized(array))]
        x = jnp.asarray(x, dtypes.canonicalize_dtype(x, *own, dtype=self.dtype))
        y, metrics = (layer if uses_adapters else layer.without_adapters).apply(
            params | of_adapters,
            x,
            selection_bias,
            router_x=router_x,
            topk_indices=topk_indices,
            mask=mask,
            sharding=self.sharding,
            precision=self.precision,
            quantization=self.quantization,
            implementation=self.implementation,
        )
        for name, value in metrics._asdict().items():
            self.sow("intermediates", name, value)
        return y

    def _packed(self, name: str, shape: tuple[int, ...]) -> QuantizedArray | None:
        """The parameter of this name if it is in MXFP4, whose bytes do not have the shape that Flax checks for."""
        value = nn.unbox(self.get_variable("params", name))
        if not isinstance(value, QuantizedArray):
            return None
        block_of(value, f"{name}.")
        check(value.shape == shape, f"{name} must have the layer's shape {list(shape)}, got {list(value.shape)}.")
        return value if value.is_packed else None
