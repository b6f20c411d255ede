"""Random weights in MXFP4."""

import jax.numpy as jnp
import numpy as np

import jgg


def random_packed(shape, axis, *, exponents=(118, 124), seed=0):
    """A packed QuantizedArray of this shape, with two numbers in a byte along an axis and all bytes that there are."""
    rng = np.random.default_rng(seed)
    of_values, of_scales = [*shape], [*shape]
    of_values[axis] //= 2
    of_scales[axis] //= 32
    values = rng.integers(0, 256, of_values, np.uint8)
    return jgg.QuantizedArray(jnp.asarray(values), jnp.asarray(rng.integers(*exponents, of_scales, np.uint8)))
