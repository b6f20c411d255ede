"""Reads a whole model from a Hugging Face folder, one parameter of one layer at a time."""

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jgg.core.arguments import as_flag, check, check_instance
from jgg.core.choices import EXPERTS, MXFP4, OF_EXPERTS, TARGETS
from jgg.core.mxfp4 import GROUP
from jgg.core.quantized import QuantizedArray, WeightForms
from jgg.core.terminal import rich_console
from jgg.experts.sharding import MoESharding
from jgg.hf.checkpoints import Checkpoint, UnreadCheckpoint, read_config, read_params
from jgg.hf.family import FREQUENCIES, Family
from jgg.hf.files import DTYPES, Header, check_names, errors_with
from jgg.hf.hub import folder_of
from jgg.hf.quantized import QuantizedTensors, quantization
from jgg.linear.fp8 import Fp8, quantize_mxfp4, quantize_weights
from jgg.linear.lora import adapter_init, target_of
from jgg.models.config import ModelConfig, model_config
from jgg.models.decoder import Decoder
from jgg.models.left_out import LeftOut
from jgg.models.placement import place, put, spec_of, split_init
from jgg.models.tensors import Stack, ends, expected_shapes, module_of, stacks
from jgg.nnx import Frozen

type Param = jax.Array | QuantizedArray | WeightForms

# what `experts` of `load` is by the names that commands have
EXPERTS_BY_NAME: dict[str, str | Fp8] = dict(zip(EXPERTS, ("dense", "as stored", Fp8(), MXFP4), strict=True))


def load(
    folder: str | Path,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    param_dtype: DTypeLike | None = None,
    experts: str | Fp8 = "dense",
    remat: str = "none",
    unroll: int = 1,
    lora_rank: int | tuple[int, ...] | None = None,
    lora_alpha: float | tuple[float, ...] | None = None,
    lora_targets: tuple[str, ...] = TARGETS,
    lora_param_dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
    batch_invariant: bool = False,
    sharding: MoESharding | None = None,
    rngs: nnx.Rngs | None = None,
    show_progress: bool = True,
    abstract: bool = False,
) -> Decoder:
    """Loads a model from a folder with config.json and safetensors files, as Hugging Face's transformers writes them.

    A Hugging Face Hub name, "owner/model", is fetched by `jgg.hf.download`, unless a folder with this path exists.

    Experts may be stored one by one, as in published checkpoints, or together, as transformers 5 has them in memory. As
    in transformers, model.safetensors takes precedence over an index next to it. Also as in transformers, `load` does
    not read the frequencies of rotary embeddings, a copy of a tied head, layers that predict further tokens, and vision
    and audio towers; `save` copies the last two and the tokenizer's files. FP8 matrices outside the experts are
    dequantized to bfloat16.

    The headers of all files are checked before any tensor is read. Host memory holds one parameter of one layer at a
    time. With a sharding, each device gets only its own shards, except that experts are quantized on one device, one
    parameter of one layer at a time. If there are several processes, each reads the whole folder.

    Args:
      folder: the folder, or the model's name on the Hub.
      dtype: dtype of the computation.
      param_dtype: dtype of the matrices, by default `dtype`. Routers, norms and other vectors that are stored in a
        wider dtype keep it; a router's selection bias is at least float32.
      experts: "dense": in param_dtype, even if the folder has them quantized. "as stored": quantized if they are
        quantized in the folder. A `jgg.Fp8`: quantized while loading, and multiplied in FP8. "mxfp4": quantized by
        `jgg.quantize_mxfp4` while loading unless the folder has MXFP4, and multiplied in `dtype`. Quantized experts
        are `jgg.nnx.Frozen`.
      remat, unroll, lora_rank, lora_alpha, lora_targets, lora_param_dtype, implementation, batch_invariant, sharding:
        as in `jgg.models.Decoder`.
      rngs: random number generators for new LoRA adapters, by default `nnx.Rngs(0)`.
      show_progress: whether to show a progress bar on stderr, if that is a terminal.
      abstract: return the model without values, as from `nnx.eval_shape`: its variables hold jax.ShapeDtypeStructs of
        the shapes and dtypes that loading gives. Only config.json and the headers are read.

    Raises:
      FileNotFoundError: the folder, config.json or a file of tensors is missing, or the Hub has no such model.
      PermissionError, ConnectionError, ImportError: the model cannot be fetched, as `jgg.hf.download` says.
      ValueError: `jgg.models.model_config` does not accept config.json; a file is damaged or is a pipe, or the index
        leads out of the folder; experts is "mxfp4" and their sizes are no multiples of 32; abstract is True with a
        sharding; or a tensor is missing, is not expected, has a wrong shape or does not hold floats. The message names
        the file and the key or tensor.
    """
    abstract = as_flag("abstract", abstract)
    check(not abstract or sharding is None, "abstract must be False with a sharding, got True.")
    is_known = experts in ("dense", "as stored", MXFP4) if isinstance(experts, str) else isinstance(experts, Fp8)
    check(is_known, f"experts must be 'dense', 'as stored', 'mxfp4' or a jgg.Fp8, got {experts!r}.")
    folder = folder_of(folder)
    checkpoint, content = (UnreadCheckpoint if abstract else Checkpoint)(folder), read_config(folder)
    with errors_with(checkpoint.path / "config.json"):
        config = model_config(content)
    if experts == MXFP4:
        for name in OF_EXPERTS:
            rows = config.moe.shapes[name][-2]
            check(rows % GROUP == 0, f"experts='mxfp4' needs a multiple of {GROUP} rows of {name}, got {rows}.")
    checkpoint = _with_own_names(checkpoint, config.family)
    config = _tied_as_stored(config, checkpoint)
    config = dataclasses.replace(config, name=_name_of(folder))
    rngs = nnx.Rngs(0) if rngs is None else rngs
    check_instance("rngs", rngs, nnx.Rngs, "an nnx.Rngs or None")
    param_dtype = dtype if param_dtype is None else param_dtype
    show_progress = as_flag("show_progress", show_progress)
    create = functools.partial(
        Decoder,
        config,
        dtype=dtype,
        param_dtype=param_dtype,
        remat=remat,
        unroll=unroll,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        quantization=experts if isinstance(experts, Fp8) else None,
        lora_targets=lora_targets,
        lora_param_dtype=lora_param_dtype,
        implementation=implementation,
        batch_invariant=batch_invariant,
        sharding=sharding,
    )
    model = nnx.eval_shape(lambda: create(rngs=nnx.Rngs(0)))
    reader = _Reader(model, checkpoint, experts)
    model.config = dataclasses.replace(config, left_out=reader.left_out)
    for name, value in reader.ends():
        getattr(model, name).set_value(value)
    if abstract:
        for stack in stacks(model):
            _describe(stack, reader)
        return model
    with _progress(config.num_layers, show_progress) as advance:
        for stack in stacks(model):
            _fill(stack, reader, advance)
    _create_adapters(model, rngs)
    return model


def _with_own_names(checkpoint: Checkpoint, own: Family) -> Checkpoint:
    """The checkpoint with the names that the family writes."""
    other = own.other_prefix
    if other is None or not any(name.startswith(other) for name in checkpoint):
        return checkpoint
    return checkpoint.renamed(other, own.prefix)


def _tied_as_stored(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """The config, but not tied if the folder has a head that differs from the embedding, as transformers reads it."""
    embedding, head = (config.family.ends[name].names[0] for name in ("w_embedding", "w_head"))
    if not config.is_tied or embedding not in checkpoint or head not in checkpoint:
        return config
    return dataclasses.replace(config, is_tied=np.array_equal(checkpoint[embedding], checkpoint[head]))


def _name_of(folder: str | Path) -> str:
    """What transformers finds the model of a folder by: its name on the Hub for a folder in the Hub's cache."""
    *_, repository, kind, _ = "", "", "", *Path(folder).parts
    if kind == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return os.path.abspath(folder)


@contextlib.contextmanager
def _progress(num_layers: int, is_shown: bool) -> Iterator[Callable[[], None]]:
    """Shows a progress bar on stderr, if that is a terminal; yields the function to call after each layer."""
    from rich.progress import MofNCompleteColumn, Progress

    console = rich_console(stderr=True)
    columns = *Progress.get_default_columns()[:2], MofNCompleteColumn()
    with Progress(*columns, console=console, disable=not (is_shown and console.is_terminal), transient=True) as bar:
        task = bar.add_task("Loading layers", total=num_layers)
        yield lambda: bar.advance(task)


class _Reader:
    """Reads parameters from a folder; raises unless its tensors are those that the model has."""

    def __init__(self, model: Decoder, checkpoint: Checkpoint, experts: str | Fp8) -> None:
        self.model, self.checkpoint, self.experts = model, checkpoint, experts
        with errors_with(checkpoint.path / "config.json"):
            how = quantization(model.config.hf)
        self.quantized = None if how is None else QuantizedTensors(checkpoint, how)
        self.tensors: Mapping[str, np.ndarray] = checkpoint if self.quantized is None else self.quantized
        self.left_out = self._left_out(self._check(checkpoint.headers()))

    def _check(self, headers: Mapping[str, Header]) -> set[str]:
        """Returns the names of the model's tensors."""
        tensors, where = self.tensors, f"in {self.checkpoint.path}, a {self.model.config.model_type} model"
        names = (name for name, _ in expected_shapes(self.model, tensors))
        check_names(tensors.keys(), names, where, functools.partial(self._is_ignored, headers))
        shapes = dict(expected_shapes(self.model, tensors))
        for name, shape in shapes.items():
            if self.quantized is not None:
                self.quantized.check(name, shape, headers)
                if name in self.quantized.names:
                    continue
            what, got = f"{name} of {self.checkpoint.path_of(name)}", headers[name]
            check(got.shape == shape, f"{what} must have shape {list(shape)}, got {list(got.shape)}.")
            check(got.dtype in DTYPES, f"{what} must have one of the dtypes {DTYPES}, got {got.dtype}.")
        return set(shapes)

    def _is_ignored(self, headers: Mapping[str, Header], name: str) -> bool:
        """Whether a tensor may be there though the model does not use it."""
        config, own = self.model.config, self.model.config.family
        if name in headers and 0 in headers[name].shape:  # of 0 shared experts
            return True
        if self._is_copy(name) or any(re.search(pattern, name) for pattern in own.ignored):
            return True
        layer = re.match(re.escape(own.prefix) + r"layers\.(\d+)\.", name)
        return layer is not None and 0 <= int(layer[1]) - config.num_layers < config.num_further_layers

    def _is_copy(self, name: str) -> bool:
        """Whether a tensor repeats what is stored elsewhere: the embedding, or the frequencies in config.json."""
        config = self.model.config
        is_head = config.is_tied and name in config.family.ends["w_head"].names
        return is_head or re.search(FREQUENCIES, name) is not None

    def _left_out(self, own: Set[str]) -> LeftOut | None:
        """What `save` copies, where the model's tensors are `own`."""
        found = [name for name in self.tensors if name not in own and not self._is_copy(name)]
        if self.quantized is not None:
            found = [part for name in found for part in self.quantized.stored_names(name)]
        return LeftOut.of(self.checkpoint.path, found)

    def ends(self) -> Iterator[tuple[str, Param]]:
        """Yields the parameters outside the layers."""
        for name, tensor in ends(self.model, self.tensors):
            shape = getattr(self.model, name).shape
            yield name, self._placed(name, tensor.filled("", shape, self.tensors.__getitem__))

    def layer(self, stack: Stack, number: int) -> Iterator[tuple[str, Param]]:
        """Yields each of a layer's parameters when it is read, with the name of the stack's variable."""
        of_layer, block = stack.tensors, stack.family.layer_name(number)
        for name, variable in stack.variables.items():
            if name in of_layer:
                value = of_layer[name].filled(block, variable.shape[1:], self.tensors.__getitem__)
                yield name, self._placed(name, value)
        if hasattr(stack.layers, "moe"):
            has_mxfp4 = self.quantized is not None and self.quantized.how.is_packed
            keeps = OF_EXPERTS if self.experts == "as stored" or (self.experts == MXFP4 and has_mxfp4) else ()
            for name, param in read_params(self.model.config.hf, self.checkpoint, number, keeps):
                yield f"moe.{name}", self._placed(f"moe.{name}", param)

    def _placed(self, name: str, value: np.ndarray | QuantizedArray) -> Param:
        """A parameter on its devices, as `load` says it is stored; only its shapes and dtypes if nothing is read."""
        own, options = name.rpartition(".")[2], self.model.options
        stored = functools.partial(self._stored, own)
        if isinstance(self.checkpoint, UnreadCheckpoint):
            described: Param = jax.eval_shape(stored, value)
            return described
        param = stored(value)
        if options.sharding is None or isinstance(param, WeightForms):
            placed: Param = jax.device_put(param)
            return placed
        spec = spec_of(tuple(name.split(".")), param.shape, options.sharding)
        options.sharding.check_split(name, param, spec)
        return jax.tree.map(functools.partial(put, place=options.sharding.named(spec)), param)

    def _stored(self, own: str, value: np.ndarray | QuantizedArray) -> np.ndarray | QuantizedArray | WeightForms:
        """A parameter of a name of its own as `load` says that it is stored: its dtype, and how it is quantized."""
        options = self.model.options
        if not isinstance(value, QuantizedArray):
            value = self._cast(own, value)
            is_of_experts = own in OF_EXPERTS and value.ndim == 3
            if self.experts == MXFP4 and is_of_experts:
                value = quantize_mxfp4(jnp.asarray(value))
            if isinstance(self.experts, Fp8) and is_of_experts:
                value = quantize_weights(jnp.asarray(value), power_of_2_scales=self.experts.power_of_2_scales)
                if options.batch_invariant and options.sharding is None:  # all that `put_forms` would make of it
                    return WeightForms(None, value.mT)
        return value

    def _cast(self, name: str, value: np.ndarray) -> np.ndarray:
        dtype = jnp.dtype(jnp.float32 if name == "selection_bias" else self.model.options.param_dtype)
        is_vector = name == "w_router" or not name.startswith("w_")
        stays = is_vector and value.dtype.itemsize > dtype.itemsize
        return value if stays else value.astype(dtype, copy=False)


def _fill(stack: Stack, reader: _Reader, advance: Callable[[], None]) -> None:
    """Reads the stacked layers' parameters, layer after layer."""
    sharding = reader.model.options.sharding
    stacked: dict[str, Param] = {}
    count = stack.plan.count
    for index, number in enumerate(stack.plan.numbers):
        for name, value in reader.layer(stack, number):
            shape, where = (count, *value.shape), None
            if sharding is not None:
                where = place(tuple(name.split(".")), shape, sharding, is_stacked=True)
            if name in stacked:
                _check_dtypes(name, stacked[name], value, number)
            stacked[name] = _with_layer(stacked.get(name), value, index, count=count, where=where)
        advance()
    for name, value in stacked.items():
        _set(stack, name, value)


def _describe(stack: Stack, reader: _Reader) -> None:
    """Sets the stacked layers' parameters to their shapes and dtypes, by the headers of the first layer."""
    count = stack.plan.count
    for name, value in reader.layer(stack, stack.plan.numbers[0]):
        _set(stack, name, jax.tree.map(lambda part: jax.ShapeDtypeStruct((count, *part.shape), part.dtype), value))


def _set(stack: Stack, name: str, value: Param) -> None:
    """Sets a parameter of stacked layers."""
    path = name.split(".")
    module, own = module_of(stack.layers, path), path[-1]
    if isinstance(value, QuantizedArray | WeightForms):
        setattr(module, own, Frozen(value))
    else:
        getattr(module, own).set_value(value)


def _check_dtypes(name: str, stacked: object, layer: object, number: int) -> None:
    is_alike = isinstance(stacked, QuantizedArray) == isinstance(layer, QuantizedArray)
    what = f"{name} of layer {number} must be quantized or unquantized like the first layer's"
    check(is_alike, f"{what}: load the model with experts='dense' or a jgg.Fp8.")
    for whole, part in zip(jax.tree.leaves(stacked), jax.tree.leaves(layer), strict=True):
        check(
            part.dtype == whole.dtype,
            f"{name} of layer {number} must have the dtype of its first layer, {whole.dtype}, got {part.dtype}.",
        )


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("count", "where"))
def _with_layer[Arrays](
    stacked: Arrays | None, layer: Arrays, index: int, *, count: int, where: jax.NamedSharding | None
) -> Arrays:
    """Arrays of `count` layers with a layer's at an index; in place, as the memory of `stacked` is used again.

    If `stacked` is None, the arrays are new, and no device has more than its part of them.
    """
    if stacked is None:
        stacked = jax.tree.map(lambda part: jnp.zeros((count, *part.shape), part.dtype), layer)
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
    result = jax.tree.map(put, stacked, layer)
    return result if where is None else jax.lax.with_sharding_constraint(result, where)


def _create_adapters(model: Decoder, rngs: nnx.Rngs) -> None:
    """Creates the LoRA adapters of a model that `nnx.eval_shape` made."""
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        names, shape = tuple(map(str, path)), variable.shape
        w = getattr(module_of(model, path), target_of(names[-1])).get_value()
        init = split_init(adapter_init(names[-1], w), names, shape, model.options.sharding, is_stacked=True)
        adapter = init(rngs.params(), shape, model.options.lora_param_dtype)
        getattr(module_of(model, path), names[-1]).set_value(adapter)
