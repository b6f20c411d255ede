"""Rotary position embeddings: frequencies from a config, YaRN's included, and the rotation."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgg.core.arguments import as_finite, as_flag, check, check_instance

# transformers 5 writes the first, others the rest
ROTARY_KEYS = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")


def read_rotary(settings: Mapping[str, Any], head_features: int) -> tuple[tuple[float, ...], float]:
    """The radians per position of each pair of rotated features, and the factor of the rotated features.

    Args:
      settings: a config's values of ROTARY_KEYS, None where it has none.
    """
    flat = {key: value for key, value in settings.items() if value is not None}
    given: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        part = flat.pop(name, {})
        check_instance(name, part, Mapping, "null or an object")
        given |= {key: value for key, value in part.items() if value is not None}
    given = flat | given
    check("rope_theta" in given, "config must have 'rope_theta', got none.")
    theta, kind = as_finite("rope_theta", given.pop("rope_theta")), given.pop("rope_type", None)
    kind = given.pop("type", "default") if kind is None else kind
    check(theta > 1, f"rope_theta must be greater than 1, got {theta}.")
    rotated = int(head_features * as_finite("partial_rotary_factor", given.pop("partial_rotary_factor", 1.0)))
    is_even = 0 < rotated <= head_features and rotated % 2 == 0
    check(is_even, f"partial_rotary_factor must leave an even part of {head_features} features, got {rotated}.")
    frequencies = theta ** -(np.arange(0, rotated, 2) / rotated)
    if kind == "yarn":
        frequencies, scale = _yarn(frequencies, theta, rotated, given)
    else:
        check(kind == "default", f"rope_type must be 'default' or 'yarn', got {kind!r}.")
        scale = 1.0
    check(not given, f"rope_parameters of type {kind!r} must have only keys that jgg.models knows, got {given}.")
    return tuple(map(float, frequencies)), scale


def _yarn(frequencies: np.ndarray, theta: float, rotated: int, given: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Slows down low frequencies by `factor`, keeps high ones, and goes linearly from one to the other between.

    Takes its keys out of `given`. Source: Peng et al., YaRN, 2023, 3.2 and 3.4.
    """
    needed = ("factor", "original_max_position_embeddings")
    check(given.keys() >= set(needed), f"rope_parameters of type 'yarn' must have {needed}, got {given}.")
    factor, context = (as_finite(key, given.pop(key)) for key in needed)
    fast, slow = (as_finite(key, given.pop(key, default)) for key, default in (("beta_fast", 32), ("beta_slow", 1)))
    # the index of the pair that turns so often over the context
    first, last = (
        rotated * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow)
    )
    if as_flag("truncate", given.pop("truncate", True)):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    slowed = np.clip((np.arange(len(frequencies)) - first) / max(last - first, 1e-3), 0, 1)
    scale = as_finite("attention_factor", given.pop("attention_factor", 0.1 * math.log(max(factor, 1)) + 1))
    return frequencies * (1 - slowed) + frequencies / factor * slowed, scale


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
