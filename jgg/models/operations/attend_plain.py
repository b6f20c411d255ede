"""Attention in plain JAX by one kind of mask: for operations without a kernel, and for whole sequences."""

from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp

_MASKED = -1e30  # finite: a query that sees no key has a result and gradients that are numbers
_MOST_LOGITS = 2**24  # in memory at a time, in float32
_LEAST_QUERIES = 64  # of a block: products of fewer are slow


class Mask(NamedTuple):
    """The keys that queries see: those up to their own places, of the window and of their segment or chunk.

    Attributes:
      places: int32 [B or 1, S], the place of each query among the keys.
      starts: int32 [B or 1, S], the place of the first key of each query's segment or chunk; None if all begin at 0.
      window: how many of the last keys a query sees, its own included; None for all.
      is_local: bool [], whether the window holds; None if it does, or if there is none.
    """

    places: jax.Array
    starts: jax.Array | None = None
    window: int | None = None
    is_local: jax.Array | None = None

    def sees(self, keys: jax.Array) -> jax.Array:
        """Whether each query sees the key at each of the places int32 [C], bool [B or 1, S, C]."""
        keys, places = keys[None, None], self.places[:, :, None]
        seen = keys <= places
        if self.starts is not None:
            seen &= keys >= self.starts[:, :, None]
        if self.window is not None:
            is_near = places - keys < self.window
            seen &= is_near if self.is_local is None else is_near | ~self.is_local
        return seen


def attend_by_mask(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, sinks: jax.Array | None, scale: float
) -> tuple[jax.Array, jax.Array]:
    """The result [B, S, heads, features of a value], and the logits float32 [B, kv heads, group, S, C].

    Args:
      q: [B, S, heads, D].
      k, v: [B, C, kv heads, D or features of a value], in the dtype of q.
      seen: bool [B or 1, S, C], from `Mask.sees`.
      sinks: float32 [heads], finite logits that take part in the softmax and add nothing to the result. With them there
        is a logit more of each query.
      scale: factor of the products of queries and keys.
    """
    dtype = q.dtype
    if dtype == jnp.float16:  # XLA multiplies it to float32 on GPUs alone
        q, k, v = (array.astype(jnp.float32) for array in (q, k, v))
    grouped = q.reshape(*q.shape[:2], k.shape[2], q.shape[2] // k.shape[2], q.shape[3])
    logits = _products(grouped, k) * jnp.float32(scale)
    logits = jnp.where(seen[:, None, None], logits, jnp.float32(_MASKED))
    if sinks is not None:
        of_sinks = jnp.broadcast_to(sinks.reshape(1, *grouped.shape[2:4], 1, 1), (*logits.shape[:4], 1))
        logits = jnp.concatenate([logits, of_sinks], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : k.shape[1]].astype(v.dtype)
    y = jnp.einsum("bghsc,bcgd->bsghd", weights, v)
    return y.reshape(*q.shape[:3], v.shape[3]).astype(dtype), logits


def attend_in_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, sinks: jax.Array | None, scale: float
) -> jax.Array:
    """The result of `attend_by_mask`, a block of queries at a time, which the backward pass computes again.

    So the logits of all pairs of tokens are never in memory together. With a window, the places are [1, S] and follow
    each other, without is_local.
    """
    (batch, length, heads, _), window = q.shape, mask.window
    size = block_size(batch * heads, length, k.shape[1])

    @jax.checkpoint
    def of_block(
        q: jax.Array, places: jax.Array, starts: jax.Array | None, k: jax.Array, v: jax.Array, sinks: jax.Array | None
    ) -> jax.Array:
        keys = jnp.arange(k.shape[1], dtype=jnp.int32)
        if window is not None and q.shape[1] + window < k.shape[1]:
            first = jnp.maximum(places[0, 0] - window + 1, 0)
            count = q.shape[1] + window - 1
            k, v = (jax.lax.dynamic_slice_in_dim(array, first, count, axis=1) for array in (k, v))
            # the last slice begins earlier than asked for where it would go past the end
            keys = jax.lax.dynamic_slice_in_dim(keys, first, count)
        seen = Mask(places, starts, window).sees(keys)
        return attend_by_mask(q, k.astype(q.dtype), v.astype(q.dtype), seen, sinks, scale)[0]

    if size is None:
        return of_block(q, mask.places, mask.starts, k, v, sinks)
    count = -(-length // size)
    blocks = [_blocks(q, size, count), *(_blocks(each, size, count, "edge") for each in mask[:2])]
    y = jax.lax.map(lambda own: of_block(*own, k, v, sinks), tuple(blocks))
    return jnp.moveaxis(y, 0, 1).reshape(batch, count * size, heads, v.shape[3])[:, :length]


def block_size(rows: int, length: int, keys: int) -> int | None:
    """How many positions' queries a block has, for `rows` queries per position; None for all."""
    if any(map(jax.export.is_symbolic_dim, (rows, length, keys))) or rows * length * keys <= _MOST_LOGITS:
        return None
    size = max(_LEAST_QUERIES, _MOST_LOGITS // (rows * keys))
    return None if size >= length else size


def _blocks(array: jax.Array | None, size: int, count: int, mode: str = "constant") -> jax.Array | None:
    """[B, S, ...] as [blocks, B, size, ...]."""
    if array is None:
        return None
    padding = ((0, 0), (0, count * size - array.shape[1]), *((0, 0) for _ in array.shape[2:]))
    padded = jnp.pad(array, padding, mode=mode)
    return jnp.moveaxis(padded.reshape(array.shape[0], count, size, *array.shape[2:]), 1, 0)


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
