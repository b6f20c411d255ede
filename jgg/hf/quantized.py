"""Quantization formats of Hugging Face checkpoints: FP8 with a scale per block or row, and MXFP4 (gpt-oss)."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from jgg.core import mxfp4
from jgg.core.mxfp4 import GROUP
from jgg.core.quantized import BLOCK, E4M3, scaled, scales_shape
from jgg.hf.files import DTYPES, Header, as_weights, is_unread, shape_of, unread
from jgg.hf.settings import language_model

_IN_4_BITS = "for experts in 4 bits load the folder that is not quantized with experts='mxfp4'"
ALL = 2**31  # how many rows or columns a block has that has all of them
# the 16 numbers of MXFP4, indexed by their four bits; float8_e4m3fn can hold all of them
_NUMBERS = np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(jnp.float8_e4m3fn)
_MAGNITUDES = ", ".join(f"{number:g}" for number in _NUMBERS[:8].astype(np.float32)) + " and their negatives"
_IS_NUMBER = np.isin(np.arange(256), _NUMBERS.view(np.uint8))  # indexed by the bits of a float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A format that stores each tensor as two: its values and its scales.

    Each function takes a name for its error messages and a tensor, and raises ValueError if the format cannot hold the
    tensor exactly.

    Attributes:
      suffixes: what a tensor's name takes to become the name of its values and the name of its scales.
      block: number of rows and of columns that share a scale, in transformers' layout of the tensor.
      read_values: converts stored values to those of a QuantizedArray [..., rows, columns].
      read_scales: converts stored scales to those of a QuantizedArray, [..., rows / block, columns / block].
      write_values, write_scales: the inverse of `read_values` and of `read_scales`.
      is_packed: whether two rows share a byte.
    """

    suffixes: tuple[str, str]
    block: tuple[int, int]
    read_values: Callable[[str, np.ndarray], np.ndarray]
    read_scales: Callable[[str, np.ndarray], np.ndarray]
    write_values: Callable[[str, np.ndarray], np.ndarray]
    write_scales: Callable[[str, np.ndarray], np.ndarray]
    is_packed: bool = False

    def values_shape(self, shape: tuple[int, ...], *, is_transposed: bool = False) -> tuple[int, ...]:
        """The shape of the values of a tensor of this shape, or of a tensor whose transpose has it."""
        axis = -1 if is_transposed else -2
        return mxfp4.packed_shape(shape, axis) if self.is_packed else shape

    def dequantize(self, name: str, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Returns the tensor with these values and scales, in bfloat16."""
        if is_unread(values):
            shape = mxfp4.unpacked_shape(values.shape, -2) if self.is_packed else values.shape
            return unread(shape, jnp.bfloat16)
        if self.is_packed:
            values = _NUMBERS[mxfp4.unpacked_codes(values, -2, np)]
            scales = scales.view(jnp.float8_e8m0fnu).astype(np.float32)
        expected = scales_shape(values.shape, self.block)
        if scales.shape != expected:
            raise ValueError(f"The scales of {name} must have shape {list(expected)}, got {list(scales.shape)}.")
        return scaled(values, scales, self.block, np).astype(jnp.bfloat16)


def quantization(config: Mapping[str, object]) -> Quantization | None:
    """Returns the format that a config's "quantization_config" names; None if the checkpoint is not quantized.

    A tensor is quantized if it has scales. The lists of unquantized modules, which config.json may have under several
    names, are not read.

    Raises: ValueError: jgg does not read the format.
    """
    how = config.get("quantization_config") or language_model(config).get("quantization_config")
    if how is None:
        return None
    known = how if isinstance(how, Mapping) else {}
    method = known.get("quant_method")
    if method == "mxfp4":
        return _MXFP4
    if method == "fp8":
        return dataclasses.replace(_FP8, block=_block_of_fp8(known))
    if method == "compressed-tensors":
        return dataclasses.replace(_FP8, suffixes=("", "_scale"), block=_block_of_groups(known))
    raise ValueError(
        "quantization_config must have quant_method 'fp8' with a weight_block_size of rows and columns, "
        f"'compressed-tensors' with weights in FP8, or 'mxfp4' ({_IN_4_BITS}), got {how!r}."
    )


def _block_of_fp8(how: Mapping[str, object]) -> tuple[int, int]:
    given, scheme = how.get("weight_block_size"), how.get("activation_scheme", "dynamic")
    block = _as_block(given)
    if block is None:
        raise ValueError(
            f"weight_block_size of quantization_config must be two positive ints, got {given!r}. They are the rows and "
            "columns that share a scale; weights with one scale for each tensor are not read."
        )
    if scheme != "dynamic":
        raise ValueError(f"activation_scheme of quantization_config must be 'dynamic', got {scheme!r}.")
    return block


def _block_of_groups(how: Mapping[str, object]) -> tuple[int, int]:
    """The block size of weights that llm-compressor wrote; it must be the same in all groups of modules."""
    groups = how.get("config_groups")
    found = {_block_of_group(group) for group in groups.values()} if isinstance(groups, Mapping) else {None}
    block = found.pop() if len(found) == 1 else None
    if block is None:
        raise ValueError(
            "config_groups of quantization_config must have weights of type 'float', with 8 num_bits and one strategy: "
            f"'channel', or 'block' with a block_structure ({_IN_4_BITS}). Got {groups!r}."
        )
    return block


def _block_of_group(group: object) -> tuple[int, int] | None:
    """The block size of a group's weights; None for a format that jgg does not read."""
    match group:
        case {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}:
            return 1, ALL
        case {"weights": {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": sizes}}:
            return _as_block(sizes)
    return None


def _as_block(block: object) -> tuple[int, int] | None:
    """The rows and columns that share a scale, from a list of the two; None if it is not such a list."""
    if not isinstance(block, list | tuple) or len(block) != 2:
        return None
    rows, columns = block
    return (rows, columns) if all(type(size) is int and size > 0 for size in block) else None


def _check_dtype(name, array, dtype, expected):
    if array.dtype != dtype:
        raise ValueError(f"{name} must be {expected}, got {array.dtype}.")


def _check_each(name, array, fits, expected):
    """Raises ValueError with the first element that does not fit."""
    if not fits.all():
        raise ValueError(f"{name} must be {expected}, got {array.flat[fits.argmin()]:g}.")


def _float8(name, values):
    _check_dtype(name, values, E4M3, E4M3.name)
    return values


def _as_is(name, scales):
    return as_weights(name, scales)


def _read_blocks(name, blocks):
    """Bytes [..., columns, groups, 16] of two numbers each as [..., rows / 2, columns]."""
    if blocks.dtype != np.uint8 or blocks.ndim < 3 or blocks.shape[-1] != GROUP // 2:
        raise ValueError(
            f"{name} must be uint8 [..., groups, {GROUP // 2}] in MXFP4, got {blocks.dtype} {list(blocks.shape)}."
        )
    return blocks.reshape(*blocks.shape[:-2], -1).swapaxes(-1, -2)


def _write_blocks(name, values):
    """The inverse of `_read_blocks`; values may also be numbers in float8_e4m3fn."""
    values = values if values.dtype == mxfp4.PACKED_DTYPE else _packed(name, values)
    columns = values.swapaxes(-1, -2)
    return columns.reshape(*columns.shape[:-1], -1, GROUP // 2)


def _packed(name, values):
    rows = _float8(name, values).shape[-2]
    if rows % GROUP:
        raise ValueError(f"{name} must have a multiple of {GROUP} rows in MXFP4, got {rows}.")
    _check_each(name, values, _IS_NUMBER[values.view(np.uint8)], f"numbers that MXFP4 has ({_MAGNITUDES})")
    return mxfp4.packed(values.astype(jnp.float4_e2m1fn).view(np.uint8) & 15, -2)


def _read_exponents(name, exponents):
    _check_dtype(name, exponents, np.uint8, "uint8 in MXFP4")
    return exponents.swapaxes(-1, -2)


def _write_exponents(name, scales):
    if scales.dtype == mxfp4.PACKED_DTYPE:
        return np.ascontiguousarray(scales.swapaxes(-1, -2))
    written = scales.astype(jnp.float8_e8m0fnu)
    fits = (written.astype(np.float32) == scales) | np.isnan(scales)
    _check_each(name, scales, fits, "powers of 2 from 2**-127 to 2**127, or NaN, in MXFP4")
    return np.ascontiguousarray(written.swapaxes(-1, -2)).view(np.uint8)


# Source: `weight_dequant` of DeepSeek-V3's inference/kernel.py
_FP8 = Quantization(("", "_scale_inv"), (BLOCK, BLOCK), _float8, _as_is, _float8, _as_is)
_MXFP4 = Quantization(
    ("_blocks", "_scales"), (GROUP, 1), _read_blocks, _read_exponents, _write_blocks, _write_exponents, is_packed=True
)


class QuantizedTensors(Mapping[str, np.ndarray]):
    """A mapping with a checkpoint's tensors, where each quantized tensor appears under its own name and in bfloat16.

    Attributes:
      how: the format of the quantized tensors.
      names: names of the quantized tensors, without the suffixes for values and scales.
    """

    def __init__(self, tensors: Mapping[str, np.ndarray], how: Quantization) -> None:
        self._tensors, self.how = tensors, how
        of_values, of_scales = how.suffixes
        scaled = [name.removesuffix(of_scales) for name in tensors if name.endswith(of_scales)]
        self.names = {name for name in scaled if name + of_values in tensors}
        parts = {part for name in self.names for part in self.parts_of(name)}
        self._all = dict.fromkeys([name for name in tensors if name not in parts] + sorted(self.names))

    def parts_of(self, name: str) -> tuple[str, str]:
        """The names of the values and of the scales of a quantized tensor."""
        of_values, of_scales = self.how.suffixes
        return name + of_values, name + of_scales

    def stored_names(self, name: str) -> tuple[str, ...]:
        """The checkpoint's names for a tensor: two if it is quantized."""
        return self.parts_of(name) if name in self.names else (name,)

    def check(self, name: str, shape: tuple[int, ...], headers: Mapping[str, Header]) -> None:
        """Raises ValueError unless, by their headers, an FP8 tensor has this shape and a scale for each block."""
        of_values, of_scales = self.parts_of(name)
        if self.how.is_packed or headers[of_values].dtype != "F8_E4M3":
            return
        if of_scales not in headers:
            raise ValueError(f"{of_scales} is missing, the scales of {of_values} in float8_e4m3fn.")
        for part, expected in ((of_values, shape), (of_scales, scales_shape(shape, self.how.block))):
            got = headers[part].shape
            if got != expected:
                raise ValueError(f"{part} must have shape {list(expected)}, got {list(got)}.")
        if headers[of_scales].dtype not in DTYPES:
            raise ValueError(f"{of_scales} must have one of the dtypes {DTYPES}, got {headers[of_scales].dtype}.")

    def read_values(self, name: str) -> np.ndarray:
        """Reads the values of a quantized tensor, in float8_e4m3fn or packed."""
        stored, _ = self.parts_of(name)
        return self.how.read_values(stored, np.asarray(self._tensors[stored]))

    def read_scales(self, name: str) -> np.ndarray:
        """Reads the scales of a quantized tensor.

        Raises: ValueError: the checkpoint has no scales for it.
        """
        _, scales = self.parts_of(name)
        if scales not in self._tensors:
            raise ValueError(f"{scales} is missing, the scales of {name} in float8_e4m3fn.")
        return self.how.read_scales(scales, np.asarray(self._tensors[scales]))

    def __getitem__(self, name: str) -> np.ndarray:
        """Reads a tensor into host memory."""
        if name in self.names:
            return self.how.dequantize(name, self.read_values(name), self.read_scales(name))
        tensor = np.asarray(self._tensors[name])
        if tensor.dtype == jnp.float8_e4m3fn:
            self.read_scales(name)  # raises ValueError: the scales are missing
        return tensor

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, or of its values, from the beginning of its file."""
        return shape_of(self._tensors, self.stored_names(name)[0])

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name; reads nothing."""
        return name in self._all

    def __iter__(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._all)

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._all)
