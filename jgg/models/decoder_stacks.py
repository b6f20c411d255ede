"""What a `Decoder` computes from tokens to features and logits: its embedding, stacks of layers and head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from jgg.core.arguments import as_dtype, as_flag, as_mask, check
from jgg.core.choices import CACHE_DTYPES
from jgg.core.gpu_target import known_target
from jgg.core.mixers import AttentionConfig, LatentConfig
from jgg.extend import barrier
from jgg.models.attention import Attention, Place
from jgg.models.config import ModelConfig
from jgg.models.embedding import embed, embedded
from jgg.models.fp8_forms import put_forms
from jgg.models.head import Head, logits_of
from jgg.models.layer import MIXERS, Layer
from jgg.models.modules import Options
from jgg.models.norms import norm
from jgg.models.operations.cache_layout import CacheLayout
from jgg.models.operations.cached_heads import check_gpu
from jgg.models.placement import check_batch, gathered, split_batch
from jgg.models.shard_map import map_sequences
from jgg.models.stack_plan import StackPlan
from jgg.models.stacks import joined, merge_stack, merged_stack, periods_of, rotations_of, run
from jgg.models.token_arrays import as_choices, as_segments, check_shape, runs_of
from jgg.models.updating import Updates, run_updating
from jgg.nnx import sow

Caches = tuple[object, ...]  # of each stack of the plan, in the form that its mixer gives it


class DecoderStacks(nnx.Module):
    """The layers of a `Decoder`, its embedding and its head, for arguments that are checked.

    Attributes:
      updates: in a training step whose backward pass updates the layers, how it does; else None.
    """

    updates: Updates | None = None
    config: ModelConfig
    options: Options
    dense_layers: Layer | None
    layers: Layer
    w_embedding: nnx.Param[jax.Array]
    norm: nnx.Param[jax.Array]
    w_head: nnx.Param[jax.Array]

    def features(
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
        if self.updates is not None:
            self.updates.begin()
        sown = []
        for stacks in periods_of(layers, config, self.options, rotations_of(config, positions), place, choices):
            if self.updates is None:
                x, after, own = run(stacks, x, after)
            else:
                x, own = run_updating(stacks, x, self.updates)
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

    def empty_caches(
        self, batch: int, positions: int, piece: int | None = None, cache_dtype: DTypeLike | None = None
    ) -> Caches:
        """Empty caches for this many sequences and positions: one for each stack of `config.plan`.

        Args:
          piece: the most tokens of a sequence that run at once with a `start` after its first token. Layers with a
            window then keep little more than that. None for any number; all layers keep all positions.
          cache_dtype: float8_e4m3fn for keys and values in FP8, with a float32 scale for each token and key/value head;
            tokens then attend to rounded keys and values, their own included. None for the dtype of the computation.
            States of recurrent layers do not change.

        Raises:
          ValueError: cache_dtype with latent attention, with float16, or on a GPU below compute capability 8.9.
          TypeError: another cache_dtype.
        """
        if cache_dtype is not None:
            cache_dtype = as_cache_dtype(cache_dtype, self.config, self.options)
        dtype = self.options.dtype if cache_dtype is None else cache_dtype
        caches = tuple(self._empty_cache(plan, batch, positions, piece, dtype) for plan in self.config.plan)
        return jax.tree.map(functools.partial(split_batch, sharding=self.options.sharding, axis=1), caches)

    def _empty_cache(
        self, plan: StackPlan, batch: int, positions: int, piece: int | None, cache_dtype: DTypeLike
    ) -> object:
        own, sizes = plan.mixer, (plan.count, batch, positions)
        if not isinstance(own, AttentionConfig):
            return MIXERS[own.kind].empty_cache(own, *sizes, self.options.dtype)
        layout = None if piece is None else CacheLayout.of(plan.window, plan.has_window, positions, piece)
        return Attention.empty_cache(own, *sizes, cache_dtype, layout)

    def logits(self, x: jax.Array) -> jax.Array:
        """Float32 logits [..., V] of the last features [..., H]."""
        return self.head.final(self.raw_logits(x))

    def raw_logits(self, x: jax.Array) -> jax.Array:
        """The logits of the last features before `head.final` scales and caps them."""
        head = self.head
        return map_sequences(lambda w, x: logits_of(x, w, head), self.options.mapped, self.w_logits(x.dtype), x)

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

    def w_logits(self, dtype: DTypeLike) -> jax.Array:
        """The matrix of the logits, [H, V] or, if it is the embedding, [V, H], whole on each device."""
        return self._end("w_embedding" if self.config.is_tied else "w_head").astype(dtype)

    def _end(self, name: str) -> jax.Array:
        """A matrix outside the layers, whole on each device."""
        return gathered({name: getattr(self, name)[...]}, self.options.sharding, self.options.dtype)[name]

    def merge_adapters(self) -> None:
        """Merges each LoRA adapter into its matrix and sets b to zero. The model computes the same, up to rounding.

        Raises: TypeError: a matrix with an adapter is a QuantizedArray. Nothing is merged then.
        """
        stacks = [getattr(self, plan.name) for plan in self.config.plan]
        jax.eval_shape(lambda: [merged_stack(layers) for layers in stacks])  # raises before anything is merged
        for layers in stacks:
            merge_stack(layers, self.options)


def as_cache_dtype(cache_dtype: DTypeLike, config: ModelConfig, options: Options | None = None) -> np.dtype:
    """The argument `cache_dtype` of a model with this config and these options, if they are known.

    Raises:
      ValueError: the mixers, the dtype of the computation or the GPU cannot have such caches.
      TypeError: no cache has this dtype.
    """
    dtype = as_dtype("cache_dtype", cache_dtype, CACHE_DTYPES)
    has_latents = any(isinstance(plan.mixer, LatentConfig) for plan in config.plan)
    needed = "cache_dtype must be None with latent attention, whose caches have no keys and values"
    check(not has_latents, f"{needed}, as in {config.model_type}, got {dtype}.")
    if options is None:
        return dtype
    # weights times scales could be 0 there
    check(options.dtype != jnp.float16, f"cache_dtype must be None with a computation in float16, got {dtype}.")
    target = known_target()
    if target is not None and options.dense_implementation in (None, "triton"):
        check_gpu(target)
    return dtype
