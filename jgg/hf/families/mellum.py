"""JetBrains' Mellum 2."""

import dataclasses

from jgg.hf.expert_settings import read_normalized
from jgg.hf.families.common import OF_MODELS
from jgg.hf.family import Family
from jgg.hf.model_settings import in_layers, read_attention, read_biases, read_mlp_types
from jgg.hf.settings import Arguments, Settings
from jgg.hf.tensors import FUSED, QWEN

# the rotary embeddings that Mellum has if its config has no other
_ROTARY = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def _mellum(settings: Settings) -> Arguments:
    settings.only("use_sliding_window", True)
    settings.only("rope_scaling", None)
    kinds = {
        kind: read_attention(settings, layer_type=kind, qk_norm="head", **read_biases(settings)) for kind in _ROTARY
    }
    window = None if settings.get("sliding_window") is None else settings.int("sliding_window")
    kinds["sliding_attention"] = dataclasses.replace(kinds["sliding_attention"], window=window)
    num_layers = settings.int("num_hidden_layers")
    usual = ["full_attention"] * num_layers
    return in_layers(settings, kinds, usual) | read_mlp_types(settings, [False] * num_layers)


MELLUM = Family(
    "mlp",
    read_normalized,
    QWEN,
    defaults=OF_MODELS
    | {"vocab_size": 98304, "hidden_size": 2304, "num_hidden_layers": 28, "intermediate_size": 7168}
    | {"rms_norm_eps": 1e-6, "mlp_layer_types": None}
    | {"mtp_layer_types": None, "mtp_mlp_layer_types": None}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "attention_bias": False}
    | {"sliding_window": 1024, "layer_types": None, "rope_parameters": _ROTARY}
    | {"max_position_embeddings": 131072}
    | {"moe_intermediate_size": 896, "norm_topk_prob": True, "num_experts": 64, "num_experts_per_tok": 8}
    # of published configs, not of transformers
    | {"use_sliding_window": True},
    model=_mellum,
    aliases={"num_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    fused=FUSED,
    ignored=(r"rotary_emb\.inv_freq", r"^mtp\."),
)
