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
from jgg.core.arguments import check_instance
from jgg.linear.fp8 import Fp8
from jgg.models.attention import Attention, Cache, Place
from jgg.models.config import ModelConfig
from jgg.models.embedding import embed, embedded
from jgg.models.loss import Head, logits_of, losses_of
from jgg.models.parts import OF_EXPERTS, OF_MOE, TARGETS, Mlp, Options, merge_adapters, norm, set_params
from jgg.models.placement import check_batch, gathered, remat_policy_of_gathered, split, split_batch
from jgg.models.rotary import rotations
from jgg.models.tokens import as_segments, as_tokens, check_shape, runs_of
from jgg.router.losses import as_mask
from jgg.sharding import MoESharding

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
        config = self.config
        attended, cache = self.attention(norm(x, self.attention_norm, config.norm_epsilon), place, cache)
        x = checkpoint_name(x + attended * config.residual_scale, "attention")
        normalized = norm(x, self.mlp_norm, config.norm_epsilon)
        y = self.moe(normalized, mask=place.mask) if hasattr(self, "moe") else self.mlp(normalized)
        return x + y * config.residual_scale, cache

    def merge_adapters(self) -> None:
        """Merges each LoRA adapter into its matrix."""
        for module in (self.attention, getattr(self, "mlp", None)):
            if module is not None:
                merge_adapters(module, module.options.lora)
        if hasattr(self, "moe"):
            self.moe.merge_adapters()


def _experts(config: ModelConfig, options: Options, rngs: nnx.Rngs) -> jgg.nnx.MoE:
    init = nnx.initializers.normal(config.init_scale)
    adapters: dict[str, Any] = {}
    lora = options.lora.of({name: name for name in (*OF_EXPERTS, *OF_MOE) if name in config.moe.shapes})
    if lora.rank is not None:
        adapters = {"lora_rank": lora.rank, "lora_alpha": lora.alpha, "lora_targets": lora.targets}
    return jgg.nnx.MoE(
        **vars(config.moe) | adapters,
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
      param_dtype: dtype of the parameters, one of the same.
      remat: what the backward pass computes again: "none"; "names", all of a layer but what jgg names, x and the
        pre-activation of the experts, and what follows attention; or "all", each layer but its x.
      unroll: how many layers an iteration of the scan computes, as in `jax.lax.scan`: with more, the model takes longer
        to compile and may run faster.
      quantization: a `jgg.Fp8` to multiply the experts' products in FP8.
      lora_rank, lora_alpha: as in `jgg.nnx.MoE`; a tuple has one number for each of lora_targets.
      lora_targets: the matrices that have LoRA adapters, where the model has such matrices: "w_q", "w_k", "w_v", "w_o",
        the experts' "w_gate_up" and "w_down", "w_dense_gate_up" and "w_dense_down" of dense layers,
        "w_shared_gate_up" and "w_shared_down" of shared experts, and "w_router", by default all but the last three.
        Matrices with adapters in layers with experts get no gradient.
      lora_param_dtype: dtype of the adapters and of their gradients, one of the same. Products round them to `dtype`.
      implementation: of the experts, as in `jgg.grouped_gemm`.
      sharding: how a mesh of Auto axes splits the model, a `jgg.sharding.MoESharding`: experts as in `jgg.nnx.MoE`,
        sequences over `sharding.token_axes`. All other matrices are stored split over the fsdp axis, and each layer
        gathers its own, in the forward and again in the backward pass; they are replicated along the other axes, also
        along tensor, which splits the experts alone. Parameters are created already split.
      rngs: random number generators; the stream "params" is used.
    """

    w_embedding: nnx.Param[jax.Array]
    norm: nnx.Param[jax.Array]
    w_head: nnx.Param[jax.Array]

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        remat: str = "none",
        unroll: int = 1,
        quantization: Fp8 | None = None,
        lora_rank: int | tuple[int, ...] | None = None,
        lora_alpha: float | tuple[float, ...] | None = None,
        lora_targets: tuple[str, ...] = TARGETS,
        lora_param_dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        sharding: MoESharding | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_instance("config", config, ModelConfig, "a ModelConfig, as jgg.models.model_config returns it")
        check_instance("rngs", rngs, nnx.Rngs, "an nnx.Rngs")
        options = Options.checked(
            dtype=dtype,
            param_dtype=param_dtype,
            lora_param_dtype=lora_param_dtype,
            remat=remat,
            unroll=unroll,
            quantization=quantization,
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            lora_targets=lora_targets,
            implementation=implementation,
            sharding=sharding,
        )
        self.config, self.options = config, options
        create = functools.partial(Layer, config, options)
        num_dense = config.num_dense_layers
        self.dense_layers = _stacked(functools.partial(create, True), num_dense, rngs, sharding) if num_dense else None
        self.layers = _stacked(functools.partial(create, False), config.num_layers - num_dense, rngs, sharding)
        shapes = {"w_embedding": (config.vocabulary, config.features), "norm": (config.features,)}
        if not config.is_tied:
            shapes["w_head"] = (config.features, config.vocabulary)
        set_params(self, shapes, config.init_scale, options, rngs)

    def __call__(
        self, tokens: ArrayLike, segments: ArrayLike | None = None, *, mask: ArrayLike | None = None
    ) -> jax.Array:
        """Returns the logits of each next token, float32 [B, S, V], for tokens, integer [B, S] from 0 to V - 1.

        Other ids raise ValueError where their values are known. A traced program has none to check: there, the logits
        of such a token and of those that attend to it are NaN, and those of others in its row may be.

        With a sharding, B must be a multiple of the number of devices that split sequences.

        Sows what each `jgg.nnx.MoE` sows, stacked over the L layers that have experts, as intermediates, which
        `nnx.capture(model, nnx.Intermediate)` collects, each in a tuple of one:

        - "group_sizes", int32 [L, E]: rows that the router gave each expert;
        - "load_balancing_loss", float32 [L]: 1 where the load is even;
        - "router_z_loss", float32 [L];
        - "overflow", int32 [L]: rows that found no room in the buffers of a sharded layer;
        - "topk_indices", int32 [L, B, S, k]: the experts that each token went to.

        Args:
          segments: integer [B, S], the sequence that each token is of, where a row has several, one after the other:
            tokens with the same number side by side are one sequence. Each gives the logits that it gives alone.
          mask: bool or number [B, S], False or 0 for tokens that do not count in the routers' losses, such as padding;
            by default all count. The logits do not depend on it, and "group_sizes" has the rows of all tokens.
        """
        return self.logits(self._features(as_tokens("tokens", tokens, self.config.vocabulary), segments, mask))

    def losses(
        self,
        tokens: ArrayLike,
        targets: ArrayLike,
        segments: ArrayLike | None = None,
        *,
        mask: ArrayLike | None = None,
    ) -> jax.Array:
        """Returns the loss of each target, the negative logarithm of its probability, float32 [B, S].

        The same as the cross entropy of `model(tokens, segments)` and the targets, but the logits never exist as a
        whole, and the backward pass computes them again: with 151,936 words, 8,192 tokens' logits are 5 GB, and as much
        again for their gradient. A mean over all of them is the loss of a language model. Sows what a call sows.

        Args:
          tokens, segments, mask: as in a call. The losses of targets do not depend on the mask.
          targets: integer [B, S], from 0 to V - 1, the token that follows each of `tokens`. Other ids, also the -100 of
            PyTorch, raise ValueError; in a traced program their losses are NaN. To leave targets out, give them any id,
            and their losses the weight 0.
        """
        vocabulary = self.config.vocabulary
        tokens, targets = as_tokens("tokens", tokens, vocabulary), as_tokens("targets", targets, vocabulary)
        check_shape("targets", targets, tokens)
        x = self._features(tokens, segments, mask)
        return losses_of(x, self._w_logits(x.dtype), targets, self._head, self.options.sharding)

    def _features(self, tokens: jax.Array, segments: ArrayLike | None, mask: ArrayLike | None) -> jax.Array:
        """The last features [B, S, H] of whole sequences."""
        mask = as_mask(mask, "[B, S]", tokens.shape)
        if segments is None:
            return self.run_layers(tokens, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], mask=mask)[0]
        segments = as_segments("segments", segments)
        check_shape("segments", segments, tokens)
        runs, positions = runs_of(segments)
        return self.run_layers(tokens, positions, segments=runs, mask=mask)[0]

    def run_layers(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: Cache | None = None,
        *,
        segments: jax.Array | None = None,
        mask: jax.Array | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """The last layer's normalized features [B, S, H] of tokens [B, S], and the cache.

        Args:
          positions, segments, mask, lengths: as in `Place`.
        """
        config, sharding = self.config, self.options.sharding
        check_batch(tokens, sharding)
        table = self._end("w_embedding").astype(self.options.dtype)
        # a sharding splits sequences evenly
        x = embed(table, tokens) if sharding is None else embedded(table, split_batch(tokens, sharding))
        x = split_batch(x * config.embedding_scale, sharding)
        rotation = rotations(config.rotary_frequencies, config.rotary_scale, positions)
        place = functools.partial(Place, positions, rotation, segments=segments, mask=mask, lengths=lengths)
        if self.dense_layers is not None:
            x, cache, _ = self._scan(self.dense_layers, x, cache, place, first=0)
        x, cache, sown = self._scan(self.layers, x, cache, place, first=config.num_dense_layers)
        for name, value in sown.items() if hasattr(self, "__captures__") else ():
            self.sow(nnx.Intermediate, name, value)
        return norm(x, self.norm, config.norm_epsilon), cache

    def logits(self, x: jax.Array) -> jax.Array:
        """Float32 logits [..., V] of the last features [..., H]."""
        return logits_of(x, self._w_logits(x.dtype), self._head) * self.config.logits_scale

    @property
    def _head(self) -> Head:
        layout = "enk" if self.config.is_tied else "ekn"
        return Head(self.config.logits_scale, layout, self.options.dense_implementation)

    def _w_logits(self, dtype: DTypeLike) -> jax.Array:
        """The matrix of the logits, [H, V] or, if it is the embedding, [V, H], whole on each device."""
        return self._end("w_embedding" if self.config.is_tied else "w_head").astype(dtype)

    def _end(self, name: str) -> jax.Array:
        """A matrix beside the layers, whole on each device."""
        return gathered({name: getattr(self, name)[...]}, self.options.sharding, self.options.dtype)[name]

    def merge_adapters(self) -> None:
        """Merges each LoRA adapter into its matrix, and sets its b to zero: the model stays the same, up to rounding.

        Raises: TypeError: a matrix with an adapter is a QuantizedArray. Nothing is merged then.
        """
        for layers in (self.dense_layers, self.layers):
            if layers is not None:
                graphdef, state = nnx.split(layers)
                merged = jax.lax.map(functools.partial(_merged, graphdef), state)
                nnx.update(layers, split(merged, self.options.sharding))

    def _scan(
        self, layers: Layer, x: jax.Array, cache: Cache | None, place: Callable[..., Place], *, first: int
    ) -> tuple[jax.Array, Cache | None, dict[str, jax.Array]]:
        """Runs stacked layers, the first of them number `first`; also returns what the experts sowed, stacked."""
        options = self.options
        graphdef, state = nnx.split(layers)
        count, *_ = layers.attention_norm.shape
        decodes = cache is not None and x.shape[1] == 1
        own_windows = self.config.windows[first : first + count]
        window = next(filter(None, own_windows), None)
        is_local = None if len(set(own_windows)) == 1 else jnp.asarray([each is not None for each in own_windows])

        def body(carry: tuple[jax.Array, Cache | None], inputs: Any) -> tuple[Any, dict[str, jax.Array]]:
            own, number, is_local = inputs
            layer = nnx.merge(graphdef, gathered(own, options.sharding, options.dtype))
            if decodes and hasattr(layer, "moe"):
                layer.moe.quantization = None  # reading weights takes the time: quantized ones are read as they are
            own_place = place(layer=number, window=window, is_local=is_local)
            (x, cache), sown = nnx.capture(layer, nnx.Intermediate)(*carry[:1], own_place, carry[1])
            return (split_batch(x, options.sharding), cache), {
                name: value[0] for name, value in nnx.to_pure_dict(sown).get("moe", {}).items()
            }

        xs = state, jnp.arange(first, first + count, dtype=jnp.int32), is_local
        unroll = min(self.options.unroll, count)
        (x, cache), sown = jax.lax.scan(self._rematerialized(body), (x, cache), xs, unroll=unroll)
        return x, cache, sown

    def _rematerialized(self, body: Callable[..., Any]) -> Callable[..., Any]:
        options = self.options
        if options.remat == "none" and (options.sharding is None or options.sharding.gather_axis is None):
            return body
        names = SAVED_NAMES if options.remat == "names" else ()
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        if options.remat == "none":
            policy = remat_policy_of_gathered
        # only a loop keeps XLA from merging what the backward pass computes again with what the forward pass computed
        return jax.checkpoint(body, policy=policy, prevent_cse=options.unroll > 1)


def _merged(graphdef: nnx.GraphDef[Layer], state: nnx.State[Any, Any]) -> nnx.State[Any, Any]:
    """The state of a layer with its adapters merged."""
    layer = nnx.merge(graphdef, state)
    layer.merge_adapters()
    return nnx.state(layer)


def _stacked(create: Callable[[nnx.Rngs], Layer], count: int, rngs: nnx.Rngs, sharding: MoESharding | None) -> Layer:
    """`count` layers in one, whose parameters have the layers as their first axis."""
    keys = jax.random.split(rngs.params(), count)
    stacked = nnx.vmap(lambda key: create(nnx.Rngs(params=key)))
    if sharding is None:
        return stacked(keys)
    graphdef, _ = nnx.split(nnx.eval_shape(stacked, keys))
    return nnx.merge(graphdef, jax.jit(lambda keys: split(nnx.state(stacked(keys)), sharding))(keys))
