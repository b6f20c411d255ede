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
from jgg.core.arguments import as_array, check, check_instance, check_integers, check_rank
from jgg.fp8 import Fp8
from jgg.models.attention import Attention, Cache, Place
from jgg.models.config import ModelConfig
from jgg.models.embedding import embed
from jgg.models.loss import logits_of, losses_of
from jgg.models.parts import OF_EXPERTS, TARGETS, Mlp, Options, merge_adapters, norm, set_params
from jgg.models.placement import check_batch, gathered, remat_policy_of_gathered, split, split_batch
from jgg.models.rotary import rotations
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
        **vars(config.moe) | adapters, dtype=options.dtype, param_dtype=options.param_dtype,
        lora_param_dtype=options.lora_param_dtype, kernel_init=init, router_init=init,
        quantization=options.quantization, implementation=options.implementation, sharding=options.sharding, rngs=rngs,
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
      lora_param_dtype: dtype of the adapters and of their gradients. Products round them to `dtype`.
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
        self, config: ModelConfig, *, dtype: DTypeLike = jnp.bfloat16, param_dtype: DTypeLike = jnp.float32,
        remat: str = "none", unroll: int = 1, quantization: Fp8 | None = None, lora_rank: int | None = None,
        lora_alpha: float | None = None, lora_targets: tuple[str, ...] = TARGETS,
        lora_param_dtype: DTypeLike = jnp.float32, implementation: str | None = None,
        sharding: MoESharding | None = None, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        check_instance("config", config, ModelConfig, "a ModelConfig, as jgg.models.model_config returns it")
        options = Options.checked(
            dtype=dtype, param_dtype=param_dtype, lora_param_dtype=lora_param_dtype, remat=remat, unroll=unroll,
            quantization=quantization, lora_rank=lora_rank, lora_alpha=lora_alpha, lora_targets=lora_targets,
            implementation=implementation, sharding=sharding,
        )  # fmt: skip
        self.config, self.options = config, options
        create = functools.partial(Layer, config, options)
        num_dense = config.num_dense_layers
        self.dense_layers = _stacked(functools.partial(create, True), num_dense, rngs, sharding) if num_dense else None
        self.layers = _stacked(functools.partial(create, False), config.num_layers - num_dense, rngs, sharding)
        shapes = {"w_embedding": (config.vocabulary, config.features), "norm": (config.features,)}
        if not config.is_tied:
            shapes["w_head"] = (config.features, config.vocabulary)
        set_params(self, shapes, config.init_scale, options, rngs)

    def __call__(self, tokens: ArrayLike, segments: ArrayLike | None = None) -> jax.Array:
        """Returns the logits of each next token, float32 [B, S, V], for tokens, integer [B, S].

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
        """
        return self.logits(self._features(as_tokens("tokens", tokens), segments))

    def losses(self, tokens: ArrayLike, targets: ArrayLike, segments: ArrayLike | None = None) -> jax.Array:
        """Returns the loss of each target, the negative logarithm of its probability, float32 [B, S].

        The same as the cross entropy of `model(tokens, segments)` and the targets, but the logits never exist as a
        whole, and the backward pass computes them again: with 151,936 words, 8,192 tokens' logits are 5 GB, and as much
        again for their gradient. A mean over all of them is the loss of a language model. Sows what a call sows.

        Args:
          tokens, segments: as in a call.
          targets: integer [B, S], from 0 to V - 1, the token that follows each of `tokens`.
        """
        tokens, targets = as_tokens("tokens", tokens), as_tokens("targets", targets)
        _check_shape("targets", targets, tokens)
        x = self._features(tokens, segments)
        targets = targets.astype(jnp.int32)
        return losses_of(x, self._w_logits(x.dtype), targets, self.config.logits_scale, self.options.sharding)

    def _features(self, tokens: jax.Array, segments: ArrayLike | None) -> jax.Array:
        """The last features [B, S, H] of whole sequences."""
        if segments is None:
            return self.run_layers(tokens, jnp.arange(tokens.shape[1])[None])[0]
        segments = as_tokens("segments", segments)
        _check_shape("segments", segments, tokens)
        runs, positions = _runs(segments)
        return self.run_layers(tokens, positions, segments=runs)[0]

    def run_layers(
        self, tokens: jax.Array, positions: jax.Array, cache: Cache | None = None, segments: jax.Array | None = None
    ) -> tuple[jax.Array, Cache | None]:
        """The last layer's normalized features [B, S, H] of tokens [B, S] at positions [B, S], and the cache."""
        config, sharding = self.config, self.options.sharding
        check_batch(tokens, sharding)
        table = self._end("w_embedding").astype(self.options.dtype)
        # a sharding splits sequences evenly
        x = embed(table, tokens) if sharding is None else table[split_batch(tokens, sharding)]
        x = split_batch(x * config.embedding_scale, sharding)
        rotation = rotations(config.rotary_frequencies, config.rotary_scale, positions)
        run = functools.partial(self._scan, positions=positions, rotation=rotation, segments=segments)
        if self.dense_layers is not None:
            x, cache, _ = run(self.dense_layers, x, cache, first=0)
        x, cache, sown = run(self.layers, x, cache, first=config.num_dense_layers)
        for name, value in sown.items() if hasattr(self, "__captures__") else ():
            self.sow(nnx.Intermediate, name, value)
        return norm(x, self.norm, config.norm_epsilon), cache

    def logits(self, x: jax.Array) -> jax.Array:
        """Float32 logits [..., V] of the last features [..., H]."""
        return logits_of(x, self._w_logits(x.dtype)) * self.config.logits_scale

    def _w_logits(self, dtype: DTypeLike) -> jax.Array:
        """The matrix [H, V] of the logits, whole on each device."""
        return (self._end("w_embedding").T if self.config.is_tied else self._end("w_head")).astype(dtype)

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
        self, layers: Layer, x: jax.Array, cache: Cache | None, *, first: int, positions: jax.Array,
        rotation: tuple[jax.Array, jax.Array], segments: jax.Array | None,
    ) -> tuple[jax.Array, Cache | None, dict[str, jax.Array]]:  # fmt: skip
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
            place = Place(positions, rotation, number, window, is_local, segments)
            (x, cache), sown = nnx.capture(layer, nnx.Intermediate)(*carry[:1], place, carry[1])
            return (split_batch(x, options.sharding), cache), {
                name: value[0] for name, value in nnx.to_pure_dict(sown).get("moe", {}).items()
            }

        xs = state, jnp.arange(first, first + count), is_local
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


def _stacked(
    create: Callable[[nnx.Rngs], Layer], count: int, rngs: nnx.Rngs, sharding: MoESharding | None
) -> Layer:  # fmt: skip
    """`count` layers in one, whose parameters have the layers as their first axis."""
    keys = jax.random.split(rngs.params(), count)
    stacked = nnx.vmap(lambda key: create(nnx.Rngs(params=key)))
    if sharding is None:
        return stacked(keys)
    graphdef, _ = nnx.split(nnx.eval_shape(stacked, keys))
    return nnx.merge(graphdef, jax.jit(lambda keys: split(nnx.state(stacked(keys)), sharding))(keys))


def _runs(segments: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each token the number of its run of equal segments, and its position in the run: int32 [B, S]."""
    is_first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    columns = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    first = jax.lax.cummax(jnp.where(is_first, columns, 0), axis=1)
    return jnp.cumsum(is_first, axis=1, dtype=jnp.int32), columns - first


def _check_shape(name: str, array: jax.Array, tokens: jax.Array) -> None:
    shape = list(tokens.shape)
    check(list(array.shape) == shape, f"{name} must be [B, S], {shape}, got {list(array.shape)}.")


def as_tokens(name: str, tokens: ArrayLike) -> jax.Array:
    """The tokens as an integer array [B, S]; raises if they are none."""
    tokens = as_array(name, tokens)
    check_integers(name, tokens)
    check_rank(name, tokens, "[B, S]")
    return tokens
