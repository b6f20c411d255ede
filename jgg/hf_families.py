"""Hugging Face's architectures: how each configures its MoE blocks and what it names their tensors."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jgg.activations import clamped_swiglu

_ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu"}
SELECTION_BIAS = "selection_bias"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """How a parameter is stored, as one tensor or several.

    Attributes:
      names: of its parts, which follow each other along the out-features; "{e}" stands for an expert's number, and
        experts are then stacked.
      is_transposed: the file has [.., out, in], jgg [.., in, out].
    """

    names: tuple[str, ...]
    is_transposed: bool = True

    @property
    def is_per_expert(self) -> bool:
        """Whether each expert has tensors of its own."""
        return "{e}" in self.names[0]


@dataclasses.dataclass(frozen=True)
class Family:
    """What the models of one architecture have in common.

    Attributes:
      block: name of the MoE block in a decoder layer.
      options: (config) -> the arguments of `MoELayer`.
      tensors: by parameter, names within the block.
      prefix: what precedes "layers.N." in a checkpoint.
    """

    block: str
    options: Callable[[dict], dict[str, Any]]
    tensors: dict[str, Tensor]
    prefix: str = "model."


def _vector(name):
    return Tensor((name,), is_transposed=False)


def _matrix(*names):
    return Tensor(names)


def _experts(gate, up, down):
    names = (tuple(f"experts.{{e}}.{name}.weight" for name in part) for part in ((gate, up), (down,)))
    return dict(zip(("w_gate_up", "w_down"), map(Tensor, names), strict=True))


def _shared(block):
    return {
        "w_shared_gate_up": _matrix(f"{block}.gate_proj.weight", f"{block}.up_proj.weight"),
        "w_shared_down": _matrix(f"{block}.down_proj.weight"),
    }


def _common(config, experts, hidden_features):
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"hidden_act must be one of {sorted(_ACTIVATIONS)}, got {activation!r}.")
    return {
        "in_features": config["hidden_size"],
        "hidden_features": config[hidden_features],
        "num_experts": config[experts],
        "topk": config["num_experts_per_tok"],
        "activation": _ACTIVATIONS[activation],
    }


def _mixtral(config):
    return _common(config, "num_local_experts", "intermediate_size") | {"score": "topk_softmax"}


def _qwen3_moe(config):
    # transformers 5 writes num_local_experts
    experts = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return _common(config, experts, "moe_intermediate_size") | {"normalize": config["norm_topk_prob"]}


def _qwen3_next(config):
    shared = {"shared_features": config["shared_expert_intermediate_size"], "use_shared_gate": True}
    return _qwen3_moe(config) | shared


def _olmoe(config):
    return _common(config, "num_experts", "intermediate_size") | {"normalize": config["norm_topk_prob"]}


def _deepseek_v3(config):
    return _common(config, "n_routed_experts", "moe_intermediate_size") | {
        "score": "sigmoid",
        "normalize": config["norm_topk_prob"],
        "scale": config["routed_scaling_factor"],
        "num_groups": config["n_group"],
        "topk_groups": config["topk_group"],
        "use_selection_bias": True,
        "shared_features": config["n_shared_experts"] * config["moe_intermediate_size"],
    }


def _llama4(config):
    return _common(config, "num_local_experts", "intermediate_size") | {
        "score": "sigmoid",
        "normalize": False,
        "scale_input": True,
        "shared_features": config["intermediate_size"],
    }


def _gpt_oss(config):
    return _common(config, "num_local_experts", "intermediate_size") | {
        "score": "topk_softmax",
        "activation": clamped_swiglu(config.get("swiglu_limit", 7.0), config.get("swiglu_alpha", 1.702)),
        "interleaved": True,
        "use_bias": True,
        "use_router_bias": True,
    }


_PROJECTIONS = "gate_proj", "up_proj", "down_proj"
_GATE = {"w_router": _matrix("gate.weight")}
_FUSED = {
    "w_gate_up": Tensor(("experts.gate_up_proj",), is_transposed=False),
    "w_down": Tensor(("experts.down_proj",), is_transposed=False),
}
_DEEPSEEK = Family(
    "mlp",
    _deepseek_v3,
    _GATE
    | {SELECTION_BIAS: _vector("gate.e_score_correction_bias")}
    | _experts(*_PROJECTIONS)
    | _shared("shared_experts"),
)
FAMILIES = {
    "mixtral": Family("block_sparse_moe", _mixtral, _GATE | _experts("w1", "w3", "w2")),
    "qwen3_moe": Family("mlp", _qwen3_moe, _GATE | _experts(*_PROJECTIONS)),
    "qwen3_next": Family(
        "mlp",
        _qwen3_next,
        _GATE
        | _experts(*_PROJECTIONS)
        | _shared("shared_expert")
        | {"w_shared_gate": _matrix("shared_expert_gate.weight")},
    ),
    "olmoe": Family("mlp", _olmoe, _GATE | _experts(*_PROJECTIONS)),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "llama4": Family(
        "feed_forward",
        _llama4,
        {"w_router": _matrix("router.weight")} | _FUSED | _shared("shared_expert"),
        prefix="language_model.model.",
    ),
    "gpt_oss": Family(
        "mlp",
        _gpt_oss,
        {
            "w_router": _matrix("router.weight"),
            "b_router": _vector("router.bias"),
            "b_gate_up": _vector("experts.gate_up_proj_bias"),
            "b_down": _vector("experts.down_proj_bias"),
        }
        | _FUSED,
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
}
