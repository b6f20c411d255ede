"""Arrays in FP8 with a scale for each block, as DeepSeek-V3 trains with and its checkpoints hold."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jgg.core.arguments import as_array, as_dtype, check, check_instance

BLOCK = 128  # features, and for weights also rows, that share a scale
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
QUANTIZED_DTYPE = E4M3  # of a problem of quantized operands, whichever of DTYPES their values have
DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
BLOCKS = 1, 32, BLOCK
NO_DERIVATIVES = (
    "What is quantized to FP8 has gradients, but no second or forward-mode derivatives: 8 bits would round them to "
    "zero. Take them without quantization."
)
_LEAST_SCALE = np.finfo(np.float32).smallest_normal  # subnormal numbers are zero on some devices


@dataclasses.dataclass(frozen=True)
class Format:
    """How kernels store an array that they quantize; a static parameter of products.

    Attributes:
      dtype: of the values.
      power_of_2_scales: whether scales are rounded up to powers of two, so that scaling rounds nothing.
    """

    dtype: Any = E4M3
    power_of_2_scales: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """An array as floats of 8 bits and a scale for each block of them; a pytree of the two.

    Attributes:
      values: float8_e4m3fn or float8_e5m2 [..., rows, columns].
      scales: float32 [..., rows / block, columns / block], rounded up. A block has 1, 32 or 128 rows, and columns.
    """

    values: jax.Array | np.ndarray
    scales: jax.Array | np.ndarray

    @classmethod
    def from_qwix(cls, array: Any) -> "QuantizedArray":
        """A QArray of the qwix library, with its values as they are and its scales repeated to blocks.

        Args:
          array: a QArray [..., rows, columns] in FP8, symmetric, whose scales are of any tiles or whole axes.

        Raises: TypeError: array is no QArray, or not in FP8. ValueError: it has a zero_point.
        """
        missing = [name for name in ("qvalue", "scale", "zero_point") if not hasattr(array, name)]
        if missing:
            raise TypeError(f"array must be a QArray with {missing[0]}, got {type(array).__name__}.")
        as_dtype("array.qvalue", array.qvalue.dtype, DTYPES)
        if array.zero_point is not None:
            raise ValueError("array must be symmetric, without a zero_point, got one.")
        shape, scales = array.qvalue.shape, jnp.asarray(array.scale, jnp.float32)
        scales = jnp.broadcast_to(scales, (*shape[:-2], *scales.shape[-2:]))
        for axis in (-2, -1):
            tile = shape[axis] // scales.shape[axis]
            whole = scales.shape[axis] == 1
            block = BLOCK if whole else max(block for block in BLOCKS if tile % block == 0)
            starts = np.arange(0, shape[axis], block)
            scales = jnp.take(scales, starts // tile, axis=axis)
        return cls(array.qvalue, scales)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.values.shape

    @property
    def mT(self) -> "QuantizedArray":
        """The array with rows and columns exchanged; equal to what was quantized so."""
        return QuantizedArray(self.values.mT, self.scales.mT)

    def dequantize(self, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
        """values * scales, rounded once; what quantization rounded up past the dtype's largest number is that number.

        Raises: ValueError: values have fewer than two axes, or scales have a shape that no blocks explain.
        """
        check(len(self.shape) >= 2, f"values must be [..., rows, columns], got {list(self.shape)}.")
        possible = (
            block for block in itertools.product(BLOCKS, BLOCKS) if scales_shape(self.shape, block) == self.scales.shape
        )
        block = next(possible, None)
        if block is None:
            raise ValueError(
                f"scales must be of blocks of {BLOCKS} rows and columns of values {list(self.shape)}, got "
                f"{list(self.scales.shape)}."
            )
        values, scales = jnp.asarray(self.values), jnp.asarray(self.scales)
        product = scaled(values, scales, block, jnp)
        limit = min(float(jnp.finfo(dtype).max), float(jnp.finfo(jnp.float32).max))
        # rounded by less than an eighth, which float8_e5m2 rounds by at most
        is_near = jnp.abs(scaled(values, scales * np.float32(7 / 8), block, jnp)) <= limit
        return jnp.where(is_near, jnp.clip(product, -limit, limit), product).astype(dtype)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["is_turned", "stored_as"]
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class ToQuantize:
    """Weights that a product quantizes itself, so that plain JAX need never have all of them quantized.

    Attributes:
      array: float [..., rows, columns].
      is_turned: whether the product multiplies by them with rows and columns exchanged.
      stored_as: how they are quantized.
    """

    array: jax.Array
    is_turned: bool
    stored_as: Format

    def dequantize(self, dtype: DTypeLike) -> jax.Array:
        """The weights of the product, quantized and dequantized."""
        array = quantize(self.array, (BLOCK, BLOCK), self.stored_as).dequantize(dtype)
        return array.mT if self.is_turned else array


def is_quantized(array: Any) -> bool:
    """Whether an operand is multiplied as what it dequantizes to."""
    return isinstance(array, QuantizedArray | ToQuantize)


class WeightForms(NamedTuple):
    """Quantized weights: as they are, and with rows and columns exchanged.

    Kernels read both operands of a quantized product along the reduced axis, so that the forward product multiplies by
    one form and dX by the other.
    """

    straight: QuantizedArray | None
    turned: QuantizedArray | None


def values_and_scales(array: Any) -> tuple[Any, Any]:
    """The values and scales of a QuantizedArray; for another array itself and None."""
    return (array.values, array.scales) if isinstance(array, QuantizedArray) else (array, None)


def as_bits(array: Any) -> jax.Array:
    """An array in FP8 as uint8, any other as it is: XLA keeps FP8 in 16-bit floats where a loop of a CPU reads it."""
    return jax.lax.bitcast_convert_type(array, jnp.uint8) if array.dtype.itemsize == 1 else array


def from_bits(bits: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The array of that dtype that `as_bits` made bits of."""
    return jax.lax.bitcast_convert_type(bits, dtype)


def scales_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the scales of an array with so many rows and columns in a block."""
    return (*shape[:-2], *(-(-size // step) for size, step in zip(shape[-2:], block, strict=True)))


def scaled(values: Any, scales: Any, block: tuple[int, int], numpy: Any) -> Any:
    """values * scales in float32, of JAX's arrays by `jnp` or NumPy's by `np`."""
    return values.astype(np.float32) * _of_elements(scales.astype(np.float32), values.shape, block, numpy)


def _of_elements(scales, shape, block, numpy):
    """The scale of each element.

    Uses `take`: a reshape could leave the array with a sharding that no NamedSharding can express.
    """
    for axis, step in zip((-2, -1), block, strict=True):
        # NumPy has no arange of a symbolic size
        scales = numpy.take(scales, numpy.arange(shape[axis]) // step, axis=axis, mode="clip")
    return scales


def quantized_types(shape: tuple[int, ...], block: tuple[int, int], stored_as: Format) -> Any:
    """The QuantizedArray of an array of a shape, with a jax.ShapeDtypeStruct in place of values and scales."""
    scales: Any = jax.ShapeDtypeStruct(scales_shape(shape, block), jnp.float32)
    values: Any = jax.ShapeDtypeStruct(shape, stored_as.dtype)
    return QuantizedArray(values, scales)


def quantize(array: jax.Array, block: tuple[int, int], stored_as: Format) -> QuantizedArray:
    """An array [..., rows, columns] with a scale for each block, as `jgg.quantize_tokens` says; in plain JAX."""
    largest = float(jnp.finfo(stored_as.dtype).max)
    array = array.astype(jnp.float32)
    window = (*[1] * (array.ndim - 2), *block)
    sizes = zip(scales_shape(array.shape, block), window, array.shape, strict=True)
    missing = [(0, count * step - size) for count, step, size in sizes]  # of symbolic sizes the shape of scales follows
    highest, is_nan = (
        jax.lax.reduce_window(each, jnp.float32(0), jax.lax.max, window, window, missing)
        # XLA's maximum on a CPU leaves NaN out
        for each in (jnp.abs(array), jnp.isnan(array).astype(jnp.float32))
    )
    highest = jnp.where(is_nan > 0, jnp.nan, highest)
    # times the inverse, here and below, by which XLA may or may not replace a division
    scales = highest * np.float32(1 / largest)
    scales = jnp.where(scales < _LEAST_SCALE, _LEAST_SCALE, scales)
    if stored_as.power_of_2_scales:
        fraction, exponent = jnp.frexp(scales)  # fraction in [0.5, 1)
        exponent = jnp.where(fraction == 0.5, exponent - 1, exponent)
        scales = jnp.where(jnp.isfinite(scales), jnp.ldexp(jnp.float32(1), exponent), scales)
    values = jnp.clip(array * _of_elements(1 / scales, array.shape, block, jnp), -largest, largest)
    return QuantizedArray(values.astype(stored_as.dtype), scales)


def check_blocks(name: str, value: object, rows: int) -> QuantizedArray:
    """A QuantizedArray with blocks of so many rows and of BLOCK columns.

    Raises: TypeError: it is none, or its values are not in FP8. ValueError: its blocks are others.
    """
    check_instance(name, value, QuantizedArray, "a QuantizedArray, as the other operand is")
    assert isinstance(value, QuantizedArray)
    as_dtype(f"{name}.values", value.values.dtype, DTYPES)
    expected = scales_shape(value.shape, (rows, BLOCK))
    if value.scales.shape != expected:
        raise ValueError(
            f"{name}.scales must be {list(expected)}, for blocks of {rows} x {BLOCK}, got {list(value.scales.shape)}."
        )
    return value


def dense_weights(rows_name: str, rows: object, arguments: Mapping[str, object]) -> dict[str, Any]:
    """Arguments with those that are a QuantizedArray dequantized to the dtype of the rows, without gradients."""
    if not any(isinstance(value, QuantizedArray) for value in arguments.values()):
        return dict(arguments)
    dtype = as_array(rows_name, rows).dtype
    return {
        name: jax.lax.stop_gradient(value.dequantize(dtype)) if isinstance(value, QuantizedArray) else value
        for name, value in arguments.items()
    }
