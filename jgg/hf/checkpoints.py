"""Converts MoE blocks of checkpoints: config.json to a layer, and tensors to its parameters and back."""

import copy
import functools
import re
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Self

import numpy as np

from jgg.core.arguments import as_path, check_instance
from jgg.core.quantized import BLOCKS, QuantizedArray, scales_shape
from jgg.experts.layer import MoELayer
from jgg.hf.families import FAMILIES
from jgg.hf.family import Family
from jgg.hf.files import (
    Header,
    as_weights,
    check_names,
    check_shape,
    opened,
    read_object,
    read_tensor,
    read_weight_map,
    unread_tensor,
)
from jgg.hf.quantized import ALL, Quantization, QuantizedTensors, quantization
from jgg.hf.tensors import SELECTION_BIAS, Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DOWNLOAD = "jgg.hf.download(NAME) fetches a model from the Hub and returns its folder."


def read_config(path: str | Path) -> dict[str, object]:
    """Reads config.json. `path` is the checkpoint's folder or the file itself.

    Raises: FileNotFoundError: there is no such folder or file. ValueError: the file holds no JSON object.
    """
    path = as_path("path", path)
    if not path.exists():
        raise FileNotFoundError(f"path must be a folder with config.json or that file, got {path}. {_DOWNLOAD}")
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(f"{path} must have config.json, got none.")
    return read_object(file)


def family(config: Mapping[str, object]) -> Family:
    """Returns the model family that config["model_type"] names.

    Raises: ValueError: the model_type is not a key of FAMILIES. TypeError: config is not a mapping.
    """
    check_instance("config", config, Mapping, "a mapping, as read_config returns it")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type must be one of {sorted(FAMILIES)}, got {model_type!r}.")
    return FAMILIES[model_type]


def moe_layer(config: Mapping[str, object]) -> MoELayer:
    """Returns the sizes and options of a model's MoE layers, as a `MoELayer`.

    Args:
      config: content of config.json, as `read_config` returns it. A missing key has the default of transformers'
        configuration class.

    Raises:
      ValueError: the family is unknown, or the config's values fit no layer or are null.
      TypeError: a value has the wrong type; the message names its key.
    """
    own = family(config)
    options = own.options(own.settings(config))
    try:
        return MoELayer(**options)
    except ValueError as error:
        raise ValueError(f"config of model_type {config['model_type']!r} must fit a layer: {error}") from error


def from_hf(
    config: Mapping[str, object], tensors: Mapping[str, np.ndarray], layer: int, *, keep_quantized: bool = False
) -> dict[str, np.ndarray | QuantizedArray]:
    """Parameters of one layer as {name: array}, with the names of `MoELayer.shapes`.

    The result also has "selection_bias" if the router has one.

    Args:
      config: content of config.json; its "quantization_config" says how tensors are quantized.
      tensors: checkpoint tensors by name. Tensors of other blocks and layers are ignored, and each needed tensor is
        read once.
      layer: index of the decoder layer.
      keep_quantized: if True, quantized weights become a QuantizedArray, with values in float8_e4m3fn or, for MXFP4,
        two numbers per byte; if False, the default, they are converted to bfloat16.

    Raises:
      ValueError: a tensor is missing, is not expected in the block or has a wrong shape; the message names it. Or the
        checkpoint is quantized, but neither in blocks of FP8 nor in MXFP4, or a QuantizedArray cannot hold a weight.
    """
    return dict(read_params(config, tensors, layer, param_shapes(config) if keep_quantized else ()))


def read_params(
    config: Mapping[str, object], tensors: Mapping[str, np.ndarray], layer: int, keep_quantized: Container[str]
) -> Iterator[tuple[str, np.ndarray | QuantizedArray]]:
    """Yields what `from_hf` returns, one item at a time; `keep_quantized` has the names of parameters."""
    own, shapes = family(config), param_shapes(config)
    how = quantization(config)
    quantized = None if how is None else QuantizedTensors(tensors, how)
    tensors = tensors if quantized is None else quantized
    stored_as = {name: own.stored(name, layer, tensors, shape) for name, shape in shapes.items()}
    expected = (part for name, (of, stored) in stored_as.items() for part, _ in stored.shapes(of, shapes[name]))
    present = {name for name in tensors if own.is_in_block(name, layer)}
    where = f"in the MoE block {own.block_name(layer)!r} of a {config['model_type']} checkpoint"
    # transformers writes tensors without elements where there are 0 shared experts
    check_names(present, expected, where, lambda name: tensors[name].size == 0)
    for name, shape in shapes.items():
        block, stored = stored_as[name]
        first, _ = next(stored.shapes(block, shape))
        if name in keep_quantized and quantized is not None and first in quantized.names:
            _scales_shape(own.tensors[name], name, shape, quantized.how)  # `to_hf` writes these
            of_scales = _scales_shape(stored, name, shape, quantized.how)
            of_values = quantized.how.values_shape(shape, is_transposed=stored.is_transposed)
            values = stored.filled(block, of_values, quantized.read_values)
            scales = stored.filled(block, of_scales, quantized.read_scales, "scales of ")
            yield name, QuantizedArray(values, scales)
        else:
            yield name, stored.filled(block, shape, lambda part: as_weights(part, tensors[part]))


def _scales_shape(stored: Tensor, name: str, shape: tuple[int, ...], how: Quantization) -> tuple[int, ...]:
    """Returns the shape of a parameter's scales.

    Raises: ValueError: a block would span two tensors, or a QuantizedArray cannot have blocks of this size.
    """
    rows_of, columns_of = how.block
    block = (columns_of, rows_of) if stored.is_transposed else how.block
    columns = shape[-1] // len(stored.names)
    if not set(block) <= set(BLOCKS) or (len(stored.names) > 1 and columns % block[1]):
        got = ", ".join("all" if size == ALL else str(size) for size in block)
        raise ValueError(
            f"{name} {list(shape)} of {len(stored.names)} tensors side by side must have whole blocks of {BLOCKS} rows "
            f"and columns to stay quantized, got blocks of [{got}]."
        )
    return scales_shape(shape, block)


def to_hf(config: Mapping[str, object], params: Mapping[str, object], layer: int) -> dict[str, np.ndarray]:
    """The inverse of `from_hf`: one layer's checkpoint tensors by name, bit for bit.

    A QuantizedArray is stored in the format of config["quantization_config"]. Weights that `from_hf` converted to
    bfloat16 are not quantized again: save them with a config.json that lacks this entry.

    Raises:
      ValueError: a parameter is missing, is not expected, has a wrong shape, is a QuantizedArray although config has
        no quantization_config, or holds values that the config's format cannot store exactly; the message names it.
    """
    own, shapes = family(config), param_shapes(config)
    check_names(params.keys(), shapes.keys(), f"among the parameters of a {config['model_type']} layer")
    tensors: dict[str, np.ndarray] = {}

    def store(name: str, suffix: str, write: Callable[[np.ndarray], np.ndarray], array: object) -> None:
        for part, value in own.tensors[name].parts(own.block_name(layer), np.asarray(array)):
            tensors[part + suffix] = np.ascontiguousarray(write(value))

    for name, shape in shapes.items():
        param = params[name]
        if not isinstance(param, QuantizedArray):
            check_shape(name, np.asarray(param), shape)
            store(name, "", np.asarray, param)
            continue
        how = quantization(config)
        if how is None:
            raise ValueError(f"{name} must be no QuantizedArray if config has no quantization_config, got one.")
        of_scales = f"scales of {name}"
        check_shape(name, param, shape)
        check_shape(of_scales, param.scales, _scales_shape(own.tensors[name], name, shape, how))
        store(name, how.suffixes[0], functools.partial(how.write_values, f"values of {name}"), param.values)
        store(name, how.suffixes[1], functools.partial(how.write_scales, of_scales), param.scales)
    return tensors


def param_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layer's parameters and, if it has one, of its selection bias."""
    layer = moe_layer(config)
    return layer.shapes | ({SELECTION_BIAS: (layer.num_experts,)} if layer.use_selection_bias else {})


class Checkpoint(Mapping[str, np.ndarray]):
    """A mapping from names to the tensors in a folder of safetensors files; looking one up reads it.

    Args:
      path: folder with model.safetensors or, if there is none, model.safetensors.index.json and the files that it
        names. The names must not lead out of the folder, but the files may be symbolic links, as in the Hub's cache.

    Raises:
      FileNotFoundError: the folder or one of its files is missing.
      ValueError: a file is damaged, or the index names a file outside of the folder; the message names the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = as_path("path", path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"path must be a folder with safetensors files, got {path}. {_DOWNLOAD}")
        here = [name for name in (SINGLE, INDEX) if (self.path / name).exists()]
        if not here:
            raise FileNotFoundError(f"{path} must have {SINGLE} or {INDEX}, got neither.")
        # as transformers does: an index next to a single file is left over from an older save
        name = next((name for name in here if (self.path / name).is_file()), here[0])
        if name == INDEX:
            self._files = read_weight_map(self.path / INDEX)
        else:
            with opened(self.path / SINGLE) as file:
                self._files = dict.fromkeys(file.keys(), SINGLE)
        self._stored = {name: name for name in self._files}

    def renamed(self, prefix: str, new: str) -> Self:
        """The same tensors, where names that begin with a prefix begin with a new one instead."""
        other = copy.copy(self)
        other._stored = {
            new + name.removeprefix(prefix) if name.startswith(prefix) else name: stored
            for name, stored in self._stored.items()
        }
        other._files = {name: self._files[old] for name, old in zip(other._stored, self._files, strict=True)}
        return other

    def __getitem__(self, name: str) -> np.ndarray:
        """Reads a tensor into host memory."""
        path = self.path_of(name)
        with opened(path) as file:
            return read_tensor(file, path, self._stored[name])

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name; reads nothing."""
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._files)

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._files)

    def headers(self) -> dict[str, Header]:
        """The dtypes and shapes of all tensors by name, from the beginnings of the files.

        Raises: FileNotFoundError, ValueError: a file is missing, is damaged or lacks a tensor; the message names it.
        """
        headers: dict[str, Header] = {}
        for own in sorted(set(self._files.values())):
            with opened(self.path / own) as file:
                for name in (name for name, path in self._files.items() if path == own):
                    tensor = file.get_slice(self._stored[name])
                    headers[name] = Header(tensor.get_dtype(), tuple(tensor.get_shape()))
        return headers

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the beginning of its file."""
        with opened(self.path_of(name)) as file:
            return tuple(file.get_slice(self._stored[name]).get_shape())

    def path_of(self, name: str) -> Path:
        """The file that has a tensor."""
        return self.path / self._files[name]

    def moe_layers(self, config: Mapping[str, object]) -> list[int]:
        """Indices of the decoder layers that have an MoE block."""
        own, pattern = family(config), re.compile(r"(?<=layers\.)\d+(?=\.)")
        numbers = {int(found[0]) for name in self if (found := pattern.search(name))}

        def has_router(layer: int) -> bool:
            block, router = own.stored("w_router", layer, self)
            return block + router.names[0] in self

        return [layer for layer in sorted(numbers) if has_router(layer)]


class UnreadCheckpoint(Checkpoint):
    """A `Checkpoint` that reads headers alone: its tensors have shapes and dtypes, but no values."""

    def __getitem__(self, name: str) -> np.ndarray:
        """The shape and dtype of a tensor, in an array that takes no memory."""
        path = self.path_of(name)
        with opened(path) as file:
            return unread_tensor(file, path, self._stored[name])
