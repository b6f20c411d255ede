"""Attention in plain JAX by blocks of queries, so that the logits of all pairs of tokens are never there at once.

For what no kernel takes, such as heads of many features. The backward pass computes each block again.
"""

import functools

import jax
import jax.export
import jax.numpy as jnp

_MOST_LOGITS = 2**24  # of a block, in float32
_LEAST_QUERIES = 64  # of a block: products of fewer are slow


def attend_plain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    positions: jax.Array,
    scale: float,
    window: int | None = None,
    segments: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """The result for each query, [B, S, heads, features of a value].

    Args:
      q: [B, S, heads, D].
      k: [B, C, kv heads, D].
      v: [B, C, kv heads, features].
      positions: int32 [B, S] or [1, S], the place in k of each query, which sees the keys up to there. With a window
        or segments they are the last S of the C places.
      scale: factor of the products of queries and keys.
      window: how many of the last keys a query sees, its own included; None for all.
      segments: int32 [B, C]: a token sees tokens of the same number alone.
      sinks: float32 [heads], a finite logit that takes part in the softmax and adds nothing to the result.
    """
    batch, length, heads = q.shape[:3]
    size = block_size(batch * heads, length, k.shape[1])
    of_block = jax.checkpoint(functools.partial(_of_block, scale=scale, window=window))
    if size is None:
        return of_block(q, k, v, positions, segments, sinks, None)
    count = -(-length // size)
    rest = count * size - length
    q = jnp.pad(q, ((0, 0), (0, rest), (0, 0), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, rest)), mode="edge")

    def step(number: jax.Array, own: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first = k.shape[1] - length + number * size
        return number + 1, of_block(own[0], k, v, own[1], segments, sinks, first)

    _, y = jax.lax.scan(step, jnp.int32(0), (_by_block(q, count), _by_block(positions, count)))
    return jnp.moveaxis(y, 0, 1).reshape(batch, count * size, heads, v.shape[3])[:, :length]


def block_size(rows: int, length: int, keys: int) -> int | None:
    """The queries of a block, for so many queries of one position, positions and keys; None for all."""
    if any(map(jax.export.is_symbolic_dim, (rows, length, keys))) or rows * length * keys <= _MOST_LOGITS:
        return None
    size = max(_LEAST_QUERIES, _MOST_LOGITS // (rows * keys))
    return None if size >= length else size


def _by_block(array: jax.Array, count: int) -> jax.Array:
    """[B, S, ...] as [blocks, B, S / blocks, ...]."""
    return jnp.moveaxis(array.reshape(array.shape[0], count, -1, *array.shape[2:]), 1, 0)


def _of_block(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    segments: jax.Array | None,
    sinks: jax.Array | None,
    first: jax.Array | None,
    *,
    scale: float,
    window: int | None,
) -> jax.Array:
    """The result of a block of queries, of which `first` is the place of the first one; None for all queries."""
    places = jnp.arange(k.shape[1], dtype=jnp.int32)
    if first is not None and window is not None and q.shape[1] + window < k.shape[1]:
        # the last block may begin later than its first window: its queries past the end are not used
        seen = functools.partial(
            jax.lax.dynamic_slice_in_dim,
            start_index=jnp.maximum(first - window + 1, 0),
            slice_size=q.shape[1] + window - 1,
        )
        k, v, places = seen(k, axis=1), seen(v, axis=1), seen(places)
        segments_of_keys = None if segments is None else seen(segments, axis=1)
    else:
        segments_of_keys = segments
    distance = positions[:, :, None] - places[None, None]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    if segments is not None and segments_of_keys is not None:
        of_queries = jnp.take_along_axis(segments, jnp.broadcast_to(positions, q.shape[:2]), axis=1)
        mask &= of_queries[:, :, None] == segments_of_keys[:, None]
    return _softmax_of(q, k.astype(q.dtype), v.astype(q.dtype), mask, sinks, scale)


def _softmax_of(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, sinks: jax.Array | None, scale: float
) -> jax.Array:
    """Attention by a mask bool [B, S, C] or [1, S, C]."""
    dtype = q.dtype
    if dtype == jnp.float16:  # XLA multiplies it to float32 on GPUs alone
        q, k, v = (array.astype(jnp.float32) for array in (q, k, v))
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    logits = _products(grouped, k) * jnp.float32(scale)
    logits = jnp.where(mask[:, None, None], logits, jnp.float32(-1e30))
    if sinks is not None:
        of_sinks = jnp.broadcast_to(sinks.reshape(1, *grouped.shape[2:4], 1, 1), (*logits.shape[:4], 1))
        logits = jnp.concatenate([logits, of_sinks], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : k.shape[1]].astype(v.dtype)
    y = jnp.einsum("bghsc,bcgd->bsghd", weights, v)
    return y.reshape(*q.shape[:3], v.shape[3]).astype(dtype)


@jax.custom_vjp
def _products(q: jax.Array, k: jax.Array) -> jax.Array:
    """Float32 products [B, kv heads, group, S, C] of q [B, S, kv heads, group, D] and k [B, C, kv heads, D].

    Their gradients are rounded to the dtype of q, as in flash attention: else the backward pass multiplies in float32.
    """
    return jnp.einsum("bsghd,bcgd->bghsc", q, k, preferred_element_type=jnp.float32)


def _gradients(arrays: tuple[jax.Array, jax.Array], gradients: jax.Array) -> tuple[jax.Array, jax.Array]:
    q, k = arrays
    gradients = gradients.astype(q.dtype)
    return jnp.einsum("bghsc,bcgd->bsghd", gradients, k), jnp.einsum("bghsc,bsghd->bcgd", gradients, q)


_products.defvjp(lambda q, k: (_products(q, k), (q, k)), _gradients)
