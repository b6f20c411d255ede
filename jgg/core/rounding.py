"""What XLA would leave out: rounding, and NaN among magnitudes."""

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
