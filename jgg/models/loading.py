"""Reads a whole model from a Hugging Face folder, a parameter of a layer at a time."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jgg.core.arguments import check, check_instance
from jgg.core.quantized import QuantizedArray
from jgg.fp8 import Fp8, quantize_weights
from jgg.hf.checkpoints import Checkpoint, read_config, read_params
from jgg.hf.files import check_names
from jgg.hf.quantized import QuantizedTensors, quantization
from jgg.models.config import ModelConfig
from jgg.models.decoder import Decoder
from jgg.models.families import model_config
from jgg.models.parts import OF_EXPERTS, TARGETS, adapter_init
from jgg.models.tensors import ENDS, OF_LAYERS, Stack, expected_shapes, module_of, prefix, stacks
from jgg.nnx import Frozen


def load(
    folder: str | Path, *, dtype: DTypeLike = jnp.bfloat16, param_dtype: DTypeLike | None = None,
    experts: str | Fp8 = "dense", remat: str = "none", lora_rank: int | None = None, lora_alpha: float | None = None,
    lora_targets: tuple[str, ...] = TARGETS, implementation: str | None = None, rngs: nnx.Rngs | None = None,
) -> Decoder:  # fmt: skip
    """Loads a model from a folder with config.json and safetensors files, as Hugging Face's transformers writes them.

    All files' beginnings are checked before anything is read. Host memory holds one parameter of one layer at a time.

    Args:
      folder: the folder.
      dtype: dtype of the computation.
      param_dtype: dtype of the matrices, by default `dtype`. Routers, norms and other vectors keep a wider dtype that
        they are stored in; a router's selection bias is at least float32.
      experts: "dense", in param_dtype, also if the folder has them quantized; "as stored", quantized where the folder
        has them so; or a `jgg.Fp8`, to quantize them as they are loaded and multiply in FP8. Quantized experts are
        `jgg.nnx.Frozen`.
      remat, lora_rank, lora_alpha, lora_targets, implementation: as in `jgg.models.Decoder`.
      rngs: random number generators for new LoRA adapters, by default `nnx.Rngs(0)`.

    Raises:
      FileNotFoundError: the folder, config.json or a file of tensors is missing.
      ValueError: config.json is none that `jgg.models.model_config` takes; a file is damaged, or the index leads out
        of the folder; or a tensor is missing, is not expected or has a wrong shape. The message names file and tensor.
    """
    is_known = experts in ("dense", "as stored") if isinstance(experts, str) else isinstance(experts, Fp8)
    check(is_known, f"experts must be 'dense', 'as stored' or a jgg.Fp8, got {experts!r}.")
    config, checkpoint = model_config(read_config(folder)), Checkpoint(folder)
    rngs = nnx.Rngs(0) if rngs is None else rngs
    check_instance("rngs", rngs, nnx.Rngs, "an nnx.Rngs or None")
    param_dtype = dtype if param_dtype is None else param_dtype
    create = functools.partial(
        Decoder, config, dtype=dtype, param_dtype=param_dtype, remat=remat, lora_rank=lora_rank, lora_alpha=lora_alpha,
        quantization=experts if isinstance(experts, Fp8) else None, lora_targets=lora_targets,
        implementation=implementation,
    )  # fmt: skip
    model = nnx.eval_shape(lambda: create(rngs=nnx.Rngs(0)))
    tensors = _checked(checkpoint, config, expected_shapes(model))
    for name, tensor in ENDS.items():
        if hasattr(model, name):
            variable = getattr(model, name)
            variable.set_value(jnp.asarray(_cast(name, tensor.filled("", variable.shape, tensors.__getitem__), model)))
    for stack in stacks(model):
        _fill(stack, tensors, model, experts)
    _create_adapters(model, rngs)
    return model


def _checked(
    checkpoint: Checkpoint, config: ModelConfig, expected: Mapping[str, tuple[int, ...]]
) -> Mapping[str, np.ndarray]:
    """The folder's tensors, dequantized as they are read; raises unless they are those that the model has."""
    shapes, how = checkpoint.shapes(), quantization(config.hf)
    quantized = None if how is None else QuantizedTensors(checkpoint, how)
    tensors: Mapping[str, np.ndarray] = checkpoint if quantized is None else quantized
    last, further = config.num_layers, config.hf.get("num_nextn_predict_layers") or 0
    ignored = tuple(prefix(number) for number in range(last, last + further))  # they predict further tokens
    present = {name for name in tensors if not name.startswith(ignored)}
    check_names(present, expected.keys(), f"in {checkpoint.path}, a {config.model_type} model")
    for name, shape in expected.items():
        if quantized is None or name not in quantized.names:
            got = list(shapes[name])
            check(got == list(shape), f"{name} of {checkpoint.path_of(name)} must have shape {list(shape)}, got {got}.")
    return tensors


def _fill(stack: Stack, tensors: Mapping[str, np.ndarray], model: Decoder, experts: str | Fp8) -> None:
    """Reads the stacked layers' parameters, layer after layer."""
    stacked: dict[str, Any] = {}
    for number in stack.numbers:
        for name, value in _read_layer(stack, tensors, model, number, experts):
            placed = jax.tree.map(jnp.asarray, _cast(name, value, model))
            if isinstance(experts, Fp8) and name.removeprefix("moe.") in OF_EXPERTS:
                placed = quantize_weights(placed, power_of_2_scales=experts.power_of_2_scales)
            if name not in stacked:
                count = len(stack.numbers)
                stacked[name] = jax.tree.map(lambda part, n=count: jnp.empty((n, *part.shape), part.dtype), placed)
            _check_dtypes(name, stacked[name], placed, number)
            stacked[name] = _with_layer(stacked[name], placed, number - stack.first)
    for name, value in stacked.items():
        path = name.split(".")
        module, own = module_of(stack.layers, path), path[-1]
        if isinstance(value, QuantizedArray):
            setattr(module, own, Frozen(value))
        else:
            getattr(module, own).set_value(value)


def _read_layer(
    stack: Stack, tensors: Mapping[str, np.ndarray], model: Decoder, number: int, experts: str | Fp8
) -> Iterator[tuple[str, Any]]:
    """Yields a layer's parameters in host memory, by the names of the stack's variables."""
    for name, variable in stack.variables.items():
        if name in OF_LAYERS:
            yield name, OF_LAYERS[name].filled(prefix(number), variable.shape[1:], tensors.__getitem__)
    if hasattr(stack.layers, "moe"):
        of_experts = read_params(model.config.hf, tensors, number, keep_quantized=experts == "as stored")
        yield from ((f"moe.{name}", value) for name, value in of_experts)


def _cast(name: str, value: Any, model: Decoder) -> Any:
    """A parameter in the dtype that `load` says."""
    if isinstance(value, QuantizedArray):
        return value
    own, dtype = name.rpartition(".")[2], jnp.dtype(model.options.param_dtype)
    if own == "selection_bias":
        dtype = jnp.dtype(jnp.float32)
    is_vector = own == "w_router" or not own.startswith("w_")
    if is_vector and value.dtype.itemsize > dtype.itemsize:
        return value
    return value.astype(dtype, copy=False)


def _check_dtypes(name: str, stacked: Any, layer: Any, number: int) -> None:
    for whole, part in zip(jax.tree.leaves(stacked), jax.tree.leaves(layer), strict=True):
        check(
            part.dtype == whole.dtype,
            f"{name} of layer {number} must have the dtype of its first layer, {whole.dtype}, got {part.dtype}.",
        )


@functools.partial(jax.jit, donate_argnums=0)
def _with_layer(stacked: Any, layer: Any, index: int) -> Any:
    """Stacked arrays with a layer's at an index; in place, as the memory of `stacked` is used again."""
    return jax.tree.map(lambda whole, part: whole.at[index].set(part), stacked, layer)


def _create_adapters(model: Decoder, rngs: nnx.Rngs) -> None:
    """Creates the LoRA adapters of a model that `nnx.eval_shape` made."""
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        own, shape = str(path[-1]), variable.shape
        adapter = adapter_init(own, shape)(rngs.params(), shape, model.options.param_dtype)
        getattr(module_of(model, path), own).set_value(adapter)
