"""MXFP4: numbers of 4 bits, two in a byte, and an 8-bit power of two for each 32 numbers, as gpt-oss is published.

A number is E2M1: a sign, two bits of exponent and one of mantissa, so 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. A
scale is E8M0: the byte e stands for 2**(e - 127), and 255 for NaN. The two numbers in a byte are
neighbours along the packed axis, and the first one is in the low four bits.

Source: OCP Microscaling Formats (MX) Specification 1.0; the order in a byte matches `convert_moe_packed_tensors` in
transformers.
"""

import functools
import itertools
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jgg.core.arguments import check
from jgg.core.rounding import magnitudes

PACKED_DTYPE = jnp.dtype(jnp.uint8)
GROUP = 32  # numbers that share a scale
MAGNITUDES = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
_BOUNDS = tuple((low + high) / 2 for low, high in itertools.pairwise(MAGNITUDES))
_LARGEST_SCALE = 252  # all whose numbers are finite in float32
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


@functools.partial(jax.jit, static_argnames="axis")
def pack(array: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """The values and scales that stand for an array, in plain JAX.

    A number becomes the nearest one that its scale gives, of two equally near ones the one whose mantissa is even. A
    scale is the power of two with the least sum of squared errors, of that which makes the largest magnitude at least 4
    and less than 8, where more than 6 becomes 6, its half and its double. A group with a NaN or an infinity becomes
    NaN. Numbers below float32's smallest normal one count as zero.

    Args:
      array: floats, with a multiple of 32 along `axis`.
      axis: -2 or -1, along which two numbers share a byte and 32 numbers a scale.
    """
    if array.ndim > 2:  # matrix by matrix, as what is computed on the way takes six times their memory in bfloat16
        return jax.lax.map(functools.partial(pack, axis=axis), array)
    groups = jnp.moveaxis(array.astype(jnp.float32), axis, -1)
    *others, count = groups.shape
    groups = groups.reshape(*others, count // GROUP, GROUP)
    sizes = magnitudes(groups)
    largest = jnp.max(sizes, axis=-1, keepdims=True)
    first = jnp.clip((jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 2, 0, _LARGEST_SCALE)
    half = (first - 127) // 2  # in two steps, as 2**-127 is not a normal number
    scaled = sizes * _power_of_2(-half) * _power_of_2(half - (first - 127))

    def candidate(step: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A scale, the numbers without their signs as indices of MAGNITUDES, and the sum of squared errors."""
        scale = jnp.clip(first + step, 0, _LARGEST_SCALE)
        factor = _power_of_2(scale - first)
        even, odd = ([factor * bound for bound in _BOUNDS[start::2]] for start in (0, 1))
        above = [*(scaled > bound for bound in even), *(scaled >= bound for bound in odd)]
        code = functools.reduce(jnp.add, (each.astype(jnp.int32) for each in above))
        errors = scaled - factor * jnp.take(jnp.asarray(MAGNITUDES, jnp.float32), code)
        return scale, code, jnp.sum(errors**2, axis=-1, keepdims=True)

    scale, code, error = candidate(0)
    for step in (-1, 1):
        other_scale, other_code, other_error = candidate(step)
        is_less = other_error < error
        scale, code = jnp.where(is_less, other_scale, scale), jnp.where(is_less, other_code, code)
        error = jnp.minimum(error, other_error)
    code = jnp.where(groups < 0, code | 8, code).astype(PACKED_DTYPE)
    values = (code[..., ::2] | code[..., 1::2] << 4).reshape(*others, count // 2)
    scales = jnp.where(jnp.isfinite(largest), scale, 255)[..., 0].astype(PACKED_DTYPE)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(scales, -1, axis)


def _power_of_2(exponent: jax.Array) -> jax.Array:
    """2**exponent, of -126 to 127."""
    return jax.lax.bitcast_convert_type(exponent + 127 << 23, jnp.float32)


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
