"""The Granite models."""

import math
from typing import Any

from jgg.core.arguments import check
from jgg.hf.families.common import OF_MODELS
from jgg.hf.families.mixtral import experts_of_mixtral
from jgg.hf.family import Family
from jgg.hf.model_settings import in_all_layers, read_attention, read_biases
from jgg.hf.settings import Settings
from jgg.hf.tensors import FUSED, matrix


def _granitemoe(settings: Settings) -> dict[str, Any]:
    logits_scaling = settings.number("logits_scaling")
    is_invertible = logits_scaling and math.isfinite(1 / logits_scaling)
    check(is_invertible, f"logits_scaling must be a number to divide by, got {logits_scaling}.")
    attention = read_attention(settings, scale=settings.number("attention_multiplier"), **read_biases(settings))
    return in_all_layers(settings, attention) | {
        "embedding_scale": settings.number("embedding_multiplier"),
        "residual_scale": settings.number("residual_multiplier"),
        "logits_scale": 1 / logits_scaling,
    }


GRANITEMOE = Family(
    "block_sparse_moe",
    experts_of_mixtral,
    {
        "w_router": matrix("router.layer.weight"),
        "w_gate_up": matrix("input_linear.weight"),
        "w_down": matrix("output_linear.weight"),
    },
    defaults=OF_MODELS
    | {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 11008}
    | {"rms_norm_eps": 1e-6, "eos_token_id": 2, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
    | {"logits_scaling": 1.0}
    | {"num_attention_heads": 32, "num_key_value_heads": None, "attention_bias": False}
    | {"max_position_embeddings": 2048, "attention_multiplier": 1.0}
    | {"num_experts_per_tok": 2, "num_local_experts": 8},
    model=_granitemoe,
    fused={"w_router": matrix("router.weight")} | FUSED,
)
