"""What XLA would leave out: rounding, and NaN among magnitudes; rounding at random."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def rounded(array: jax.Array, dtype: DTypeLike) -> jax.Array:
    """A float32 array rounded to a dtype, in float32; XLA may leave out a plain conversion there and back."""
    if dtype == jnp.float32:
        return array
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(array, info.nexp, info.nmant)
    if dtype == jnp.bfloat16:
        return rounded
    # reduce_precision makes float16's subnormal numbers 0; they are multiples of the smallest
    smallest = float(info.smallest_subnormal)
    return jnp.where(jnp.abs(array) < float(info.tiny), jnp.round(array / smallest) * smallest, rounded)


def magnitudes(array: jax.Array) -> jax.Array:
    """Magnitudes whose maximum tells of NaN: it counts as infinity, since XLA's maximum on a CPU leaves NaN out."""
    return jnp.where(jnp.isnan(array), jnp.inf, jnp.abs(array))


def rounded_stochastically(array: jax.Array, salt: jax.Array) -> jax.Array:
    """Rounds float32 to bfloat16, up or down at random, so that the mean over many salts is the array itself.

    Numbers that bfloat16 has do not change, nor do infinities; NaN stays NaN.

    Args:
      array: float32, of any shape.
      salt: uint32 [], which selects how elements are rounded.
    """
    place = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(array.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    bits = jax.lax.bitcast_convert_type(array, jnp.uint32)
    up = jnp.where(jnp.isfinite(array), mixed(place + salt) >> 16, 0)
    return jax.lax.bitcast_convert_type((bits + up >> 16).astype(jnp.uint16), jnp.bfloat16)


def mixed(bits: jax.Array) -> jax.Array:
    """A hash of uint32s, in which each bit depends on all bits.

    Source: the finalizer of MurmurHash3, A. Appleby, 2008.
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)
