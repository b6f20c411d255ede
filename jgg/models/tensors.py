"""The tensors of a whole model in a Hugging Face folder: their names, shapes and places in a `Decoder`."""

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

import jax
from flax import nnx

from jgg.core.choices import OF_DENSE, OF_EXPERTS, OF_MIXERS, OF_MOE
from jgg.hf.checkpoints import param_shapes
from jgg.hf.family import Family
from jgg.hf.tensors import Tensor, as_is
from jgg.models.decoder import Decoder
from jgg.models.layer import Layer
from jgg.models.stack_plan import StackPlan

# the matrices outside the mixer that may have adapters, by their names in lora_targets
_MATRICES = {name: f"mlp.{name.replace('_dense', '')}" for name in OF_DENSE}
_MATRICES |= {name: f"moe.{name}" for name in (*OF_MOE, *OF_EXPERTS)}


class Stack(NamedTuple):
    """Layers that are stacked: the module, what the plan says of them, and how their family stores them."""

    layers: Layer
    plan: StackPlan
    family: Family

    @property
    def variables(self) -> dict[str, nnx.Variable[jax.Array]]:
        """The variables that are no adapters by the names in `Family.layer`, and those of experts as "moe.NAME"."""
        return self._of(nnx.Not(nnx.LoRAParam))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of all variables but the experts', in the family's order."""
        variables = self.variables
        return {name: tensor for name, tensor in self.family.layer.items() if name in variables}

    @property
    def adapters(self) -> dict[str, nnx.Variable[jax.Array]]:
        """The variables of the LoRA adapters, by the same names with "_lora_a" or "_lora_b"."""
        return self._of(nnx.LoRAParam)

    def _of(self, kind: nnx.filterlib.Filter) -> dict[str, nnx.Variable[jax.Array]]:
        flat = nnx.to_flat_state(nnx.state(self.layers, kind))
        return {".".join(map(str, path)): variable for path, variable in flat}


def stacks(model: Decoder) -> Iterator[Stack]:
    """The model's stacks in the order of the layers."""
    for plan in model.config.plan:
        yield Stack(getattr(model, plan.name), plan, model.config.family)


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
    own = model.config.family
    of_moe = {**own.tensors, **own.fused}
    for stack in stacks(model):
        variables = stack.variables
        of_mixer = {name: f"{stack.plan.mixer.kind}.{name}" for name in OF_MIXERS}
        for target, name in (of_mixer | _MATRICES).items():
            if name in variables:
                is_of_moe = target in OF_MOE
                tensor = of_moe[target] if is_of_moe else own.layer.get(name, Tensor(()))
                names = [part.removesuffix(".weight") for part in tensor.names]
                block_name = own.fused_block_name if is_of_moe else own.layer_name
                modules = {number: [block_name(number) + part for part in names] for number in stack.plan.numbers}
                yield Matrix(stack, target, name, modules)


def module_of(module: nnx.Module, path: Iterable[object]) -> nnx.Module:
    """The module that the last name of a variable's path is in."""
    *modules, _ = path
    for name in modules:
        module = getattr(module, str(name))
    return module


def ends(model: Decoder, names: Container[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters outside the layers and the tensors that hold them, in a folder with these names.

    If the head is tied to the embedding, a folder may have only the head.
    """
    own = model.config.family.ends
    embedding, head = (own[name].names[0] for name in ("w_embedding", "w_head"))
    for name, tensor in own.items():
        if name == "w_embedding" and model.config.is_tied and embedding not in names and head in names:
            yield name, as_is(head)
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
    own, of_experts = model.config.family, param_shapes(model.config.hf)
    for stack in stacks(model):
        variables, tensors = stack.variables, stack.tensors
        for number in stack.plan.numbers:
            for name, tensor in tensors.items():
                yield from tensor.shapes(own.layer_name(number), variables[name].shape[1:])
            for name, shape in of_experts.items() if hasattr(stack.layers, "moe") else ():
                block, tensor = own.stored(name, number, names, shape)
                yield from tensor.shapes(block, shape)
