"""Hugging Face's architectures: the keys of their config.json, with defaults, and the names of their tensors."""

import dataclasses
from collections.abc import Callable, Container, Mapping
from typing import Any

from jgg.hf import options
from jgg.hf.settings import Settings
from jgg.hf.tensors import Tensor, as_is, matrix

SELECTION_BIAS = "selection_bias"


@dataclasses.dataclass(frozen=True)
class Family:
    """What the models of one architecture have in common.

    Attributes:
      block: name of the MoE block in a decoder layer.
      options: function from a config's settings to the arguments of `MoELayer`.
      tensors: the tensors of each parameter, with names relative to the block.
      defaults: the keys of config.json that jgg reads, with what transformers takes if a key is absent. jgg reads all
        that change the logits of the families in `jgg.models`, and those of the MoE blocks of the others.
      aliases: other names that transformers has for some of these keys.
      fused: the tensors that transformers 5 writes for these parameters instead, if it is asked for its own format,
        with names relative to the block `fused_block`. jgg reads them, and writes `tensors`.
      prefix: the beginning of tensor names, before "layers.N.".
      fused_block: name of the MoE block in transformers 5, if it differs from the checkpoints' name.
      ignored: patterns of the names of tensors that a folder may have though the model does not use them.
      is_swapped: True if PEFT takes the in-features of fused experts for their out-features, which it does where they
        are stored [E, in, out] and transformers does not say so.
    """

    block: str
    options: Callable[[Settings], dict[str, Any]]
    tensors: dict[str, Tensor]
    defaults: dict[str, Any]
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    fused: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    prefix: str = "model."
    fused_block: str | None = None
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq",)
    is_swapped: bool = False

    def settings(self, config: Mapping[str, Any]) -> Settings:
        """Returns the settings of a config of this family."""
        return Settings(config, self.defaults, self.aliases)

    def block_name(self, layer: int) -> str:
        """Returns the beginning of the names of all tensors in the MoE block of a decoder layer."""
        return f"{self.prefix}layers.{layer}.{self.block}."

    def fused_block_name(self, layer: int) -> str:
        """Returns the beginning of the names of all tensors in the MoE block in transformers 5."""
        return f"{self.prefix}layers.{layer}.{self.fused_block or self.block}."

    def fused_name(self, layer: int) -> str:
        """Returns the name of the module of all experts in transformers 5."""
        return f"{self.fused_block_name(layer)}experts"

    def stored(self, name: str, layer: int, names: Container[str]) -> tuple[str, Tensor]:
        """Returns the block and the tensors that hold a parameter of a layer, of those with these names."""
        written = self.block_name(layer), self.tensors[name]
        for block in (self.block_name(layer), self.fused_block_name(layer)):
            for tensor in (self.tensors[name], self.fused.get(name, self.tensors[name])):
                if block + tensor.names[0].replace("{e}", "0") in names:
                    return block, tensor
        return written


def _experts(gate: str, up: str, down: str) -> dict[str, Tensor]:
    gate, up, down = (f"experts.{{e}}.{name}.weight" for name in (gate, up, down))
    return {"w_gate_up": matrix(gate, up), "w_down": matrix(down)}


def _shared(block: str) -> dict[str, Tensor]:
    return {
        "w_shared_gate_up": matrix(f"{block}.gate_proj.weight", f"{block}.up_proj.weight"),
        "w_shared_down": matrix(f"{block}.down_proj.weight"),
    }


# keys of all families that `jgg.models` has
_OF_MODELS = {
    "eos_token_id": None,
    "head_dim": None,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "num_nextn_predict_layers": 0,
    "original_max_position_embeddings": None,
    "partial_rotary_factor": None,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# the settings of the YaRN that gpt-oss has if its config has no other
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_ROUTER = {"w_router": matrix("gate.weight")}
_FUSED = {"w_gate_up": matrix("experts.gate_up_proj"), "w_down": matrix("experts.down_proj")}
_QWEN = _ROUTER | _experts("gate_proj", "up_proj", "down_proj")
_IN_OUT = {  # experts' matrices that are stored [E, in, out]
    "w_router": matrix("router.weight"),
    "w_gate_up": as_is("experts.gate_up_proj"),
    "w_down": as_is("experts.down_proj"),
}
_DEEPSEEK = Family(
    "mlp",
    options.deepseek,
    _QWEN | {SELECTION_BIAS: as_is("gate.e_score_correction_bias")} | _shared("shared_experts"),
    defaults={
        "hidden_act": "silu",
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
    aliases={"n_routed_experts": "num_local_experts"},
    fused=_FUSED,
)
FAMILIES = {
    "mixtral": Family(
        "block_sparse_moe",
        options.mixtral,
        _ROUTER | _experts("w1", "w3", "w2"),
        defaults=_OF_MODELS
        | {
            "eos_token_id": 2,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "vocab_size": 32000,
        },
        aliases={"num_local_experts": "num_experts"},
        fused=_FUSED,
        fused_block="mlp",
    ),
    "qwen3_moe": Family(
        "mlp",
        options.qwen3_moe,
        _QWEN,
        defaults=_OF_MODELS
        | {
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 32768,
            "mlp_only_layers": None,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "vocab_size": 151936,
            # of Qwen3-Coder's config, not of transformers
            "qkv_bias": False,
            "shared_expert_intermediate_size": 0,
            "use_qk_norm": True,
        },
        aliases={"num_experts": "num_local_experts"},
        fused=_FUSED,
    ),
    "qwen3_next": Family(
        "mlp",
        options.qwen3_next,
        _QWEN | _shared("shared_expert") | {"w_shared_gate": matrix("shared_expert_gate.weight")},
        defaults={
            "hidden_act": "silu",
            "hidden_size": 2048,
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "shared_expert_intermediate_size": 512,
        },
        aliases={"num_experts": "num_local_experts"},
        fused=_FUSED,
    ),
    "olmoe": Family(
        "mlp",
        options.olmoe,
        _QWEN,
        defaults=_OF_MODELS
        | {
            "attention_bias": False,
            "clip_qkv": None,
            "eos_token_id": 50279,
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "max_position_embeddings": 4096,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 16,
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-5,
            "vocab_size": 50304,
        },
        aliases={"num_experts": "num_local_experts"},
        fused=_FUSED,
    ),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": dataclasses.replace(
        _DEEPSEEK,
        defaults=_OF_MODELS
        | {
            "attention_bias": False,
            "first_k_dense_replace": 1,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 96,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 46,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "use_qk_norm": False,
            "vocab_size": 151552,
        },
        aliases={"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
        # of published checkpoints, which have 46 and 92 layers and one more, which predicts further tokens
        ignored=(*_DEEPSEEK.ignored, r"model\.layers\.(46|92)\."),
    ),
    "llama4": Family(
        "feed_forward",
        options.llama4,
        _IN_OUT | _shared("shared_expert"),
        defaults={
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
        },
        prefix="language_model.model.",
        is_swapped=True,
    ),
    "gpt_oss": Family(
        "mlp",
        options.gpt_oss,
        _IN_OUT
        | {
            "b_router": as_is("router.bias"),
            "b_gate_up": as_is("experts.gate_up_proj_bias"),
            "b_down": as_is("experts.down_proj_bias"),
        },
        defaults=_OF_MODELS
        | {
            "attention_bias": True,
            "head_dim": 64,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "layer_types": None,
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _YARN,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "vocab_size": 201088,
        },
        aliases={"num_local_experts": "num_experts"},
    ),
    "granitemoe": Family(
        "block_sparse_moe",
        options.mixtral,
        {
            "w_router": matrix("router.layer.weight"),
            "w_gate_up": matrix("input_linear.weight"),
            "w_down": matrix("output_linear.weight"),
        },
        defaults=_OF_MODELS
        | {
            "attention_bias": False,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "eos_token_id": 2,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "logits_scaling": 1.0,
            "max_position_embeddings": 2048,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": None,
            "num_local_experts": 8,
            "residual_multiplier": 1.0,
            "rms_norm_eps": 1e-6,
            "vocab_size": 32000,
        },
        fused={"w_router": matrix("router.weight")} | _FUSED,
    ),
}
