"""The Granite models."""

import dataclasses
import math

from jgg.core.arguments import check
from jgg.hf.families.common import OF_MODELS
from jgg.hf.families.mixtral import experts_of_mixtral
from jgg.hf.family import Family
from jgg.hf.model_settings import in_all_layers, read_attention, read_biases
from jgg.hf.settings import Arguments, Settings
from jgg.hf.tensors import FUSED, matrix


def _experts_with_shared(settings: Settings) -> Arguments:
    return experts_of_mixtral(settings, shared_features=settings.int("shared_intermediate_size", 0))


def _granitemoe(settings: Settings) -> Arguments:
    logits_scaling = settings.number("logits_scaling")
    is_invertible = logits_scaling and math.isfinite(1 / logits_scaling)
    check(is_invertible, f"logits_scaling must be a number to divide by, got {logits_scaling}.")
    attention = read_attention(settings, scale=settings.number("attention_multiplier"), **read_biases(settings))
    return in_all_layers(settings, attention) | {
        "embedding_scale": settings.number("embedding_multiplier"),
        "residual_scale": settings.number("residual_multiplier"),
        "logits_scale": 1 / logits_scaling,
    }


def _granitemoehybrid(settings: Settings) -> Arguments:
    settings.int("shared_intermediate_size")
    settings.only("normalization_function", "rmsnorm")
    known, num_layers = ("attention", "full_attention"), settings.int("num_hidden_layers")
    given = settings.get("layer_types")
    is_known = isinstance(given, list) and len(given) == num_layers and all(kind in known for kind in given)
    check(
        is_known,
        f"{settings.name('layer_types')} must be 'attention' for each of {num_layers} layers, as jgg.models has no "
        f"Mamba layers, which are those of other kinds and all if the key is absent, got {given!r}.",
    )
    read = _granitemoe(settings)
    if settings.get("position_embedding_type") == "rope":
        return read
    mixers = (dataclasses.replace(own, rotary=own.rotary and own.rotary.unrotated) for own in read["mixers"])
    return read | {"mixers": tuple(mixers)}


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
# the shared expert is a module outside the block of the other experts
GRANITEMOESHARED = dataclasses.replace(
    GRANITEMOE,
    block="",
    options=_experts_with_shared,
    tensors={
        "w_router": matrix("block_sparse_moe.router.layer.weight"),
        "w_gate_up": matrix("block_sparse_moe.input_linear.weight"),
        "w_down": matrix("block_sparse_moe.output_linear.weight"),
        "w_shared_gate_up": matrix("shared_mlp.input_linear.weight"),
        "w_shared_down": matrix("shared_mlp.output_linear.weight"),
    },
    defaults={**GRANITEMOE.defaults, "shared_intermediate_size": 0},
    fused={
        "w_router": matrix("block_sparse_moe.router.weight"),
        "w_gate_up": matrix("block_sparse_moe.experts.gate_up_proj"),
        "w_down": matrix("block_sparse_moe.experts.down_proj"),
    },
)
_OF_MAMBA = """
    mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads
    mamba_proj_bias time_step_limit
"""
GRANITEMOEHYBRID = dataclasses.replace(
    GRANITEMOESHARED,
    defaults={**GRANITEMOESHARED.defaults, "shared_intermediate_size": 1024}
    | {"position_embedding_type": None, "layer_types": None}
    | dict.fromkeys(_OF_MAMBA.split())
    # of published configs, not of transformers
    | {"init_method": None, "normalization_function": "rmsnorm"},
    model=_granitemoehybrid,
    aliases={"layer_types": "layers_block_type"},
)
