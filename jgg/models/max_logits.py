"""The largest logits of attention, which tell qk-clip how to scale the matrices of queries and keys."""

import math

import jax
import jax.numpy as jnp

from jgg.models.operations.attend_plain import Mask

_QUERIES = 512  # whose logits are in memory at a time


def max_logits(
    q: jax.Array,
    k: jax.Array,
    *,
    scale: float,
    starts: jax.Array | None = None,
    window: int | None = None,
    is_local: jax.Array | None = None,
) -> jax.Array:
    """The largest `scale * q k` of each head, float32 [heads], among the keys that queries attend to.

    Args:
      q: [B, S, heads, D].
      k: [B, S, kv heads, D].
      scale, starts, window, is_local: as in `attend`.
    """
    batch, length, heads, features = q.shape
    parts = math.ceil(length / _QUERIES)
    padding = ((0, 0), (0, parts * _QUERIES - length), (0, 0), (0, 0))
    groups = jnp.pad(q, padding).reshape(batch, parts, _QUERIES, k.shape[2], heads // k.shape[2], features)
    places = jnp.arange(length, dtype=jnp.int32)

    def of_part(part: jax.Array) -> jax.Array:
        own = part * _QUERIES + jnp.arange(_QUERIES, dtype=jnp.int32)
        logits = scale * jnp.einsum("bqhgd,bkhd->bhgqk", groups[:, part], k, preferred_element_type=jnp.float32)
        of_queries = None if starts is None else jnp.take(starts, jnp.minimum(own, length - 1), axis=1)
        sees = Mask(own[None], of_queries, window, is_local).sees(places) & (own < length)[None, :, None]
        return jnp.max(logits, axis=(0, 3, 4), where=sees[:, None, None], initial=-jnp.inf)

    return jax.lax.map(of_part, jnp.arange(parts, dtype=jnp.int32)).max(axis=0).reshape(heads)
