"""The config.json of published models opens: keys that transformers does not read are taken or refused by name."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jgg.hf
import jgg.models
from tests.layers.test_hf_quantized import in_fp8
from tests.support.models import DATA, config_of, copied

FP8 = {"quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# fmt: off
# what each config has in addition to token ids, and what is read from it
PUBLISHED = {
    "MiniMaxAI/MiniMax-M2": {
        "model_type": "minimax_m2", "attn_type_list": [1] * 62,
        "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608,
        "mlp_intermediate_size": 8192, "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8,
        "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "quantization_config": FP8 | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid",
        "shared_intermediate_size": 0, "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
        "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
    },
    "upstage/Solar-Open-100B": {
        "model_type": "solar_open", "first_k_dense_replace": 0, "head_dim": 128, "hidden_size": 4096,
        "intermediate_size": 10240, "max_position_embeddings": 131072, "moe_intermediate_size": 1280,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8, "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
        "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "vocab_size": 196608,
    },
    "tencent/Hy3-preview": {
        "model_type": "hy_v3", "enable_attention_fp32_softmax": False, "enable_lm_head_fp32": True,
        "enable_moe_fp32_combine": False, "eod_token_id": 120026, "expert_hidden_dim": 1536, "first_k_dense_replace": 1,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.006,
        "intermediate_size": 13312, "max_position_embeddings": 262144, "moe_intermediate_size": 1536,
        "moe_router_enable_expert_bias": True, "moe_router_use_sigmoid": True, "num_attention_heads": 64,
        "num_experts": 192, "num_experts_per_tok": 8, "num_hidden_layers": 80, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1, "num_shared_experts": 1, "output_router_logits": True, "qk_norm": True,
        "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
        "route_norm": True, "router_scaling_factor": 2.826, "sep_token_id": 120007, "tie_word_embeddings": False,
        "use_cache": True, "use_grouped_mm": False, "vocab_size": 120832,
    },
    "Qwen/Qwen1.5-MoE-A2.7B": {
        "model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
        "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "output_router_logits": False,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "rednote-hilab/dots.llm1.inst": {
        "model_type": "dots1", "attention_bias": False, "first_k_dense_replace": 1, "hidden_size": 4096,
        "intermediate_size": 10944, "max_position_embeddings": 32768, "moe_intermediate_size": 1408, "n_group": None,
        "n_routed_experts": 128, "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts_per_tok": 6, "num_hidden_layers": 62, "num_key_value_heads": 32, "rms_norm_eps": 1e-05,
        "rope_theta": 10000000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "topk_group": None, "vocab_size": 152064,
    },
    "baidu/ERNIE-4.5-21B-A3B-PT": {
        "model_type": "ernie4_5_moe", "head_dim": None, "hidden_act": "silu", "hidden_size": 2560,
        "intermediate_size": 12288, "max_position_embeddings": 131072, "moe_capacity": [64, 64, 64], "moe_gate": "topk",
        "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_end_index": 27, "moe_layer_interval": 1,
        "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_use_aux_free": True,
        "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4, "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05, "rope_theta": 500000, "tie_word_embeddings": True, "use_bias": False, "use_cache": False,
        "use_rmsnorm": True, "vocab_size": 103424,
    },
}
# fmt: on
# 300B-A47B, and 57B-A14B
PUBLISHED["baidu/ERNIE-4.5-300B-A47B-PT"] = PUBLISHED["baidu/ERNIE-4.5-21B-A3B-PT"] | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "moe_intermediate_size": 3584,
    "moe_k": 8,
    "moe_layer_end_index": 53,
    "moe_layer_start_index": 3,
    "moe_num_shared_experts": 0,
    "num_attention_heads": 64,
    "num_hidden_layers": 54,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
PUBLISHED["Qwen/Qwen2-57B-A14B"] = PUBLISHED["Qwen/Qwen1.5-MoE-A2.7B"] | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "moe_intermediate_size": 2560,
    "num_attention_heads": 28,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "shared_expert_intermediate_size": 20480,
    "sliding_window": 65536,
}


# features of a head and how many of them are rotated, norms of queries and keys, dense and further layers, tied
EXPECTED = {
    "MiniMaxAI/MiniMax-M2": (128, 64, "all", 0, 3, False),
    "upstage/Solar-Open-100B": (128, 128, None, 0, 0, False),
    "tencent/Hy3-preview": (128, 128, "head", 1, 1, False),
    "Qwen/Qwen1.5-MoE-A2.7B": (128, 128, None, 0, 0, False),
    "Qwen/Qwen2-57B-A14B": (128, 128, None, 0, 0, False),
    "rednote-hilab/dots.llm1.inst": (128, 128, "head", 1, 0, False),
    "baidu/ERNIE-4.5-21B-A3B-PT": (128, 128, None, 1, 1, True),
    "baidu/ERNIE-4.5-300B-A47B-PT": (128, 128, None, 3, 1, False),
}
# experts, those of a token, their hidden features and those of shared experts; score, factor, selection bias
EXPERTS = {
    "MiniMaxAI/MiniMax-M2": (256, 8, 1536, 0, "sigmoid", True, 1.0, True),
    "upstage/Solar-Open-100B": (128, 8, 1280, 1280, "sigmoid", True, 1.0, True),
    "tencent/Hy3-preview": (192, 8, 1536, 1536, "sigmoid", True, 2.826, True),
    "Qwen/Qwen1.5-MoE-A2.7B": (60, 4, 1408, 5632, "softmax", False, 1.0, False),
    "Qwen/Qwen2-57B-A14B": (64, 8, 2560, 20480, "softmax", False, 1.0, False),
    "rednote-hilab/dots.llm1.inst": (128, 6, 1408, 2816, "sigmoid", True, 2.5, True),
    "baidu/ERNIE-4.5-21B-A3B-PT": (64, 6, 1536, 3072, "softmax", True, 1.0, True),
    "baidu/ERNIE-4.5-300B-A47B-PT": (64, 8, 3584, 0, "softmax", True, 1.0, True),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name):
    config = jgg.models.model_config(PUBLISHED[name])
    mixer, moe = config.mixers[-1], config.moe
    rotated, dense = 2 * len(mixer.rotary.frequencies), sum(config.is_dense)
    of_model = mixer.head_features, rotated, mixer.qk_norm, dense, config.num_further_layers, config.is_tied
    assert of_model == EXPECTED[name]
    sizes = moe.num_experts, moe.topk, moe.hidden_features, moe.shared_features
    assert (*sizes, moe.score, moe.normalize, moe.scale, moe.use_selection_bias) == EXPERTS[name]


# fmt: off
# keys that would make a model that jgg does not have
REFUSED = {
    "MiniMaxAI/MiniMax-M2": {
        "attn_type_list": [0] + [1] * 61, "scoring_func": "softmax", "use_routing_bias": False,
        "shared_intermediate_size": 1536, "use_qk_norm": False, "qk_norm_type": "per_head", "layernorm_mlp_beta": 2.0,
        "sliding_window": 4096,
    },
    "upstage/Solar-Open-100B": {"first_k_dense_replace": 1, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "tencent/Hy3-preview": {
        "expert_hidden_dim": 768, "first_k_dense_replace": 2, "mlp_bias": True, "moe_router_use_sigmoid": False,
        "qk_norm": False, "route_norm": False,
    },
    "Qwen/Qwen1.5-MoE-A2.7B": {"use_qk_norm": True, "attention_bias": True},
    "rednote-hilab/dots.llm1.inst": {"scoring_func": "softmax", "moe_layer_freq": 2, "use_sliding_window": True},
    "baidu/ERNIE-4.5-21B-A3B-PT": {"moe_norm_min": 1e-3, "moe_use_aux_free": False, "use_bias": True},
}
# fmt: on


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in REFUSED.items() for key in keys])
def test_what_would_be_another_model_is_refused_by_the_name_of_its_key(name, key):
    with pytest.raises(ValueError, match=re.escape(key)):
        jgg.models.model_config(PUBLISHED[name] | {key: REFUSED[name][key]})


def test_a_folder_in_fp8_is_read_as_what_it_stands_for(tmp_path):
    """MiniMax publishes them so: attention and experts have scales, the router and the head have none."""
    how = PUBLISHED["MiniMaxAI/MiniMax-M2"]["quantization_config"]
    names = "embed_tokens", *how["modules_to_not_convert"]
    tensors = dict(jgg.hf.Checkpoint(DATA / "minimax_m2"))
    plain = {name: array for name, array in tensors.items() if any(f"{own}." in f"{name}." for own in names)}
    quantized, exact = in_fp8({name: array for name, array in tensors.items() if name not in plain}, (128, 128))
    assert {"model.layers.1.self_attn.o_proj.weight_scale_inv"} <= quantized.keys()
    assert {"model.layers.1.block_sparse_moe.gate.weight", "lm_head.weight"} <= plain.keys()
    for name, own in ("fp8", quantized), ("exact", exact):
        save_file(plain | own, copied("minimax_m2", tmp_path / name) / "model.safetensors")
    config = config_of("minimax_m2") | {"quantization_config": how}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    got, wanted = (jgg.models.load(tmp_path / name, dtype=jnp.float32) for name in ("fp8", "exact"))
    tokens = np.arange(12).reshape(2, 6)
    np.testing.assert_array_equal(got(tokens), wanted(tokens))
