"""The sizes of published models, as their config.json has them, and of small ones with the same structure."""

from typing import Any

import jgg.models

_SHARED = {"hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _SHARED
    | {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "rope_theta": 1e6,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gpt-oss-20b": _SHARED
    | {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "qwen3.5-35b-a3b": _SHARED
    | {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "attn_output_gate": True,
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "glm-4.7-flash": _SHARED
    | {
        "model_type": "glm4_moe_lite",
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "first_k_dense_replace": 1,
        "num_attention_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    "gemma-4-26b-a4b": _SHARED
    | {
        "model_type": "gemma4_text",
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "vocab_size": 262144,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 704,
        "final_logit_softcapping": 30.0,
    },
}
CONFIGS["gpt-oss-120b"] = CONFIGS["gpt-oss-20b"] | {
    "num_hidden_layers": 36,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_local_experts": 128,
}
_NOT_IN_MXFP4 = "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
_SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# layers of small models: as many as have each kind
_SMALL_LAYERS = {"qwen3.5-35b-a3b": 4, "gemma-4-26b-a4b": 6}


def config_of(name: str, num_layers: int | None, is_small: bool, has_mxfp4: bool = False) -> jgg.models.ModelConfig:
    """A model's config, with fewer layers if that is asked for; small, it has the same keys with small sizes.

    With `has_mxfp4` it says that the experts are stored in MXFP4, as gpt-oss's folders say.
    """
    config = dict(CONFIGS[name])
    if is_small:
        config |= {key: size for key, size in _SMALL.items() if key in config}
        config["num_hidden_layers"] = _SMALL_LAYERS.get(name, 2)
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    if has_mxfp4:
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": list(_NOT_IN_MXFP4)}
    return jgg.models.model_config(config)
