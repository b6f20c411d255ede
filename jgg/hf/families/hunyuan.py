"""Tencent's Hunyuan V3."""

from jgg.hf.expert_settings import read_experts
from jgg.hf.families.common import OF_MODELS
from jgg.hf.family import Family
from jgg.hf.model_settings import in_all_layers, read_attention, read_biases, read_mlp_types
from jgg.hf.settings import Arguments, Settings
from jgg.hf.tensors import FUSED, ROUTER, SELECTION_BIAS, as_is, experts, matrix, shared


def _experts_of_hy_v3(settings: Settings) -> Arguments:
    return read_experts(
        settings,
        "num_experts",
        "moe_intermediate_size",
        score="sigmoid",
        use_selection_bias=True,
        normalize=True,
        scale=settings.number("router_scaling_factor"),
        shared_features=settings.int("num_shared_experts", 0) * settings.int("moe_intermediate_size"),
    )


def _hy_v3(settings: Settings) -> Arguments:
    usual = [number < 1 for number in range(settings.int("num_hidden_layers"))]
    read = read_mlp_types(settings, usual, also="first_k_dense_replace")
    return in_all_layers(settings, read_attention(settings, qk_norm="head", **read_biases(settings))) | read


HY_V3 = Family(
    "mlp",
    _experts_of_hy_v3,
    {"w_router": matrix("router.gate.weight"), SELECTION_BIAS: as_is("expert_bias")}
    | experts("gate_proj", "up_proj", "down_proj")
    | shared("shared_mlp"),
    defaults=OF_MODELS
    | {"vocab_size": 120832, "hidden_size": 4096, "num_hidden_layers": 80, "intermediate_size": 13312}
    | {"rms_norm_eps": 1e-5, "initializer_range": 0.006, "mlp_layer_types": None, "first_k_dense_replace": None}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": False}
    | {"rope_theta": 11158840.0, "max_position_embeddings": 131072}
    | {"moe_intermediate_size": 1536, "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1}
    | {"router_scaling_factor": 2.826},
    model=_hy_v3,
    aliases={"num_experts": "num_local_experts", "moe_intermediate_size": "expert_hidden_dim"},
    only={"mlp_bias": False, "moe_router_enable_expert_bias": True, "moe_router_use_sigmoid": True}
    | {"qk_norm": True, "route_norm": True},
    # the first three round less
    without_effect=(
        *("enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine"),
        *("eod_token_id", "sep_token_id", "use_grouped_mm"),
    ),
    fused=ROUTER | FUSED | {SELECTION_BIAS: as_is("e_score_correction_bias")} | shared("shared_experts"),
    # of the published checkpoint: the layer that predicts further tokens
    ignored=(r"rotary_emb\.inv_freq", r"model\.layers\.80\."),
    has_modules_in_peft=False,
)
