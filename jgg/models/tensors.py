"""The tensors of a whole model in a Hugging Face folder: their names, shapes and places in a `Decoder`."""

from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

from flax import nnx

from jgg.hf.checkpoints import param_shapes
from jgg.hf.families import FAMILIES
from jgg.hf.tensors import Tensor, as_is, matrix
from jgg.models.decoder import Decoder, Layer
from jgg.models.parts import OF_ATTENTION, OF_DENSE, OF_EXPERTS, OF_MOE

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# parameters of a `Decoder` beside its layers
ENDS = {"w_embedding": as_is(EMBEDDING), "norm": as_is("model.norm.weight"), "w_head": matrix(HEAD)}
# parameters of a `Layer` without experts, each in the module that the first part of its name says
OF_LAYERS = {
    "attention_norm": as_is("input_layernorm.weight"),
    "mlp_norm": as_is("post_attention_layernorm.weight"),
    "attention.q_norm": as_is("self_attn.q_norm.weight"),
    "attention.k_norm": as_is("self_attn.k_norm.weight"),
    "attention.sinks": as_is("self_attn.sinks"),
    "mlp.w_gate_up": matrix("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.w_down": matrix("mlp.down_proj.weight"),
}
OF_LAYERS |= {f"attention.w_{name}": matrix(f"self_attn.{name}_proj.weight") for name in "qkvo"}
OF_LAYERS |= {f"attention.b_{name}": as_is(f"self_attn.{name}_proj.bias") for name in "qkvo"}

# the matrices that may have adapters, by their names in lora_targets
_MATRICES = {name: f"attention.{name}" for name in OF_ATTENTION}
_MATRICES |= {name: f"mlp.{name.replace('_dense', '')}" for name in OF_DENSE}
_MATRICES |= {name: f"moe.{name}" for name in (*OF_MOE, *OF_EXPERTS)}


class Stack(NamedTuple):
    """Layers that are stacked: the module, and the number of the first of them."""

    layers: Layer
    first: int

    @property
    def numbers(self) -> range:
        """The layers' numbers."""
        return range(self.first, self.first + self.layers.attention_norm.shape[0])

    @property
    def variables(self) -> dict[str, nnx.Variable[Any]]:
        """The variables that are no adapters by the names in OF_LAYERS, and those of experts as "moe.NAME"."""
        flat = nnx.to_flat_state(nnx.state(self.layers, nnx.Not(nnx.LoRAParam)))
        return {".".join(map(str, path)): variable for path, variable in flat}

    @property
    def own_names(self) -> list[str]:
        """The names in OF_LAYERS of the variables that the layers have, in a fixed order."""
        variables = self.variables
        return [name for name in OF_LAYERS if name in variables]

    @property
    def adapters(self) -> dict[str, nnx.Variable[Any]]:
        """The variables of the LoRA adapters, by the same names with "_lora_a" or "_lora_b"."""
        flat = nnx.to_flat_state(nnx.state(self.layers, nnx.LoRAParam))
        return {".".join(map(str, path)): variable for path, variable in flat}


def stacks(model: Decoder) -> Iterator[Stack]:
    """The model's stacks in the order of the layers."""
    if model.dense_layers is not None:
        yield Stack(model.dense_layers, 0)
    yield Stack(model.layers, model.config.num_dense_layers)


class Matrix(NamedTuple):
    """A matrix of stacked layers that may have LoRA adapters.

    Attributes:
      target: its name in lora_targets.
      name: the name of its variable in the stack.
      modules: the modules of transformers that it is of, in the order of its columns, for each layer's number; those of
        experts are not named.
    """

    stack: Stack
    target: str
    name: str
    modules: dict[int, list[str]]

    @property
    def is_of_experts(self) -> bool:
        """Whether it has a matrix for each expert, which `jgg.hf` names."""
        return self.target in OF_EXPERTS

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in one layer."""
        return self.stack.variables[self.name].shape[1:]


def matrices(model: Decoder) -> Iterator[Matrix]:
    """The model's matrices that may have adapters."""
    own = FAMILIES[model.config.model_type]
    for stack in stacks(model):
        variables = stack.variables
        for target, name in _MATRICES.items():
            if name in variables:
                modules: dict[int, list[str]] = {}
                for number in stack.numbers:
                    is_of_moe = target in OF_MOE
                    block = own.fused_name(number).removesuffix("experts") if is_of_moe else prefix(number)
                    tensor = (own.tensors | own.fused)[target] if is_of_moe else OF_LAYERS.get(name, Tensor(()))
                    modules[number] = [block + part.removesuffix(".weight") for part in tensor.names]
                yield Matrix(stack, target, name, modules)


def module_of(module: nnx.Module, path: Iterable[Any]) -> Any:
    """The module that the last name of a variable's path is in."""
    *modules, _ = path
    for name in modules:
        module = getattr(module, name)
    return module


def prefix(number: int) -> str:
    """The beginning of the names of a layer's tensors."""
    return f"model.layers.{number}."


def ends(model: Decoder, names: Container[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters beside the layers and the tensors that hold them, in a folder with these names.

    If the head is tied to the embedding, a folder may have only the head.
    """
    for name, tensor in ENDS.items():
        if name == "w_embedding" and model.config.is_tied and EMBEDDING not in names and HEAD in names:
            yield name, as_is(HEAD)
        elif hasattr(model, name):
            yield name, tensor


def expected_shapes(model: Decoder, names: Container[str] = ()) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the names and shapes of all tensors of the model's folder, where they are not quantized.

    Args:
      model: the model.
      names: the names of the tensors that the folder has, which say in which of several ways it stores experts.
    """
    for name, tensor in ends(model, names):
        yield from tensor.shapes("", getattr(model, name).shape)
    own, of_experts = FAMILIES[model.config.model_type], param_shapes(model.config.hf)
    for stack in stacks(model):
        variables, own_names = stack.variables, stack.own_names
        for number in stack.numbers:
            for name in own_names:
                yield from OF_LAYERS[name].shapes(prefix(number), variables[name].shape[1:])
            for name, shape in of_experts.items() if hasattr(stack.layers, "moe") else ():
                block, tensor = own.stored(name, number, names)
                yield from tensor.shapes(block, shape)
