"""The largest logits of attention, by which qk-clip scales the matrices of queries and keys."""

import math

import jax
import jax.numpy as jnp

_QUERIES = 512  # whose logits are in memory at a time


def max_logits(
    q: jax.Array,
    k: jax.Array,
    *,
    scale: float,
    positions: jax.Array,
    window: int | None = None,
    is_local: jax.Array | None = None,
    chunk: int | None = None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """The largest `scale * q k` of each head, float32 [heads], among the keys that queries attend to.

    Args:
      q: [B, S, heads, D].
      k: [B, S, kv heads, D].
      positions: int32 [B or 1, S], of the tokens in their sequences.
      scale, window, is_local, segments: as in `attend`.
      chunk: tokens attend to those of their chunk of so many alone; None for all.
    """
    batch, length, heads, features = q.shape
    parts = math.ceil(length / _QUERIES)
    padding = ((0, 0), (0, parts * _QUERIES - length), (0, 0), (0, 0))
    groups = jnp.pad(q, padding).reshape(batch, parts, _QUERIES, k.shape[2], heads // k.shape[2], features)
    places = jnp.arange(length, dtype=jnp.int32)

    def of_part(part: jax.Array) -> jax.Array:
        own = part * _QUERIES + jnp.arange(_QUERIES, dtype=jnp.int32)
        logits = scale * jnp.einsum("bqhgd,bkhd->bhgqk", groups[:, part], k, preferred_element_type=jnp.float32)
        near = (own[:, None] >= places[None]) & (own < length)[:, None]
        if window is not None:
            is_near = own[:, None] - places[None] < window
            near &= is_near if is_local is None else is_near | ~is_local
        sees = jnp.broadcast_to(near[None], (batch, *near.shape))
        for marks in (segments, None if chunk is None else positions // chunk):
            if marks is not None:
                of_queries = jnp.take(marks, jnp.minimum(own, length - 1), axis=1)
                sees &= of_queries[:, :, None] == marks[:, None]
        return jnp.max(logits, axis=(0, 3, 4), where=sees[:, None, None], initial=-jnp.inf)

    return jax.lax.map(of_part, jnp.arange(parts, dtype=jnp.int32)).max(axis=0).reshape(heads)
