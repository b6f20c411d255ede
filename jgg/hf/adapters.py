"""Reads LoRA adapters of MoE layers from PEFT's folders, as one `LowRank` per parameter, and writes them."""

import dataclasses
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from jgg.core.arguments import as_flag, as_int, as_path, check, check_instance
from jgg.core.files import replacing, share_as_usual
from jgg.hf.adapter_experts import (
    FUSED,
    PREFIX,
    ExpertsReader,
    flat,
    names_of_parameters,
    pair_of,
    pattern_of_experts,
    places,
)
from jgg.hf.adapter_settings import AdapterSettings, new_settings
from jgg.hf.checkpoints import family, moe_layer
from jgg.hf.files import opened, read_object, read_tensor
from jgg.hf.settings import language_model
from jgg.linear.low_rank import LowRank, as_low_rank

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_DTYPES = "float16", "bfloat16", "float32", "float64"


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A LoRA adapter of a whole model, as PEFT stores it.

    Attributes:
      layers: the adapters of experts: for the index of a decoder layer, a `jgg.LowRank` in w_layout "ekn" for each of
        the parameters "w_gate_up" and "w_down" that has one.
      others: tensors of other modules, such as attention, by their names in PEFT's file.
      settings: the content of adapter_config.json. `save_adapter` adds missing keys.
    """

    layers: Mapping[int, Mapping[str, LowRank]]
    others: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)


def load_adapter(folder: str | Path, config: Mapping[str, object], *, is_expert_slowest: bool = False) -> Adapter:
    """Reads a LoRA adapter that PEFT wrote: adapter_config.json and adapter_model.safetensors.

    PEFT stores the adapters of experts in one of two ways: one per parameter that holds all experts of a layer
    ("target_parameters", in the form of PEFT 0.21), or one per module of each expert ("target_modules"). Both become
    one LowRank per parameter of a layer. If gate and up are modules of rank r, the LowRank has rank 2 r: its a holds
    both a side by side, and its b is zero from gate's a to up's columns and from up's a to gate's. The result's
    `settings` then no longer name these modules. Dropout is not applied. As in PEFT, target_modules may name modules
    that the model lacks.

    Args:
      folder: the adapter's folder.
      config: content of the model's config.json, as `read_config` returns it.
      is_expert_slowest: True for an adapter of fused experts that Unsloth wrote before 2026-09-17. The columns of its
        lora_B begin with all ranks of expert 0; PEFT's begin with rank 0 of all experts. Both have the same shape, so
        nothing in the files tells them apart. `save_adapter` writes PEFT's order.

    Returns: an Adapter of NumPy arrays, whose scales are lora_alpha / r or, with use_rslora, lora_alpha / sqrt(r).

    Raises:
      FileNotFoundError: the folder or a file is missing.
      ValueError: a file is damaged; a tensor of an expert is missing, is not expected or has a wrong shape; a tensor
        does not hold floats of 16 bits or more; a parameter of experts is a target without tensors; or the adapter has
        more than low-rank terms, such as DoRA, biases or modules_to_save. The message names the file and the key or
        tensor.
      TypeError: an argument or a setting has the wrong type.
    """
    own, shapes, folder = family(config), moe_layer(config).shapes, as_path("folder", folder)
    is_expert_slowest = as_flag("is_expert_slowest", is_expert_slowest)
    settings, tensors = read_settings(folder), _read_tensors(folder)
    pattern, where = pattern_of_experts(own), str(folder / TENSORS)
    found = {name: int(match[1]) for name in tensors if (match := pattern.match(name))}
    of_experts = {name: tensors[name] for name in found}
    reader = ExpertsReader(own, shapes, settings, of_experts, where, is_expert_slowest)
    layers: dict[int, dict[str, LowRank]] = {}
    for layer in sorted(set(found.values())):
        layers[layer] = reader.read({name for name, index in found.items() if index == layer}, layer)
    others = {name: tensor for name, tensor in tensors.items() if name not in found}
    experts = " or ".join(sorted({own.fused_name(0), f"{own.block_name(0)}experts"}))
    for name in others:
        check(
            "experts" not in name.split("."),
            f"{name} is not expected in {where}: layer 0 of a {config['model_type']} model has its experts in "
            f"{experts}.",
        )
    numbers = range(as_int("num_hidden_layers", language_model(config).get("num_hidden_layers") or 0, 0)) or layers
    parameters = [name for number in numbers for name in names_of_parameters(own, number).values()]
    settings.check_has_tensors(parameters, reader.parameters)
    values = settings.values
    if reader.modules:
        values = {**values, "target_modules": sorted({_module_of(name) for name in others if ".lora_" in name})}
    return Adapter(layers, others, values)


def names_of_experts(config: Mapping[str, object], layer: int, param: str) -> tuple[str, list[str]]:
    """The names of "w_gate_up" or "w_down" in PEFT: the fused parameter, and the modules of expert 0."""
    return names_of_parameters(family(config), layer)[param], modules_of_expert(config, layer, param, 0)


def modules_of_expert(config: Mapping[str, object], layer: int, param: str, expert: int) -> list[str]:
    """The modules of one expert that make up "w_gate_up" or "w_down", in column order; [] if it has none."""
    own = family(config)
    parts = [name.removesuffix(".weight") for name in own.tensors[param].names if "{e}" in name]
    return [own.block_name(layer) + part.replace("{e}", str(expert)) for part in parts]


def left_out_by_peft(config: Mapping[str, object], modules: Collection[str]) -> str:
    """What PEFT leaves out of an adapter of these modules, some of them of single experts; "" if nothing."""
    of_experts = {own.rpartition(".")[2] for param in FUSED for own in modules_of_expert(config, 0, param, 0)}
    others = [own for own in modules if ".experts." not in own]
    if not family(config).has_modules_in_peft:
        return "experts" if len(others) < len(modules) else ""
    # PEFT takes these names for the experts', whatever precedes them
    is_lost = any(own.rpartition(".")[2] in of_experts for own in others)
    return "dense layers and shared experts" if is_lost else ""


def read_settings(folder: Path) -> AdapterSettings:
    """Reads adapter_config.json; raises if the folder or the file is missing, or the settings are wrong."""
    if not folder.is_dir():
        raise FileNotFoundError(f"folder must be a folder with {SETTINGS} and {TENSORS}, got {folder}.")
    if not (folder / SETTINGS).exists():
        raise FileNotFoundError(f"{folder} must have {SETTINGS}, got none.")
    return AdapterSettings(str(folder / SETTINGS), read_object(folder / SETTINGS))


def _read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Reads adapter_model.safetensors; raises unless all its tensors are floats that need no scales."""
    path = folder / TENSORS
    with opened(path) as file:
        tensors = {name: read_tensor(file, path, name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        dtype = tensor.dtype.name
        check(dtype in _DTYPES, f"{name} of {path} must have one of the dtypes {', '.join(_DTYPES)}, got {dtype}.")
    return tensors


def save_adapter(folder: str | Path, config: Mapping[str, object], adapter: Adapter) -> None:
    """Writes an adapter in PEFT's format for transformers 5, which keeps all experts of a layer in one parameter.

    Terms that `load_adapter` read from target_parameters, and `others`, are written bit for bit. Terms that it read
    from each expert's modules are written as parameters of all experts. They compute the same, and PEFT itself converts
    such modules this way in transformers 5. Ranks and scales that differ from the settings' r and lora_alpha go into
    rank_pattern and alpha_pattern; PEFT 0.21 warns that they match no module, but uses them. lora_dropout becomes 0,
    because PEFT has no dropout for parameters.

    Args:
      folder: where to write; created if missing. An adapter already in it is replaced once both files are written.
      config: content of the model's config.json.
      adapter: the adapter, from `load_adapter` or not. If its settings lack r and lora_alpha, the first LowRank's are
        written; other missing keys get PEFT's usual values. PEFT uses `others` only if the settings have their
        "target_modules".

    Raises:
      ValueError: a term does not fit the config's layer, a name in `others` belongs to experts, or jgg does not support
        a setting; the message names it.
      TypeError: a part of the adapter has the wrong type.
      OSError: the folder cannot be written.
    """
    own, shapes, folder = family(config), moe_layer(config).shapes, as_path("folder", folder)
    check_instance("adapter", adapter, Adapter, "an Adapter")
    tensors: dict[str, np.ndarray] = {}
    terms: dict[str, tuple[int, float]] = {}
    experts: set[str] = set()
    for key, params in adapter.layers.items():
        layer = as_int("layers of adapter", key, 0)
        check_instance(f"layer {layer} of adapter", params, Mapping, "a mapping from parameters to LowRanks")
        surplus = sorted(params.keys() - FUSED.keys())
        check(not surplus, f"layer {layer} of adapter must have terms of {', '.join(FUSED)}, got {surplus}.")
        names = names_of_parameters(own, layer)
        experts |= set(names.values())
        for param, place in places(own, layer, [param for param in FUSED if param in params]):
            what = f"{param} of layer {layer}"
            low_rank = as_low_rank(what, params[param], "ekn", shapes[param])
            terms[names[param]] = low_rank.a.shape[2], low_rank.scale
            tensors |= zip(pair_of(place), flat(params[param], own.is_swapped), strict=True)
    pattern = pattern_of_experts(own)
    for name, tensor in adapter.others.items():
        check(not pattern.match(name), f"others of adapter must be tensors of modules other than experts, got {name}.")
        tensors[name] = np.ascontiguousarray(tensor)
    settings = new_settings("settings of adapter", adapter.settings, terms).with_terms(terms, experts)
    write_adapter(folder, settings.values, tensors)


def write_adapter(folder: Path, settings: Mapping[str, object], tensors: Mapping[str, np.ndarray]) -> None:
    """Writes both files of an adapter; an adapter already in the folder is replaced once both are written.

    Raises: OSError: the folder cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    text = json.dumps(settings, indent=2, sort_keys=True)
    folder = Path(os.path.realpath(folder))  # a link leads to the place, which need not exist yet
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / SETTINGS) as of_settings, replacing(folder / TENSORS) as of_tensors:
        of_settings.write_text(text, encoding="utf-8")
        try:
            save_file(dict(tensors), of_tensors, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{folder / TENSORS} could not be written: {error}") from error
        share_as_usual(of_tensors)


def _module_of(name: str) -> str:
    """The module that a tensor's adapter belongs to, without PEFT's wrappers."""
    return name.removeprefix(PREFIX).partition(".lora_")[0].replace(".base_layer", "")
