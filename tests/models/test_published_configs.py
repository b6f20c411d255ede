"""The config.json of published models is read; what is here of each are the keys that say how the model computes."""

import math

import pytest

import jgg.models

YARN = {
    "rope_type": "yarn",
    "rope_theta": 500000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.2772588722239782,
}
LOCAL, FULL = "sliding_attention", "full_attention"
# fmt: off
# JetBrains/Mellum2-12B-A2.5B-Base
MELLUM2 = {
    "architectures": ["MellumForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "dtype": "bfloat16", "eos_token_id": 28, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2304,
    "initializer_range": 0.02, "intermediate_size": 7168, "layer_types": [LOCAL, LOCAL, LOCAL, FULL] * 7,
    "max_position_embeddings": 131072, "max_window_layers": 0, "mlp_layer_types": ["sparse"] * 28,
    "model_type": "mellum", "moe_intermediate_size": 896, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_parameters": {FULL: YARN, LOCAL: {"rope_type": "default", "rope_theta": 500000.0}},
    "router_aux_loss_coef": 0.001, "sliding_window": 1024, "tie_word_embeddings": False, "use_cache": True,
    "use_sliding_window": True, "vocab_size": 98304,
}
# LGAI-EXAONE/K-EXAONE-236B-A23B
K_EXAONE = {
    "architectures": ["ExaoneMoEForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "bfloat16",
    "eos_token_id": 53, "first_last_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144,
    "initializer_range": 0.02, "intermediate_size": 18432, "is_moe_layer": [False] + [True] * 47,
    "layer_types": [LOCAL, LOCAL, LOCAL, FULL] * 12, "max_position_embeddings": 262144, "model_type": "exaone_moe",
    "moe_intermediate_size": 2048, "n_group": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "num_shared_experts": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer", "topk_group": 1, "topk_method": "noaux_tc",
    "use_cache": True, "vocab_size": 153600,
}
# Qwen/Qwen3-VL-30B-A3B-Instruct
QWEN3_VL = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl_moe",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
        "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 262144, "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000, "use_cache": True, "vocab_size": 151936,
    },
    "tie_word_embeddings": False, "video_token_id": 151656,
    "vision_config": {"deepstack_visual_indexes": [8, 16, 24], "depth": 27, "model_type": "qwen3_vl_moe"},
    "vision_end_token_id": 151653, "vision_start_token_id": 151652,
}
# meta-llama/Llama-4-Scout-17B-16E
LLAMA4_SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
    "image_token_index": 200092, "model_type": "llama4",
    "text_config": {
        "_attn_implementation_autoset": True, "attention_bias": False, "attention_chunk_size": 8192,
        "attention_dropout": 0.0, "bos_token_id": 200000, "eos_token_id": [200001, 200007, 200008],
        "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "initializer_range": 0.02, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760, "model_type": "llama4_text",
        "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "num_local_experts": 16, "output_router_logits": False, "pad_token_id": 200018,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "torch_dtype": "bfloat16",
        "use_cache": True, "use_qk_norm": True, "vocab_size": 202048,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"_attn_implementation_autoset": True, "hidden_size": 1408, "image_size": 336},
}
# fmt: on
# meta-llama/Llama-4-Maverick-17B-128E
LLAMA4_MAVERICK = LLAMA4_SCOUT | {
    "text_config": LLAMA4_SCOUT["text_config"]
    | {
        "interleave_moe_layer_step": 2,
        "max_position_embeddings": 1048576,
        "num_local_experts": 128,
        "rope_scaling": None,
        "use_qk_norm": False,
    }
}
# fmt: off
# ibm-granite/granite-4.0-h-small
GRANITE_4_SMALL = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12, "hidden_act": "silu", "hidden_size": 4096, "init_method": "mup",
    "initializer_range": 0.1, "intermediate_size": 768,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "logits_scaling": 16, "mamba_chunk_size": 256,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False, "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid", "normalization_function": "rmsnorm", "num_attention_heads": 32,
    "num_experts_per_tok": 10, "num_hidden_layers": 40, "num_key_value_heads": 8, "num_local_experts": 72,
    "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000, "shared_intermediate_size": 1536, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
# google/gemma-4-26B-A4B-it; of the vision tower's keys there are two
GEMMA4 = {
    "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "audio_token_id": 258881,
    "boa_token_id": 256000, "boi_token_id": 255999, "dtype": "bfloat16", "eoa_token_id": 258883,
    "eoa_token_index": 258883, "eoi_token_id": 258882, "eos_token_id": [1, 106], "image_token_id": 258880,
    "initializer_range": 0.02, "model_type": "gemma4",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True, "bos_token_id": 2,
        "dtype": "bfloat16", "enable_moe_block": True, "eos_token_id": 1, "final_logit_softcapping": 30.0,
        "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2816,
        "hidden_size_per_layer_input": 0, "initializer_range": 0.02, "intermediate_size": 2112,
        "layer_types": [*[LOCAL] * 5, FULL] * 5, "max_position_embeddings": 262144, "model_type": "gemma4_text",
        "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads": 2,
        "num_hidden_layers": 30, "num_key_value_heads": 8, "num_kv_shared_layers": 0, "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            LOCAL: {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024, "tie_word_embeddings": True, "top_k_experts": 8,
        "use_bidirectional_attention": "vision", "use_cache": True, "use_double_wide_mlp": False, "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
    "tie_word_embeddings": True, "video_token_id": 258884,
    "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision"}, "vision_soft_tokens_per_image": 280,
}
# fmt: on


def billions(config):
    """How many parameters the model has."""
    of_mixers = sum(math.prod(shape) for own in config.mixers for shape in own.shapes(config.features).values())
    of_experts = config.num_moe_layers * sum(map(math.prod, config.moe.shapes.values()))
    num_mlps = config.num_layers if config.layout == "sandwich" else sum(config.is_dense)
    of_mlps = num_mlps * 3 * config.features * config.dense_features
    of_ends = (2 - config.is_tied) * config.vocabulary * config.features
    return (of_mixers + of_experts + of_mlps + of_ends) / 1e9


def test_mellum2_has_windows_of_1024_and_yarn_in_every_fourth_layer():
    config = jgg.models.model_config(MELLUM2)
    assert [own.window for own in config.mixers] == [1024, 1024, 1024, None] * 7
    assert (config.mixers[0].rotary.scale, config.mixers[3].rotary.scale) == (1.0, YARN["attention_factor"])
    assert len(config.plan) == 1
    assert round(billions(config), 1) == 12.1


def test_k_exaone_has_no_positions_in_every_fourth_layer():
    config = jgg.models.model_config(K_EXAONE)
    assert [own.window for own in config.mixers] == [128, 128, 128, None] * 12
    assert [any(own.rotary.frequencies) for own in config.mixers] == [True, True, True, False] * 12
    assert config.is_dense == (True,) + (False,) * 47
    assert round(billions(config), 1) == 236.6


def test_qwen3_vl_has_the_language_model_of_qwen3():
    config = jgg.models.model_config(QWEN3_VL)
    assert (config.mixers[0].qk_norm, config.moe.normalize, config.is_tied) == ("head", True, False)
    assert round(billions(config), 1) == 30.5


def test_llama4_has_chunks_in_three_of_four_layers_and_maverick_experts_in_every_second():
    scout, maverick = (jgg.models.model_config(config) for config in (LLAMA4_SCOUT, LLAMA4_MAVERICK))
    for config in (scout, maverick):
        assert [own.chunk for own in config.mixers] == [8192, 8192, 8192, None] * 12
        assert [bool(own.temperature_scale) for own in config.mixers] == [False, False, False, True] * 12
        assert [any(own.rotary.frequencies) for own in config.mixers] == [True, True, True, False] * 12
    assert [own.qk_norm for own in scout.mixers] == ["unit", "unit", "unit", None] * 12
    assert not any(scout.is_dense) and maverick.is_dense == (True, False) * 24
    assert len(scout.schedule) == 1 and len(maverick.schedule) == 1
    assert (round(billions(scout), 1), round(billions(maverick), 1)) == (107.8, 400.7)


def test_granite_4_is_refused_for_its_mamba_layers_and_has_no_positions_without_them():
    with pytest.raises(ValueError, match=r"layer_types must be 'attention' for each of 40 layers, .* got \['mamba', "):
        jgg.models.model_config(GRANITE_4_SMALL)
    with pytest.raises(ValueError, match=r"layer_types must be 'attention' .* all if the key is absent, got None"):
        jgg.models.model_config(GRANITE_4_SMALL | {"layer_types": None})
    config = jgg.models.model_config(GRANITE_4_SMALL | {"layer_types": ["attention"] * 40})
    assert not any(config.mixers[0].rotary.frequencies)
    assert config.moe.shapes["w_shared_gate_up"] == (4096, 2 * 1536)
    rotated = GRANITE_4_SMALL | {"layer_types": ["attention"] * 40, "position_embedding_type": "rope"}
    assert all(jgg.models.model_config(rotated).mixers[0].rotary.frequencies)


def test_gemma4_has_other_heads_in_every_sixth_layer():
    config = jgg.models.model_config(GEMMA4)
    sizes = [(own.window, own.head_features, own.num_kv_heads, own.are_keys_values) for own in config.mixers]
    assert sizes == [*[(1024, 256, 8, False)] * 5, (None, 512, 2, True)] * 5
    assert sum(frequency > 0 for frequency in config.mixers[5].rotary.frequencies) == 64
    assert (config.is_tied, config.logits_softcap, config.embedding_scale) == (True, 30, 2816**0.5)
    assert round(billions(config), 1) == 25.2
