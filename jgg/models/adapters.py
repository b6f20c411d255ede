"""Writes a model's LoRA adapters into PEFT's format, and reads them from it; the experts' by `jgg.hf`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgg.core.arguments import check, check_instance
from jgg.experts.lora import Lora, adapter_names
from jgg.hf import adapters as of_hf
from jgg.hf.adapter_settings import AdapterSettings, as_number
from jgg.hf.files import check_names, check_shape
from jgg.low_rank import LowRank
from jgg.models.decoder import Decoder
from jgg.models.parts import OF_EXPERTS
from jgg.models.tensors import OF_LAYERS, Stack, prefix, stacks


def save_adapter(model: Decoder, folder: str | Path) -> None:
    """Writes a model's LoRA adapters as PEFT does: adapter_config.json and adapter_model.safetensors.

    `PeftModel.from_pretrained` opens the folder with transformers 5: adapters of attention and of dense layers are of
    modules ("target_modules"), those of experts of fused parameters ("target_parameters"). The gate and up projections
    of a dense layer share one a, which is written for both. Arrays are written bit for bit, in their dtype.

    Args:
      model: the model, which has a lora_rank.
      folder: where to write; it is made if it is missing. An adapter that it holds is replaced once both files are
        written.

    Raises:
      ValueError: the model has no adapters.
      TypeError: an argument has the wrong type.
      OSError: the folder cannot be written.
    """
    lora = _lora_of(model)
    layers: dict[int, dict[str, LowRank]] = {}
    others: dict[str, np.ndarray] = {}
    modules: list[str] = []
    parameters: list[str] = []
    for stack in stacks(model):
        values = {name: np.asarray(variable.get_value()) for name, variable in stack.adapters.items()}
        for number in stack.numbers:
            for name in _matrices(stack):
                a, b = (values[part][number - stack.first] for part in adapter_names(name))
                if name in OF_LAYERS:
                    others |= _tensors_of(name, number, a, b)
                    if name.startswith("mlp."):
                        # PEFT takes a target_module "gate_proj" for the experts', whatever precedes it
                        parameters += [f"{module}.weight" for module in _modules(name, number)]
                    else:
                        modules += _modules(name, number)
                else:
                    term = LowRank(a, b, _scale(lora))
                    layers.setdefault(number, {})[name.removeprefix("moe.")] = term
    settings = {
        "r": lora.rank, "lora_alpha": as_number(lora.alpha or 0.0), "target_modules": modules,
        "target_parameters": parameters,
    }  # fmt: skip
    of_hf.save_adapter(folder, model.config.hf, of_hf.Adapter(layers, others, settings))


def load_adapter(model: Decoder, folder: str | Path) -> None:
    """Sets a model's LoRA adapters to those of a folder that PEFT or `save_adapter` wrote, and keeps their dtype.

    The folder must have an adapter for each matrix that the model has one for, and no other, of the model's rank and
    scale: load the model with the lora_rank, lora_alpha and lora_targets of the folder. Those of experts are read as by
    `jgg.hf.load_adapter`. Dropout is not applied. If something is wrong, nothing is set.

    Args:
      model: the model, which has a lora_rank.
      folder: the adapter's folder.

    Raises:
      FileNotFoundError: the folder or a file is missing.
      ValueError: the model has no adapters; a file is damaged; a tensor is missing, is not expected or has a wrong
        shape; a rank or a scale is not the model's; the gate and up projections of a dense layer have different lora_A;
        or the adapter is more than low-rank terms, as with DoRA, biases or modules_to_save. The message names the file
        and the key or tensor.
      TypeError: an argument or a setting has the wrong type.
    """
    lora, folder = _lora_of(model), Path(folder)
    adapter = of_hf.load_adapter(folder, model.config.hf)
    settings = AdapterSettings(str(folder / of_hf.SETTINGS), adapter.settings)
    where = f"in {folder / of_hf.TENSORS}, beside the matrices with adapters of the model, lora_targets {lora.targets}"
    check_names(adapter.others.keys(), set(_names_of_modules(model)), where)
    matrices = {
        f"{param} of layer {number}": (number, param)
        for number, terms in adapter.layers.items()
        for param in terms
    }  # fmt: skip
    check_names(matrices.keys(), set(_names_of_experts(model)), where)
    new = [(stack, _Reader(lora, settings, adapter).stacked(stack)) for stack in stacks(model)]
    for stack, arrays in new:
        for name, variable in stack.adapters.items():
            _set(variable, arrays[name])


def _lora_of(model: Decoder) -> Lora:
    check_instance("model", model, Decoder, "a jgg.models.Decoder")
    check(model.options.lora.rank is not None, "model must have LoRA adapters, of a lora_rank, got a model without.")
    return model.options.lora


def _scale(lora: Lora) -> float:
    assert lora.alpha is not None and lora.rank is not None
    return lora.alpha / lora.rank


def _matrices(stack: Stack) -> Iterator[str]:
    """The names of a stack's matrices that have adapters, those of experts as "moe.NAME", w_gate_up before w_down."""
    names = {name.removesuffix("_lora_a") for name in stack.adapters if name.endswith("_lora_a")}
    experts = [f"moe.{name}" for name in OF_EXPERTS if f"moe.{name}" in names]
    yield from [name for name in OF_LAYERS if name in names]
    yield from experts


def _names_of_modules(model: Decoder) -> Iterator[str]:
    """The names of all tensors of modules with adapters."""
    for stack in stacks(model):
        for name in OF_LAYERS.keys() & set(_matrices(stack)):
            for number in stack.numbers:
                for module in _modules(name, number):
                    yield from of_hf.pair_of(module)


def _names_of_experts(model: Decoder) -> Iterator[str]:
    """The experts' matrices with adapters, as messages name them."""
    for stack in stacks(model):
        for name in set(_matrices(stack)) - OF_LAYERS.keys():
            yield from (f"{name.removeprefix('moe.')} of layer {number}" for number in stack.numbers)


def _modules(name: str, number: int) -> list[str]:
    """The modules of transformers that a matrix of a layer is of, in the order of its columns."""
    return [prefix(number) + part.removesuffix(".weight") for part in OF_LAYERS[name].names]


def _tensors_of(name: str, number: int, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a matrix's adapter, a [K, r] and b [r, N]: lora_A [r, K] and lora_B [columns, r] of modules."""
    of_a, of_b = zip(*map(of_hf.pair_of, _modules(name, number)), strict=True)
    parts = replace(OF_LAYERS[name], names=of_b).parts("", b)
    return dict.fromkeys(of_a, np.ascontiguousarray(a.T)) | {part: np.ascontiguousarray(own) for part, own in parts}


class _Reader:
    """Reads the adapters of a stack's matrices from what `jgg.hf` read; raises unless they fit the model."""

    def __init__(self, lora: Lora, settings: AdapterSettings, adapter: of_hf.Adapter) -> None:
        self.lora, self.settings, self.adapter = lora, settings, adapter

    def stacked(self, stack: Stack) -> dict[str, np.ndarray]:
        """The values of the stack's adapters by name."""
        variables, arrays = stack.adapters, dict[str, np.ndarray]()
        for name in _matrices(stack):
            of_a, of_b = adapter_names(name)
            shapes = variables[of_a].shape[1:], variables[of_b].shape[1:]
            pairs = [self._of_matrix(name, number, *shapes) for number in stack.numbers]
            arrays[of_a], arrays[of_b] = (np.stack(parts) for parts in zip(*pairs, strict=True))
        return arrays

    def _of_matrix(
        self, name: str, number: int, shape_a: tuple[int, ...], shape_b: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """a and b of a layer's matrix."""
        if name not in OF_LAYERS:
            own = name.removeprefix("moe.")
            term = self.adapter.layers[number][own]
            self._check(f"{own} of layer {number}", term.a.shape[2], term.scale)
            return np.asarray(term.a), np.asarray(term.b)
        modules, tensors = _modules(name, number), self.adapter.others
        for module in modules:
            rank = self.settings.rank(module)
            self._check(module, rank, self.settings.scale(module, rank))
        of_a, of_b = zip(*map(of_hf.pair_of, modules), strict=True)
        for part in of_a:
            check_shape(part, tensors[part], shape_a[::-1])
            is_same = tensors[part].tobytes() == tensors[of_a[0]].tobytes()
            check(is_same, f"{part} must be equal to {of_a[0]}, as the model has one a for both, got another.")
        b = replace(OF_LAYERS[name], names=of_b).filled("", shape_b, tensors.__getitem__)
        return tensors[of_a[0]].T, b

    def _check(self, what: str, rank: int, scale: float) -> None:
        """Raises unless a rank and a scale are the model's."""
        where = self.settings.where
        check(
            rank == self.lora.rank,
            f"r of {what} in {where} must be the model's lora_rank {self.lora.rank}, got {rank}.",
        )
        wanted = _scale(self.lora)
        is_same = np.isclose(scale, wanted, rtol=1e-12, atol=0)
        check(
            is_same,
            f"the scale of {what} in {where} must be the model's lora_alpha / lora_rank, {wanted}, got {scale}.",
        )


def _set(variable: Any, array: np.ndarray) -> None:
    """Sets a variable, and keeps its dtype and sharding."""
    value = variable.get_value()
    placement = value.sharding if value.committed else None
    variable.set_value(jax.device_put(array.astype(value.dtype), placement))
