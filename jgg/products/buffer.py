"""An array for a collective to write into, which costs no time to make."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.primitives.product import Product, array_type


class Buffer(NamedTuple):
    """How many rows will be written, int32 [1].

    The array is the same whatever they are. But as it depends on them, it is made where it is needed: without, JAX and
    XLA would make it before a loop over layers and copy it in every step.
    """

    num_written: jax.Array


def _plain(operands: Buffer, shape, dtype):
    return jnp.zeros(shape, dtype)


BUFFER: Product[jax.Array] = Product(
    "buffer",
    Buffer,
    result_types=lambda operands, shape, dtype: array_type(shape, dtype),
    plain=_plain,
    # not by a kernel, whose result XLA would copy to where collectives may write
    launch=lambda launcher, operands, shape, dtype: jax.lax.empty(shape, dtype),
    several=lambda how, operands, **parameters: _plain(operands, **parameters),
)
"""An array of `shape` and `dtype`, whatever it holds."""
