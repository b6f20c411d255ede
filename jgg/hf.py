"""MoE blocks of Hugging Face models: a layer from config.json, its parameters from safetensors and back, bit for bit.

    config = jgg.hf.read_config(folder)
    checkpoint = jgg.hf.Checkpoint(folder)
    layer = jgg.nnx.MoE(**vars(jgg.hf.moe_layer(config)), rngs=nnx.Rngs(0))
    for name, value in jgg.hf.from_hf(config, checkpoint, layer=3).items():
        getattr(layer, name)[...] = value

Checkpoint needs safetensors (`pip install 'jgg[hf]'`). FP8 and MXFP4 checkpoints must be converted to a plain dtype
first.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jgg.hf_families import FAMILIES, SELECTION_BIAS, Family, Tensor
from jgg.layers import MoELayer


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint, given by its folder or by the file's own path."""
    path = Path(path)
    return json.loads((path / "config.json" if path.is_dir() else path).read_text())


def family(config: Mapping[str, Any]) -> Family:
    """The family of a model by its config.

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

    Raises: ValueError: the family is unknown, or the config lacks a key.
    """
    options = family(config).options
    try:
        return MoELayer(**options(config.get("text_config", config)))
    except KeyError as error:
        raise ValueError(f"config of model_type {config['model_type']!r} must have {error}, got none.") from error


def from_hf(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    """Parameters of one layer, by the names of `MoELayer.shapes`, and with a selection bias "selection_bias".

    Args:
      config: the model's.
      tensors: by their names in a checkpoint, each read once; those of other blocks and layers are ignored.
      layer: index of the decoder layer.

    Raises: ValueError: a tensor is missing, is not expected in the block or has a wrong shape; the message names it.
    """
    sizes, block = moe_layer(config), _block_name(config, layer)
    plan = _plan(config, sizes, block)
    expected = {name for _, _, parts in plan for part in parts for name in part}
    present = {name for name in tensors if name.startswith(block)}
    for names, what in ((expected - present, "is missing"), (present - expected, "is not expected")):
        if names:
            raise ValueError(f"{min(names)} {what} in the MoE block {block!r} of a {config['model_type']} checkpoint.")
    stored = family(config).tensors
    return {name: _join(shape, stored[name], parts, tensors) for name, shape, parts in plan}


def to_hf(config: Mapping[str, Any], params: Mapping[str, Any], layer: int) -> dict[str, np.ndarray]:
    """Tensors of one layer by their names in a checkpoint: what `from_hf` was given, bit for bit.

    Raises: ValueError: a parameter is missing, not expected or has a wrong shape; the message names it.
    """
    sizes, block = moe_layer(config), _block_name(config, layer)
    plan = _plan(config, sizes, block)
    names = {name for name, _, _ in plan}
    for wrong, what in ((names - params.keys(), "is missing"), (params.keys() - names, "is not expected")):
        if wrong:
            raise ValueError(f"{min(wrong)} {what} among the parameters of a {config['model_type']} layer.")
    tensors: dict[str, np.ndarray] = {}
    for name, shape, parts in plan:
        array = np.asarray(params[name])
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(array.shape)}.")
        tensors |= _split(array, family(config).tensors[name], parts)
    return tensors


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
        with self._open(self._files[name]) as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._files)

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._files)

    def moe_layers(self, config: Mapping[str, Any]) -> list[int]:
        """Indices of the decoder layers that have an MoE block."""
        router = family(config).tensors["w_router"].names[0]
        block = re.escape(_block_name(config, 0)).replace(r"layers\.0\.", r"layers\.(\d+)\.")
        found = (re.fullmatch(block + re.escape(router), name) for name in self)
        return sorted(int(match[1]) for match in found if match)

    def _open(self, name: str) -> Any:
        from safetensors import safe_open

        return safe_open(self.path / name, framework="np")


def _block_name(config: Mapping[str, Any], layer: int) -> str:
    own = family(config)
    return f"{own.prefix}layers.{layer}.{own.block}."


def _plan(config: Mapping[str, Any], sizes: MoELayer, block: str) -> list[tuple[str, tuple[int, ...], list[list[str]]]]:
    """(parameter, its shape, for each expert or once the full names of its parts)."""
    shapes = dict(sizes.shapes)
    if sizes.use_selection_bias:
        shapes[SELECTION_BIAS] = (sizes.num_experts,)
    plan = []
    for name, shape in shapes.items():
        tensor = family(config).tensors[name]
        numbers = range(sizes.num_experts if tensor.is_per_expert else 1)
        parts = [[block + part.replace("{e}", str(number)) for part in tensor.names] for number in numbers]
        plan.append((name, shape, parts))
    return plan


def _join(
    shape: tuple[int, ...], tensor: Tensor, parts: list[list[str]], tensors: Mapping[str, np.ndarray]
) -> np.ndarray:
    """A parameter from its tensors, filled in one by one."""
    array: np.ndarray = np.empty(0)
    for expert, names in enumerate(parts):
        for number, name in enumerate(names):
            part = np.asarray(tensors[name])
            if expert == number == 0:
                array = np.empty(shape, part.dtype)
            target = _part(array[expert] if tensor.is_per_expert else array, tensor, number)
            if part.shape != target.shape:
                raise ValueError(f"{name} must have shape {list(target.shape)}, got {list(part.shape)}.")
            if part.dtype != array.dtype:
                raise ValueError(f"{name} must have the dtype of {parts[0][0]}, {array.dtype}, got {part.dtype}.")
            target[...] = part
    return array


def _split(array: np.ndarray, tensor: Tensor, parts: list[list[str]]) -> dict[str, np.ndarray]:
    """The tensors of a parameter."""
    return {
        name: np.ascontiguousarray(_part(array[expert] if tensor.is_per_expert else array, tensor, number))
        for expert, names in enumerate(parts)
        for number, name in enumerate(names)
    }


def _part(array: np.ndarray, tensor: Tensor, number: int) -> np.ndarray:
    """The view of a parameter that one tensor fills, in that tensor's order of axes."""
    size = array.shape[-1] // len(tensor.names)
    part = array[..., number * size : (number + 1) * size]
    return part.swapaxes(-1, -2) if tensor.is_transposed else part
