"""`Layer`: one layer of a decoder, and the kinds of mixers that it may have."""

import dataclasses
from typing import Any, ClassVar, Protocol

import jax
from flax import nnx
from jax.typing import DTypeLike

import jgg.nnx
from jgg.core.choices import OF_EXPERTS, OF_MOE
from jgg.core.gpu_target import current_target
from jgg.core.mixers import MixerConfig
from jgg.core.problem import has_few_rows
from jgg.extend import barrier
from jgg.models import flash
from jgg.models.attention import PROJECTIONS, Attention, Place
from jgg.models.config import ModelConfig
from jgg.models.delta_net import Delta
from jgg.models.delta_rule import RESULT, STATES
from jgg.models.latent import Latent
from jgg.models.modules import Mlp, Options, merge_adapters, set_params
from jgg.models.norms import NORMALIZED, TOTAL, add_and_norm, how_of_rows, norm_beside, residual, sum_and_norm
from jgg.models.shard_map import map_method

EXPERTS = "experts"  # a name of the experts' result, where the backward pass needs it, for the same policy


def saved_names(options: Options) -> tuple[str, ...]:
    """What `options.remat` keeps for the backward pass; other code of jgg names those with "jgg"."""
    if options.remat not in ("names", "attention"):
        return ()
    of_experts = TOTAL, EXPERTS, "jgg_pre_activation", "jgg_routing"
    if options.remat == "attention":  # the experts' rows are the norm of what is kept, computed again
        return *of_experts, PROJECTIONS, *flash.NAMES, RESULT, STATES
    x = "jgg_x" if how_of_rows(options.dense_implementation) is None else NORMALIZED  # two names of the experts' rows
    return x, *of_experts


class Mixer[Own: MixerConfig, Cache](Protocol):
    """The part of a layer in which tokens of a sequence see each other. A cache keeps what decoding needs of them."""

    options: Options

    def __init__(self, config: ModelConfig, own: Own, options: Options, rngs: nnx.Rngs) -> None:
        """A mixer of a model with this config; `own` is the part with the mixer's sizes and options."""
        ...

    def __call__(self, x: jax.Array, place: Place, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        """Maps x [B, S, H] to the same shape; with a cache, also returns it with what the tokens add to it."""
        ...

    @staticmethod
    def empty_cache(own: Own, layers: int, batch: int, positions: int, dtype: DTypeLike) -> Cache:
        """The cache of stacked layers before the first token: arrays [layers, B, ...]."""
        ...


MIXERS: dict[str, type[Mixer[Any, Any]]] = {"attention": Attention, "delta": Delta, "latent": Latent}


class Layer(nnx.Module):
    """One layer: a mixer such as attention, then experts or a dense MLP, each of normalized x and added to x.

    The mixer is the attribute that has the name of its kind in MIXERS.

    Attributes:
      norms: the names of the norms' weights [H].
    """

    norms: ClassVar[tuple[str, ...]] = "attention_norm", "mlp_norm"

    attention_norm: nnx.Param[jax.Array]
    mlp_norm: nnx.Param[jax.Array]

    def __init__(
        self, config: ModelConfig, options: Options, mixer: MixerConfig, is_dense: bool, rngs: nnx.Rngs
    ) -> None:
        self.config, self.mixer = config, mixer.kind
        shapes = dict.fromkeys(self.norms, (config.features,))
        set_params(self, shapes, config.init_scale, options, rngs, norm=config.norm_init)
        setattr(self, mixer.kind, MIXERS[mixer.kind](config, mixer, options, rngs))
        if is_dense:
            self.mlp = Mlp(config, options, rngs)
        else:
            self.moe = _new_experts(config, options, rngs)

    def __call__[Cache](self, x: jax.Array, place: Place, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        """Maps x [B, S, H] to the same shape; returns the mixer's cache with what the layer adds to it, or None."""
        generates, options = cache is not None, self.options
        before_experts = map_method(Layer._before_experts, options.mapped, besides="moe")
        (x, y), cache = before_experts(self, x, place, cache)
        if hasattr(self, "moe"):
            y = self._experts(y, None, place, generates)
        if options.batch_invariant:
            y = barrier(y)  # else XLA may add without rounding what made y
        return residual(x, y, self.config.residual_scale), cache

    @property
    def options(self) -> Options:
        """The options of the decoder."""
        options: Options = getattr(self, self.mixer).options
        return options

    def _before_experts[Cache](
        self, x: jax.Array, place: Place, cache: Cache | None
    ) -> tuple[tuple[jax.Array, jax.Array], Cache | None]:
        """x with what the mixer adds, and its norm, which experts take; in a dense layer what the MLP makes of that."""
        config = self.config
        mixer: Mixer[MixerConfig, Cache] = getattr(self, self.mixer)
        norms = config.norm_epsilon, self.options.dense_implementation
        x, normalized = norm_beside(x, config.norm_scale(self.attention_norm[...]), *norms)
        mixed, cache = mixer(normalized, place, cache)
        add = sum_and_norm if self.options.remat == "attention" else add_and_norm
        x, normalized = add(x, mixed, config.residual_scale, config.norm_scale(self.mlp_norm[...]), *norms)
        return (x, self.mlp(normalized, place.adapters) if hasattr(self, "mlp") else normalized), cache

    def _experts(self, x: jax.Array, router_x: jax.Array | None, place: Place, generates: bool) -> jax.Array:
        """The experts' result for x [B, S, H]; the router takes router_x in its place, if that is not None."""
        return self.moe(
            x,
            place.topk_indices,
            place.mask,
            router_x=router_x,
            adapters=place.adapters,
            quantized=self._is_quantized(x, generates),
        )

    def _is_quantized(self, x: jax.Array, generates: bool) -> bool:
        """Whether the experts' products are in FP8; not where text is generated and an expert has few rows.

        FP8 products would be no faster there than reading the stored weights, and would transpose them first. Only the
        number of rows decides, so that calls with equally many tokens compute alike. With `batch_invariant` the recipe
        applies to every number of rows, as in training; see `fp8_forms.put_forms`.
        """
        moe, quantization = self.config.moe, self.moe.quantization
        if quantization is None or not generates or self.options.batch_invariant:
            return True
        num_rows = x.shape[0] * x.shape[1] * moe.topk
        return not has_few_rows(num_rows, moe.num_experts, current_target())

    def merge_adapters(self) -> None:
        """Merges each LoRA adapter into its matrix."""
        for module in (getattr(self, name) for name in (self.mixer, "mlp") if hasattr(self, name)):
            merge_adapters(module, module.options.lora)
        if hasattr(self, "moe"):
            self.moe.merge_adapters()


def _new_experts(config: ModelConfig, options: Options, rngs: nnx.Rngs) -> jgg.nnx.MoE:
    init = nnx.initializers.normal(config.init_scale)
    lora = options.lora.of({name: name for name in (*OF_EXPERTS, *OF_MOE) if name in config.moe.shapes})
    sharding = options.sharding and dataclasses.replace(options.sharding, prevent_cse=False)  # see `_rematerialized`
    return jgg.nnx.MoE(
        **vars(config.moe) | (lora.of_a_layer if lora.rank is not None else {}),
        dtype=options.dtype,
        param_dtype=options.param_dtype,
        lora_param_dtype=options.lora_param_dtype,
        kernel_init=init,
        router_init=init,
        quantization=options.quantization,
        implementation=options.implementation,
        sharding=sharding,
        rngs=rngs,
    )
