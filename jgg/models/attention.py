"""Causal attention with grouped queries, and the cache of keys and values for decoding."""

import dataclasses
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jgg.core.arguments import check
from jgg.core.gpu_target import current_target
from jgg.core.mixers import AttentionConfig
from jgg.core.quantized import QuantizedArray
from jgg.extend import How, barrier
from jgg.models.attend import attend, finite_sinks
from jgg.models.attend_in_steps import Tokens, attend_in_steps
from jgg.models.config import ModelConfig
from jgg.models.max_logits import max_logits
from jgg.models.modules import Options, linear, linear_several, set_params
from jgg.models.norms import how_of_rows, norm
from jgg.models.operations.attend import ATTEND, PART, Attend, takes_heads_of
from jgg.models.operations.attend_one import ATTEND_ONE, AttendOne
from jgg.models.operations.cache_layout import CacheLayout, place_of
from jgg.models.operations.cached_heads import Heads, dense, empty_heads, put, stored_as
from jgg.models.rotary import Rotation, halves_first, rotated

PROJECTIONS = "attention_projections"  # a name of the products q, k and v, for a policy of `jax.checkpoint`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of stacked layers: [layers, B, C, kv heads, D], for C positions, or as their layout says.

    In FP8, they have a scale for each position and head.
    """

    k: Heads
    v: Heads
    layout: CacheLayout | None = dataclasses.field(default=None, metadata={"static": True})

    def write(self, layer: jax.Array | int, slots: jax.Array, k: Heads, v: Heads) -> Self:
        """Puts a layer's k and v [B, S, kv heads, D] at their slots [B, S]; those past the last are left out."""
        at = layer, jnp.arange(len(slots))[:, None], slots
        k, v = jax.tree.map(lambda cache, own: put(cache, at, own), (self.k, self.v), (k, v))
        return dataclasses.replace(self, k=k, v=v)


class Place(NamedTuple):
    """Where tokens and a layer are, and which tokens count.

    Attributes:
      positions: int32 [B, S], of the tokens in their sequences; B may be 1 if all have the same.
      rotation: cosines and sines of the layer's rotary embedding, as `rotated` takes them.
      layer: int32 [], the layer's index in its stack, or with a cache its index there.
      window: how many of the last tokens one attends to, itself included; None for all, in all layers.
      is_local: bool [], whether this layer has the window; None if all have it.
      segments: int32 [B, S], the segment of each token; it attends to no other segment. None for one. Without a cache.
      mask: bool [B, S], the tokens that go to experts; None for all. Attention does not look at it.
      lengths: int32 [B], of the sequences; None if all have S tokens. The keys and values of what follows are zero: a
        NaN in them would reach tokens that do not attend to them, as 0 * NaN is NaN.
      start: with a cache, the position of the first of the S tokens in all sequences, an int or int32 []: they attend
        to the cached tokens before it too, and their positions must be start, start + 1, ... None or 0 if there
        are none.
      topk_indices: integer [B, S, k], the experts of each token in this layer, -1 for a choice of the router; None if
        the router makes all choices.
      adapters: whether the layer has its LoRA adapters.
      measures: whether mixers sow the largest logit of each head, float32 [heads], as "max_logits". Without a cache.
    """

    positions: jax.Array
    rotation: Rotation
    layer: jax.Array
    window: int | None
    is_local: jax.Array | None
    segments: jax.Array | None = None
    mask: jax.Array | None = None
    lengths: jax.Array | None = None
    start: jax.Array | int | None = None
    topk_indices: jax.Array | None = None
    adapters: bool = True
    measures: bool = False

    @property
    def has_more(self) -> bool:
        """Whether tokens may be before these in the cache."""
        return self.start is not None and not (isinstance(self.start, int) and self.start == 0)

    def starts(self, shape: tuple[int, ...], chunk: int | None = None) -> jax.Array | None:
        """Where each token's segment, or its chunk of a segment, begins, [B, S]; None if all begin at 0.

        The tokens attend to each other alone.
        """
        length = shape[1]
        chunk = None if chunk is None or length <= chunk else chunk
        if chunk is None and self.segments is None:
            return None
        positions = self.positions if chunk is None else self.positions % chunk
        return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None] - positions, shape)

    def is_token(self, length: int) -> jax.Array | None:
        """Whether each of `length` places has a token of its sequence, bool [B, S]; None if all have."""
        if self.lengths is None:
            return None
        places = jnp.arange(length, dtype=jnp.int32) + (0 if self.start is None else self.start)
        return places[None] < self.lengths[:, None]

    def write(self, cache: Cache, k: Heads, v: Heads) -> Cache:
        """The cache with the tokens' k and v [B, S, kv heads, D], if later tokens may see them."""
        layout, positions = cache.layout, jnp.broadcast_to(self.positions, k.shape[:2])
        layer, slots = place_of(layout, self.layer, positions, self.window, self.is_local)
        if layout is not None:  # two tokens of a sequence have different slots, and padding has none
            ends = positions[:, -1:] + 1
            if self.lengths is not None:
                ends = jnp.minimum(ends, self.lengths[:, None])
            is_kept = (positions < ends) & (positions >= ends - layout.size(self.window, self.is_local))
            slots = jnp.where(is_kept, slots, cache.k.shape[2])
        return cache.write(layer, slots, k, v)


class Attention(nnx.Module):
    """Attention of one layer: projections, norms of queries and keys, rotary embedding, softmax, output."""

    q_norm: nnx.Param[jax.Array]
    k_norm: nnx.Param[jax.Array]
    sinks: nnx.Param[jax.Array]

    def __init__(self, config: ModelConfig, own: AttentionConfig, options: Options, rngs: nnx.Rngs) -> None:
        check(
            not options.batch_invariant or takes_heads_of(own.head_features, options.dtype),
            f"batch_invariant must be False with heads that no kernel takes, of {own.head_features} features in "
            f"{jnp.dtype(options.dtype).name}, got True.",
        )
        self.config, self.own, self.options = config, own, options
        has_parts = own.chunk is None or own.chunk % PART == 0
        needed = f"batch_invariant needs chunks of attention whose size is a multiple of {PART}, got {own.chunk}."
        check(has_parts or not options.batch_invariant, needed)
        set_params(self, own.shapes(config.features), config.init_scale, options, rngs, norm=config.norm_init)

    def __call__(self, x: jax.Array, place: Place, cache: Cache | None = None) -> tuple[jax.Array, Cache | None]:
        """Maps x [B, S, H] to the same shape; with a cache, also returns it with the tokens' keys and values.

        Without a cache, or if S > 1 and `place` has no start, tokens attend to each other alone, so positions must be
        0, 1, 2, ... in each segment.
        """
        q, keys, values, gate = self._heads(x, place)
        if place.measures:
            starts = place.starts(x.shape[:2], self.own.chunk)
            largest = max_logits(
                q, keys, scale=self.own.scale, starts=starts, window=place.window, is_local=place.is_local
            )
            self.sow(nnx.Intermediate, "max_logits", largest)
        is_token = place.is_token(x.shape[1])
        if is_token is not None:
            keys, values = (
                jnp.where(is_token[..., None, None], array, jnp.zeros((), array.dtype)) for array in (keys, values)
            )
        k: Heads = keys if cache is None else stored_as(cache.k, keys)
        v: Heads = values if cache is None else stored_as(cache.v, values)
        may_pad = place.lengths is not None and place.start is not None
        if cache is not None and x.shape[1] == 1 and (cache.layout is None or not may_pad):
            attended, cache = self._attend_to_cache(q, k, v, place, cache)
        else:
            if cache is not None:
                cache = place.write(cache, k, v)
            if cache is not None and place.has_more:
                attended = self._attend_to_those_before(q, place, cache)
            else:
                attended = self._attend_to_each_other(q, k, v, place)
        attended = attended.reshape(*x.shape[:2], q.shape[2] * q.shape[3])
        if gate is not None:
            attended = (attended.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(x.dtype)
        return linear(self, attended, "o", self.options, place.adapters), cache

    @staticmethod
    def empty_cache(
        own: AttentionConfig,
        layers: int,
        batch: int,
        positions: int,
        dtype: DTypeLike,
        layout: CacheLayout | None = None,
    ) -> Cache:
        """An empty cache for this many layers, sequences and positions, in this layout; with scales in FP8."""
        layers, slots = (layers, positions) if layout is None else layout.cache_shape(layers)
        shape = (layers, batch, slots, own.num_kv_heads, own.head_features)
        return Cache(empty_heads(shape, dtype), empty_heads(shape, dtype), layout)

    def _heads(self, x: jax.Array, place: Place) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Rotated queries and keys, and values, [B, S, heads, D], and the gate [B, S, heads * D], if there is one."""
        own, gate = self.own, None
        names = "qk" if own.are_keys_values else "qkv"
        products = zip(names, linear_several(self, x, names, self.options, place.adapters), strict=True)
        named = {name: checkpoint_name(y, PROJECTIONS) for name, y in products}
        q, k, v = (self._projected(named.get(name, named["k"]), name) for name in "qkv")
        if own.is_interleaved:  # the same order of features in queries and keys changes none of their products
            q, k = (halves_first(y, own.head_features) for y in (q, k))
        if own.use_gate:
            both = q.reshape(*x.shape[:2], own.num_heads, 2, own.head_features)
            q, gate = (both[:, :, :, part].reshape(*x.shape[:2], q.shape[2] // 2) for part in range(2))
        scale_of = self.config.norm_scale
        scales = (scale_of(self.q_norm[...]), scale_of(self.k_norm[...])) if own.qk_norm == "head" else None
        if own.qk_norm == "unit":  # a rotation changes no norm
            ones = jnp.ones(own.head_features, jnp.float32)
            scales = ones, ones
        implementation = self.options.dense_implementation
        q, k = rotated(q, k, scales, place.rotation, own.head_features, self.config.norm_epsilon, implementation)
        if own.temperature_scale:
            q = self._tempered(q, place.positions)
        v = v.reshape(*v.shape[:-1], own.num_kv_heads, own.head_features)
        if own.norm_values:
            v = norm(v, jnp.ones(own.head_features, jnp.float32), self.config.norm_epsilon, implementation)
        return q, k, v, gate

    def _tempered(self, q: jax.Array, positions: jax.Array) -> jax.Array:
        """Queries [B, S, heads, D] of late tokens, with larger logits. Source: Nakanishi, Scalable-Softmax, 2025."""
        steps = barrier(jnp.floor((positions.astype(jnp.float32) + 1) / self.own.temperature_floor))
        factors = 1 + self.own.temperature_scale * jnp.log1p(steps)  # behind a barrier, as the angles of `rotations`
        return (q.astype(jnp.float32) * factors[:, :, None, None]).astype(q.dtype)

    def _projected(self, y: jax.Array, name: str) -> jax.Array:
        """Queries, keys or values of all heads together, [B, S, heads * D], of their product."""
        own = self.own
        if own.qk_norm == "all" and name != "v":
            scale = self.config.norm_scale(getattr(self, f"{name}_norm")[...])
            y = norm(y, scale, self.config.norm_epsilon, self.options.dense_implementation)
        return y if own.clip_qkv is None else jnp.clip(y, -own.clip_qkv, own.clip_qkv)

    def _attend_to_each_other(self, q: jax.Array, k: Heads, v: Heads, place: Place) -> jax.Array:
        """The result for all tokens of sequences or segments, [B, S, heads, D]."""
        sinks = self.sinks[...] if self.own.use_sinks else None
        how = how_of_rows(self.options.dense_implementation) if self.options.batch_invariant else None
        scale, window, is_local = self.own.scale, place.window, place.is_local
        starts = place.starts(q.shape[:2], self.own.chunk)
        if how is None:
            k, v = dense(k, q.dtype), dense(v, q.dtype)
            return attend(q, k, v, scale=scale, window=window, is_local=is_local, starts=starts, sinks=sinks)
        if isinstance(k, QuantizedArray) or isinstance(v, QuantizedArray):  # as a cache has them, without gradients
            k, v = jax.tree.map(lambda array: array[None], (k, v))
            operands = Attend(
                q, k, v, starts=starts, is_local=is_local, sinks=None if sinks is None else finite_sinks(sinks)
            )
            return ATTEND(how, operands, scale=scale, window=window).attended
        return attend_in_steps(how, Tokens(q, k, v, is_local, starts, sinks), scale=scale, window=window)

    def _attend_to_those_before(self, q: jax.Array, place: Place, cache: Cache) -> jax.Array:
        """The result for tokens that are in the cache, at place.start and after it, [B, S, heads, D]."""
        if cache.layout is not None and place.window is not None:
            most = cache.layout.ring - place.window + 1
            needed = f"piece of empty_caches must be at least the tokens that run at once with a start, {q.shape[1]}"
            check(q.shape[1] <= most, f"{needed}, got caches for {most}.")
        sinks = self.sinks[...] if self.own.use_sinks else None
        chunk = self._chunk_of(cache)
        starts = None if chunk is None else jnp.broadcast_to(place.positions // chunk * chunk, q.shape[:2])
        operands = Attend(
            q,
            cache.k,
            cache.v,
            layer=place.layer,
            offset=jnp.asarray(place.start, jnp.int32),
            starts=starts,
            is_local=None if place.window is None else place.is_local,
            sinks=None if sinks is None else finite_sinks(sinks),
        )
        scale, window = self.own.scale, place.window
        return ATTEND(self._how_of_cache, operands, scale=scale, window=window, layout=cache.layout).attended

    def _chunk_of(self, cache: Cache) -> int | None:
        """The size of chunks; None if the cache has room for one."""
        chunk = self.own.chunk
        return None if chunk is None or cache.k.shape[2] <= chunk else chunk

    @property
    def _how_of_cache(self) -> How | None:
        """How tokens attend to a cache; XLA splits plain JAX over the devices of a sharding."""
        return None if self.options.is_split_by_xla else How(self.options.implementation, current_target())

    def _attend_to_cache(self, q: jax.Array, k: Heads, v: Heads, place: Place, cache: Cache) -> tuple[jax.Array, Cache]:
        """The result for one token of each sequence [B, 1, heads, D], and the cache with its key and value."""
        sinks = self.sinks[...] if self.own.use_sinks else None
        operands = AttendOne(
            q=q[:, 0],
            k=jax.tree.map(lambda array: array[:, 0], k),
            v=jax.tree.map(lambda array: array[:, 0], v),
            k_cache=cache.k,
            v_cache=cache.v,
            layer=place.layer,
            positions=jnp.broadcast_to(place.positions[:, 0], q.shape[:1]),
            is_local=None if place.window is None else place.is_local,
            sinks=None if sinks is None else finite_sinks(sinks),
        )
        parameters = {"scale": self.own.scale, "window": place.window, "chunk": self._chunk_of(cache)}
        attended, k_cache, v_cache = ATTEND_ONE(self._how_of_cache, operands, **parameters, layout=cache.layout)
        return attended[:, None], Cache(k_cache, v_cache, cache.layout)
