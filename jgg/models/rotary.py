"""Rotary position embeddings."""

import jax
import jax.numpy as jnp


def rotations(frequencies: tuple[float, ...], scale: float, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cosines and sines that `rotate` takes, float32 [B, S, 1, pairs], for positions [B, S]."""
    angles = positions[:, :, None, None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)[None, None, None]
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates pairs of features of x [B, S, heads, D]; the rotated features' halves have one of each pair.

    Source: Su et al., RoFormer, 2021.
    """
    cos, sin = (part.astype(x.dtype) for part in rotation)
    a, b, rest = jnp.split(x, [cos.shape[-1], 2 * cos.shape[-1]], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
