"""An array for a collective to write into, which costs no time to make."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.launching.choice import Launcher
from jgg.launching.launch import Launch, power_of_2
from jgg.primitives.product import Product, array_type


class Buffer(NamedTuple):
    """How many rows will be written, int32 [1] of at least 0.

    The array depends on this, so XLA makes it where it is needed. Constant zeros it would make before a loop over
    layers and copy in every step.
    """

    num_written: jax.Array


def _plain(operands: Buffer, shape, dtype):
    return jnp.broadcast_to(jnp.minimum(operands.num_written[0], 0).astype(dtype), shape)


def _launch(launcher: Launcher, operands: Buffer, shape, dtype):
    from jgg.kernels.buffer import clear_kernel

    num_rows, columns = shape
    block_columns = min(512, power_of_2(columns))
    launch = Launch(
        operands={"first": operands.num_written, "num_rows": num_rows},
        outputs={"y": jax.ShapeDtypeStruct(shape, dtype)},
        constants={"COLUMNS": columns, "BLOCK_ROWS": 4096 // block_columns, "BLOCK_COLUMNS": block_columns},
        grid=(2 * launcher.target.num_sms,),
    )
    return launcher.run(clear_kernel, launch)["y"]


BUFFER: Product[jax.Array] = Product(
    "buffer",
    Buffer,
    result_types=lambda operands, shape, dtype: array_type(shape, dtype),
    plain=_plain,
    launch=_launch,
    several=lambda how, operands, **parameters: _plain(operands, **parameters),
)
"""An array of `shape` [rows, columns] and `dtype`: rows from `num_written` on are zero, those before unspecified."""
