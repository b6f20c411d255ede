"""`Decoder`: a whole mixture-of-experts language model in Flax NNX."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from jgg.core.arguments import as_array, as_flag, as_mask, check, check_instance
from jgg.core.choices import TARGETS
from jgg.experts.sharding import MoESharding
from jgg.extend import barrier
from jgg.linear.fp8 import Fp8
from jgg.linear.lora import Lora
from jgg.models.attention import Place
from jgg.models.config import ModelConfig
from jgg.models.embedding import embed, embedded
from jgg.models.fp8_forms import put_forms
from jgg.models.head import Head, logits_of
from jgg.models.layer import MIXERS, Layer
from jgg.models.loss import Scores, loss_of, losses_of, scores_of
from jgg.models.modules import Options, set_params
from jgg.models.norms import norm
from jgg.models.placement import check_batch, gathered, split_batch
from jgg.models.shard_map import map_sequences
from jgg.models.stacks import joined, merge_stack, new_stack, periods_of, rotations_of, run
from jgg.models.token_arrays import as_choices, as_segments, as_tokens, as_weights, check_shape, runs_of
from jgg.nnx import sow

Caches = tuple[object, ...]  # of each stack of the plan, in the form that its mixer gives it


class Decoder(nnx.Module):
    """A decoder-only language model with mixtures of experts, as a checkpoint's config.json describes it.

    The parameters of layers with the same shapes are stacked along a first axis, and the layers run in a
    `jax.lax.scan`, so that a deep model compiles as quickly as a shallow one.

    Attributes:
      config: the ModelConfig.
      options: the other arguments, checked.
      w_embedding: nnx.Param [V, H].
      layers: the layers with experts, which have `attention_norm`, `attention` or another mixer, `mlp_norm` and `moe`,
        a `jgg.nnx.MoE`. Where their shapes differ, for example because every fourth layer has another mixer, layers of
        the same shapes are stacked, and the name of each further stack has the number of its first layer, such as
        `layers_3`. Gemma 4's layers have `mlp` alongside `moe`, and more norms.
      dense_layers: the layers without experts, which have `mlp` instead of `moe`, or None.
      norm: nnx.Param [H], of the last RMS norm.
      w_head: nnx.Param [H, V]; missing if the model uses its embedding instead.

    Args:
      config: what to build, from `jgg.models.model_config`.
      dtype: dtype of the computation: float32, bfloat16 or float16. Norms and routers compute in float32.
      param_dtype: dtype of the parameters, one of these three.
      remat: which results of the forward pass stay in memory for the backward pass, which recomputes the others.
        "none": all stay. "names": each layer keeps x, the pre-activation of its experts, the router's choice, and the
        sum of x and attention. "attention": the same without x, which is recomputed from the sum, plus the products
        that give queries, keys and values, the output of attention before its last product, and one float32 per head
        and token, so that a GPU need not attend again. Recurrent layers keep the output of their rule and the states
        before its chunks. "all": each layer keeps only its input x.
      unroll: how many layers one iteration of the scan computes, as in `jax.lax.scan`. With more, the model takes
        longer to compile and may run faster.
      quantization: a `jgg.Fp8` to multiply the experts' products in FP8.
      lora_rank, lora_alpha: as in `jgg.nnx.MoE`; a tuple has one number per entry of lora_targets.
      lora_targets: the matrices that have LoRA adapters, where the model has such matrices: "w_q", "w_k", "w_v", "w_o",
        "w_q_a", "w_q_b", "w_kv_a" and "w_kv_b" of latent attention, "w_qkvz", "w_qkv", "w_z" and "w_out" of recurrent
        layers, the experts' "w_gate_up" and "w_down", and "w_dense_gate_up" and "w_dense_down" of dense MLPs, which
        is the default; and "w_ba", "w_b" and "w_a" of recurrent layers, "w_shared_gate_up" and "w_shared_down" of
        shared experts, and "w_router". Matrices with adapters in layers with experts get no gradient.
      lora_param_dtype: dtype of the adapters and their gradients, one of these three. Products round them to `dtype`.
      implementation: of all products with matrices, as in `jgg.grouped_gemm`. By default, on a GPU, the kernels compute
        the experts' products, norms and rotary embeddings. They also compute products with other matrices where a table
        of measurements shows that they beat XLA. With a sharding, XLA computes everything but the experts, unless
        batch_invariant is set.
      batch_invariant: on a GPU, a token's result has the same bits whatever other tokens are in the batch, and whatever
        their number, order or padding. Kernels with a fixed order of additions then compute everything. With a
        sharding, each device's sequences get the same bits on any device. Gradients are not covered. Without a GPU the
        option promises nothing. Models with recurrent layers refuse it.
      sharding: how a mesh of Auto axes splits the model, a `jgg.sharding.MoESharding`: experts as in `jgg.nnx.MoE`, and
        sequences over `sharding.token_axes`. With an fsdp axis, all other matrices are stored split over that axis and
        the expert axis, and each layer gathers its own in the forward pass and again in the backward pass. They are
        replicated along the other axes, including tensor, which splits only the experts. Parameters are created already
        split.
      rngs: random number generators; the stream "params" is used.
    """

    dense_layers: Layer | None
    layers: Layer
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
        batch_invariant: bool = False,
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
            lora=Lora(lora_rank, lora_alpha, lora_targets),
            implementation=implementation,
            batch_invariant=batch_invariant,
            sharding=sharding,
        )
        self.config, self.options = config, options
        if not any(config.is_dense):
            self.dense_layers = None
        for plan in config.plan:
            setattr(self, plan.name, new_stack(plan, config, options, rngs))
        shapes = {"w_embedding": (config.vocabulary, config.features), "norm": (config.features,)}
        if not config.is_tied:
            shapes["w_head"] = (config.features, config.vocabulary)
        set_params(self, shapes, config.init_scale, options, rngs, norm=config.norm_init)

    def __call__(
        self,
        tokens: ArrayLike,
        segments: ArrayLike | None = None,
        *,
        topk_indices: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        adapters: bool = True,
    ) -> jax.Array:
        """Returns the logits of each next token, float32 [B, S, V], for tokens, integer [B, S] from 0 to V - 1.

        Other ids raise ValueError where their values are known. Inside a traced program they are not: there, the logits
        of such a token, and of tokens that attend to it, are NaN, and the logits of other tokens in its row may be.

        With a sharding, B must be a multiple of the number of devices that split sequences.

        Sows what each `jgg.nnx.MoE` sows, stacked over the L layers that have experts, as intermediates, which
        `nnx.capture(model, nnx.Intermediate)` collects, each in a tuple of one:

        - "group_sizes", int32 [L, E]: rows that the router gave each expert, from tokens that count;
        - "load_balancing_loss", float32 [L]: 1 where the load is even;
        - "router_z_loss", float32 [L];
        - "overflow", int32 [L]: rows that found no room in the buffers of a sharded layer;
        - "topk_indices", int32 [L, B, S, k]: the experts that each token went to, -1 where it does not count.

        Args:
          segments: integer [B, S], for rows that hold several sequences one after the other: adjacent tokens with the
            same number form one sequence. Each sequence gets the logits that it gets alone.
          topk_indices: integer [L, B, S, k], the experts of each token in each of the L layers that have experts, such
            as an earlier call sowed; -1 leaves a choice to the router. As in `jgg.route`, weights are still the
            router's. An index that is no expert, or an expert given twice for a token that counts, raises ValueError
            where the values are known. Inside a traced program they are not: there, a choice that is no expert adds
            nothing, and an expert given twice counts twice.
          mask: bool or number [B, S], False or 0 for tokens that do not count, such as padding; by default all count.
            Tokens that do not count go to no expert, cost no expert's time and count in no router's loss. Attention
            sees them like all others, so they must come after the tokens that count or be in segments of their own:
            their logits, and the logits of tokens that attend to them, depend on the mask.
          adapters: whether to use the model's LoRA adapters; False computes the model without them, such as the
            reference of a KL divergence.
        """
        tokens = as_tokens("tokens", tokens, self.config.vocabulary)
        return self.logits(self._features(tokens, segments, topk_indices, mask, adapters))

    def losses(
        self,
        tokens: ArrayLike,
        targets: ArrayLike,
        segments: ArrayLike | None = None,
        *,
        topk_indices: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        adapters: bool = True,
    ) -> jax.Array:
        """Returns the loss of each target, the negative logarithm of its probability, float32 [B, S].

        Equals the cross entropy of `model(tokens, segments)` and the targets, but the full logits never exist at once,
        and the backward pass recomputes them. With a vocabulary of 151,936, the logits of 8,192 tokens would take 5 GB,
        and their gradient as much again. `loss` is the mean, and faster to differentiate. Sows what a call sows.

        Args:
          tokens, segments, topk_indices, mask, adapters: as in a call. The mask does not leave out targets.
          targets: integer [B, S], from 0 to V - 1, the token that follows each of `tokens`. Other ids, including
            PyTorch's -100, raise ValueError; in a traced program their losses are NaN. To leave targets out, give them
            any id, and weight their losses with 0.
        """
        tokens, targets = self._tokens_and_targets(tokens, targets)
        x = self._features(tokens, segments, topk_indices, mask, adapters)
        return losses_of(x, self._w_logits(x.dtype), targets, self.head, self.options.sharding)

    def loss(
        self,
        tokens: ArrayLike,
        targets: ArrayLike,
        segments: ArrayLike | None = None,
        *,
        weights: ArrayLike | None = None,
        topk_indices: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        adapters: bool = True,
    ) -> jax.Array:
        """Returns the sum of the losses of the targets, each times its weight, float32 []; by default their mean.

        Equals `(weights * losses).sum()` with `losses`, but is faster to differentiate: the forward pass computes the
        gradients along with the losses, so the logits are computed only once. Sows what a call sows.

        Args:
          tokens, targets, segments, topk_indices, mask, adapters: as in `losses`.
          weights: number or bool [B, S], by default 1 / (B S) for all; `learned / learned.sum()` gives the mean over
            the targets where `learned` is 1. A target with the weight 0 does not count; in a traced program it may have
            any id. The gradient of the weights is the losses, or 0 where the weight is 0 and the loss is NaN.
        """
        tokens, targets = self._tokens_and_targets(tokens, targets)
        weights = as_weights("weights", weights, tokens)
        x = self._features(tokens, segments, topk_indices, mask, adapters)
        return loss_of(x, self._w_logits(x.dtype), targets, weights, self.head, self.options.sharding)

    def scores(
        self,
        tokens: ArrayLike,
        targets: ArrayLike,
        segments: ArrayLike | None = None,
        *,
        mask: ArrayLike | None = None,
        adapters: bool = True,
    ) -> Scores:
        """Returns the log-probabilities of targets, for evaluation, and whether greedy decoding picks them.

        As in `losses`, the logits of all tokens are never in memory together. Sows what a call sows. It has no
        gradients.

        Args:
          tokens, segments, mask, adapters: as in a call. All targets are scored, even where the mask is False.
          targets: integer [B, S] or [B, S, C], from 0 to V - 1: the token that may follow each token, or C
            alternatives, so that one row scores several one-token answers to the same question.

        Returns: `jgg.models.Scores`, its arrays in the shape of the targets.
        """
        tokens = as_tokens("tokens", tokens, self.config.vocabulary)
        targets = as_array("targets", targets)
        (batch, length), shape = tokens.shape, targets.shape
        is_right = shape[:2] == (batch, length) and len(shape) in (2, 3) and 0 not in shape[2:]
        check(is_right, f"targets must be [B, S] or [B, S, C], C at least 1, {[batch, length]}, got {list(shape)}.")
        alternatives = math.prod(shape[2:])
        ids = as_tokens("targets", targets.reshape(batch, length * alternatives), self.config.vocabulary)
        x = self._features(tokens, segments, None, mask, adapters)
        ids = ids.reshape(batch, length, alternatives)
        scores = scores_of(x, self._w_logits(x.dtype), ids, self.head, self.options.sharding)
        return Scores(*(each.reshape(shape) for each in scores))

    def max_logits(self, tokens: ArrayLike, segments: ArrayLike | None = None) -> dict[str, jax.Array]:
        """Returns each attention head's largest logit before the softmax, over all tokens.

        The result maps the name of each stack of layers with attention to float32 [layers, heads]; pass it to
        `jgg.optim.qk_clip`. It costs a forward pass and one more product of queries and keys.

        Args:
          tokens, segments: as in a call.

        Raises: ValueError: the model is both sharded and batch_invariant; or as a call.
        """
        check(self.options.mapped is None, "max_logits needs batch_invariant=False where the model has a sharding.")
        tokens = as_tokens("tokens", tokens, self.config.vocabulary)
        measured = nnx.capture(Decoder._features, nnx.Intermediate)
        _, sown = measured(self, tokens, segments, None, None, True, measures=True)
        end = "_max_logits"
        return {name.removesuffix(end): of[0] for name, of in nnx.to_pure_dict(sown).items() if name.endswith(end)}

    def _tokens_and_targets(self, tokens: ArrayLike, targets: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """Both as int32 [B, S]."""
        vocabulary = self.config.vocabulary
        tokens, targets = as_tokens("tokens", tokens, vocabulary), as_tokens("targets", targets, vocabulary)
        check_shape("targets", targets, tokens)
        return tokens, targets

    def _features(
        self,
        tokens: jax.Array,
        segments: ArrayLike | None,
        topk_indices: ArrayLike | None,
        mask: ArrayLike | None,
        adapters: bool,
        measures: bool = False,
    ) -> jax.Array:
        """The last features [B, S, H] of whole sequences."""
        mask, experts = as_mask(mask, "[B, S]", tokens.shape), self.config.moe
        if topk_indices is not None:
            shape = self.config.num_moe_layers, *tokens.shape, experts.topk
            topk_indices = as_choices(topk_indices, shape, experts.num_experts, mask)
        run = functools.partial(
            self.run_layers,
            tokens,
            topk_indices=topk_indices,
            mask=mask,
            adapters=as_flag("adapters", adapters),
            measures=measures,
        )
        if segments is None:
            return run(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None])[0]
        segments = as_segments("segments", segments)
        check_shape("segments", segments, tokens)
        runs, positions = runs_of(segments)
        return run(positions, segments=runs)[0]

    def run_layers(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        caches: Caches | None = None,
        *,
        segments: jax.Array | None = None,
        mask: jax.Array | None = None,
        lengths: jax.Array | None = None,
        start: jax.Array | int | None = None,
        topk_indices: jax.Array | None = None,
        adapters: bool = True,
        measures: bool = False,
    ) -> tuple[jax.Array, Caches | None]:
        """Returns the last layer's normalized features [B, S, H] for tokens [B, S], and the updated caches.

        Args:
          caches: from `empty_caches`, or from the call for the preceding tokens; None to keep nothing.
          positions, segments, mask, lengths, start, adapters, measures: as in `Place`.
          topk_indices: integer [L, B, S, k], as in `Place` for each of the layers that have experts.
        """
        config, sharding = self.config, self.options.sharding
        check_batch(tokens, sharding)
        table = self._end("w_embedding").astype(self.options.dtype)
        # a sharding splits sequences evenly
        x = embed(table, tokens) if sharding is None else embedded(table, split_batch(tokens, sharding))
        if config.embedding_scale != 1:  # behind a barrier, as XLA might not round the table before it multiplies
            x = barrier(x) * config.embedding_scale
        x = split_batch(x, sharding)
        layers: dict[str, Layer] = {plan.name: getattr(self, plan.name) for plan in config.plan}
        after = None if caches is None else dict(zip(layers, caches, strict=True))
        place = functools.partial(
            Place,
            positions,
            segments=segments,
            mask=mask,
            adapters=adapters,
            lengths=lengths,
            start=start,
            measures=measures,
        )
        choices = None if topk_indices is None else split_batch(topk_indices, sharding, axis=1)
        sown = []
        for stacks in periods_of(layers, config, self.options, rotations_of(config, positions), place, choices):
            x, after, own = run(stacks, x, after)
            sown.append(own)
        sow(self, joined(sown))
        x = map_sequences(self._last_norm, self.options.mapped, self.norm[...], x)
        return x, None if after is None else tuple(after.values())

    def put_forms(self) -> None:
        """Prepares the model for forward passes only: see `fp8_forms.put_forms`."""
        for plan in self.config.plan:
            put_forms(getattr(self, plan.name), self.options)

    def _last_norm(self, scale: jax.Array, x: jax.Array) -> jax.Array:
        return norm(x, self.config.norm_scale(scale), self.config.norm_epsilon, self.options.dense_implementation)

    def empty_caches(self, batch: int, positions: int) -> Caches:
        """Empty caches for this many sequences and positions: one for each stack of `config.plan`."""
        config, options = self.config, self.options
        caches = (
            MIXERS[plan.mixer.kind].empty_cache(plan.mixer, plan.count, batch, positions, options.dtype)
            for plan in config.plan
        )
        return jax.tree.map(functools.partial(split_batch, sharding=options.sharding, axis=1), tuple(caches))

    def logits(self, x: jax.Array) -> jax.Array:
        """Float32 logits [..., V] of the last features [..., H]."""
        return self.head.final(self.raw_logits(x))

    def raw_logits(self, x: jax.Array) -> jax.Array:
        """The logits of the last features before `head.final` scales and caps them."""
        head = self.head
        return map_sequences(lambda w, x: logits_of(x, w, head), self.options.mapped, self._w_logits(x.dtype), x)

    @property
    def head(self) -> Head:
        """How the model computes logits."""
        config, options = self.config, self.options
        layout = "enk" if config.is_tied else "ekn"
        return Head(
            config.logits_scale,
            layout,
            options.dense_implementation,
            options.batch_invariant,
            softcap=config.logits_softcap,
        )

    def _w_logits(self, dtype: DTypeLike) -> jax.Array:
        """The matrix of the logits, [H, V] or, if it is the embedding, [V, H], whole on each device."""
        return self._end("w_embedding" if self.config.is_tied else "w_head").astype(dtype)

    def _end(self, name: str) -> jax.Array:
        """A matrix outside the layers, whole on each device."""
        return gathered({name: getattr(self, name)[...]}, self.options.sharding, self.options.dtype)[name]

    def merge_adapters(self) -> None:
        """Merges each LoRA adapter into its matrix and sets b to zero. The model computes the same, up to rounding.

        Raises: TypeError: a matrix with an adapter is a QuantizedArray. Nothing is merged then.
        """
        for plan in self.config.plan:
            merge_stack(getattr(self, plan.name), self.options)
