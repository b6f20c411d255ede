"""Writes a model's LoRA adapters in PEFT's format, and loads such a folder into a model."""

import collections
import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from jgg.core.arguments import as_flag, as_path, check, check_instance
from jgg.core.choices import OF_MIXERS
from jgg.hf import adapters as of_hf
from jgg.hf.adapter_experts import padded, pair_of, rescaled
from jgg.hf.adapter_settings import as_number, new_settings
from jgg.linear.lora import Lora, adapter_names
from jgg.linear.low_rank import LowRank
from jgg.models.decoder import Decoder
from jgg.models.modules import Options
from jgg.models.placement import on_host, place, put
from jgg.models.read_adapters import Found, read_terms
from jgg.models.tensors import Matrix, matrices


def save_adapter(model: Decoder, folder: str | Path, *, by_expert: bool = False) -> None:
    """Writes a model's LoRA adapters as PEFT does: adapter_config.json and adapter_model.safetensors.

    `PeftModel.from_pretrained` loads the folder with transformers 5. Adapters of attention and of recurrent layers are
    written for modules ("target_modules"), all others for parameters ("target_parameters"). The gate and up projections
    of a dense layer share one a, which is written for both. Arrays are written bit for bit, in their dtype. Layers
    whose a and b are zero are left out, and so are ranks whose column of a and row of b are zero, which `load_adapter`
    may have added. "base_model_name_or_path", where `AutoPeftModelForCausalLM` finds the model, is `model.config.name`.

    If a model is split over the devices of several processes, all of them must call this: process 0 writes, and all
    return once the folder is complete.

    Args:
      model: the model, which has a lora_rank.
      folder: where to write; created if missing. An adapter in it is replaced once both new files are written.
      by_expert: whether to write adapters of experts as modules of each expert, named as in published checkpoints, with
        one rank (padded with zeros) and one scale for all terms. vLLM, SGLang and `load_adapter` read this form. PEFT
        does not read all of it: it ignores the experts of Hunyuan V3, Qwen2-MoE and Qwen3.5, and, in all families
        except Mixtral, MiniMax-M2, OLMoE and Qwen3-MoE, the dense layers and shared experts, whose modules have the
        same names as the experts'. A UserWarning says so.

    Raises:
      ValueError: the model has no adapters; or, with by_expert, its family has no modules for each expert.
      TypeError: an argument has the wrong type.
      OSError: the folder cannot be written.
    """
    check_instance("model", model, Decoder, "a jgg.models.Decoder")
    check(model.options.lora.rank is not None, "model must have LoRA adapters, of a lora_rank, got a model without.")
    folder = as_path("folder", folder)
    if as_flag("by_expert", by_expert):
        write = functools.partial(of_hf.write_adapter, folder, *_by_module(model))
    else:
        write = functools.partial(of_hf.save_adapter, folder, model.config.hf, _by_parameter(model))
    is_shared = not model.w_embedding[...].is_fully_addressable
    if not is_shared or jax.process_index() == 0:
        write()
    if is_shared:
        multihost_utils.sync_global_devices("jgg.models.save_adapter: the folder is there")


def _by_parameter(model: Decoder) -> of_hf.Adapter:
    """The adapter whose terms of experts are of parameters, and all others of modules."""
    layers: dict[int, dict[str, LowRank]] = {}
    others: dict[str, np.ndarray] = {}
    of_modules: dict[str, tuple[int, float]] = {}  # rank and alpha by the name of a module or parameter
    of_experts: list[tuple[int, float]] = []
    for matrix, number, term in _terms(model):
        rank = term.a.shape[-1]
        own = rank, as_number(term.scale * rank)
        if matrix.is_of_experts:
            layers.setdefault(number, {})[matrix.target] = term
            of_experts.append(own)
        else:
            modules = matrix.modules[number]
            others |= _tensors_of(modules, term)
            # PEFT takes a target_module "gate_proj" for the experts', whatever precedes it
            ending = "" if matrix.target in OF_MIXERS else ".weight"
            of_modules |= dict.fromkeys([module + ending for module in modules], own)
    settings = _settings(of_modules, of_experts) | {"base_model_name_or_path": model.config.name}
    return of_hf.Adapter(layers, others, settings)


def _by_module(model: Decoder) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """The settings and the tensors of an adapter that has modules alone, with one rank and one scale."""
    terms = list(_terms(model))
    rank = max((term.a.shape[-1] for *_, term in terms), default=1)
    scale = terms[0][2].scale if terms else 1.0
    tensors: dict[str, np.ndarray] = {}
    for matrix, number, term in terms:
        own = padded(rescaled(term, scale), rank)
        if matrix.is_of_experts:
            for expert, (a, b) in enumerate(zip(own.a, own.b, strict=True)):
                modules = of_hf.modules_of_expert(model.config.hf, number, matrix.target, expert)
                check(bool(modules), f"model must have modules for each expert, got {model.config.model_type}.")
                tensors |= _tensors_of(modules, LowRank(a, b, scale))
        else:
            tensors |= _tensors_of(matrix.modules[number], own)
    written = {name.partition(".lora_")[0] for name in tensors}
    left_out = of_hf.left_out_by_peft(model.config.hf, written)
    if left_out:
        warnings.warn(
            f"PEFT leaves out the adapters of {left_out} from what by_expert=True writes for "
            f"{model.config.model_type}; for PEFT, save the adapter without by_expert.",
            stacklevel=3,
        )
    settings = {
        "base_model_name_or_path": model.config.name,
        "target_modules": sorted({module.rpartition(".")[2] for module in written}),
    }
    return dict(new_settings("settings", settings, {"": (rank, scale)}).values), tensors


def _settings(of_modules: dict[str, tuple[int, float]], of_experts: Sequence[tuple[int, float]]) -> dict[str, object]:
    """The settings of modules and parameters with these ranks and alphas: r and lora_alpha are the commonest."""
    pairs = collections.Counter([*of_modules.values(), *of_experts])
    rank, alpha = max(pairs, key=pairs.__getitem__, default=(1, 1.0))
    return {
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": [name for name in of_modules if not name.endswith(".weight")],
        "target_parameters": [name for name in of_modules if name.endswith(".weight")],
        "rank_pattern": {re.escape(name): own for name, (own, _) in of_modules.items() if own != rank},
        "alpha_pattern": {re.escape(name): own for name, (_, own) in of_modules.items() if own != alpha},
    }


def load_adapter(model: Decoder, folder: str | Path) -> None:
    """Replaces a model's LoRA adapters with those in a folder that PEFT or `save_adapter` wrote.

    The model need not have adapters before. It takes the folder's targets, ranks and scales, with adapters in
    `lora_param_dtype`. Adapters of experts are read as in `jgg.hf.load_adapter`; dropout is not applied. As in PEFT,
    names in target_modules that the model lacks are ignored. If anything is wrong, the model stays unchanged.

    A target has one rank and one scale in all layers. Where the folder's differ between layers, for example because of
    rank_pattern or layers_to_transform, the rank is the largest. Layers with a smaller rank have zeros in the rest of a
    and b, where gradients are zero too. The scale is the first layer's; in other layers, b makes up for the difference.

    Args:
      model: the model.
      folder: the adapter's folder.

    Raises:
      FileNotFoundError: the folder or a file is missing.
      ValueError: a file is damaged; a tensor is missing, is not expected or has a wrong shape; or the adapter has
        more than low-rank terms, such as DoRA, biases or modules_to_save. The message names the file and the key or
        tensor.
      TypeError: an argument or a setting has the wrong type.
    """
    check_instance("model", model, Decoder, "a jgg.models.Decoder")
    found = read_terms(model, as_path("folder", folder))
    lora = Lora.of_terms((matrix.target, term) for matrix, terms in found for term in terms.values())
    if not _is_same(model, lora):
        _replace_adapters(model, lora)
    _set_terms(model, found)


def _is_same(model: Decoder, lora: Lora) -> bool:
    """Whether the model's adapters have these targets, ranks and scales."""
    own, present = model.options.lora, {matrix.target for matrix in matrices(model)}
    ranks = {target: rank for target, rank in own.ranks.items() if target in present}
    return ranks == lora.ranks and all(
        math.isclose(scale, own.scales[target], rel_tol=1e-12) for target, scale in lora.scales.items()
    )


def _replace_adapters(model: Decoder, lora: Lora) -> None:
    """Sets the options of adapters in the model's modules, and replaces their adapters by new ones without values."""
    own_options = {field.name: getattr(model.options, field.name) for field in dataclasses.fields(Options)}
    del own_options["lora"]
    options = lora.of_a_layer
    new = nnx.eval_shape(lambda: Decoder(model.config, **own_options, **options, rngs=nnx.Rngs(0)))
    for path, module in nnx.iter_modules(new):
        own = functools.reduce(getattr, map(str, path), model)
        for name in [name for name, value in vars(own).items() if isinstance(value, nnx.LoRAParam)]:
            delattr(own, name)
        for name, value in vars(module).items():
            if isinstance(value, nnx.LoRAParam) or name in ("options", *options):
                setattr(own, name, value)


def _set_terms(model: Decoder, found: Found) -> None:
    """Sets the model's adapters to terms that fit its options."""
    scales, sharding = model.options.lora.scales, model.options.sharding
    for matrix, terms in found:
        if matrix.target not in scales:
            continue
        names = adapter_names(matrix.name)
        variables = [matrix.stack.adapters[name] for name in names]
        arrays = [np.zeros(variable.shape, variable.dtype) for variable in variables]
        for number, term in terms.items():
            own, index = rescaled(term, scales[matrix.target]), matrix.stack.plan.numbers.index(number)
            rank = term.a.shape[-1]
            arrays[0][index, ..., :rank], arrays[1][index, ..., :rank, :] = own.a, own.b
        beside = matrix.stack.layers.attention_norm.get_value()
        for name, variable, array in zip(names, variables, arrays, strict=True):
            if sharding is not None:
                value = put(array, place(tuple(name.split(".")), array.shape, sharding, is_stacked=True))
            else:
                value = jax.device_put(array, beside.sharding if beside.committed else None)
            variable.set_value(value)


def _terms(model: Decoder) -> Iterator[tuple[Matrix, int, LowRank]]:
    """Yields each layer's terms, a [.., K, r] and b [.., r, N], without ranks that are zero."""
    for matrix in matrices(model):
        if matrix.target in model.options.lora.scales:
            variables = matrix.stack.adapters
            whole = [on_host(variables[name].get_value()) for name in adapter_names(matrix.name)]
            for index, number in enumerate(matrix.stack.plan.numbers):
                a, b = (array[index] for array in whole)
                is_used = np.any(a, tuple(range(a.ndim - 1))) | np.any(b, (*range(b.ndim - 2), b.ndim - 1))
                if np.any(is_used):
                    term = LowRank(a[..., is_used], b[..., is_used, :], model.options.lora.scales[matrix.target])
                    yield matrix, number, term


def _tensors_of(modules: Sequence[str], term: LowRank) -> dict[str, np.ndarray]:
    """A term's tensors, for a matrix that joins several modules: lora_A [r, K] and lora_B [columns, r] per module."""
    tensors: dict[str, np.ndarray] = {}
    for module, b in zip(modules, np.split(np.asarray(term.b), len(modules), axis=1), strict=True):
        own = (np.ascontiguousarray(factor.T) for factor in (np.asarray(term.a), b))
        tensors |= zip(pair_of(module), own, strict=True)
    return tensors
