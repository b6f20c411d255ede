"""DeepSeek-V3, and the families that have its router."""

import dataclasses

from jgg.hf.expert_settings import read_groups
from jgg.hf.families.common import OF_MODELS
from jgg.hf.family import Family
from jgg.hf.model_settings import in_all_layers, read_attention, read_dense_layers, read_latent, read_mlp_types
from jgg.hf.settings import Arguments, Settings
from jgg.hf.tensors import FUSED, LATENT, LAYER, QWEN, SELECTION_BIAS, as_is, shared


def _glm4_moe(settings: Settings) -> Arguments:
    attention = read_attention(
        settings,
        qk_norm="head" if settings.flag("use_qk_norm") else None,
        use_qkv_bias=settings.flag("attention_bias"),
    )
    key = "first_k_dense_replace"
    return in_all_layers(settings, attention) | read_dense_layers(settings, key, settings.int(key, 0))


def _deepseek_v3(settings: Settings) -> Arguments:
    for key in ("moe_layer_freq", "scoring_func", "topk_method"):
        settings.only(key, settings.defaults[key])
    key = "first_k_dense_replace"
    dense = read_dense_layers(settings, key, settings.int(key, 0))
    return in_all_layers(settings, read_latent(settings)) | dense


def _glm4_moe_lite(settings: Settings) -> Arguments:
    for key in ("scoring_func", "topk_method"):
        settings.only(key, settings.defaults[key])
    usual = [number < 1 for number in range(settings.int("num_hidden_layers"))]
    found = read_mlp_types(settings, usual, also="first_k_dense_replace")
    return in_all_layers(settings, read_latent(settings)) | found


# keys of latent attention, and keys that published configs have in addition to transformers'
_OF_LATENT = {
    **{"attention_bias": False, "kv_lora_rank": 512, "num_key_value_heads": None, "qk_head_dim": None},
    **{"qk_rope_head_dim": 64, "rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
DEEPSEEK_V3 = Family(
    "mlp",
    read_groups,
    QWEN | {SELECTION_BIAS: as_is("gate.e_score_correction_bias")} | shared("shared_experts"),
    defaults=OF_MODELS
    | {"vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432}
    | {"rms_norm_eps": 1e-6, "eos_token_id": 1, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1}
    | _OF_LATENT
    | {"num_attention_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128}
    | {"max_position_embeddings": 4096}
    | {"moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1}
    | {"norm_topk_prob": True, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "topk_group": 4}
    | {"moe_layer_freq": 1},
    model=_deepseek_v3,
    aliases={"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"}
    | {"qk_rope_head_dim": "head_dim"},
    fused=FUSED,
    layer=LATENT,
    # the layer after the 61 of published checkpoints, which predicts further tokens
    ignored=(r"rotary_emb\.inv_freq", r"model\.layers\.61\."),
)
GLM4_MOE_LITE = dataclasses.replace(
    DEEPSEEK_V3,
    defaults=OF_MODELS
    | {"vocab_size": 154880, "hidden_size": 2048, "num_hidden_layers": 47, "intermediate_size": 10240}
    | {"rms_norm_eps": 1e-5, "eos_token_id": 1, "first_k_dense_replace": None, "mlp_layer_types": None}
    | _OF_LATENT
    | {"num_attention_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}
    | {"max_position_embeddings": 202752}
    | {"moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1}
    | {"norm_topk_prob": True, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8, "topk_group": 1},
    model=_glm4_moe_lite,
    aliases={"n_routed_experts": "num_local_experts", "qk_rope_head_dim": "head_dim"},
    ignored=(r"rotary_emb\.inv_freq", r"model\.layers\.47\."),
)
GLM4_MOE = dataclasses.replace(
    DEEPSEEK_V3,
    defaults=OF_MODELS
    | {"vocab_size": 151552, "hidden_size": 4096, "num_hidden_layers": 46, "intermediate_size": 10944}
    | {"rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
    | {"num_attention_heads": 96, "num_key_value_heads": 8, "attention_bias": False, "use_qk_norm": False}
    | {"partial_rotary_factor": 0.5, "max_position_embeddings": 131072}
    | {"moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1}
    | {"norm_topk_prob": True, "num_experts_per_tok": 8, "routed_scaling_factor": 1.0, "topk_group": 1},
    model=_glm4_moe,
    aliases={"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    layer=LAYER,
    # of published checkpoints, which have 46 and 92 layers and one more, which predicts further tokens
    ignored=(r"rotary_emb\.inv_freq", r"model\.layers\.(46|92)\."),
)
