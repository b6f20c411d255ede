"""Hugging Face's architectures: how each configures its MoE blocks and what it names their tensors."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jgg.activations import clamped_swiglu
from jgg.core.arguments import as_finite, as_flag, as_int, check_one_of
from jgg.hf.files import check_shape

SELECTION_BIAS = "selection_bias"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The checkpoint tensors that hold one parameter: a single tensor, or several parts side by side.

    Attributes:
      names: names of the parts, in their order along the out-features. A name with "{e}" stands for one tensor for
        each expert, with the expert's number in place of "{e}"; the parameter stacks the experts.
      is_transposed: True if the file stores [.., out, in]; jgg always has [.., in, out].
    """

    names: tuple[str, ...]
    is_transposed: bool = True

    def parts(self, block: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yields each tensor's full name and the view of `array` that it fills, with axes in the tensor's order."""
        for expert, own in enumerate(array) if "{e}" in self.names[0] else [(0, array)]:
            for name, part in zip(self.names, np.split(own, len(self.names), axis=-1), strict=True):
                yield block + name.replace("{e}", str(expert)), part.swapaxes(-1, -2) if self.is_transposed else part

    def filled(
        self, block: str, shape: tuple[int, ...], read: Callable[[str], np.ndarray], what: str = ""
    ) -> np.ndarray:
        """Reads the parts of a parameter and joins them to an array of `shape`; `what` precedes names in messages."""
        first_part, _ = next(self.parts(block, np.broadcast_to(0, shape)))
        first = np.asarray(read(first_part))
        array = np.empty(shape, first.dtype)
        for part, target in self.parts(block, array):
            value = first if part == first_part else np.asarray(read(part))
            check_shape(what + part, value, target.shape)
            if value.dtype != first.dtype:
                raise ValueError(f"{what}{part} must have the dtype of {first_part}, {first.dtype}, got {value.dtype}.")
            target[...] = value
        return array


@dataclasses.dataclass(frozen=True)
class Family:
    """What the models of one architecture have in common.

    Attributes:
      block: name of the MoE block in a decoder layer.
      options: function from a config to the arguments of `MoELayer`.
      tensors: the tensors of each parameter, with names relative to the block.
      prefix: the beginning of tensor names, before "layers.N.".
      fused_block: name of the MoE block in transformers 5, if it differs from the checkpoints' name.
      is_swapped: True if PEFT takes the in-features of fused experts for their out-features, which it does where they
        are stored [E, in, out] and transformers does not say so.
    """

    block: str
    options: Callable[[Mapping[str, Any]], dict[str, Any]]
    tensors: dict[str, Tensor]
    prefix: str = "model."
    fused_block: str | None = None
    is_swapped: bool = False

    def block_name(self, layer: int) -> str:
        """Returns the beginning of the names of all tensors in the MoE block of a decoder layer."""
        return f"{self.prefix}layers.{layer}.{self.block}."

    def fused_name(self, layer: int) -> str:
        """Returns the name of the module of all experts in transformers 5."""
        return f"{self.prefix}layers.{layer}.{self.fused_block or self.block}.experts"


_COUNTS = ("n_shared_experts",)  # configs have null rather than 0 for these keys


def language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the language model's part of a config, without keys that are null; counts that are null become 0.

    Raises: ValueError: the config's "text_config" is not an object.
    """
    found = config.get("text_config") or config
    if not isinstance(found, Mapping):
        raise ValueError(f"text_config must be an object, got {found!r}.")
    counts = {key: found[key] or 0 for key in _COUNTS if key in found}
    return {key: value for key, value in found.items() if value is not None} | counts


_ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu"}


def _int(config: Mapping[str, Any], key: str, least: int = 1) -> int:
    return as_int(key, config[key], least)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    return as_flag(key, config[key])


def _options(config: Mapping[str, Any], experts: str, hidden_features: str, **others: Any) -> dict[str, Any]:
    """Returns the arguments of `MoELayer`; `experts` and `hidden_features` are the keys that a family has for them."""
    activation = config.get("hidden_act", "silu")
    check_one_of("hidden_act", activation, sorted(_ACTIVATIONS))
    return {
        "in_features": _int(config, "hidden_size"),
        "hidden_features": _int(config, hidden_features),
        "num_experts": _int(config, experts),
        "topk": _int(config, "num_experts_per_tok"),
        "activation": _ACTIVATIONS[activation],
    } | others


def _mixtral(config: Mapping[str, Any]) -> dict[str, Any]:
    return _options(config, "num_local_experts", "intermediate_size", score="topk_softmax")


def _qwen3_moe(config: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    # transformers 5 writes num_local_experts
    experts = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return _options(config, experts, "moe_intermediate_size", normalize=_flag(config, "norm_topk_prob"), **others)


def _matrix(*names: str) -> Tensor:
    return Tensor(names)


def _as_is(name: str) -> Tensor:
    return Tensor((name,), is_transposed=False)


def _experts(gate: str, up: str, down: str) -> dict[str, Tensor]:
    gate, up, down = (f"experts.{{e}}.{name}.weight" for name in (gate, up, down))
    return {"w_gate_up": _matrix(gate, up), "w_down": _matrix(down)}


def _shared(block: str) -> dict[str, Tensor]:
    return {
        "w_shared_gate_up": _matrix(f"{block}.gate_proj.weight", f"{block}.up_proj.weight"),
        "w_shared_down": _matrix(f"{block}.down_proj.weight"),
    }


_QWEN = {"w_router": _matrix("gate.weight")} | _experts("gate_proj", "up_proj", "down_proj")
_FUSED = {
    "w_router": _matrix("router.weight"),
    "w_gate_up": _as_is("experts.gate_up_proj"),
    "w_down": _as_is("experts.down_proj"),
}
_DEEPSEEK = Family(
    "mlp",
    lambda config: _options(
        config, "n_routed_experts", "moe_intermediate_size", score="sigmoid", normalize=_flag(config, "norm_topk_prob"),
        scale=as_finite("routed_scaling_factor", config["routed_scaling_factor"]), num_groups=_int(config, "n_group"),
        topk_groups=_int(config, "topk_group"), use_selection_bias=True,
        shared_features=_int(config, "n_shared_experts", 0) * _int(config, "moe_intermediate_size"),
    ),
    _QWEN | {SELECTION_BIAS: _as_is("gate.e_score_correction_bias")} | _shared("shared_experts"),
)  # fmt: skip
FAMILIES = {
    "mixtral": Family(
        "block_sparse_moe",
        _mixtral,
        {"w_router": _matrix("gate.weight")} | _experts("w1", "w3", "w2"),
        fused_block="mlp",
    ),
    "qwen3_moe": Family("mlp", _qwen3_moe, _QWEN),
    "qwen3_next": Family(
        "mlp",
        lambda config: _qwen3_moe(
            config, shared_features=_int(config, "shared_expert_intermediate_size"), use_shared_gate=True
        ),
        _QWEN | _shared("shared_expert") | {"w_shared_gate": _matrix("shared_expert_gate.weight")},
    ),
    "olmoe": Family(
        "mlp",
        lambda config: _options(config, "num_experts", "intermediate_size", normalize=_flag(config, "norm_topk_prob")),
        _QWEN,
    ),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "llama4": Family(
        "feed_forward",
        lambda config: _options(
            config, "num_local_experts", "intermediate_size", score="sigmoid", normalize=False, scale_input=True,
            shared_features=_int(config, "intermediate_size"),
        ),
        _FUSED | _shared("shared_expert"),
        prefix="language_model.model.",
        is_swapped=True,
    ),
    "gpt_oss": Family(
        "mlp",
        lambda config: _options(
            config, "num_local_experts", "intermediate_size", score="topk_softmax", interleaved=True, use_bias=True,
            activation=clamped_swiglu(
                as_finite("swiglu_limit", config.get("swiglu_limit", 7.0)),
                as_finite("swiglu_alpha", config.get("swiglu_alpha", 1.702)),
            ),
            use_router_bias=True,
        ),
        _FUSED | {
            "b_router": _as_is("router.bias"),
            "b_gate_up": _as_is("experts.gate_up_proj_bias"),
            "b_down": _as_is("experts.down_proj_bias"),
        },
    ),
    "granitemoe": Family(
        "block_sparse_moe",
        _mixtral,
        {
            "w_router": _matrix("router.layer.weight"),
            "w_gate_up": _matrix("input_linear.weight"),
            "w_down": _matrix("output_linear.weight"),
        },
    ),
}  # fmt: skip
