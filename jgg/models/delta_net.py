"""A recurrent layer by the gated delta rule, and its cache: a state for each head, and what its convolution sees."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jgg.core.mixers import DeltaConfig
from jgg.core.rounding import rounded
from jgg.extend import barrier
from jgg.models.attention import PROJECTIONS, Place
from jgg.models.config import ModelConfig
from jgg.models.delta_rule import delta_rule, delta_rule_in_order, delta_rule_one
from jgg.models.modules import Options, linear, linear_several, set_params
from jgg.models.norms import norm
from jgg.models.operations.norm import rms_norm

_LARGEST_RATE, _SMALLEST_RATE = 16.0, 0.01  # of new layers' decays, from which exp(log_a) is drawn evenly


class States(NamedTuple):
    """What stacked layers keep of the tokens so far; its size does not depend on their number.

    Attributes:
      seen: [layers, B, W - 1, channels], what a convolution of W tokens took of the last ones; zeros before the first.
      state: float32 [layers, B, value heads, K, V].
    """

    seen: jax.Array
    state: jax.Array


class Delta(nnx.Module):
    """A recurrent layer: projections, causal convolution, the gated delta rule, gated norm, output.

    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, https://arxiv.org/abs/2412.06464, as Qwen3-Next
    has it.
    """

    w_conv: nnx.Param[jax.Array]
    log_a: nnx.Param[jax.Array]
    dt_bias: nnx.Param[jax.Array]
    norm: nnx.Param[jax.Array]

    def __init__(self, config: ModelConfig, own: DeltaConfig, options: Options, rngs: nnx.Rngs) -> None:
        self.config, self.own, self.options = config, own, options
        shapes, ones = own.shapes(config.features), nnx.initializers.ones
        set_params(self, shapes, config.init_scale, options, rngs, log_a=_log_a, dt_bias=ones)

    def __call__(self, x: jax.Array, place: Place, cache: States | None = None) -> tuple[jax.Array, States | None]:
        """Maps x [B, S, H] to the same shape; with a cache, tokens follow those that it has seen."""
        own, options = self.own, self.options
        qkv, z, b, a = self._projections(x, place.adapters)
        log_decay, beta = _gates(b, a, self.log_a[...], self.dt_bias[...])
        is_token, count = place.is_token(x.shape[1]), None
        if is_token is not None:  # what follows the last token of a row changes no state
            count = is_token.sum(axis=1, dtype=jnp.int32)
            qkv, log_decay, beta = (
                jnp.where(is_token[..., None], array, jnp.zeros((), array.dtype)) for array in (qkv, log_decay, beta)
            )
        seen = resets = positions = None
        if cache is not None:
            seen = cache.seen[place.layer]
        elif place.segments is not None:
            positions = jnp.broadcast_to(place.positions, x.shape[:2])
            resets = positions == 0
        mixed = _convolved(qkv, self.w_conv[...], seen, positions, options.batch_invariant)
        q, k, v = _heads(own, mixed)
        y, states = self._rule(q, k, v, log_decay, beta, resets, None if cache is None else cache.state, place.layer)
        implementation = options.dense_implementation
        y = _gated_norm(y, z, self.norm[...], self.config.norm_epsilon, options.batch_invariant, implementation)
        if cache is not None and states is not None:
            seen = _last_seen(cache.seen[place.layer], qkv, count)
            cache = States(cache.seen.at[place.layer].set(seen), states)
        return linear(self, y, "out", options, place.adapters), cache

    def _rule(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        log_decay: jax.Array,
        beta: jax.Array,
        resets: jax.Array | None,
        states: jax.Array | None,
        layer: jax.Array,
    ) -> tuple[jax.Array, jax.Array | None]:
        """The rule's results [B, S, value heads, V], and the stacked states, this layer's after the tokens."""
        in_order = self.options.batch_invariant
        options = {"scale": self.own.key_features**-0.5, "implementation": self.options.dense_implementation}
        if states is not None and in_order:
            return delta_rule_in_order(q, k, v, log_decay, beta, states, layer, **options)
        if states is not None and q.shape[1] == 1:
            q, k, v, log_decay, beta = (array[:, 0] for array in (q, k, v, log_decay, beta))
            y, states = delta_rule_one(q, k, v, log_decay, beta, states, layer, **options)
            return y[:, None], states
        state = None if states is None else states[layer]
        y, state = delta_rule(q, k, v, log_decay, beta, state=state, resets=resets, in_order=in_order, **options)
        return y, None if states is None else states.at[layer].set(state)

    @staticmethod
    def empty_cache(own: DeltaConfig, layers: int, batch: int, positions: int, dtype: DTypeLike) -> States:
        """An empty cache for this many layers and sequences; the number of positions makes no difference."""
        heads = own.num_value_heads, own.key_features, own.value_features
        seen = jnp.zeros((layers, batch, own.conv_size - 1, own.channels), dtype)
        return States(seen, jnp.zeros((layers, batch, *heads), jnp.float32))

    def _projections(self, x: jax.Array, adapters: bool) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values [B, S, channels], z [B, S, value heads, V], b and a [B, S, value heads]."""
        own, several = self.own, self._several
        tokens = x.shape[:2]
        if not own.is_grouped:
            (qkv, z), (b, a) = several(x, ("qkv", "z"), adapters), several(x, ("b", "a"), adapters)
            return qkv, z.reshape(*tokens, own.num_value_heads, own.value_features), b, a
        (qkvz,), (ba,) = several(x, ("qkvz",), adapters), several(x, ("ba",), adapters)
        keys, group = own.num_key_heads, own.num_value_heads // own.num_key_heads
        sizes = own.key_features, own.key_features, group * own.value_features, group * own.value_features
        q, k, v, z = _split(qkvz.reshape(*tokens, keys, sum(sizes)), sizes)
        b, a = _split(ba.reshape(*tokens, keys, 2 * group), (group, group))
        qkv = jnp.concatenate([array.reshape(*tokens, -1) for array in (q, k, v)], axis=-1)
        b, a = (array.reshape(*tokens, own.num_value_heads) for array in (b, a))
        return qkv, z.reshape(*tokens, own.num_value_heads, own.value_features), b, a

    def _several(self, x: jax.Array, names: tuple[str, ...], adapters: bool) -> list[jax.Array]:
        products = linear_several(self, x, names, self.options, adapters)
        return [checkpoint_name(y, PROJECTIONS) for y in products]


def _log_a(
    key: jax.Array, shape: Sequence[int], dtype: DTypeLike | None = None, out_sharding: object = None
) -> jax.Array:
    """Initializes `log_a`, the logarithms of the rates of decays."""
    del out_sharding
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, _SMALLEST_RATE, _LARGEST_RATE)).astype(dtype)


def _gates(b: jax.Array, a: jax.Array, log_a: jax.Array, dt_bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logarithm of each head's decay, and how far a token corrects its state: float32 [B, S, value heads]."""
    b, a = (array.astype(jnp.float32) for array in (b, a))
    log_a, dt_bias = (array.astype(jnp.float32)[None, None] for array in (log_a, dt_bias))
    return -jnp.exp(log_a) * jax.nn.softplus(a + dt_bias), jax.nn.sigmoid(b)


def _split(array: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """Parts of the last axis, which have these sizes."""
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [array[..., end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _heads(own: DeltaConfig, mixed: jax.Array) -> list[jax.Array]:
    """Queries, keys and values [B, S, heads, features], which stand side by side in `mixed`."""
    counts = own.num_key_heads, own.num_key_heads, own.num_value_heads
    features = own.key_features, own.key_features, own.value_features
    parts = _split(mixed, tuple(count * size for count, size in zip(counts, features, strict=True)))
    return [
        part.reshape(*mixed.shape[:2], count, size) for part, count, size in zip(parts, counts, features, strict=True)
    ]


@functools.partial(jax.checkpoint, static_argnums=4)  # the backward pass keeps x alone, not float32 copies of it
def _convolved(
    x: jax.Array, w: jax.Array, seen: jax.Array | None, positions: jax.Array | None, is_invariant: bool
) -> jax.Array:
    """SiLU of each channel's causal convolution, computed in float32.

    Args:
      x: [B, S, channels].
      w: [channels, 1, W]; the last column multiplies a token itself.
      seen: [B, W - 1, channels], the tokens before; None for zeros.
      positions: int32 [B, S], how many tokens of its segment are before each; None if all are of one.
      is_invariant: whether all ways to fuse this give the same bits.
    """
    length, size = x.shape[1], w.shape[2]
    before = jnp.zeros((x.shape[0], size - 1, x.shape[2]), x.dtype) if seen is None else seen
    tokens = jnp.concatenate([before, x], axis=1)
    if is_invariant:  # products of two numbers of 16 bits are exact, and so it does not matter what they are fused with
        wide = w.astype(jnp.float32)  # whose gradient is not rounded
        w = barrier(wide + jax.lax.stop_gradient(rounded(wide, x.dtype) - wide))
    total = jnp.zeros(x.shape, jnp.float32)
    for back in range(size):
        first = size - 1 - back
        token = tokens[:, first : first + length]
        is_seen = None if positions is None else (positions >= back)[..., None]
        if is_invariant and is_seen is not None:  # a product with zero, as before a row
            token = jnp.where(is_seen, token, jnp.zeros((), x.dtype))
        own = token.astype(jnp.float32) * w[:, 0, first].astype(jnp.float32)[None, None]
        if is_invariant:
            own = own if x.dtype.itemsize == 2 else barrier(own)
        elif is_seen is not None:
            own = jnp.where(is_seen, own, 0.0)
        total += own
    return jax.nn.silu(total).astype(x.dtype)


def _last_seen(seen: jax.Array, x: jax.Array, count: jax.Array | None) -> jax.Array:
    """The last tokens of each row, as many as were seen before, after `count` tokens of x; None for all of them."""
    tokens, size = jnp.concatenate([seen, x], axis=1), seen.shape[1]
    if count is None:
        return tokens[:, x.shape[1] :]
    places = count[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    return jnp.take_along_axis(tokens, places[..., None], axis=1)


@functools.partial(jax.checkpoint, static_argnums=(3, 4, 5))
def _gated_norm(
    y: jax.Array, z: jax.Array, scale: jax.Array, epsilon: float, is_invariant: bool, implementation: str | None
) -> jax.Array:
    """RMS norm of each head's y [B, S, heads, V] times SiLU of z, computed in float32: [B, S, heads * V]."""
    y = y.astype(jnp.float32)
    y = norm(y, scale, epsilon, implementation) if is_invariant else rms_norm(y, scale, epsilon)
    return (y * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype).reshape(*y.shape[:2], -1)
