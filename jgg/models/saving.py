"""Writes a whole model into a Hugging Face folder, in the names and shapes of published checkpoints."""

import collections
import itertools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from jgg.core.arguments import as_int, as_path, check, check_instance
from jgg.core.files import fill, is_new_or_empty, share_as_usual
from jgg.core.quantized import BLOCK, QuantizedArray, WeightForms, block_of
from jgg.hf.checkpoints import INDEX, SINGLE, to_hf
from jgg.models.decoder import Decoder
from jgg.models.left_out import Copies, module_of
from jgg.models.placement import on_host
from jgg.models.tensors import Stack, ends, expected_shapes, matrices, stacks

_CONFIG = "config.json"


def save(model: Decoder, folder: str | Path, *, max_shard_bytes: int = 5 * 10**9) -> None:
    """Writes a model into a new folder: config.json and safetensors files, as Hugging Face's transformers reads them.

    Other files that a server or transformers needs are copied from the folder that the model was loaded from: the
    tokenizer, chat templates, generation_config.json, processor settings, and Python files for these. A model that was
    not loaded has no such files.

    A loaded model is written bit for bit, as long as its parameters have the dtypes of the files. FP8 experts are
    written in blocks of 128 x 128 with float32 scales, as in DeepSeek-V3, and MXFP4 ones as gpt-oss's folder has them;
    everything else is dense, also other models' experts in MXFP4, whose numbers bfloat16 has exactly. A new folder
    appears only once it is complete. An existing empty folder, such as a mount point, gets the files once all are
    written, config.json last. If something else has appeared in the folder by then, the model goes into folder-2, or
    the next free name, next to it, and a warning says where.

    Tensors of the loaded folder that the model does not have, such as a vision tower's, are copied too. FP8 ones become
    dense, unless the new folder has experts in the same format. Tensors that are no longer in the loaded folder are
    left out, with a warning.

    If a model is split over the devices of several processes, all of them must call this with the same folder. They
    gather one parameter of one layer at a time, and process 0 writes. All return once the folder is complete.

    Args:
      model: the model.
      folder: where to write; a path that does not exist, or an empty folder.
      max_shard_bytes: how many bytes a file may reach before the next one begins; host memory holds one file at a time.

    Raises:
      FileExistsError: the folder exists and is not empty.
      ValueError: the model has LoRA adapters that are not merged (`Decoder.merge_adapters`), or experts that are
        quantized in other blocks.
      TypeError: an argument has the wrong type.
      OSError: a file cannot be written.
    """
    check_instance("model", model, Decoder, "a jgg.models.Decoder")
    limit, folder = as_int("max_shard_bytes", max_shard_bytes, 1), as_path("folder", folder)
    if not is_new_or_empty(folder):
        raise FileExistsError(f"folder must be new or an empty folder, got {folder}.")
    config = _config(model)
    _check_adapters(model)
    is_shared = not model.w_embedding[...].is_fully_addressable
    if is_shared:
        multihost_utils.sync_global_devices("jgg.models.save: all have seen that the folder is new")
    if is_shared and jax.process_index():
        collections.deque(_tensors(model, config), maxlen=0)  # takes part in the gathering
    else:
        _write_folder(model, config, folder, limit)
    if is_shared:
        multihost_utils.sync_global_devices("jgg.models.save: the folder is there")


def named_tensors(model: Decoder) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and array of each of the model's tensors, for example to send weights to a server.

    These are the tensors that `save` writes, without those it copies from the loaded folder.

    Host memory holds the tensors of one parameter of one layer at a time. If a model is split over the devices of
    several processes, all of them must iterate over all tensors.

    Raises: ValueError, TypeError: as in `save`.
    """
    check_instance("model", model, Decoder, "a jgg.models.Decoder")
    config = _config(model)
    _check_adapters(model)
    return _tensors(model, config)


def _write_folder(model: Decoder, config: dict[str, Any], folder: Path, limit: int) -> None:
    copies = Copies(model.config.left_out, model.config.hf, config, model.w_embedding.dtype)
    how = config.get("quantization_config", {})
    if how.get("quant_method") == "fp8":
        how["modules_to_not_convert"] = sorted({*how["modules_to_not_convert"], *copies.dense_modules})

    def write(temporary: Path) -> None:
        _write_shards(itertools.chain(_tensors(model, config), copies), temporary, limit)
        if model.config.left_out is not None:
            model.config.left_out.copy_files(temporary)
        text = model.config.source if config == model.config.hf else json.dumps(config, indent=2) + "\n"
        (temporary / _CONFIG).write_text(text, encoding="utf-8")

    place = fill(folder, _CONFIG, write)
    if place != folder:
        warnings.warn(
            f"{folder} was not empty any longer when the model was written, so it is in {place}", stacklevel=3
        )


def _config(model: Decoder) -> dict[str, object]:
    """The content of config.json: the model's config, with its dtype and the format of its experts.

    Experts in MXFP4 are written so if they were read so, else dense, as only gpt-oss's are read in it by others.

    Raises: ValueError: the experts are quantized, but neither in blocks of FP8 nor in MXFP4.
    """
    config = model.config.hf
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    # transformers takes the second if a config has both; those of towers stay
    keys = [(part, key) for part in parts for key in ("torch_dtype", "dtype") if key in part] or [(config, "dtype")]
    for part, key in keys:
        part[key] = model.w_embedding.dtype.name
    formats: list[Any] = [part.pop("quantization_config", None) or {} for part in parts]
    quantized = [item for stack in stacks(model) for item in _quantized(stack).items()]
    how: dict[str, Any] = next(filter(None, formats), {})
    if quantized and how.get("quant_method") == "mxfp4" and model.options.quantization is None:
        return config | {"quantization_config": how}
    blocks = {name: block_of(value, name) for name, value in quantized if not value.is_packed}
    if not blocks:
        return config
    check(
        set(blocks.values()) == {(BLOCK, BLOCK)},
        f"{', '.join(blocks)} must have blocks of {BLOCK} rows and columns, or be in MXFP4, to be saved, "
        f"got blocks of {', '.join(map(str, blocks.values()))}: load the model with experts='dense'.",
    )
    return config | {
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": sorted(_dense_modules(model)),
        }
    }


def _quantized(stack: Stack) -> dict[str, QuantizedArray]:
    """The parameters of a stack that are quantized, which are experts."""
    values = {name: _value(variable) for name, variable in stack.variables.items()}
    return {name: value for name, value in values.items() if isinstance(value, QuantizedArray)}


def _value(variable: nnx.Variable[Any]) -> jax.Array | QuantizedArray:
    """What a folder has of a variable."""
    value = variable.get_value()
    return value.array if isinstance(value, WeightForms) else value


def _dense_modules(model: Decoder) -> set[str]:
    """The modules of all matrices but those of quantized experts."""
    of_experts = tuple(
        f"{stack.family.block_name(number)}experts."
        for stack in stacks(model)
        for number in stack.plan.numbers
        if _quantized(stack)
    )
    names = (name for name, shape in expected_shapes(model) if len(shape) == 2)
    return {module_of(name) for name in names if not name.startswith(of_experts)}


def _check_adapters(model: Decoder) -> None:
    params = {".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model))}
    for matrix in matrices(model):
        name = f"{matrix.stack.plan.name}.{matrix.name}"
        model.options.lora.of({matrix.target: name}).check_merged(params)


def _tensors(model: Decoder, config: dict[str, object]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the folder's tensors, layer after layer."""
    for name, tensor in ends(model):
        yield from tensor.parts("", on_host(getattr(model, name)[...]))
    for stack in stacks(model):
        for index, number in enumerate(stack.plan.numbers):
            values = {}
            for name, variable in stack.variables.items():
                value = jax.tree.map(lambda whole, index=index: whole[index], _value(variable))
                if isinstance(value, QuantizedArray) and "quantization_config" not in config:
                    value = value.dequantize(model.w_embedding.dtype)
                values[name] = jax.tree.map(on_host, value)
            for name, tensor in stack.tensors.items():
                yield from tensor.parts(stack.family.layer_name(number), values[name])
            experts = {name.removeprefix("moe."): value for name, value in values.items() if name.startswith("moe.")}
            if experts:
                yield from to_hf(config, experts, number).items()


def _write_shards(tensors: Iterator[tuple[str, np.ndarray]], folder: Path, limit: int) -> None:
    """Writes tensors in files of at most `limit` bytes, or of one tensor, and the index, if there are several files."""
    shards: list[list[str]] = []
    total = 0
    for shard in _shards(tensors, limit):
        _write(shard, folder / str(len(shards)))
        shards.append(list(shard))
        total += sum(array.nbytes for array in shard.values())
    if len(shards) == 1:
        (folder / "0").rename(folder / SINGLE)
        return
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for number, file in enumerate(files):
        (folder / str(number)).rename(folder / file)
    weight_map = {name: file for names, file in zip(shards, files, strict=True) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Iterator[tuple[str, np.ndarray]], limit: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the tensors in groups of at most `limit` bytes, or of one."""
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, array in tensors:
        if shard and size + array.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = array
        size += array.nbytes
    yield shard


def _write(tensors: dict[str, np.ndarray], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    try:
        save_file(contiguous, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error
    share_as_usual(path)
