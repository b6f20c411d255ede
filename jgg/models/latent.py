"""Multi-head latent attention, and its cache, which stores one short vector per token instead of keys and values.

Keys and values of all heads are products of a token's latent c with w_kv_b = (w_k, w_v); all heads also share a rotated
key r. Tokens that attend to each other have keys and values per head, as in other attention. Tokens that attend to a
cache have none: since q (w_k c) = (q w_k) c, a query is multiplied by its head's w_k, all heads attend to the latents
themselves, and the sum of latents is multiplied by w_v.

With batch_invariant, tokens attend to each other as they attend to a cache, in one order of additions, and have keys
and values for the gradients alone.

Source: DeepSeek-AI, DeepSeek-V2, 2024, 2.1 and appendix C. https://arxiv.org/abs/2405.04434
"""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jgg.core.arguments import check
from jgg.core.gpu_target import current_target
from jgg.core.mixers import LatentConfig
from jgg.extend import How
from jgg.linear.grouped_gemm import grouped_gemm
from jgg.linear.low_rank import LowRank
from jgg.models.attend import attend
from jgg.models.attend_in_steps import Tokens, with_attention_gradients
from jgg.models.attention import PROJECTIONS, Place
from jgg.models.config import ModelConfig
from jgg.models.max_logits import max_logits
from jgg.models.modules import Options, linear, linear_several, matrix_of, set_params
from jgg.models.norms import norm
from jgg.models.operations.attend_latents import ATTEND_LATENTS, AttendLatents, SummedLatents, takes_latents_of
from jgg.models.operations.attend_latents_one import ATTEND_LATENTS_ONE, AttendLatentsOne
from jgg.models.operations.attend_one import written
from jgg.models.operations.attend_plain import Mask, attend_in_blocks
from jgg.models.rotary import halves_first, rotated


class LatentCache(NamedTuple):
    """The latents and rotated keys of stacked layers, side by side: [layers, B, C, 1, kv_rank + rotated features]."""

    latents: jax.Array

    def write(self, layer: jax.Array, positions: jax.Array, latents: jax.Array) -> Self:
        """Puts a layer's latents [B, S, features] at their positions [B, S]."""
        return self._replace(latents=written(self.latents, layer, positions, latents[:, :, None]))


class Latent(nnx.Module):
    """Latent attention of one layer: projections, norms of the latents, rotary embedding, softmax, output."""

    q_norm: nnx.Param[jax.Array]
    kv_norm: nnx.Param[jax.Array]

    def __init__(self, config: ModelConfig, own: LatentConfig, options: Options, rngs: nnx.Rngs) -> None:
        check(
            not options.batch_invariant or takes_latents_of(own.kv_rank, options.dtype),
            f"batch_invariant must be False with latents that no kernel takes, of {own.kv_rank} features in "
            f"{jnp.dtype(options.dtype).name}, got True.",
        )
        self.config, self.own, self.options = config, own, options
        set_params(self, own.shapes(config.features), config.init_scale, options, rngs)

    def __call__(
        self, x: jax.Array, place: Place, cache: LatentCache | None = None
    ) -> tuple[jax.Array, LatentCache | None]:
        """Maps x [B, S, H] to the same shape; with a cache, also returns it with the tokens' latents.

        Without a cache, or if S > 1 and `place` has no start, tokens attend to each other alone, so positions must be
        0, 1, 2, ... in each segment.
        """
        q, latents = self._queries_and_latents(x, place)
        is_token = place.is_token(x.shape[1])
        if is_token is not None:
            latents = jnp.where(is_token[..., None], latents, jnp.zeros((), latents.dtype))
        if cache is not None:
            cache = cache.write(place.layer, jnp.broadcast_to(place.positions, x.shape[:2]), latents)
        if cache is not None and (place.has_more or x.shape[1] == 1):
            attended = self._attend_to_cache(q, place, cache)
        else:
            attended = self._attend_to_each_other(q, latents, place)
        attended = attended.reshape(*x.shape[:2], self.own.num_heads * self.own.value_features)
        return linear(self, attended, "o", self.options, place.adapters), cache

    @staticmethod
    def empty_cache(own: LatentConfig, layers: int, batch: int, positions: int, dtype: DTypeLike) -> LatentCache:
        """An empty cache for this many layers, sequences and positions."""
        return LatentCache(jnp.zeros((layers, batch, positions, 1, own.cached_per_token), dtype))

    def _queries_and_latents(self, x: jax.Array, place: Place) -> tuple[jax.Array, jax.Array]:
        """Rotated queries [B, S, heads, D], and normalized latents joined to rotated keys [B, S, kv_rank + rotated]."""
        own, options = self.own, self.options
        names = ("q" if own.q_rank is None else "q_a"), "kv_a"
        # the backward pass computes keys and values again of these, which are small
        products = linear_several(self, x, names, options, place.adapters)
        q, latents = (checkpoint_name(product, PROJECTIONS) for product in products)
        norms = own.norm_epsilon, options.dense_implementation
        if own.q_rank is not None:
            q = linear(self, norm(q, self.q_norm[...], *norms), "q_b", options, place.adapters)
        q = q.reshape(*q.shape[:2], own.num_heads, own.head_features)
        q, q_rotated = jnp.split(q, [own.plain_features], axis=-1)
        latents, k_rotated = jnp.split(latents, [own.kv_rank], axis=-1)
        latents = norm(latents, self.kv_norm[...], *norms)
        q_rotated = q_rotated.reshape(*x.shape[:2], -1)
        if own.is_interleaved:  # the same order of features in queries and keys changes none of their products
            q_rotated, k_rotated = (halves_first(y, own.rotated_features) for y in (q_rotated, k_rotated))
        q_rotated, k_rotated = rotated(q_rotated, k_rotated, None, place.rotation, own.rotated_features, *norms)
        q = jnp.concatenate([q, q_rotated], axis=-1)
        return q, jnp.concatenate([latents, k_rotated[:, :, 0]], axis=-1)

    def _attend_to_each_other(self, q: jax.Array, latents: jax.Array, place: Place) -> jax.Array:
        """The result for all tokens of sequences or segments, [B, S, heads, value features]."""
        k, v = self._keys_and_values(latents, place)
        scale, starts = self.own.scale, place.starts(q.shape[:2])
        if place.measures:
            self.sow(nnx.Intermediate, "max_logits", max_logits(q, k, scale=scale, starts=starts))
        if not self.options.batch_invariant:
            return attend(q, k, v, scale=scale, starts=starts)
        # as tokens attend to a cache; keys and values are for the gradients alone
        operands = AttendLatents(self._for_latents(q, place), latents[None, :, :, None], starts=starts)
        summed, log_sums = self._summed(jax.lax.stop_gradient(operands))
        y = jax.lax.stop_gradient(self._times_w_v(summed, place))
        return with_attention_gradients(Tokens(q, k, v, None, starts, None), y, log_sums, scale=scale)

    def _keys_and_values(self, latents: jax.Array, place: Place) -> tuple[jax.Array, jax.Array]:
        """Keys [B, S, heads, D] and values [B, S, heads, value features]."""
        own = self.own
        latents, k_rotated = jnp.split(latents, [own.kv_rank], axis=-1)
        both = linear(self, latents, "kv_b", self.options, place.adapters)
        k, v = jnp.split(both.reshape(*both.shape[:2], own.num_heads, -1), [own.plain_features], axis=-1)
        of_heads = (*k.shape[:3], own.rotated_features)
        return jnp.concatenate([k, jnp.broadcast_to(k_rotated[:, :, None], of_heads)], axis=-1), v

    def _attend_to_cache(self, q: jax.Array, place: Place, cache: LatentCache) -> jax.Array:
        """The result for tokens that are in the cache, [B, S, heads, value features]."""
        own, q = self.own, self._for_latents(q, place)
        if q.shape[1] == 1:
            positions = jnp.broadcast_to(place.positions[:, 0], q.shape[:1])
            operands = AttendLatentsOne(q[:, 0], cache.latents, place.layer, positions)
            summed = ATTEND_LATENTS_ONE(self._how, operands, scale=own.scale, rank=own.kv_rank)[:, None]
        elif self.options.batch_invariant:
            offset = jnp.asarray(place.start, jnp.int32)
            summed, _ = self._summed(AttendLatents(q, cache.latents, place.layer, offset))
        else:
            latents = cache.latents[place.layer]  # [B, C, 1, kv_rank + rotated]
            summed = attend_in_blocks(q, latents, latents, Mask(place.positions), None, own.scale)[..., : own.kv_rank]
        return self._times_w_v(summed, place)

    @property
    def _how(self) -> How | None:
        """How tokens attend to latents; XLA splits plain JAX over the devices of a sharding."""
        return None if self.options.is_split_by_xla else How(self.options.implementation, current_target())

    def _summed(self, operands: AttendLatents) -> SummedLatents:
        return ATTEND_LATENTS(self._how, operands, scale=self.own.scale, rank=self.own.kv_rank)

    def _for_latents(self, q: jax.Array, place: Place) -> jax.Array:
        """Queries that multiply latents, [B, S, heads, kv_rank + rotated], of those that multiply keys."""
        plain = self.own.plain_features
        return jnp.concatenate([self._times_w_k(q[..., :plain], place), q[..., plain:]], axis=-1)

    def _times_w_k(self, q: jax.Array, place: Place) -> jax.Array:
        """Queries [B, S, heads, plain features] times w_k, [B, S, heads, kv_rank], to multiply latents with."""
        w, factors = self._by_heads(place, slice(None, self.own.plain_features), q.dtype)
        if self.options.batch_invariant:
            return self._grouped(q, w, factors, "enk")
        product = jnp.einsum("bshd,rhd->bshr", q, w)
        if factors is not None:
            a, b = factors
            product += jnp.einsum("bshk,rk->bshr", jnp.einsum("bshd,khd->bshk", q, b), a)
        return product

    def _times_w_v(self, latents: jax.Array, place: Place) -> jax.Array:
        """Sums of latents [B, S, heads, kv_rank] times w_v, which are sums of values: [B, S, heads, value features]."""
        w, factors = self._by_heads(place, slice(self.own.plain_features, None), latents.dtype)
        if self.options.batch_invariant:
            return self._grouped(latents, w, factors, "ekn")
        product = jnp.einsum("bshr,rhd->bshd", latents, w)
        if factors is not None:
            a, b = factors
            product += jnp.einsum("bshk,khd->bshd", jnp.einsum("bshr,rk->bshk", latents, a), b)
        return product

    def _grouped(
        self, x: jax.Array, w: jax.Array, factors: tuple[jax.Array, jax.Array] | None, w_layout: str
    ) -> jax.Array:
        """x [B, S, heads, K] times w and its adapter as `_by_heads` gives them, by kernels: each head is a group."""
        w, (batch, length, heads, _) = w.swapaxes(0, 1), x.shape
        low_rank = None
        if factors is not None:
            a, b = jnp.broadcast_to(factors[0], (heads, *factors[0].shape)), factors[1].swapaxes(0, 1)
            low_rank = LowRank(a, b) if w_layout == "ekn" else LowRank(b, a)
        rows, sizes = x.transpose(2, 0, 1, 3).reshape(-1, x.shape[3]), jnp.full(heads, batch * length, jnp.int32)
        implementation = self.options.dense_implementation
        y = grouped_gemm(rows, w, sizes, low_rank=low_rank, w_layout=w_layout, implementation=implementation)
        return y.reshape(heads, batch, length, -1).transpose(1, 2, 0, 3)

    def _by_heads(
        self, place: Place, features: slice, dtype: DTypeLike
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Some of each head's features of w_kv_b [kv_rank, heads, features], and those of its adapter or None."""
        matrix, heads = matrix_of(self, "w_kv_b", self.options, place.adapters), self.own.num_heads

        def part(array: jax.Array) -> jax.Array:
            return array.reshape(array.shape[0], heads, -1)[..., features].astype(dtype)

        factors = matrix.factors
        return part(matrix.dense), None if factors is None else (factors.a.astype(dtype), part(factors.b))
