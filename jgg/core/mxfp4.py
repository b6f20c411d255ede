"""MXFP4: numbers of 4 bits, two in a byte, and an 8-bit power of two for each 32 numbers, as gpt-oss is published.

A number is E2M1: a sign, two bits of exponent and one of mantissa, so 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. A
scale is E8M0: the byte e stands for 2**(e - 127), and 255 for NaN. The two numbers in a byte are
neighbours along the packed axis, and the first one is in the low four bits.

Source: OCP Microscaling Formats (MX) Specification 1.0; the order in a byte matches `convert_moe_packed_tensors` in
transformers.
"""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jgg.core.arguments import check

PACKED_DTYPE = jnp.dtype(jnp.uint8)
GROUP = 32  # numbers that share a scale
_BYTES = GROUP // 2  # of the numbers that share a scale
_INFINITY, _NAN = 0x7F800000, 0x7FC00000  # bits of float32


def packed_axis(values: tuple[int, ...], scales: tuple[int, ...], prefix: str = "") -> int:
    """The axis, -2 or -1, along which two numbers share a byte and 32 numbers a scale.

    Args:
      values, scales: the shapes of the two arrays.
      prefix: put before names in messages.

    Raises: ValueError: values have fewer than two axes, or scales have another shape.
    """
    check(len(values) >= 2, f"{prefix}values must be [..., rows, columns], got {list(values)}.")
    for axis in (-2, -1):
        expected = [*values]
        expected[axis], rest = divmod(values[axis], _BYTES)
        if not rest and (*expected,) == scales:
            return axis
    raise ValueError(
        f"{prefix}scales must have one row for {_BYTES} rows of bytes, or one column for {_BYTES} columns, of values "
        f"{list(values)}, got {list(scales)}."
    )


def packed_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The shape of the bytes with numbers of this shape, rounded down."""
    values = [*shape]
    values[axis] //= 2
    return tuple(values)


def unpacked_shape(values: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The shape of the numbers in bytes of this shape."""
    shape = [*values]
    shape[axis] *= 2
    return tuple(shape)


def unpacked_codes[Array: (jax.Array, np.ndarray)](values: Array, axis: int, numpy: ModuleType) -> Array:
    """The numbers in packed bytes, each as its four bits, uint8; `numpy` is `jnp` or `np`."""
    after = values.ndim + axis + 1
    return numpy.stack([values & 15, values >> 4], axis=after).reshape(unpacked_shape(values.shape, axis))


def packed(codes: np.ndarray, axis: int) -> np.ndarray:
    """The inverse of `unpacked_codes`, in NumPy."""
    first, second = (np.take(codes, np.arange(start, codes.shape[axis], 2), axis=axis) for start in (0, 1))
    return first | second << 4


def unpack(values: jax.Array, scales: jax.Array, dtype: DTypeLike) -> jax.Array:
    """number * scale in `dtype`, in plain JAX: exact in float32 and bfloat16, up to overflow to infinity.

    It computes with bits, since products that are subnormal numbers become zero on some devices.
    """
    axis = packed_axis(values.shape, scales.shape)
    code = unpacked_codes(values, axis, jnp).astype(jnp.int32)
    # by `take`: a reshape could leave the array with a sharding that no NamedSharding can express
    of_each = jnp.arange(code.shape[axis]) // GROUP
    scale = jnp.take(scales.astype(jnp.int32), of_each, axis=axis, mode="clip")
    exponent, mantissa = (code >> 1 & 3) + scale - 1, jnp.where(code & 7 == 1, 0, code & 1) << 22
    normal = jnp.where(exponent < 255, exponent << 23 | mantissa, _INFINITY)
    subnormal = (1 << 23 | mantissa) >> jnp.maximum(1 - exponent, 0)
    bits = jnp.where(code & 7 == 0, 0, jnp.where(exponent > 0, normal, subnormal)) | (code & 8) << 28
    bits = jnp.where(scale == 255, _NAN, bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)
