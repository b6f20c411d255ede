"""How attention within windows and segments becomes attention by a mask, of blocks where there is a window."""

import jax
import jax.numpy as jnp


def split(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, window: int | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Queries, keys and values, and the mask bool [B, queries, keys] by which they attend; None if it is causal.

    With a window, blocks take the place of sequences: they have as many queries as the window, each with the keys of
    its own block and of the one before.

    Args:
      q: [B, S, heads, D], the last of the tokens that k has.
      k, v: [B, keys, kv heads, D].
      segments: int32 [B, keys]: a token attends to tokens of the same number alone.
      window: how many of the last tokens a token attends to, itself included; None for all.
    """
    if window is not None:
        mask = _window_mask(k.shape[0], k.shape[1], window)
        if segments is not None:
            mask &= blocks(segments, window)[:, :, None] == _with_previous(segments, window)[:, None]
        return blocks(q, window), _with_previous(k, window), _with_previous(v, window), mask
    if segments is None:
        return q, k, v, None
    position = jnp.arange(k.shape[1])
    is_seen = position[-q.shape[1] :, None] >= position[None]
    return q, k, v, is_seen[None] & (segments[:, -q.shape[1] :, None] == segments[:, None])


def blocks(array: jax.Array, window: int | None) -> jax.Array:
    """Tokens [B, S, ...] as blocks [B * blocks, window, ...], the last with zeros after its tokens."""
    if window is None:
        return array
    count = -(-array.shape[1] // window)
    array = jnp.pad(array, ((0, 0), (0, count * window - array.shape[1]), *((0, 0) for _ in array.shape[2:])))
    return array.reshape(array.shape[0] * count, window, *array.shape[2:])


def join(array: jax.Array, batch: int, length: int, window: int | None) -> jax.Array:
    """Blocks [B * blocks, window, ...] as tokens [B, S, ...]."""
    if window is None:
        return array
    return array.reshape(batch, -(-length // window) * window, *array.shape[2:])[:, :length]


def _with_previous(array: jax.Array, window: int) -> jax.Array:
    """For each block of tokens [B, S, ...] those of the block before and its own, [B * blocks, 2 * window, ...]."""
    batch, rest = array.shape[0], array.shape[2:]
    own = blocks(array, window)
    own = own.reshape(batch, -(-array.shape[1] // window), window, *rest)
    before = jnp.pad(own[:, :-1], ((0, 0), (1, 0), *((0, 0) for _ in own.shape[2:])))
    both = jnp.concatenate([before, own], axis=2)
    return both.reshape(both.shape[0] * both.shape[1], 2 * window, *rest)


def _window_mask(batch: int, length: int, window: int) -> jax.Array:
    """Which keys each query of a block is to see, bool [B * blocks, window, 2 * window]."""
    count, keys = -(-length // window), jnp.arange(2 * window)
    distance = jnp.arange(window, 2 * window)[:, None] - keys[None]
    is_near = (distance >= 0) & (distance < window)
    has_key = (jnp.arange(count)[:, None] > 0) | (keys[None] >= window)  # no block is before the first
    mask = jnp.broadcast_to(is_near[None] & has_key[:, None], (batch, count, window, 2 * window))
    return mask.reshape(batch * count, window, 2 * window)
