"""The MiniMax models."""

import functools

from jgg.core.arguments import check
from jgg.hf.expert_settings import read_experts
from jgg.hf.families.common import OF_MODELS
from jgg.hf.family import Family
from jgg.hf.model_settings import in_all_layers, read_attention
from jgg.hf.settings import Arguments, Settings
from jgg.hf.tensors import FUSED, ROUTER, SELECTION_BIAS, as_is, experts


def _minimax_m2(settings: Settings) -> Arguments:
    num_layers, kinds = settings.int("num_hidden_layers"), settings.get("attn_type_list")
    has_attention = kinds is None or kinds == [1] * num_layers
    check(has_attention, f"attn_type_list must be 1, softmax attention, for each of {num_layers} layers, got {kinds}.")
    if settings.get("rotary_dim") is not None:
        rotated = settings.int("rotary_dim") / settings.int("head_dim")
        settings = settings.with_defaults(partial_rotary_factor=rotated)
    return in_all_layers(settings, read_attention(settings, qk_norm="all"))


MINIMAX_M2 = Family(
    "block_sparse_moe",
    functools.partial(
        read_experts,
        experts="num_local_experts",
        hidden_features="intermediate_size",
        score="sigmoid",
        use_selection_bias=True,
        normalize=True,
    ),
    ROUTER | experts("w1", "w3", "w2") | {SELECTION_BIAS: as_is("e_score_correction_bias")},
    defaults=OF_MODELS
    | {"vocab_size": 200064, "hidden_size": 3072, "num_hidden_layers": 62, "intermediate_size": 1536}
    | {"rms_norm_eps": 1e-6, "eos_token_id": 200020}
    | {"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608}
    | {"rope_theta": 5000000.0, "partial_rotary_factor": 1.0, "rotary_dim": None, "attn_type_list": None}
    | {"num_experts_per_tok": 8, "num_local_experts": 256},
    model=_minimax_m2,
    aliases={"num_local_experts": "num_experts", "num_nextn_predict_layers": "num_mtp_modules"},
    only={"scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0}
    | {"use_qk_norm": True, "qk_norm_type": "per_layer"}
    | {f"layernorm_{part}_beta": 1.0 for part in ("full_attention", "linear_attention", "mlp")},
    without_effect=("mlp_intermediate_size", "mtp_transformer_layers", "shared_moe_mode", "use_mtp"),
    fused=FUSED,
    fused_block="mlp",
)
