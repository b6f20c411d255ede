"""MoE blocks of Hugging Face models: a layer from config.json, its parameters from safetensors and back, bit for bit.

    config = jgg.hf.read_config(folder)
    checkpoint = jgg.hf.Checkpoint(folder)
    layer = jgg.nnx.MoE(**vars(jgg.hf.moe_layer(config)), rngs=nnx.Rngs(0))
    jgg.nnx.load_params(layer, jgg.hf.from_hf(config, checkpoint, layer=3))

Checkpoint needs safetensors (`pip install 'jgg[hf]'`). Weights in FP8 with a scale for each block (DeepSeek-V3,
Kimi-K2) and in MXFP4 (gpt-oss) are read in bfloat16, or kept as `jgg.QuantizedArray`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jgg.hf_families import FAMILIES, SELECTION_BIAS, Family, Tensor, language_model
from jgg.hf_quantized import Quantization, QuantizedTensors, quantization
from jgg.layers import MoELayer
from jgg.quantized import BLOCKS, QuantizedArray, scales_shape


def read_config(path: str | Path) -> dict[str, Any]:
    """Reads config.json. `path` is the checkpoint's folder or the file itself."""
    path = Path(path)
    return json.loads((path / "config.json" if path.is_dir() else path).read_text())


def family(config: Mapping[str, Any]) -> Family:
    """The model family, from config["model_type"].

    Raises: ValueError: its model_type is none of FAMILIES.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type must be one of {sorted(FAMILIES)}, got {model_type!r}.")
    return FAMILIES[model_type]


def moe_layer(config: Mapping[str, Any]) -> MoELayer:
    """Sizes and options of a model's MoE layers.

    Args:
      config: as in config.json; see `read_config`.

    Raises: ValueError: the family is unknown, or the config lacks a key or has null there.
    """
    options = family(config).options
    try:
        return MoELayer(**options(language_model(config)))
    except KeyError as error:
        raise ValueError(f"config of model_type {config['model_type']!r} must have {error}, got none.") from error


def from_hf(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], layer: int, *, keep_quantized: bool = False
) -> dict[str, Any]:
    """Parameters of one layer as {name: array}, with the names of `MoELayer.shapes`.

    There is also "selection_bias" if the router has one.

    Args:
      config: the model's; its "quantization_config" says how tensors are quantized.
      tensors: checkpoint tensors by name. Tensors of other blocks and layers are ignored, and each needed tensor is
        read once.
      layer: index of the decoder layer.
      keep_quantized: weights that are quantized become a QuantizedArray, with values in float8_e4m3fn, rather than
        bfloat16. MXFP4's numbers of four bits take eight then.

    Raises:
      ValueError: a tensor is missing, is not expected in the block or has a wrong shape; the message names it. Or the
        checkpoint is quantized in another way than FP8 in blocks or MXFP4, or a QuantizedArray cannot hold it.
    """
    own, shapes, block = family(config), _shapes(config), family(config).block_name(layer)
    how = quantization(config)
    quantized = None if how is None else QuantizedTensors(tensors, how)
    tensors = tensors if quantized is None else quantized
    names = {
        name: [part for part, _ in own.tensors[name].parts(block, np.broadcast_to(0, shape))]
        for name, shape in shapes.items()
    }
    expected = {part for parts in names.values() for part in parts}
    present = {name for name in tensors if name.startswith(block)}
    _check_names(present, expected, f"in the MoE block {block!r} of a {config['model_type']} checkpoint")
    params: dict[str, Any] = {}
    for name, shape in shapes.items():
        stored = own.tensors[name]
        if keep_quantized and quantized is not None and names[name][0] in quantized.names:
            of_scales = _scales_shape(stored, name, shape, quantized.how)
            values = _filled(stored, block, shape, quantized.read_values)
            scales = _filled(stored, block, of_scales, quantized.read_scales, "scales of ")
            params[name] = QuantizedArray(values, scales)
        else:
            params[name] = _filled(stored, block, shape, tensors.__getitem__)
    return params


def _filled(
    stored: Tensor, block: str, shape: tuple[int, ...], read: Callable[[str], np.ndarray], what: str = ""
) -> np.ndarray:
    """A parameter of that shape from its parts."""
    first_part, _ = next(stored.parts(block, np.broadcast_to(0, shape)))
    first = np.asarray(read(first_part))
    array = np.empty(shape, first.dtype)
    for part, target in stored.parts(block, array):
        value = first if part == first_part else np.asarray(read(part))
        _check_shape(what + part, value, target.shape)
        if value.dtype != first.dtype:
            raise ValueError(f"{what}{part} must have the dtype of {first_part}, {first.dtype}, got {value.dtype}.")
        target[...] = value
    return array


def _scales_shape(stored: Tensor, name: str, shape: tuple[int, ...], how: Quantization) -> tuple[int, ...]:
    """Of a parameter's scales.

    Raises: ValueError: a block has parts of two tensors, or other sizes than those of a QuantizedArray.
    """
    rows_of, columns_of = how.block
    block = (columns_of, rows_of) if stored.is_transposed else how.block
    columns = shape[-1] // len(stored.names)
    if not set(block) <= set(BLOCKS) or (len(stored.names) > 1 and columns % block[1]):
        raise ValueError(
            f"{name} {list(shape)} of {len(stored.names)} tensors side by side must have whole blocks of {BLOCKS} rows "
            f"and columns to stay quantized, got blocks of {list(block)}."
        )
    return scales_shape(shape, block)


def to_hf(config: Mapping[str, Any], params: Mapping[str, Any], layer: int) -> dict[str, np.ndarray]:
    """The inverse of `from_hf`: one layer's checkpoint tensors by name, bit for bit.

    A QuantizedArray is stored as config["quantization_config"] says. Weights that were quantized but not kept so are
    not quantized again: write them with a config.json without that entry.

    Raises:
      ValueError: a parameter is missing, not expected, has a wrong shape or is quantized where the config says nothing
        of it; the message names it.
    """
    own, shapes = family(config), _shapes(config)
    _check_names(params.keys(), shapes.keys(), f"among the parameters of a {config['model_type']} layer")
    tensors: dict[str, np.ndarray] = {}

    def store(name: str, array: Any, suffix: str = "", write: Callable[[np.ndarray], np.ndarray] = np.asarray) -> None:
        for part, value in own.tensors[name].parts(own.block_name(layer), np.asarray(array)):
            tensors[part + suffix] = np.ascontiguousarray(write(value))

    for name, shape in shapes.items():
        param = params[name]
        if not isinstance(param, QuantizedArray):
            _check_shape(name, np.asarray(param), shape)
            store(name, param)
            continue
        how = quantization(config)
        if how is None:
            raise ValueError(f"{name} must be no QuantizedArray if config has no quantization_config, got one.")
        _check_shape(name, param, shape)
        _check_shape(f"scales of {name}", param.scales, _scales_shape(own.tensors[name], name, shape, how))
        store(name, param.values, how.suffixes[0], how.write_values)
        store(name, param.scales, how.suffixes[1], how.write_scales)
    return tensors


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of a layer's parameters and its selection bias."""
    layer = moe_layer(config)
    return layer.shapes | ({SELECTION_BIAS: (layer.num_experts,)} if layer.use_selection_bias else {})


def _check_names(present: Set[str], expected: Set[str], where: str) -> None:
    for wrong, what in ((expected - present, "is missing"), (present - expected, "is not expected")):
        if wrong:
            raise ValueError(f"{min(wrong)} {what} {where}.")


def _check_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(array.shape)}.")


class Checkpoint(Mapping[str, np.ndarray]):
    """The tensors of a folder of safetensors files, each read when it is asked for.

    Args:
      path: folder with model.safetensors, or model.safetensors.index.json and the files that it names.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            self._files = dict(json.loads(index.read_text())["weight_map"])
        else:
            with self._open("model.safetensors") as file:
                self._files = dict.fromkeys(file.keys(), "model.safetensors")

    def __getitem__(self, name: str) -> np.ndarray:
        """The tensor, in host memory."""
        path = self._files[name]
        with self._open(path) as file:
            dtype = file.get_slice(name).get_dtype()
            return _read_float8(self.path / path, name) if dtype == "F8_E4M3" else file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._files)

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._files)

    def moe_layers(self, config: Mapping[str, Any]) -> list[int]:
        """Indices of the decoder layers that have an MoE block."""
        own = family(config)
        router = re.escape(own.block_name(0) + own.tensors["w_router"].names[0])
        found = (re.fullmatch(router.replace(r"layers\.0\.", r"layers\.(\d+)\."), name) for name in self)
        return sorted(int(match[1]) for match in found if match)

    def _open(self, name: str) -> Any:
        from safetensors import safe_open

        return safe_open(self.path / name, framework="np")


def _read_float8(path: Path, name: str) -> np.ndarray:
    """A tensor in float8_e4m3fn, for which safetensors 0.8 asks NumPy, which has no such dtype.

    Source: https://github.com/huggingface/safetensors#format
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        tensor = json.loads(file.read(length))[name]
        begin, end = tensor["data_offsets"]
        values = np.fromfile(file, np.uint8, end - begin, offset=begin)
    return values.view(jnp.float8_e4m3fn).reshape(tensor["shape"])
