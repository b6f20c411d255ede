"""OLMoE."""

import functools

from jgg.core.arguments import check
from jgg.hf.expert_settings import read_normalized
from jgg.hf.families.common import OF_MODELS
from jgg.hf.family import Family
from jgg.hf.model_settings import in_all_layers, read_attention, read_biases
from jgg.hf.settings import Arguments, Settings
from jgg.hf.tensors import FUSED, QWEN


def _olmoe(settings: Settings) -> Arguments:
    clip = None if settings.get("clip_qkv") is None else settings.number("clip_qkv")
    check(clip is None or clip > 0, f"clip_qkv must be null or more than 0, got {clip}.")
    attention = read_attention(settings, qk_norm="all", clip_qkv=clip, **read_biases(settings))
    return in_all_layers(settings, attention)


OLMOE = Family(
    "mlp",
    functools.partial(read_normalized, hidden_features="intermediate_size"),
    QWEN,
    defaults=OF_MODELS
    | {"vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 2048}
    | {"rms_norm_eps": 1e-5, "eos_token_id": 50279}
    | {"num_attention_heads": 16, "num_key_value_heads": None, "attention_bias": False, "clip_qkv": None}
    | {"max_position_embeddings": 4096}
    | {"norm_topk_prob": False, "num_experts": 64, "num_experts_per_tok": 8},
    model=_olmoe,
    aliases={"num_experts": "num_local_experts"},
    fused=FUSED,
)
