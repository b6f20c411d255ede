"""Qwen3-Next and Qwen3.5, whose layers are recurrent except for every fourth."""

import dataclasses

from jgg.core.arguments import check
from jgg.core.mixers import DeltaConfig
from jgg.hf.expert_settings import read_experts, read_normalized
from jgg.hf.families.common import OF_MODELS
from jgg.hf.family import Family
from jgg.hf.model_settings import in_layers, read_attention, read_biases
from jgg.hf.multimodal import in_multimodal
from jgg.hf.settings import LARGEST, Arguments, Settings
from jgg.hf.tensors import FUSED, LAYER, QWEN, as_is, matrix, shared

_MOST_FEATURES = 65_536  # of a head
_EXPERTS = {"num_experts": "num_local_experts"}


def experts_with_shared(settings: Settings) -> Arguments:
    """Returns the arguments of a layer with a shared expert that has a gate."""
    return read_normalized(settings, **_shared(settings))


def _experts_of_qwen3_5(settings: Settings) -> Arguments:
    return read_experts(settings, "num_experts", "moe_intermediate_size", normalize=True, **_shared(settings))


def _shared(settings: Settings) -> Arguments:
    return {"shared_features": settings.int("shared_expert_intermediate_size"), "use_shared_gate": True}


def _qwen3_next(settings: Settings) -> Arguments:
    for key in ("decoder_sparse_step", "use_sliding_window"):
        settings.only(key, settings.defaults[key])
    dense = settings.get("mlp_only_layers")
    check(dense in (None, []), f"mlp_only_layers must be none, as all layers have experts, got {dense!r}.")
    return _mixers(settings, is_grouped=True)


def _qwen3_5(settings: Settings) -> Arguments:
    for key in ("attn_output_gate", "mamba_ssm_dtype"):
        settings.only(key, settings.defaults[key])
    return _mixers(settings, is_grouped=False)


def _mixers(settings: Settings, *, is_grouped: bool) -> Arguments:
    """The mixers of all layers; the scales of their norms are stored around zero."""
    settings.only("hidden_act", "silu")  # the convolution's too
    kinds = {
        "linear_attention": _read_delta(settings, is_grouped=is_grouped),
        "full_attention": read_attention(settings, qk_norm="head", use_gate=True, **read_biases(settings)),
    }
    interval, num_layers = settings.int("full_attention_interval"), settings.int("num_hidden_layers")
    usual = ["linear_attention" if number % interval else "full_attention" for number in range(1, num_layers + 1)]
    return in_layers(settings, kinds, usual) | {"norm_offset": 1.0}


def _read_delta(settings: Settings, *, is_grouped: bool) -> DeltaConfig:
    keys, values = settings.int("linear_num_key_heads"), settings.int("linear_num_value_heads")
    check(values % keys == 0, f"linear_num_key_heads must divide linear_num_value_heads, {values}, got {keys}.")
    return DeltaConfig(
        num_key_heads=keys,
        num_value_heads=values,
        key_features=settings.int("linear_key_head_dim", most=_MOST_FEATURES),
        value_features=settings.int("linear_value_head_dim", most=_MOST_FEATURES),
        conv_size=settings.int("linear_conv_kernel_dim", most=LARGEST),
        is_grouped=is_grouped,
    )


def _delta(**projections: str) -> Arguments:
    """The tensors of a layer whose recurrent part has these projections."""
    own = projections | {"out": "out_proj"}
    return {
        **LAYER,
        **{f"delta.w_{name}": matrix(f"linear_attn.{module}.weight") for name, module in own.items()},
        "delta.w_conv": as_is("linear_attn.conv1d.weight"),
        "delta.log_a": as_is("linear_attn.A_log"),
        "delta.dt_bias": as_is("linear_attn.dt_bias"),
        "delta.norm": as_is("linear_attn.norm.weight"),
    }


WITH_SHARED = shared("shared_expert") | {"w_shared_gate": matrix("shared_expert_gate.weight")}
_OF_BOTH = (
    OF_MODELS
    | {"rms_norm_eps": 1e-6, "hidden_size": 2048}
    | {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "attention_bias": False}
    | {"partial_rotary_factor": 0.25, "max_position_embeddings": 32768}
    | {"layer_types": None, "full_attention_interval": 4, "linear_conv_kernel_dim": 4}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
)
QWEN3_NEXT = Family(
    "mlp",
    experts_with_shared,
    QWEN | WITH_SHARED,
    defaults=_OF_BOTH
    | {"vocab_size": 151936, "num_hidden_layers": 48, "intermediate_size": 5632}
    | {"mlp_only_layers": None, "decoder_sparse_step": 1, "use_sliding_window": False}
    | {"norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10},
    model=_qwen3_next,
    aliases=_EXPERTS,
    fused=FUSED,
    layer=_delta(qkvz="in_proj_qkvz", ba="in_proj_ba"),
    ignored=(r"rotary_emb\.inv_freq", r"^mtp\."),
)
QWEN3_5_MOE_TEXT = dataclasses.replace(
    QWEN3_NEXT,
    options=_experts_of_qwen3_5,
    defaults=_OF_BOTH
    | {"vocab_size": 248320, "num_hidden_layers": 40}
    | {"num_experts": 256, "num_experts_per_tok": 8}
    # of published configs, not of transformers
    | {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    | {"mtp_num_hidden_layers": 0, "mtp_use_dedicated_embeddings": False},
    model=_qwen3_5,
    layer=_delta(qkv="in_proj_qkv", z="in_proj_z", b="in_proj_b", a="in_proj_a"),
    has_modules_in_peft=False,
)
QWEN3_5_MOE = in_multimodal(
    QWEN3_5_MOE_TEXT, "qwen3_5_moe_text", towers=("model.visual.",), outer={"tie_word_embeddings": False}
)
# AutoModelForCausalLM opens a multimodal folder too, and writes the language model with the names from there
QWEN3_5_MOE_TEXT = dataclasses.replace(QWEN3_5_MOE_TEXT, other_prefix=QWEN3_5_MOE.prefix)
