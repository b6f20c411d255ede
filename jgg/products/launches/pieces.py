"""A float array as the sum of two 16-bit arrays, pieces, so that tensor cores multiply it without rounding it first."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class Pieces(NamedTuple):
    """A matrix as (sum of its pieces) * scale.

    Attributes:
      rows: [2 * M, N], the pieces one after the other, each of M rows.
      num_pieces: int32 [1], 2, or 1 if the 16-bit dtype holds all values, so that the second piece is zero. None if the
        array has that dtype; then `rows` is the array itself.
      scale: float32 [1], a power of two, or None for 1.
    """

    rows: jax.Array
    num_pieces: jax.Array | None = None
    scale: jax.Array | None = None

    @classmethod
    def of(cls, array: jax.Array, dtype: DTypeLike) -> "Pieces":
        """An array [M, N] as two pieces of a 16-bit dtype, with 17 bits of each value for bfloat16 and 23 for float16.

        For float16, values are scaled so that its range ends at the largest finite value. An array that already has the
        dtype is its only piece.
        """
        if array.dtype == dtype:
            return cls(array)
        array, scale = array.astype(jnp.float32), None
        if dtype == jnp.float16:
            largest = jnp.max(jnp.where(jnp.isfinite(array), jnp.abs(array), 0), keepdims=True, initial=0)
            exponent = jnp.frexp(jnp.maximum(largest, jnp.finfo(jnp.float32).tiny))[1] - 15
            array, scale = jnp.ldexp(array, -exponent), jnp.ldexp(jnp.float32(1), exponent).reshape(1)
        first, second = two_pieces(array, dtype)
        num_pieces = 1 + jnp.any(second != 0).astype(jnp.int32).reshape(1)
        return cls(jnp.concatenate([first, second]), num_pieces, scale)


def two_pieces(array: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """A float32 array as the sum of two 16-bit arrays; the second is zero where the value is infinite or NaN."""
    info = jnp.finfo(dtype)
    # not by converting to the dtype and back, which XLA may leave out
    first = jax.lax.reduce_precision(array, exponent_bits=8, mantissa_bits=info.nmant)
    is_finite = jnp.isfinite(array)  # finite values may be rounded to infinity
    first = jnp.where(is_finite, jnp.clip(first, -float(info.max), float(info.max)), first)
    return first.astype(dtype), jnp.where(is_finite, array - first, 0).astype(dtype)
