"""Upstage's Solar Open, whose experts are GLM-4.5's."""

import dataclasses

from jgg.hf.families.common import OF_MODELS
from jgg.hf.families.deepseek import GLM4_MOE
from jgg.hf.model_settings import in_all_layers, read_attention
from jgg.hf.settings import Arguments, Settings


def _solar_open(settings: Settings) -> Arguments:
    return in_all_layers(settings, read_attention(settings, use_qkv_bias=settings.flag("attention_bias")))


SOLAR_OPEN = dataclasses.replace(
    GLM4_MOE,
    defaults=OF_MODELS
    | {"vocab_size": 196608, "hidden_size": 4096, "num_hidden_layers": 48, "rms_norm_eps": 1e-5}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": False}
    | {"rope_theta": 1000000.0, "max_position_embeddings": 131072}
    | {"moe_intermediate_size": 1280, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1}
    | {"norm_topk_prob": True, "num_experts_per_tok": 8, "routed_scaling_factor": 1.0, "topk_group": 1},
    model=_solar_open,
    aliases={"n_routed_experts": "num_local_experts"},
    only={"first_k_dense_replace": 0, "use_qk_norm": False},
    without_effect=("intermediate_size",),  # for dense layers; it has none
    ignored=(r"rotary_emb\.inv_freq",),
)
