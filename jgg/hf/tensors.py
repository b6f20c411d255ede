"""`Tensor`: which tensors of a checkpoint hold a parameter, and in which shapes; and names that families share."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from jgg.hf.files import check_shape, is_unread, unread


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The checkpoint tensors that hold one parameter: a single tensor, or several parts side by side.

    Attributes:
      names: names of the parts, in their order along the out-features. A name with "{e}" stands for one tensor per
        expert, with the expert's number in place of "{e}"; the parameter stacks the experts.
      is_transposed: True if the file stores [.., out, in]; jgg always has [.., in, out].
      is_row: True if the file stores a vector [n] as [1, n].
    """

    names: tuple[str, ...]
    is_transposed: bool = True
    is_row: bool = False

    def shapes(self, block: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the full name and the shape of each tensor of a parameter of this shape."""
        is_of_each = "{e}" in self.names[0]
        own = [*shape[1 if is_of_each else 0 :]]
        own[-1] //= len(self.names)
        if self.is_transposed:
            own[-2:] = own[:-3:-1]
        if self.is_row:
            own.insert(0, 1)
        for expert in range(shape[0] if is_of_each else 1):
            for name in self.names:
                yield block + name.replace("{e}", str(expert)), tuple(own)

    def parts(self, block: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yields each tensor's full name and the view of `array` that it fills, with axes in the tensor's order."""
        array = array[None] if self.is_row else array
        for expert, own in enumerate(array) if "{e}" in self.names[0] else [(0, array)]:
            for name, part in zip(self.names, np.split(own, len(self.names), axis=-1), strict=True):
                yield block + name.replace("{e}", str(expert)), part.swapaxes(-1, -2) if self.is_transposed else part

    def filled(
        self, block: str, shape: tuple[int, ...], read: Callable[[str], np.ndarray], what: str = ""
    ) -> np.ndarray:
        """Reads the parts of a parameter and joins them to an array of `shape`; `what` precedes names in messages.

        If the first part is `unread`, so is the array, and the others are not looked at.
        """
        first_part, first_shape = next(self.shapes(block, shape))
        first = np.asarray(read(first_part))
        check_shape(what + first_part, first, first_shape)
        if is_unread(first):
            return unread(shape, first.dtype)
        array = np.empty(shape, first.dtype)
        for part, target in self.parts(block, array):
            value = first if part == first_part else np.asarray(read(part))
            check_shape(what + part, value, target.shape)
            if value.dtype != first.dtype:
                raise ValueError(f"{what}{part} must have the dtype of {first_part}, {first.dtype}, got {value.dtype}.")
            target[...] = value
        return array


def matrix(*names: str) -> Tensor:
    """A matrix that is stored [out, in]."""
    return Tensor(names)


def as_is(name: str) -> Tensor:
    """A vector, or a matrix that is stored [in, out]."""
    return Tensor((name,), is_transposed=False)


def as_row(name: str) -> Tensor:
    """A vector [n] that is stored as [1, n]."""
    return Tensor((name,), is_transposed=False, is_row=True)


def experts(gate: str, up: str, down: str) -> dict[str, Tensor]:
    """The parameters of experts stored one by one in modules of these names."""
    gate, up, down = (f"experts.{{e}}.{name}.weight" for name in (gate, up, down))
    return {"w_gate_up": matrix(gate, up), "w_down": matrix(down)}


def shared(block: str) -> dict[str, Tensor]:
    """The parameters of the shared experts, a block of this name."""
    return {
        "w_shared_gate_up": matrix(f"{block}.gate_proj.weight", f"{block}.up_proj.weight"),
        "w_shared_down": matrix(f"{block}.down_proj.weight"),
    }


SELECTION_BIAS = "selection_bias"
ROUTER = {"w_router": matrix("gate.weight")}
QWEN = ROUTER | experts("gate_proj", "up_proj", "down_proj")
# what transformers 5 writes in its own format
FUSED = {"w_gate_up": matrix("experts.gate_up_proj"), "w_down": matrix("experts.down_proj")}
# experts' matrices that are stored [E, in, out]
IN_OUT = {
    "w_router": matrix("router.weight"),
    "w_gate_up": as_is("experts.gate_up_proj"),
    "w_down": as_is("experts.down_proj"),
}
# parameters of a layer with grouped queries other than its experts; the name begins with the module
LAYER = {
    "attention_norm": as_is("input_layernorm.weight"),
    "mlp_norm": as_is("post_attention_layernorm.weight"),
    "attention.q_norm": as_is("self_attn.q_norm.weight"),
    "attention.k_norm": as_is("self_attn.k_norm.weight"),
    "attention.sinks": as_is("self_attn.sinks"),
    "mlp.w_gate_up": matrix("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.w_down": matrix("mlp.down_proj.weight"),
    **{f"attention.w_{name}": matrix(f"self_attn.{name}_proj.weight") for name in "qkvo"},
    **{f"attention.b_{name}": as_is(f"self_attn.{name}_proj.bias") for name in "qkvo"},
}
# the same of a layer with latent attention
LATENT = {name: tensor for name, tensor in LAYER.items() if not name.startswith("attention.")} | {
    "latent.q_norm": as_is("self_attn.q_a_layernorm.weight"),
    "latent.kv_norm": as_is("self_attn.kv_a_layernorm.weight"),
    "latent.w_q": matrix("self_attn.q_proj.weight"),
    "latent.w_q_a": matrix("self_attn.q_a_proj.weight"),
    "latent.w_q_b": matrix("self_attn.q_b_proj.weight"),
    "latent.w_kv_a": matrix("self_attn.kv_a_proj_with_mqa.weight"),
    "latent.w_kv_b": matrix("self_attn.kv_b_proj.weight"),
    "latent.w_o": matrix("self_attn.o_proj.weight"),
    "latent.b_q_a": as_is("self_attn.q_a_proj.bias"),
    "latent.b_kv_a": as_is("self_attn.kv_a_proj_with_mqa.bias"),
    "latent.b_o": as_is("self_attn.o_proj.bias"),
}
# a model's parameters outside its layers
ENDS = {
    "w_embedding": as_is("model.embed_tokens.weight"),
    "norm": as_is("model.norm.weight"),
    "w_head": matrix("lm_head.weight"),
}
