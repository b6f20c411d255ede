"""gpt-oss."""

import dataclasses

from jgg.core.activations import clamped_swiglu
from jgg.core.arguments import check
from jgg.hf.expert_settings import read_experts
from jgg.hf.families.common import OF_MODELS
from jgg.hf.family import Family
from jgg.hf.model_settings import in_layers, read_attention, read_biases
from jgg.hf.settings import Arguments, Settings
from jgg.hf.tensors import IN_OUT, as_is

# the settings of the YaRN that gpt-oss has if its config has no other
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _experts_of_gpt_oss(settings: Settings) -> Arguments:
    limit = settings.number("swiglu_limit")
    check(limit > 0, f"swiglu_limit must be more than 0, got {limit}.")
    return read_experts(
        settings,
        "num_local_experts",
        "intermediate_size",
        score="topk_softmax",
        interleaved=True,
        use_bias=True,
        activation=clamped_swiglu(limit, settings.number("swiglu_alpha")),
        use_router_bias=True,
    )


def _gpt_oss(settings: Settings) -> Arguments:
    attention = read_attention(settings, use_sinks=True, **read_biases(settings))
    kinds = {
        "sliding_attention": dataclasses.replace(attention, window=settings.int("sliding_window")),
        "full_attention": attention,
    }
    usual = [list(kinds)[layer % 2] for layer in range(settings.int("num_hidden_layers"))]
    return in_layers(settings, kinds, usual)


GPT_OSS = Family(
    "mlp",
    _experts_of_gpt_oss,
    IN_OUT
    | {
        "b_router": as_is("router.bias"),
        "b_gate_up": as_is("experts.gate_up_proj_bias"),
        "b_down": as_is("experts.down_proj_bias"),
    },
    defaults=OF_MODELS
    | {"vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 36, "intermediate_size": 2880}
    | {"rms_norm_eps": 1e-5}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True}
    | {"sliding_window": 128, "layer_types": None, "rope_parameters": _YARN, "rope_theta": 150000.0}
    | {"max_position_embeddings": 131072}
    | {"num_experts_per_tok": 4, "num_local_experts": 128, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    model=_gpt_oss,
    aliases={"num_local_experts": "num_experts"},
)
