"""Llama 4."""

import dataclasses

from jgg.core.arguments import check
from jgg.core.mixers import AttentionConfig
from jgg.hf.expert_settings import read_experts
from jgg.hf.families.common import OF_MODELS
from jgg.hf.family import Family
from jgg.hf.model_settings import read_attention, read_biases, read_layer_types, read_mlps
from jgg.hf.multimodal import in_multimodal
from jgg.hf.settings import Arguments, Settings
from jgg.hf.tensors import IN_OUT, LAYER, matrix, shared

_CHUNKED, _FULL = "chunked_attention", "full_attention"


def _experts(settings: Settings) -> Arguments:
    return read_experts(
        settings,
        "num_local_experts",
        "intermediate_size",
        score="sigmoid",
        normalize=False,
        scale_input=True,
        shared_features=settings.int("intermediate_size"),
    )


def _llama4(settings: Settings) -> Arguments:
    with_rotary, without = _rotated(settings), _unrotated(settings)
    chunk = None if settings.get("attention_chunk_size") is None else settings.int("attention_chunk_size")
    num_layers, uses_rotary = settings.int("num_hidden_layers"), _uses_rotary(settings)
    kinds = read_layer_types(
        settings, [_CHUNKED, _FULL], [_CHUNKED if uses and chunk else _FULL for uses in uses_rotary]
    )
    check(chunk or _CHUNKED not in kinds, f"attention_chunk_size must be a number for {_CHUNKED!r}, got null.")
    mixers = tuple(
        dataclasses.replace(with_rotary if uses else without, chunk=chunk if kind == _CHUNKED else None)
        for uses, kind in zip(uses_rotary, kinds, strict=True)
    )
    read = {"mixers": mixers} | read_mlps(settings, "moe_layers", _are_dense(settings, num_layers))
    return read | ({"dense_features": settings.int("intermediate_size_mlp")} if "dense_features" in read else {})


def _rotated(settings: Settings) -> AttentionConfig:
    """The attention of layers with a rotary embedding; norms come after it in transformers."""
    attention = read_attention(settings, is_interleaved=True, **read_biases(settings))
    if not settings.flag("use_qk_norm"):
        return attention
    scale = 1.0 if attention.rotary is None else attention.rotary.scale
    check(scale == 1, f"rope_parameters must not scale rotated features where use_qk_norm is true, got {scale}.")
    return dataclasses.replace(attention, qk_norm="unit")


def _unrotated(settings: Settings) -> AttentionConfig:
    """The attention of layers without a rotary embedding, with other logits for late tokens."""
    attention = read_attention(settings, is_interleaved=True, **read_biases(settings))
    floor, scale = settings.number("floor_scale"), settings.number("attn_scale")
    check(floor > 0, f"floor_scale must be more than 0, got {floor}.")
    attention = dataclasses.replace(attention, rotary=attention.rotary and attention.rotary.unrotated)
    if not settings.flag("attn_temperature_tuning"):
        return attention
    return dataclasses.replace(attention, temperature_floor=floor, temperature_scale=scale)


def _uses_rotary(settings: Settings) -> list[bool]:
    """For each layer, whether it has a rotary embedding: "no_rope_layers" has a 1 for these."""
    num_layers, interval = settings.int("num_hidden_layers"), settings.int("no_rope_layer_interval")
    given = settings.get("no_rope_layers") or [int(number % interval != 0) for number in range(1, num_layers + 1)]
    is_known = isinstance(given, list) and len(given) >= num_layers and all(uses in (0, 1) for uses in given)
    check(is_known, f"no_rope_layers must have 0 or 1 for each of {num_layers} layers, or be empty, got {given!r}.")
    return [bool(uses) for uses in given[:num_layers]]


def _are_dense(settings: Settings, num_layers: int) -> list[bool]:
    """For each layer, whether it has an MLP instead of experts."""
    step = settings.int("interleave_moe_layer_step")
    given = settings.get("moe_layers")
    given = list(range(step - 1, num_layers, step)) if given is None else given
    is_known = isinstance(given, list) and all(type(number) is int for number in given)
    check(is_known, f"moe_layers must be null or numbers of layers, got {given!r}.")
    return [number not in given for number in range(num_layers)]


LLAMA4_TEXT = Family(
    "feed_forward",
    _experts,
    IN_OUT | shared("shared_expert"),
    defaults=OF_MODELS
    | {"vocab_size": 202048, "hidden_size": 5120, "num_hidden_layers": 48, "intermediate_size": 8192}
    | {"intermediate_size_mlp": 16384, "rms_norm_eps": 1e-5, "eos_token_id": 2}
    | {"moe_layers": None, "interleave_moe_layer_step": 1}
    | {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": False}
    | {"use_qk_norm": True, "attention_chunk_size": 8192, "layer_types": None, "rope_theta": 500000.0}
    | {"no_rope_layers": None, "no_rope_layer_interval": 4, "attn_temperature_tuning": True}
    | {"floor_scale": 8192, "attn_scale": 0.1, "max_position_embeddings": 131072}
    | {"num_experts_per_tok": 1, "num_local_experts": 16},
    model=_llama4,
    layer=LAYER
    | {
        "mlp.w_gate_up": matrix("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"),
        "mlp.w_down": matrix("feed_forward.down_proj.weight"),
    },
    is_swapped=True,
)
LLAMA4 = in_multimodal(
    LLAMA4_TEXT,
    "llama4_text",
    prefix="language_model.model.",
    root="language_model.",
    towers=("vision_model.", "multi_modal_projector."),
    outer={"tie_word_embeddings": False},
)
