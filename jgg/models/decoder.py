"""`Decoder`: a whole mixture-of-experts language model in Flax NNX."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike, DTypeLike

import jgg.nnx
from jgg.core.arguments import as_array, check_instance, check_integers, check_rank
from jgg.fp8 import Fp8
from jgg.models.attention import Attention, Cache, Place
from jgg.models.config import ModelConfig
from jgg.models.parts import OF_EXPERTS, TARGETS, Mlp, Options, merge_adapters, norm, set_params
from jgg.models.rotary import rotations

# what remat="names" keeps for the backward pass: jgg names all but the last
SAVED_NAMES = "jgg_x", "jgg_pre_activation", "jgg_routing", "attention"


class Layer(nnx.Module):
    """One layer: attention, then experts or a dense MLP, each of normalized x and added to x."""

    attention_norm: nnx.Param[jax.Array]
    mlp_norm: nnx.Param[jax.Array]

    def __init__(self, config: ModelConfig, options: Options, is_dense: bool, rngs: nnx.Rngs) -> None:
        self.config = config
        norms = {"attention_norm": (config.features,), "mlp_norm": (config.features,)}
        set_params(self, norms, config.init_scale, options, rngs)
        self.attention = Attention(config, options, rngs)
        if is_dense:
            self.mlp = Mlp(config, options, rngs)
        else:
            self.moe = _experts(config, options, rngs)

    def __call__(self, x: jax.Array, place: Place, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        """Maps x [B, S, H] to the same shape; returns the cache with the layer's keys and values in it, or None."""
        config, mlp = self.config, getattr(self, "mlp", None) or self.moe
        attended, cache = self.attention(norm(x, self.attention_norm, config.norm_epsilon), place, cache)
        x = checkpoint_name(x + attended * config.residual_scale, "attention")
        return x + mlp(norm(x, self.mlp_norm, config.norm_epsilon)) * config.residual_scale, cache

    def merge_adapters(self) -> None:
        """Merges each LoRA adapter into its matrix."""
        for module in (self.attention, getattr(self, "mlp", None)):
            if module is not None:
                merge_adapters(module, module.options.lora)
        if hasattr(self, "moe"):
            self.moe.merge_adapters()


def _experts(config: ModelConfig, options: Options, rngs: nnx.Rngs) -> jgg.nnx.MoE:
    init = nnx.initializers.normal(config.init_scale)
    targets = tuple(name for name in options.lora.targets if name in OF_EXPERTS)
    adapters: dict[str, Any] = {}
    if targets and options.lora.rank is not None:
        adapters = {"lora_rank": options.lora.rank, "lora_alpha": options.lora.alpha, "lora_targets": targets}
    return jgg.nnx.MoE(
        **vars(config.moe) | adapters, dtype=options.dtype, param_dtype=options.param_dtype, kernel_init=init,
        router_init=init, quantization=options.quantization, implementation=options.implementation, rngs=rngs,
    )  # fmt: skip


class Decoder(nnx.Module):
    """A decoder-only language model with mixtures of experts, as a checkpoint's config.json describes it.

    The parameters of layers that are alike are stacked, with the layer as their first axis, and the layers run in a
    `jax.lax.scan`, so that a deep model compiles as quickly as a shallow one.

    Attributes:
      config: the ModelConfig.
      options: the other arguments, checked.
      w_embedding: nnx.Param [V, H].
      dense_layers, layers: the layers before those with experts, or None, and the layers with experts, which have
        `attention_norm`, `attention`, `mlp_norm` and, in this order, `mlp` and `moe`, a `jgg.nnx.MoE`.
      norm: nnx.Param [H], of the last RMS norm.
      w_head: nnx.Param [H, V]; there is none if the embedding takes its place.

    Args:
      config: what to build, from `jgg.models.model_config`.
      dtype: dtype of the computation: float32, bfloat16 or float16. Norms and routers compute in float32.
      param_dtype: dtype of the parameters.
      remat: what the backward pass computes again: "none"; "names", all of a layer but what jgg names, x and the
        pre-activation of the experts, and what follows attention; or "all", each layer but its x.
      unroll: how many layers an iteration of the scan computes, as in `jax.lax.scan`: with more, the model takes longer
        to compile and may run faster.
      quantization: a `jgg.Fp8` to multiply the experts' products in FP8.
      lora_rank, lora_alpha: as in `jgg.nnx.MoE`.
      lora_targets: the matrices that have LoRA adapters, among "w_q", "w_k", "w_v", "w_o", "w_gate_up" and "w_down";
        those of the experts get no gradient then.
      implementation: of the experts, as in `jgg.grouped_gemm`.
      rngs: random number generators; the stream "params" is used.
    """

    w_embedding: nnx.Param[jax.Array]
    norm: nnx.Param[jax.Array]
    w_head: nnx.Param[jax.Array]

    def __init__(
        self, config: ModelConfig, *, dtype: DTypeLike = jnp.bfloat16, param_dtype: DTypeLike = jnp.float32,
        remat: str = "none", unroll: int = 1, quantization: Fp8 | None = None, lora_rank: int | None = None,
        lora_alpha: float | None = None, lora_targets: tuple[str, ...] = TARGETS, implementation: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        check_instance("config", config, ModelConfig, "a ModelConfig, as jgg.models.model_config returns it")
        options = Options.checked(
            dtype, param_dtype, remat, unroll, quantization, lora_rank, lora_alpha, lora_targets, implementation
        )
        self.config, self.options = config, options
        create = functools.partial(Layer, config, options)
        num_dense = config.num_dense_layers
        self.dense_layers = _stacked(functools.partial(create, True), num_dense, rngs) if num_dense else None
        self.layers = _stacked(functools.partial(create, False), config.num_layers - num_dense, rngs)
        shapes = {"w_embedding": (config.vocabulary, config.features), "norm": (config.features,)}
        if not config.is_tied:
            shapes["w_head"] = (config.features, config.vocabulary)
        set_params(self, shapes, config.init_scale, options, rngs)

    def __call__(self, tokens: ArrayLike) -> jax.Array:
        """Returns the logits of each next token, float32 [B, S, V], for tokens, integer [B, S].

        Sows the intermediates that the layers' `jgg.nnx.MoE` sows, stacked over the layers with experts: such as
        "load_balancing_loss" [layers].
        """
        tokens = as_tokens("tokens", tokens)
        x, _ = self.run_layers(tokens, jnp.arange(tokens.shape[1])[None])
        return self.logits(x)

    def run_layers(
        self, tokens: jax.Array, positions: jax.Array, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        """The last layer's normalized features [B, S, H] of tokens [B, S] at positions [B, S], and the cache."""
        config = self.config
        x = self.w_embedding[...].astype(self.options.dtype)[tokens] * config.embedding_scale
        rotation = rotations(config.rotary_frequencies, config.rotary_scale, positions)
        run = functools.partial(self._scan, positions=positions, rotation=rotation)
        if self.dense_layers is not None:
            x, cache, _ = run(self.dense_layers, x, cache, first=0)
        x, cache, sown = run(self.layers, x, cache, first=config.num_dense_layers)
        for name, value in sown.items() if hasattr(self, "__captures__") else ():
            self.sow(nnx.Intermediate, name, value)
        return norm(x, self.norm, config.norm_epsilon), cache

    def logits(self, x: jax.Array) -> jax.Array:
        """Float32 logits [..., V] of the last features [..., H]."""
        w = self.w_embedding[...].T if self.config.is_tied else self.w_head[...]
        y = jnp.matmul(x, w.astype(x.dtype), preferred_element_type=jnp.float32)
        return y * self.config.logits_scale

    def merge_adapters(self) -> None:
        """Merges each LoRA adapter into its matrix, and sets its b to zero: the model stays the same, up to rounding.

        Raises: TypeError: a matrix with an adapter is a QuantizedArray. Nothing is merged then.
        """
        for layers in (self.dense_layers, self.layers):
            if layers is not None:
                graphdef, state = nnx.split(layers)
                nnx.update(layers, jax.lax.map(functools.partial(_merged, graphdef), state))

    def _scan(
        self, layers: Layer, x: jax.Array, cache: Cache | None, *, first: int, positions: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, Cache | None, dict[str, jax.Array]]:  # fmt: skip
        """Runs stacked layers, the first of them number `first`; also returns what the experts sowed, stacked."""
        graphdef, state = nnx.split(layers)
        (count, *_), windows = layers.attention_norm.shape, None
        if any(self.config.windows):
            own = self.config.windows[first : first + count]
            windows = jnp.asarray([window or jnp.iinfo(jnp.int32).max for window in own], jnp.int32)

        def body(carry: tuple[jax.Array, Cache | None], inputs: Any) -> tuple[Any, dict[str, jax.Array]]:
            own, number, window = inputs
            layer = nnx.merge(graphdef, own)
            place = Place(positions, rotation, number, window)
            result, sown = nnx.capture(layer, nnx.Intermediate)(*carry[:1], place, carry[1])
            return result, {name: value[0] for name, value in nnx.to_pure_dict(sown).get("moe", {}).items()}

        xs = state, jnp.arange(first, first + count), windows
        unroll = min(self.options.unroll, count)
        (x, cache), sown = jax.lax.scan(self._rematerialized(body), (x, cache), xs, unroll=unroll)
        return x, cache, sown

    def _rematerialized(self, body: Callable[..., Any]) -> Callable[..., Any]:
        if self.options.remat == "none":
            return body
        names = SAVED_NAMES if self.options.remat == "names" else ()
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        # only a loop keeps XLA from merging what the backward pass computes again with what the forward pass computed
        return jax.checkpoint(body, policy=policy, prevent_cse=self.options.unroll > 1)


def _merged(graphdef: nnx.GraphDef[Layer], state: nnx.State[Any, Any]) -> nnx.State[Any, Any]:
    """The state of a layer with its adapters merged."""
    layer = nnx.merge(graphdef, state)
    layer.merge_adapters()
    return nnx.state(layer)


def _stacked(create: Callable[[nnx.Rngs], Layer], count: int, rngs: nnx.Rngs) -> Layer:
    """`count` layers in one, whose parameters have the layers as their first axis."""
    keys = jax.random.split(rngs.params(), count)
    return nnx.vmap(lambda key: create(nnx.Rngs(params=key)))(keys)


def as_tokens(name: str, tokens: ArrayLike) -> jax.Array:
    """The tokens as an integer array [B, S]; raises if they are none."""
    tokens = as_array(name, tokens)
    check_integers(name, tokens)
    check_rank(name, tokens, "[B, S]")
    return tokens
