"""`Layer`: one layer of a decoder, and the kinds of mixers that it may have."""

from typing import Any, Protocol

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

import jgg.nnx
from jgg.core.problem import has_few_rows
from jgg.linear.fp8 import Fp8
from jgg.models.attention import Attention, Place
from jgg.models.config import ModelConfig
from jgg.models.parts import OF_EXPERTS, OF_MOE, Mlp, Options, merge_adapters, norm, set_params

# what remat="names" keeps for the backward pass: other code of jgg names all but the last
SAVED_NAMES = "jgg_x", "jgg_pre_activation", "jgg_routing", "attention"


class Mixer(Protocol):
    """The part of a layer in which tokens of a sequence see each other. A cache keeps what decoding needs of them."""

    options: Options

    def __init__(self, config: ModelConfig, options: Options, rngs: nnx.Rngs) -> None: ...

    def __call__(self, x: jax.Array, place: Place, cache: Any) -> tuple[jax.Array, Any]:
        """Maps x [B, S, H] to the same shape; with a cache, also returns it with what the tokens add to it."""
        ...

    @staticmethod
    def empty_cache(config: ModelConfig, layers: int, batch: int, positions: int, dtype: DTypeLike) -> Any:
        """The cache of stacked layers before the first token: arrays [layers, B, ...]."""
        ...


MIXERS: dict[str, type[Mixer]] = {"attention": Attention}


class Layer(nnx.Module):
    """One layer: a mixer such as attention, then experts or a dense MLP, each of normalized x and added to x.

    The mixer is the attribute that has its name in MIXERS.
    """

    attention_norm: nnx.Param[jax.Array]
    mlp_norm: nnx.Param[jax.Array]

    def __init__(self, config: ModelConfig, options: Options, mixer: str, is_dense: bool, rngs: nnx.Rngs) -> None:
        self.config, self.mixer = config, mixer
        norms = {"attention_norm": (config.features,), "mlp_norm": (config.features,)}
        set_params(self, norms, config.init_scale, options, rngs)
        setattr(self, mixer, MIXERS[mixer](config, options, rngs))
        if is_dense:
            self.mlp = Mlp(config, options, rngs)
        else:
            self.moe = _experts(config, options, rngs)

    def __call__(self, x: jax.Array, place: Place, cache: Any) -> tuple[jax.Array, Any]:
        """Maps x [B, S, H] to the same shape; returns the mixer's cache with what the layer adds to it, or None."""
        config, generates = self.config, cache is not None
        mixer: Mixer = getattr(self, self.mixer)
        mixed, cache = mixer(norm(x, self.attention_norm, config.norm_epsilon), place, cache)
        x = checkpoint_name(x + mixed * config.residual_scale, "attention")
        normalized = norm(x, self.mlp_norm, config.norm_epsilon)
        if hasattr(self, "moe"):
            y = self.moe._compute(normalized, None, place.mask, self._quantization(x, generates))
        else:
            y = self.mlp(normalized)
        return x + y * config.residual_scale, cache

    def _quantization(self, x: jax.Array, generates: bool) -> Fp8 | None:
        """The recipe of the experts' products; none where text is generated and an expert has few rows.

        FP8 products would not be faster than reading the weights as they are, and would transpose them first. By the
        number of rows alone, so that calls with as many tokens compute alike.
        """
        moe = self.config.moe
        few = has_few_rows(x.shape[0] * x.shape[1] * moe.topk, moe.num_experts)
        return None if generates and few else self.moe.quantization

    def merge_adapters(self) -> None:
        """Merges each LoRA adapter into its matrix."""
        for module in (getattr(self, name) for name in (self.mixer, "mlp") if hasattr(self, name)):
            merge_adapters(module, module.options.lora)
        if hasattr(self, "moe"):
            self.moe.merge_adapters()


def _experts(config: ModelConfig, options: Options, rngs: nnx.Rngs) -> jgg.nnx.MoE:
    init = nnx.initializers.normal(config.init_scale)
    lora = options.lora.of({name: name for name in (*OF_EXPERTS, *OF_MOE) if name in config.moe.shapes})
    return jgg.nnx.MoE(
        **vars(config.moe) | (lora.of_a_layer if lora.rank is not None else {}),
        dtype=options.dtype,
        param_dtype=options.param_dtype,
        lora_param_dtype=options.lora_param_dtype,
        kernel_init=init,
        router_init=init,
        quantization=options.quantization,
        implementation=options.implementation,
        sharding=options.sharding,
        rngs=rngs,
    )
