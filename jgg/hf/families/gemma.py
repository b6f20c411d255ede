"""The Gemma models."""

from collections.abc import Mapping

from jgg.core.arguments import check, check_instance
from jgg.core.mixers import AttentionConfig
from jgg.hf.expert_settings import ACTIVATIONS, read_experts
from jgg.hf.families.common import OF_MODELS
from jgg.hf.family import Family
from jgg.hf.model_settings import read_attention, read_biases, read_layer_types
from jgg.hf.multimodal import in_multimodal
from jgg.hf.settings import Arguments, Settings
from jgg.hf.tensors import LAYER, as_is, matrix

# in which every sixth layer attends to all tokens, and the last one
_SLIDING, _FULL, _PERIOD = "sliding_attention", "full_attention", 6
_ROTARY = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
_OF_LAYERS = "head_dim", "num_key_value_heads"  # what layers may have of their own


def _experts_of_gemma4(settings: Settings) -> Arguments:
    return read_experts(settings, "num_experts", "moe_intermediate_size", normalize=True, use_router_scale=True)


def _gemma4(settings: Settings) -> Arguments:
    for key, value in (
        ("enable_moe_block", True),
        ("hidden_size_per_layer_input", 0),
        ("num_kv_shared_layers", 0),
        ("use_double_wide_mlp", False),
    ):
        settings.only(key, value)
    direction = settings.get("use_bidirectional_attention")
    check(
        direction in (None, "vision"),  # "vision" affects only tokens of images
        f"use_bidirectional_attention must be null or 'vision', as tokens of text see those before them, "
        f"got {direction!r}.",
    )
    softcap = settings.get("final_logit_softcapping")
    softcap = None if softcap is None else settings.number("final_logit_softcapping")
    check(softcap is None or softcap > 0, f"final_logit_softcapping must be null or more than 0, got {softcap}.")
    return {
        "mixers": _mixers(settings),
        "dense_features": settings.int("intermediate_size"),
        "dense_activation": ACTIVATIONS[settings.get("hidden_act")],
        "layout": "sandwich",
        "embedding_scale": settings.int("hidden_size") ** 0.5,
        "logits_softcap": softcap,
    }


def _mixers(settings: Settings) -> tuple[AttentionConfig, ...]:
    """Attention of each layer; layers with and without a window also differ in head sizes."""
    numbers = range(settings.int("num_hidden_layers"))
    usual = [_SLIDING if (number + 1) % _PERIOD else _FULL for number in numbers]
    types = [*read_layer_types(settings, [_SLIDING, _FULL], usual)[:-1], _FULL]
    own, known = _of_layers(settings, types), dict[object, AttentionConfig]()
    mixers = []
    for number in numbers:
        of_layer = own.get(number, {})
        key = types[number], *(of_layer.get(name) for name in _OF_LAYERS)
        if key not in known:
            known[key] = _attention(settings.updated(of_layer), types[number])
        mixers.append(known[key])
    return tuple(mixers)


def _of_layers(settings: Settings, types: list[str]) -> Mapping[int, Mapping[str, object]]:
    """The layers' own settings, by layer number, in the format of transformers 5.24 or older."""
    given = settings.get("per_layer_config")
    if given is None:
        own = {"head_dim": settings.get("global_head_dim")}
        if settings.flag("attention_k_eq_v") and settings.get("num_global_key_value_heads") is not None:
            own["num_key_value_heads"] = settings.get("num_global_key_value_heads")
        return {number: own for number, kind in enumerate(types) if kind == _FULL}
    check_instance("per_layer_config", given, Mapping, "null or an object")
    found: dict[int, Mapping[str, object]] = {}
    for number, own in given.items():
        is_layer = isinstance(number, int | str) and str(number).isdecimal() and int(number) < len(types)
        check(is_layer, f"per_layer_config must have numbers of the {len(types)} layers as keys, got {number!r}.")
        check_instance(f"per_layer_config of layer {number}", own, Mapping, "an object")
        unknown = sorted(own.keys() - set(_OF_LAYERS))
        check(not unknown, f"per_layer_config of layer {number} must have only {', '.join(_OF_LAYERS)}, got {unknown}.")
        found[int(number)] = own
    return found


def _attention(settings: Settings, kind: str) -> AttentionConfig:
    """Attention of a layer of this kind, from settings that include the layer's own."""
    is_full = kind == _FULL
    return read_attention(
        settings,
        layer_type=kind,
        scale=1.0,
        window=None if is_full else settings.int("sliding_window"),
        qk_norm="head",
        norm_values=True,
        are_keys_values=is_full and settings.flag("attention_k_eq_v"),
        **read_biases(settings),
    )


GEMMA4_TEXT = Family(
    "",
    _experts_of_gemma4,
    {
        "w_router": matrix("router.proj.weight"),
        "scale_router": as_is("router.per_expert_scale"),
        "w_gate_up": matrix("experts.gate_up_proj"),
        "w_down": matrix("experts.down_proj"),
    },
    defaults=OF_MODELS
    | {"vocab_size": 262144, "hidden_size": 2304, "num_hidden_layers": 30, "intermediate_size": 9216}
    | {"rms_norm_eps": 1e-6, "eos_token_id": 1, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    | {"final_logit_softcapping": None, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "attention_bias": False}
    | {"global_head_dim": 512, "num_global_key_value_heads": None, "per_layer_config": None}
    | {"attention_k_eq_v": False, "num_kv_shared_layers": 0, "use_bidirectional_attention": None}
    | {"sliding_window": 512, "layer_types": None, "rope_parameters": _ROTARY, "max_position_embeddings": 131072}
    | {"enable_moe_block": False, "use_double_wide_mlp": False}
    | {"moe_intermediate_size": None, "num_experts": None, "num_experts_per_tok": None},
    model=_gemma4,
    aliases={"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
    layer=LAYER
    | {
        "mixed_norm": as_is("post_attention_layernorm.weight"),
        "mlp_norm": as_is("pre_feedforward_layernorm.weight"),
        "mlp_result_norm": as_is("post_feedforward_layernorm_1.weight"),
        "router_norm": as_is("router.scale"),
        "moe_norm": as_is("pre_feedforward_layernorm_2.weight"),
        "moe_result_norm": as_is("post_feedforward_layernorm_2.weight"),
        "result_norm": as_is("post_feedforward_layernorm.weight"),
        "scale": as_is("layer_scalar"),
    },
)
GEMMA4 = in_multimodal(
    GEMMA4_TEXT,
    "gemma4_text",
    towers=("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
    outer={"tie_word_embeddings": True, "eos_token_id": None, "initializer_range": 0.02},
)
