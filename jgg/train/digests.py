"""Digests of arrays, computed on their devices, which tell whether an array is the one that was saved."""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jgg.train.state import everywhere


def digests_of(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """A 32-bit number for each array, computed from its bits in order, however devices split it.

    Two arrays of the same shape and dtype that differ in one number always get different digests; others get the same
    one with a chance of 1 in 2**32. No bytes leave the devices.
    """
    if not arrays:
        return {}
    found = _program(everywhere(arrays))(list(arrays.values()))
    return dict(zip(arrays, np.asarray(found).tolist(), strict=True))


@functools.cache
def _program(place: jax.sharding.Sharding | None) -> "jax.stages.Wrapped":
    return jax.jit(lambda arrays: jnp.stack([_digest(array) for array in arrays]), out_shardings=place)


def _digest(array: jax.Array) -> jax.Array:
    """The sum of all words, each mixed with its position by a one-to-one function."""
    words = _words_of(array)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, _ in enumerate(words.shape):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        place += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(stride)
    mixed = words + place * np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # of MurmurHash3, by Austin Appleby, public domain
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> np.uint32(16)), dtype=jnp.uint32)


def _words_of(array: jax.Array) -> jax.Array:
    """The bits of an array as uint32; shorter numbers take a word each."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return _words_of(jnp.stack([jnp.real(array), jnp.imag(array)]))
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    bits = jnp.finfo(array.dtype).bits if jnp.issubdtype(array.dtype, jnp.floating) else jnp.iinfo(array.dtype).bits
    word = {8: jnp.uint8, 16: jnp.uint16}.get(bits, jnp.uint32)
    if bits < 8:  # float32 has each number of fewer bits
        array, word = array.astype(jnp.float32), jnp.uint32
    return jax.lax.bitcast_convert_type(array, word).astype(jnp.uint32)
