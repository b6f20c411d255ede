"""The sizes and options of the tiny models in tests/data/models, in addition to what transformers' configs have."""

# tables
# fmt: off
COMMON = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}
HEADS = {"head_dim": 12}  # not hidden_size / num_attention_heads
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0,
    "beta_slow": 1.0, "truncate": False,
}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "moe_intermediate_size": 8, "intermediate_size": 24, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
}
DELTA = ["linear_attention"] * 3
RECURRENT = {
    "rms_norm_eps": 0.01,  # else small results of the recurrence grow in its norm, and so do their rounding errors
    "num_hidden_layers": 8, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 12, "partial_rotary_factor": 0.5, "num_experts": 4, "moe_intermediate_size": 4,
    "shared_expert_intermediate_size": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3,
}
FAMILIES = {
    "qwen3_moe": HEADS | {"num_experts": 4, "moe_intermediate_size": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 8, "sliding_window": 6},
    "olmoe": {"num_experts": 4, "intermediate_size": 8, "clip_qkv": 1.5, "attention_bias": True},
    "gpt_oss": HEADS | {
        "num_local_experts": 4, "intermediate_size": 8, "sliding_window": 4, "swiglu_limit": 1.5,
        "rope_parameters": YARN,
    },
    "granitemoe": {
        "num_local_experts": 4, "intermediate_size": 8, "tie_word_embeddings": True, "embedding_multiplier": 2.0,
        "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 0.7,
    },
    "glm4_moe": HEADS | {
        "n_routed_experts": 4, "moe_intermediate_size": 8, "intermediate_size": 24, "num_hidden_layers": 3,
        "use_qk_norm": True, "attention_bias": True, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
    },
    "gemma4_text": {
        "num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "hidden_size": 24, "head_dim": 8, "global_head_dim": 12, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "sliding_window": 4, "intermediate_size": 24, "enable_moe_block": True,
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8, "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 3.0, "use_bidirectional_attention": "vision",
    },
    "mellum": HEADS | {
        "num_experts": 4, "moe_intermediate_size": 8, "intermediate_size": 24, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"], "sliding_window": 4,
        "rope_parameters": {
            "full_attention": {key: value for key, value in YARN.items() if key != "truncate"},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "exaone_moe": HEADS | {
        "num_experts": 4, "moe_intermediate_size": 8, "intermediate_size": 24, "num_hidden_layers": 3,
        "sliding_window": 4, "sliding_window_pattern": 2, "n_group": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "qwen3_vl_moe": HEADS | {
        "num_experts": 4, "moe_intermediate_size": 8, "intermediate_size": 24,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 2, 2], "mrope_interleaved": True,
        },
    },
    "granitemoeshared": {
        "num_local_experts": 4, "intermediate_size": 8, "shared_intermediate_size": 12, "embedding_multiplier": 2.0,
        "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 0.7,
    },
    "granitemoehybrid": {
        "num_local_experts": 4, "intermediate_size": 8, "shared_intermediate_size": 12, "tie_word_embeddings": True,
        "attention_multiplier": 0.3, "layer_types": ["full_attention"] * 2, "mamba_n_heads": 2,
    },
    "llama4": HEADS | {
        "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 8, "intermediate_size_mlp": 24,
        "num_hidden_layers": 3, "moe_layers": [1, 2], "no_rope_layer_interval": 2, "attention_chunk_size": 4,
        "floor_scale": 4, "attn_scale": 0.3,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 32,
        },
    },
    "dots1": HEADS | {
        "n_routed_experts": 4, "moe_intermediate_size": 8, "intermediate_size": 24, "num_hidden_layers": 3,
        "attention_bias": True, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1, "sliding_window": 4, "max_window_layers": 2,
    },
    "ernie4_5_moe": HEADS | {
        "moe_num_experts": 4, "moe_intermediate_size": 8, "intermediate_size": 24, "num_hidden_layers": 4,
        "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 2,
    },
    "hy_v3": HEADS | {
        "num_experts": 4, "moe_intermediate_size": 8, "intermediate_size": 24, "num_hidden_layers": 3,
        "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True,
    },
    "minimax_m2": HEADS | {"num_local_experts": 4, "intermediate_size": 8, "rotary_dim": 6},
    "qwen2_moe": {
        "num_experts": 4, "moe_intermediate_size": 8, "intermediate_size": 24, "num_hidden_layers": 4,
        "shared_expert_intermediate_size": 12, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 4,
        "max_window_layers": 3,
    },
    "solar_open": HEADS | {
        "n_routed_experts": 4, "moe_intermediate_size": 8, "attention_bias": True, "n_shared_experts": 2, "n_group": 2,
        "routed_scaling_factor": 1.5, "rope_parameters": YARN,
    },
    "deepseek_v3": LATENT | {
        "num_hidden_layers": 3, "q_lora_rank": 12, "v_head_dim": 6, "attention_bias": True, "first_k_dense_replace": 1,
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    },
    "glm4_moe_lite": LATENT | {
        "rms_norm_eps": 0.01,  # which the norms of latents do not take
        "num_hidden_layers": 3, "q_lora_rank": None, "v_head_dim": 14, "n_routed_experts": 4,
        "mlp_layer_types": ["sparse", "dense", "sparse"], "rope_interleave": False, "tie_word_embeddings": True,
    },
    "qwen3_next": RECURRENT | {"norm_topk_prob": True, "attention_bias": True},
    "qwen3_5_moe_text": RECURRENT | {
        "num_hidden_layers": 4, "layer_types": [*DELTA[:2], "full_attention", "linear_attention"],
        "tie_word_embeddings": True,
    },
}
ZERO_CENTRED = "qwen3_next", "qwen3_5_moe_text"  # norms but the recurrent layers' multiply by 1 + weight
# what multimodal families have in addition to the language model
TOWERS = {
    "qwen3_vl_moe": {
        "vision_config": {
            "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 32,
            "num_position_embeddings": 4, "patch_size": 2, "deepstack_visual_indexes": [0],
        },
    },
    "llama4": {
        "vision_config": {
            "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
            "vision_output_dim": 8, "image_size": 4, "patch_size": 2, "projector_input_dim": 8,
            "projector_output_dim": 8,
        },
    },
}
