"""An array for a collective to write into, which costs no time to make."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgg.primitives.operation import Operation, array_type


class Buffer(NamedTuple):
    """What decides how much is written to the buffer, an array of any shape.

    The buffer does not depend on its values. But since it has an operand, it is made where it is needed; without one,
    JAX and XLA would make it before a loop over layers and copy it in every step.
    """

    needed_for: jax.Array


def _plain(operands: Buffer, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    return jnp.zeros(shape, dtype)


BUFFER: Operation[jax.Array] = Operation(
    "buffer",
    Buffer,
    result_types=lambda operands, shape, dtype: array_type(shape, dtype),
    plain=_plain,
    # not made by a kernel: XLA would copy a kernel's result to memory that collectives may write
    launch=lambda launcher, operands, shape, dtype: jax.lax.empty(shape, dtype),
)
"""An array of `shape` and `dtype` with undefined contents."""
