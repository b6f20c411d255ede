"""Unpacks weights in MXFP4 (see `jgg.core.mxfp4`), by a kernel that takes about the time of a copy."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jgg.core import mxfp4
from jgg.core.quantized import QuantizedArray, block_of, scaled
from jgg.launching.choice import Launcher
from jgg.launching.launch import Launch
from jgg.launching.tuned_configs import tiles_of
from jgg.primitives.operation import Operation, array_type


class Unpack(NamedTuple):
    """The parts of a packed QuantizedArray: values uint8 [..., rows, columns] and scales uint8."""

    values: jax.Array | Any
    scales: jax.Array | Any


def _result_types(operands: Unpack, dtype: np.dtype) -> jax.Array:
    return array_type(QuantizedArray(*operands).shape, dtype)


def _plain(operands: Unpack, dtype: np.dtype) -> jax.Array:
    return mxfp4.unpack(*operands, dtype)


def _launch(launcher: Launcher, operands: Unpack, dtype: np.dtype) -> jax.Array:
    from jgg.kernels.mxfp4 import unpack_kernel

    values, scales = operands
    *leading, rows, columns = values.shape
    packs_rows = mxfp4.packed_axis(values.shape, scales.shape) == -2
    tiles, end = tiles_of("unpack_kernel", launcher.target), "" if packs_rows else "_of_pairs"  # of columns in a byte
    block_rows, block_columns = tiles[f"rows{end}"], tiles[f"columns{end}"]
    output = _result_types(operands, dtype)
    launch = Launch(
        operands={"values": values, "scales": scales},
        outputs={"w": output},
        constants={
            "ROWS": rows,
            "COLUMNS": columns,
            "PACKS_ROWS": packs_rows,
            "BLOCK_ROWS": block_rows,
            "BLOCK_COLUMNS": block_columns,
        },
        grid=(math.ceil(columns / block_columns), math.ceil(rows / block_rows), math.prod(leading)),
        flops=2 * output.size,
        bytes_accessed=values.size + scales.size + output.size * output.dtype.itemsize,
    )
    return launcher.run(unpack_kernel, launch)["w"]


UNPACK: Operation[jax.Array] = Operation(
    "unpack",
    Unpack,
    result_types=_result_types,
    plain=_plain,
    launch=_launch,
    vmap="axis",
)
"""The numbers of a packed QuantizedArray, in the dtype that is the parameter."""


def dequantized(w: QuantizedArray, dtype: DTypeLike, unpack: Callable[..., jax.Array]) -> jax.Array:
    """Weights in a float dtype; `unpack` computes UNPACK by the implementation that computes their product.

    The bits are those that a kernel gives weights as it reads them. So in FP8, unlike `QuantizedArray.dequantize`, a
    product past the dtype's largest number is infinite, whyever it is: to tell why took a kernel twice as long.
    """
    if w.is_packed:
        return unpack(Unpack(w.values, w.scales), dtype=jnp.dtype(dtype))
    return scaled(w.values, w.scales, block_of(w), jnp).astype(dtype)
