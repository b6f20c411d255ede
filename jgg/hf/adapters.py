"""Converts LoRA adapters: PEFT's folders to low-rank terms beside the parameters of MoE layers, and back."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jgg.core.arguments import as_int, check, check_instance
from jgg.core.files import replacing
from jgg.hf.adapter_settings import AdapterSettings, new_settings
from jgg.hf.checkpoints import family, moe_layer
from jgg.hf.families import Family
from jgg.hf.files import check_names, check_shape, opened, read_object, read_tensor
from jgg.low_rank import LowRank, as_low_rank

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FUSED = {"w_gate_up": "gate_up_proj", "w_down": "down_proj"}  # in the order in which PEFT wraps them


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A LoRA adapter.

    Attributes:
      layers: for each decoder layer's index, the terms of its experts by the parameter that each is beside,
        "w_gate_up" or "w_down", in w_layout "ekn".
      others: tensors of other modules, such as attention, by their names in PEFT's file.
      settings: the content of adapter_config.json, which may be incomplete for an adapter to save.
    """

    layers: Mapping[int, Mapping[str, LowRank]]
    others: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def load_adapter(folder: str | Path, config: Mapping[str, Any]) -> Adapter:
    """Reads a LoRA adapter that PEFT wrote: adapter_config.json and adapter_model.safetensors.

    The experts' adapters may be of fused parameters ("target_parameters", as PEFT 0.21 stores them) or of each expert's
    modules. From modules, each parameter gets one term: a has the terms of gate and up side by side, of rank 2 r, and
    b is zero outside the blocks of each. `settings` are then without these modules. Dropout is not applied.

    Args:
      folder: the adapter's folder.
      config: content of the model's config.json, as `read_config` returns it.

    Returns: an Adapter of NumPy arrays, whose scales are lora_alpha / r or, with use_rslora, lora_alpha / sqrt(r).

    Raises:
      FileNotFoundError: the folder or a file is missing.
      ValueError: a file is damaged; a tensor of an expert is missing, is not expected or has a wrong shape; a target
        has no tensors; or the adapter is more than low-rank terms, as with DoRA, biases or modules_to_save. The
        message names the file and the key or tensor.
      TypeError: a setting has the wrong type.
    """
    own, shapes, folder = family(config), moe_layer(config).shapes, Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"folder must be a folder with {SETTINGS} and {TENSORS}, got {folder}.")
    if not (folder / SETTINGS).exists():
        raise FileNotFoundError(f"{folder} must have {SETTINGS}, got none.")
    settings = AdapterSettings(str(folder / SETTINGS), read_object(folder / SETTINGS))
    with opened(folder / TENSORS) as file:
        tensors = {name: read_tensor(file, folder / TENSORS, name) for name in file.keys()}  # noqa: SIM118
    pattern = _pattern_of_experts(own)
    found = {name: int(match[1]) for name in tensors if (match := pattern.match(name))}
    reader = _Reader(own, shapes, settings, {name: tensors[name] for name in found}, str(folder / TENSORS))
    layers: dict[int, dict[str, LowRank]] = {}
    for layer in sorted(set(found.values())):
        layers[layer] = reader.read({name for name, index in found.items() if index == layer}, layer)
    others = {name: tensor for name, tensor in tensors.items() if name not in found}
    modules = sorted({_module_of(name) for name in others if ".lora_" in name})
    places = " or ".join(sorted({own.fused_name(0), f"{own.block_name(0)}experts"}))
    for name in others:
        check(
            "experts" not in name.split("."),
            f"{name} is not expected in {folder / TENSORS}: layer 0 of a {config['model_type']} model has its experts "
            f"in {places}.",
        )
    settings.check_targets(reader.parameters, [*modules, *reader.modules])
    values = settings.values
    if reader.modules:
        values = {**values, "target_modules": modules}
    return Adapter(layers, others, values)


def save_adapter(folder: str | Path, config: Mapping[str, Any], adapter: Adapter) -> None:
    """Writes an adapter as PEFT does for the fused experts of transformers 5, so that PEFT opens it.

    Of what `load_adapter` read, the tensors of fused experts and `others` are written bit for bit. A term that was read
    from modules is written as one of a fused parameter: the same function, which PEFT itself makes of such modules in
    transformers 5. Ranks and scales that differ from the settings' r and lora_alpha go to rank_pattern and
    alpha_pattern; PEFT 0.21 warns that they match no module, and uses them. lora_dropout becomes 0, because PEFT has
    none for parameters.

    Args:
      folder: where to write; it is made if it is missing. An adapter that it holds is replaced once both files are
        written.
      config: content of the model's config.json.
      adapter: the layers need not come from `load_adapter`. Settings that are missing get PEFT's usual values, r and
        lora_alpha those of the first term. For `others` to be used they need their "target_modules".

    Raises:
      ValueError: a term does not fit the config's layer, a name in `others` belongs to experts, or the settings have
        what jgg does not; the message names it.
      TypeError: a part of the adapter has the wrong type.
      OSError: the folder cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    own, shapes = family(config), moe_layer(config).shapes
    check_instance("adapter", adapter, Adapter, "an Adapter")
    tensors: dict[str, np.ndarray] = {}
    terms: dict[str, tuple[int, float]] = {}
    experts: set[str] = set()
    for key, params in adapter.layers.items():
        layer = as_int("layers of adapter", key, 0)
        check_instance(f"layer {layer} of adapter", params, Mapping, "a mapping from parameters to LowRanks")
        surplus = sorted(params.keys() - _FUSED.keys())
        check(not surplus, f"layer {layer} of adapter must have terms of {', '.join(_FUSED)}, got {surplus}.")
        names = _names_of_parameters(own, layer)
        experts |= set(names.values())
        for param, place in _places(own, layer, [param for param in _FUSED if param in params]):
            what = f"{param} of layer {layer}"
            low_rank = as_low_rank(what, params[param], "ekn", shapes[param])
            terms[names[param]] = low_rank.a.shape[2], low_rank.scale
            tensors |= zip(pair_of(place), _flat(params[param], own.is_swapped), strict=True)
    pattern = _pattern_of_experts(own)
    for name, tensor in adapter.others.items():
        check(not pattern.match(name), f"others of adapter must be tensors of modules other than experts, got {name}.")
        tensors[name] = np.ascontiguousarray(tensor)
    settings = new_settings("settings of adapter", adapter.settings, terms).with_terms(terms, experts)
    text = json.dumps(settings.values, indent=2, sort_keys=True)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / SETTINGS) as of_settings, replacing(folder / TENSORS) as of_tensors:
        of_settings.write_text(text, encoding="utf-8")
        try:
            save_file(tensors, of_tensors, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{folder / TENSORS} could not be written: {error}") from error


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads the experts' terms of one layer after the other.

    Attributes:
      tensors: the tensors of experts by their names in PEFT's file.
      where: the file of the tensors, for messages.
      parameters, modules: the fused parameters and the modules of experts that were read.
    """

    own: Family
    shapes: Mapping[str, tuple[int, ...]]
    settings: AdapterSettings
    tensors: Mapping[str, np.ndarray]
    where: str
    parameters: list[str] = dataclasses.field(default_factory=list)
    modules: list[str] = dataclasses.field(default_factory=list)

    def read(self, present: set[str], layer: int) -> dict[str, LowRank]:
        """Returns the terms of a layer, of which these are the tensors."""
        fused = re.compile(re.escape(_PREFIX + self.own.fused_name(layer)) + r"\.(base_layer\.)*lora_")
        read = self._of_parameters if any(map(fused.match, present)) else self._of_modules
        return read(present, layer)

    def _check_names(self, present: set[str], expected: set[str], layer: int) -> None:
        check_names(present, expected, f"among the experts' tensors of layer {layer} in {self.where}")

    def _of_parameters(self, present: set[str], layer: int) -> dict[str, LowRank]:
        names = _names_of_parameters(self.own, layer)
        targeted = [param for param, name in names.items() if self.settings.targets_parameter(name)]
        places = dict(_places(self.own, layer, targeted))
        self._check_names(present, {name for place in places.values() for name in pair_of(place)}, layer)
        self.parameters.extend(names[param] for param in targeted)
        return {param: self._of_parameter(param, places[param], names[param]) for param in targeted}

    def _of_parameter(self, param: str, place: str, name: str) -> LowRank:
        experts, rows, columns = self.shapes[param]
        inner, outer = (columns, rows) if self.own.is_swapped else (rows, columns)
        rank = self.settings.rank(name)
        of_a, of_b = pair_of(place)
        check_shape(of_a, self.tensors[of_a], (experts * rank, inner))
        check_shape(of_b, self.tensors[of_b], (outer, rank * experts))
        # A has the expert slowest, B the expert fastest
        a = self.tensors[of_a].reshape(experts, rank, inner)
        b = self.tensors[of_b].reshape(outer, rank, experts).transpose(2, 1, 0)
        if self.own.is_swapped:
            a, b = b, a
        return LowRank(a.swapaxes(1, 2), b, self.settings.scale(name, rank))

    def _of_modules(self, present: set[str], layer: int) -> dict[str, LowRank]:
        block, expected, terms = self.own.block_name(layer), set[str](), {}
        for param in _FUSED:
            parts = [name.removesuffix(".weight") for name in self.own.tensors[param].names if "{e}" in name]
            modules = {
                part: [block + part.replace("{e}", str(expert)) for expert in range(self.shapes[param][0])]
                for part in parts
            }
            there = [part for part in parts if any(name in present for of in modules[part] for name in pair_of(of))]
            own = [module for part in there for module in modules[part]]
            expected |= {name for module in own for name in pair_of(module)}
            if there and expected <= present:
                terms[param] = self._of_module(param, block, parts, there, own)
        self._check_names(present, expected, layer)
        return terms

    def _of_module(self, param: str, block: str, parts: list[str], there: list[str], modules: list[str]) -> LowRank:
        """Returns the term of some of a parameter's parts; that of one part is zero in the columns of the others."""
        ranks = {self.settings.rank(module) for module in modules}
        scales = {self.settings.scale(module, rank) for rank in ranks for module in modules}
        check(
            len(ranks) == len(scales) == 1,
            f"The experts' modules {there} of {block} must have one rank and one lora_alpha in {self.settings.where}, "
            f"got ranks {sorted(ranks)} and scales {sorted(scales)}.",
        )
        (rank,), (scale,) = ranks, scales
        experts, rows, columns = self.shapes[param]
        width = columns // len(parts)
        a, own = (
            dataclasses.replace(
                self.own.tensors[param], names=tuple(f"{_PREFIX}{block}{part}.lora_{factor}.weight" for part in there)
            ).filled("", (experts, *shape), self.tensors.__getitem__)
            for factor, shape in (("A", (rows, len(there) * rank)), ("B", (rank, len(there) * width)))
        )
        b = np.zeros((experts, len(there), rank, len(parts), width), own.dtype)
        for index, part in enumerate(there):
            b[:, index, :, parts.index(part)] = own[..., index * width : (index + 1) * width]
        self.modules.extend(modules)
        return LowRank(a, b.reshape(experts, len(there) * rank, columns), scale)


def _flat(low_rank: LowRank, is_swapped: bool) -> Iterator[np.ndarray]:
    """Yields lora_A and lora_B of a fused parameter: A has the expert slowest, B the expert fastest."""
    a, b = np.asarray(low_rank.a).swapaxes(1, 2), np.asarray(low_rank.b)  # both [E, r, features]
    if is_swapped:
        a, b = b, a
    yield np.ascontiguousarray(a.reshape(-1, a.shape[2]))
    yield np.ascontiguousarray(b.transpose(2, 1, 0).reshape(b.shape[2], -1))


def pair_of(place: str) -> tuple[str, str]:
    """The names of the two tensors of a module's adapter."""
    return f"{_PREFIX}{place}.lora_A.weight", f"{_PREFIX}{place}.lora_B.weight"


def _places(own: Family, layer: int, targeted: list[str]) -> Iterator[tuple[str, str]]:
    """Yields each parameter with the module that holds its adapter: PEFT wraps the experts once for each parameter."""
    for index, param in enumerate(targeted, 1):
        yield param, own.fused_name(layer) + ".base_layer" * (len(targeted) - index)


def _names_of_parameters(own: Family, layer: int) -> dict[str, str]:
    """The names of a layer's fused parameters in transformers 5."""
    return {param: f"{own.fused_name(layer)}.{name}" for param, name in _FUSED.items()}


def _pattern_of_experts(own: Family) -> re.Pattern[str]:
    """A pattern of the beginning of experts' tensors in PEFT's file, with the layer's index as its group."""
    blocks = {own.block, own.fused_block or own.block}
    roots = {"experts"} | {name.partition(".")[0] for param in _FUSED for name in own.tensors[param].names}
    choices = (f"(?:{'|'.join(map(re.escape, sorted(names)))})" for names in (blocks, roots))
    return re.compile(re.escape(f"{_PREFIX}{own.prefix}layers.") + r"(\d+)\." + r"\.".join(choices) + r"\.")


def _module_of(name: str) -> str:
    """The module that a tensor's adapter is of, without PEFT's wrappers."""
    return name.removeprefix(_PREFIX).partition(".lora_")[0].replace(".base_layer", "")
