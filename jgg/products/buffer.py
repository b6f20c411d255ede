"""An array for a collective to write into, which costs no time to make."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.primitives.product import Product, array_type


class Buffer(NamedTuple):
    """The number of rows that will be written, int32 [1].

    The buffer is the same for any number. But since it depends on this operand, it is made where it is needed; without
    an operand, JAX and XLA would make it before a loop over layers and copy it in every step.
    """

    num_written: jax.Array


def _plain(operands: Buffer, shape, dtype):
    return jnp.zeros(shape, dtype)


BUFFER: Product[jax.Array] = Product(
    "buffer",
    Buffer,
    result_types=lambda operands, shape, dtype: array_type(shape, dtype),
    plain=_plain,
    # not made by a kernel: XLA would copy a kernel's result to memory that collectives may write
    launch=lambda launcher, operands, shape, dtype: jax.lax.empty(shape, dtype),
    several=lambda how, operands, **parameters: _plain(operands, **parameters),
)
"""An array of `shape` and `dtype` with undefined contents."""
