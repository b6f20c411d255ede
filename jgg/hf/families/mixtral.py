"""Mixtral."""

import functools

from jgg.hf.expert_settings import read_experts
from jgg.hf.families.common import OF_MODELS
from jgg.hf.family import Family
from jgg.hf.model_settings import in_all_layers, read_attention, read_window
from jgg.hf.settings import Arguments, Settings
from jgg.hf.tensors import FUSED, ROUTER, experts


def _mixtral(settings: Settings) -> Arguments:
    return in_all_layers(settings, read_attention(settings, window=read_window(settings)))


experts_of_mixtral = functools.partial(
    read_experts, experts="num_local_experts", hidden_features="intermediate_size", score="topk_softmax"
)
MIXTRAL = Family(
    "block_sparse_moe",
    experts_of_mixtral,
    ROUTER | experts("w1", "w3", "w2"),
    defaults=OF_MODELS
    | {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}
    | {"rms_norm_eps": 1e-5, "eos_token_id": 2}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None, "rope_theta": 1000000.0}
    | {"max_position_embeddings": 131072}
    | {"num_experts_per_tok": 2, "num_local_experts": 8},
    model=_mixtral,
    aliases={"num_local_experts": "num_experts"},
    fused=FUSED,
    fused_block="mlp",
)
