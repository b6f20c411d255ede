"""Arrays in FP8 with a scale per block, as in DeepSeek-V3, or packed in MXFP4, as in gpt-oss."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jgg.core import mxfp4
from jgg.core.arguments import Shaped, as_array, as_dtype, check, check_instance
from jgg.core.rounding import magnitudes

BLOCK = 128  # features, and for weights also rows, that share a scale
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
QUANTIZED_DTYPE = E4M3  # the dtype of a problem with quantized operands, whichever of DTYPES their values have
DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
SCALE_DTYPES = jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64  # in addition to FP8
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
      dtype: dtype of the values.
      power_of_2_scales: whether scales are rounded up to powers of two, so that scaling rounds nothing.
    """

    dtype: np.dtype = E4M3
    power_of_2_scales: bool = False


class QArray(Protocol):
    """A quantized array of the qwix library."""

    qvalue: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """An array in FP8 or MXFP4: values of few bits and a scale for each block of values; a pytree of the two.

    In FP8, a block has 1, 32 or 128 rows and 1, 32 or 128 columns; or it is a row, in caches of keys and values, whose
    kernels take no other. In MXFP4, which is packed, a block is 32 numbers that follow each other along one axis, the
    rows or the columns.

    Attributes:
      values: float8_e4m3fn or float8_e5m2 [..., rows, columns]; or uint8 [..., rows / 2, columns] or
        [..., rows, columns / 2], two numbers of 4 bits in a byte, the first in the low bits.
      scales: float32 [..., rows / rows of a block, columns / columns of a block], rounded up; or uint8 of that shape,
        where e stands for 2**(e - 127), and 255 for NaN.
    """

    values: jax.Array | np.ndarray
    scales: jax.Array | np.ndarray

    def __repr__(self) -> str:
        """The dtypes and shapes, without the numbers."""
        return f"QuantizedArray(values={type_of(self.values)}, scales={type_of(self.scales)})"

    @classmethod
    def from_qwix(cls, array: QArray) -> "QuantizedArray":
        """Converts a QArray of the qwix library: keeps its values and repeats its scales for each block.

        Args:
          array: a QArray [..., rows, columns] in FP8, symmetric, with scales of any tiles or of whole axes.

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
    def is_packed(self) -> bool:
        """Whether the array is in MXFP4, two numbers in a byte."""
        return self.values.dtype == mxfp4.PACKED_DTYPE

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array, which has twice as many numbers as bytes if it is packed."""
        shape = self.values.shape
        return mxfp4.unpacked_shape(shape, mxfp4.packed_axis(shape, self.scales.shape)) if self.is_packed else shape

    @property
    def mT(self) -> "QuantizedArray":
        """The array with rows and columns exchanged; quantizing the exchanged array gives the same."""
        return QuantizedArray(self.values.mT, self.scales.mT)

    def dequantize(self, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
        """Computes values * scales, rounded once to `dtype`.

        In FP8, a product that exceeds the dtype's largest number only because quantization rounded it up becomes that
        number.

        Raises: ValueError: values have fewer than two axes, or scales have a shape that no blocks explain.
        """
        block = block_of(self)
        values, scales = jnp.asarray(self.values), jnp.asarray(self.scales)
        if self.is_packed:
            return mxfp4.unpack(values, scales, dtype)
        product = scaled(values, scales, block, jnp)
        limit = min(float(jnp.finfo(dtype).max), float(jnp.finfo(jnp.float32).max))
        # quantization rounds by at most an eighth, in float8_e5m2
        is_near = jnp.abs(scaled(values, scales.astype(jnp.float32) * np.float32(7 / 8), block, jnp)) <= limit
        return jnp.where(is_near, jnp.clip(product, -limit, limit), product).astype(dtype)


def type_of(part: object) -> str:
    """The dtype and shape of an array; the repr of anything else that a pytree may hold."""
    return f"{part.dtype}{list(part.shape)}" if isinstance(part, Shaped | np.ndarray) else repr(part)


def block_of(array: QuantizedArray, prefix: str = "") -> tuple[int, int]:
    """The rows and columns of a block, the largest that explain the scales; errors put `prefix` before names.

    Raises:
      ValueError: values have fewer than two axes, or scales have a shape that no blocks explain.
      TypeError: values or scales are no array, or have another dtype than a QuantizedArray's.
    """
    for name, part in (("values", array.values), ("scales", array.scales)):
        check_instance(f"{prefix}{name}", part, Shaped | np.ndarray, "a NumPy or JAX array")
    as_dtype(f"{prefix}values", array.values.dtype, (*DTYPES, mxfp4.PACKED_DTYPE))
    shape, scales = array.values.shape, array.scales.shape
    if array.is_packed:
        as_dtype(f"{prefix}scales", array.scales.dtype, (mxfp4.PACKED_DTYPE,))
        return (mxfp4.GROUP, 1) if mxfp4.packed_axis(shape, scales, prefix) == -2 else (1, mxfp4.GROUP)
    # bytes would be taken for numbers, though the scales of packed values are bytes that stand for exponents
    as_dtype(f"{prefix}scales", array.scales.dtype, SCALE_DTYPES)
    check(len(shape) >= 2, f"{prefix}values must be [..., rows, columns], got {list(shape)}.")
    for block in itertools.product(BLOCKS[::-1], BLOCKS[::-1]):
        if scales_shape(shape, block) == scales:
            return block
    raise ValueError(
        f"{prefix}scales must be of blocks of {BLOCKS} rows and columns of values {list(shape)}, got {list(scales)}."
    )


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["is_transposed", "stored_as"])
@dataclasses.dataclass(frozen=True)
class ToQuantize:
    """Weights that a product quantizes itself, so that plain JAX never needs all of them quantized at once.

    Attributes:
      array: float [..., rows, columns].
      is_transposed: whether the product multiplies by them with rows and columns exchanged.
      stored_as: how the weights are quantized.
    """

    array: jax.Array
    is_transposed: bool
    stored_as: Format

    def dequantize(self, dtype: DTypeLike) -> jax.Array:
        """The weights of the product, quantized and dequantized."""
        array = quantize(self.array, (BLOCK, BLOCK), self.stored_as).dequantize(dtype)
        return array.mT if self.is_transposed else array


class WeightForms(NamedTuple):
    """Quantized weights in two forms: straight, and with rows and columns exchanged.

    Kernels read both operands of a quantized product along the reduced axis, so that the forward product multiplies by
    one form and dX by the other.
    """

    straight: QuantizedArray | None
    transposed: QuantizedArray | None

    @property
    def array(self) -> QuantizedArray:
        """The weights themselves, which at least one of the forms has."""
        if self.straight is not None:
            return self.straight
        assert self.transposed is not None
        return self.transposed.mT

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights."""
        if self.straight is not None:
            return self.straight.shape
        assert self.transposed is not None
        *experts, columns, rows = self.transposed.shape
        return *experts, rows, columns


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeights:
    """Weights together with the same weights in FP8, made by `Fp8.weights`; a pytree.

    `moe_mlp` multiplies by the weights in FP8, and the gradient goes to `array`. To quantize once for
    several microbatches, differentiate in w with `dataclasses.replace(weights, array=w)`.

    Attributes:
      array: [E, rows, columns].
      forms: the same weights in FP8, in two forms: straight, and with rows and columns exchanged.
    """

    array: jax.Array
    forms: WeightForms

    def __repr__(self) -> str:
        """The dtypes and shapes, without the numbers."""
        return f"QuantizedWeights(array={type_of(self.array)}, forms={self.forms})"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.array.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the array."""
        return self.array.dtype


def is_quantized(array: object) -> bool:
    """Whether an operand or weights are in FP8, or will be when a product quantizes them."""
    return isinstance(array, QuantizedArray | QuantizedWeights | ToQuantize | WeightForms)


def values_and_scales(array: Any) -> tuple[Any, Any]:
    """The values and scales of a QuantizedArray; for any other array, the array and None."""
    return (array.values, array.scales) if isinstance(array, QuantizedArray) else (array, None)


def count_numbers(tree: object) -> int:
    """How many numbers the arrays of a pytree stand for: in FP8 and MXFP4 without scales, and not by stored bytes."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def as_bits(array: Any) -> jax.Array:
    """An array in FP8 as uint8, any other unchanged.

    Loops on a CPU read the bits, because XLA would keep FP8 values as 16-bit floats there.
    """
    return jax.lax.bitcast_convert_type(array, jnp.uint8) if array.dtype.itemsize == 1 else array


def from_bits(bits: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The array of the dtype `dtype` for which `as_bits` returned `bits`."""
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)


def scales_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the scales of an array, where `block` says how many rows and columns a block has."""
    return (*shape[:-2], *(-(-size // step) for size, step in zip(shape[-2:], block, strict=True)))


def scaled(values: Any, scales: Any, block: tuple[int, int], numpy: ModuleType) -> Any:
    """values * scales in float32; `numpy` is `jnp` for arrays of JAX and `np` for arrays of NumPy."""
    return values.astype(np.float32) * _of_elements(scales.astype(np.float32), values.shape, block, numpy)


def _of_elements(scales, shape, block, numpy):
    """The scale of each element.

    Uses `take`: a reshape could leave the array with a sharding that no NamedSharding can express.
    """
    for axis, step in zip((-2, -1), block, strict=True):
        # NumPy has no arange of a symbolic size
        scales = numpy.take(scales, numpy.arange(shape[axis]) // step, axis=axis, mode="clip")
    return scales


def quantized_types(shape: tuple[int, ...], block: tuple[int, int], stored_as: Format) -> QuantizedArray:
    """The QuantizedArray that an array of this shape becomes, with a jax.ShapeDtypeStruct for values and for scales."""
    values = jax.ShapeDtypeStruct(shape, stored_as.dtype)
    scales = jax.ShapeDtypeStruct(scales_shape(shape, block), jnp.float32)
    return QuantizedArray(cast(jax.Array, values), cast(jax.Array, scales))


def quantize(array: jax.Array, block: tuple[int, int], stored_as: Format) -> QuantizedArray:
    """Quantizes an array [..., rows, columns] with a scale for each block, in plain JAX; see `jgg.quantize_tokens`."""
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
    return _quantized(array, highest, lambda scales: _of_elements(scales, array.shape, block, jnp), stored_as)


def quantize_rows(array: jax.Array, stored_as: Format) -> QuantizedArray:
    """Quantizes an array [..., columns] with a scale for each row, whatever its number of columns: scales [..., 1]."""
    array = array.astype(jnp.float32)
    highest = jnp.max(magnitudes(array), axis=-1, keepdims=True)  # a scale of infinity makes NaN of a row
    return _quantized(array, highest, lambda scales: scales, stored_as)


def _quantized(
    array: jax.Array, highest: jax.Array, of_elements: Callable[[jax.Array], jax.Array], stored_as: Format
) -> QuantizedArray:
    """A float32 array, quantized by the largest magnitude of each block; `of_elements` repeats a block's number."""
    largest = float(jnp.finfo(stored_as.dtype).max)
    # multiplies by the inverse, here and below, because XLA may replace a division by that or may not
    scales = highest * np.float32(1 / largest)
    scales = jnp.where(scales < _LEAST_SCALE, _LEAST_SCALE, scales)
    if stored_as.power_of_2_scales:
        fraction, exponent = jnp.frexp(scales)  # fraction in [0.5, 1)
        exponent = jnp.where(fraction == 0.5, exponent - 1, exponent)
        scales = jnp.where(jnp.isfinite(scales), jnp.ldexp(jnp.float32(1), exponent), scales)
    values = jnp.clip(array * of_elements(1 / scales), -largest, largest)
    return QuantizedArray(_rounded(values, stored_as.dtype).astype(stored_as.dtype), scales)


def _rounded(values: jax.Array, dtype: DTypeLike) -> jax.Array:
    """float32 values within the range of an FP8 dtype, rounded to its nearest numbers.

    XLA on a GPU removes a conversion to a narrower dtype and back, and then nothing would be rounded; see
    xla_allow_excess_precision.
    """
    info = jnp.finfo(dtype)
    step = np.float32(info.smallest_subnormal)
    subnormal = jnp.round(values / step) * step
    normal = jax.lax.reduce_precision(values, exponent_bits=8, mantissa_bits=info.nmant)
    return jnp.where(jnp.abs(values) < np.float32(info.smallest_normal), subnormal, normal)


def check_blocks(name: str, value: object, rows: int) -> QuantizedArray:
    """The value, checked to be a QuantizedArray with blocks of `rows` rows and BLOCK columns.

    Raises:
      TypeError: it is no QuantizedArray, its values are not in FP8, or its scales are no floats.
      ValueError: its blocks have another size.
    """
    check_instance(name, value, QuantizedArray, "a QuantizedArray, as the other operand is")
    assert isinstance(value, QuantizedArray)
    as_dtype(f"{name}.values", value.values.dtype, DTYPES)
    as_dtype(f"{name}.scales", value.scales.dtype, SCALE_DTYPES)
    expected = scales_shape(value.shape, (rows, BLOCK))
    if value.scales.shape != expected:
        raise ValueError(
            f"{name}.scales must be {list(expected)}, for blocks of {rows} x {BLOCK}, got {list(value.scales.shape)}."
        )
    return value


def as_dense(name: str, value: ArrayLike | QuantizedArray, dtype: DTypeLike) -> jax.Array:
    """The value as `as_array` returns it; a QuantizedArray is dequantized to `dtype` and gets no gradient."""
    if isinstance(value, QuantizedArray):
        block_of(value, f"{name}.")
        return jax.lax.stop_gradient(value.dequantize(dtype))
    return as_array(name, value)
