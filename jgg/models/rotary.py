"""Rotary position embeddings: of queries and keys in one kernel on a GPU, norms of their heads included."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.core.manual_axes import alike
from jgg.core.mixers import RotaryConfig
from jgg.extend import How, barrier
from jgg.models.norms import how_of_rows, norm
from jgg.models.operations.rotary import ROTARY, ROTARY_BACKWARD, Rotary, RotaryBackward, Rotated, rotate

type Rotation = tuple[jax.Array, jax.Array]


def rotations(rotary: RotaryConfig, positions: jax.Array) -> Rotation:
    """The cosines and sines that `rotated` takes, float32 [B, S, 1, pairs], for positions [B, S]."""
    angles = (
        positions[:, :, None, None].astype(jnp.float32) * jnp.asarray(rotary.frequencies, jnp.float32)[None, None, None]
    )
    angles = barrier(angles)  # so that XLA computes no cosine of known positions itself, which other bits would have
    return jnp.cos(angles) * rotary.scale, jnp.sin(angles) * rotary.scale


def halves_first(x: jax.Array, head_features: int) -> jax.Array:
    """Puts the first features of a head's pairs before the second ones; x is [B, S, heads * D], pairs side by side."""
    pairs = x.reshape(*x.shape[:2], -1, head_features // 2, 2)
    return pairs.swapaxes(-1, -2).reshape(x.shape)


def rotated(
    q: jax.Array,
    k: jax.Array,
    scales: Rotation | None,
    rotation: Rotation,
    head_features: int,
    epsilon: float,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys by heads, rotated by their positions.

    Args:
      q, k: [B, S, heads * D].
      scales: those of the norms of each head of q and of k, [D]; None without norms.
      rotation: of `rotations`, whose B may be 1.
      head_features: D.

    Returns: q and k as [B, S, heads, D].
    """
    shapes = [(*x.shape[:2], x.shape[2] // head_features, head_features) for x in (q, k)]
    how = how_of_rows(implementation)
    if how is None or 0 in q.shape:
        q, k = (x.reshape(shape) for x, shape in zip((q, k), shapes, strict=True))
        if scales is not None:
            q, k = (norm(x, scale, epsilon, implementation) for x, scale in zip((q, k), scales, strict=True))
        q, k = (rotate(x, *(part.astype(x.dtype) for part in rotation)) for x in (q, k))
        return q, k
    q_scale, k_scale = scales or (None, None)
    rows = Rotary(q, k, q_scale, k_scale, *rotation)
    rows = alike(jax.tree.map(lambda array: array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array, rows))
    results = _differentiable(_Options(how, head_features, epsilon), rows)
    return results.q.reshape(shapes[0]), results.k.reshape(shapes[1])


class _Options(NamedTuple):
    """The static argument of the custom_vjp: how, and the parameters of ROTARY."""

    how: How
    head_features: int
    epsilon: float

    @property
    def parameters(self) -> dict[str, float]:
        """The parameters of ROTARY."""
        return {"head_features": self.head_features, "epsilon": self.epsilon}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(options: _Options, operands: Rotary) -> Rotated:
    return _forward(options, operands)[0]


def _forward(options: _Options, operands: Rotary) -> tuple[Rotated, tuple[jax.Array | None, ...]]:
    # a rotation alone is linear
    kept = (None, None, *operands[2:]) if operands.q_scale is None else tuple(operands)
    return ROTARY(options.how, operands, **options.parameters), kept


def _backward(options: _Options, kept: tuple[jax.Array | None, ...], gradients: Rotated) -> tuple[Rotary]:
    operands = RotaryBackward._make((*kept, *gradients))
    dq, dk, *d_scales = ROTARY_BACKWARD(options.how, operands, **options.parameters)
    scales = [operands.q_scale, operands.k_scale]
    d_scales = jax.tree.map(lambda gradient, scale: gradient.astype(scale.dtype), d_scales, scales)
    return (Rotary._make((dq, dk, *d_scales, None, None)),)


_differentiable.defvjp(_forward, _backward)
