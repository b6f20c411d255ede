"""DeepSeek-V3, and the families that have its router."""

import dataclasses
from typing import Any

from jgg.hf.expert_settings import read_groups
from jgg.hf.families.common import OF_MODELS
from jgg.hf.family import Family
from jgg.hf.model_settings import in_all_layers, read_attention, read_dense_layers
from jgg.hf.settings import Settings
from jgg.hf.tensors import FUSED, QWEN, SELECTION_BIAS, as_is, shared


def _glm4_moe(settings: Settings) -> dict[str, Any]:
    attention = read_attention(
        settings,
        qk_norm="head" if settings.flag("use_qk_norm") else None,
        use_qkv_bias=settings.flag("attention_bias"),
    )
    key = "first_k_dense_replace"
    return in_all_layers(settings, attention) | read_dense_layers(settings, key, settings.int(key, 0))


DEEPSEEK_V3 = Family(
    "mlp",
    read_groups,
    QWEN | {SELECTION_BIAS: as_is("gate.e_score_correction_bias")} | shared("shared_experts"),
    defaults={"hidden_size": 7168, "hidden_act": "silu"}
    | {"moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1}
    | {"norm_topk_prob": True, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "topk_group": 4},
    lacks="has latent attention",
    aliases={"n_routed_experts": "num_local_experts"},
    fused=FUSED,
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
    lacks="",
    aliases={"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    # of published checkpoints, which have 46 and 92 layers and one more, which predicts further tokens
    ignored=(*DEEPSEEK_V3.ignored, r"model\.layers\.(46|92)\."),
)
