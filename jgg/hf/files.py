"""Reads the files of Hugging Face checkpoints; every error names the file, or the tensor."""

import contextlib
import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jgg.core.files import check_regular
from jgg.core.quantized import QuantizedArray

if TYPE_CHECKING:
    from safetensors import safe_open

DTYPES = "F64", "F32", "F16", "BF16"  # of weights, and of scales in FP8 folders, as safetensors names them
_FLOAT8: dict[str, DTypeLike] = {
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
}
_OTHERS: dict[str, DTypeLike] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "U8": np.uint8,
}
_UNREAD = bytes(8)  # the values of arrays that stand for tensors which are not read


class Header(NamedTuple):
    """A tensor's entry in a safetensors file: its dtype, such as "BF16", and its shape."""

    dtype: str
    shape: tuple[int, ...]


def read_object(path: Path) -> dict[str, object]:
    """Reads a file that holds a JSON object."""
    check_regular(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a JSON file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(content).__name__}.")
    return content


@contextlib.contextmanager
def errors_with(path: Path) -> Iterator[None]:
    """Puts a file's name before the message of a ValueError or a TypeError about the file's content."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{path}: {error}") from error


@contextlib.contextmanager
def opened(path: Path) -> Iterator["safe_open"]:
    """Opens a safetensors file; errors when opening it or reading a tensor become errors that name the file."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(path)
        with safe_open(path, framework="np") as file:
            yield file
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} must be a file of the checkpoint, got none.") from error
    except (SafetensorError, OSError, UnicodeEncodeError) as error:  # the last from lone surrogates in an index
        raise ValueError(f"{path} must be a whole safetensors file with each tensor read from it: {error}") from error


def read_weight_map(index: Path) -> dict[str, str]:
    """Reads the file name of each tensor from the "weight_map" of an index file."""
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict):
        raise ValueError(f'{index} must have a "weight_map" from tensors to files, got {reprlib.repr(files)}.')
    for tensor, file in files.items():
        # only the name is checked: in the Hub's cache the files are links to other folders
        own = PurePath(file) if isinstance(file, str) else PurePath()
        if own.anchor or ".." in own.parts or not own.name:
            raise ValueError(f"{index} must name a file inside its folder for {tensor!r}, got {file!r}.")
    return files


def read_tensor(file: "safe_open", path: Path, name: str) -> np.ndarray:
    """Reads a tensor of the safetensors file that `opened` opened at `path`."""
    dtype = file.get_slice(name).get_dtype()
    if dtype in _FLOAT8:
        return _read_float8(path, name, _FLOAT8[dtype])
    try:
        return file.get_tensor(name)
    except AttributeError as error:  # safetensors looks the dtype up in NumPy
        others = ", ".join(_FLOAT8)
        raise ValueError(f"{name} of {path} must have a dtype that NumPy has, or {others}, got {dtype}.") from error


def _read_float8(path: Path, name: str, dtype: DTypeLike) -> np.ndarray:
    """Reads a tensor of 8-bit floats. safetensors 0.8 cannot, because it asks NumPy for a dtype that NumPy lacks.

    Source: https://github.com/huggingface/safetensors#format
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        tensor = json.loads(file.read(length))[name]
        begin, end = tensor["data_offsets"]
        values = np.fromfile(file, np.uint8, end - begin, offset=begin)
    return values.view(dtype).reshape(tensor["shape"])


def unread_tensor(file: "safe_open", path: Path, name: str) -> np.ndarray:
    """Stands for a tensor that `read_tensor` would read: has its shape and dtype, see `unread`."""
    own = file.get_slice(name)
    dtype = (_OTHERS | _FLOAT8).get(own.get_dtype())
    if dtype is None:
        raise ValueError(f"{name} of {path} must have one of the dtypes {(*_OTHERS, *_FLOAT8)}, got {own.get_dtype()}.")
    return unread(tuple(own.get_shape()), dtype)


def unread(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An array that is only a shape and a dtype: all its values are the same bytes, so it takes no memory."""
    return np.ndarray(shape, dtype, _UNREAD, strides=(0,) * len(shape))


def is_unread(array: np.ndarray) -> bool:
    """Whether `unread` made an array, or one that it is a view of."""
    return np.may_share_memory(array, np.frombuffer(_UNREAD, np.uint8))


def check_names(
    present: Set[str], expected: Iterable[str], where: str, is_ignored: Callable[[str], bool] = lambda name: False
) -> None:
    """Raises ValueError for the first missing name, before taking more of `expected`, or for the first surplus one.

    Ignored names may be surplus.
    """
    surplus = set(present)
    for name in sorted(expected) if isinstance(expected, Set) else expected:
        if name not in present:
            raise ValueError(f"{name} is missing {where}.")
        surplus.discard(name)
    for name in sorted(surplus):
        if not is_ignored(name):
            raise ValueError(f"{name} is not expected {where}.")


def as_weights(name: str, array: object) -> np.ndarray:
    """The array in NumPy; raises ValueError unless it has floats that need no scales."""
    array = np.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
        raise ValueError(f"{name} must be of floats of 16, 32 or 64 bits, got {array.dtype}.")
    return array


def shape_of(tensors: Any, name: str) -> tuple[int, ...]:
    """The shape of a tensor in a mapping; a checkpoint knows it without reading the tensor."""
    return tensors.shape_of(name) if hasattr(tensors, "shape_of") else np.shape(tensors[name])


def check_shape(name: str, array: np.ndarray | jax.Array | QuantizedArray, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless a tensor or parameter has a shape."""
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(array.shape)}.")
