"""The architectures of Hugging Face, each as one `Family`: keys of config.json with defaults, and names of tensors."""

import dataclasses
import functools
import math
from typing import Any

from jgg.activations import clamped_swiglu
from jgg.core.arguments import check
from jgg.hf.expert_settings import read_experts, read_groups, read_normalized
from jgg.hf.family import Family
from jgg.hf.model_settings import read_attention, read_biases, read_dense_layers, read_windows
from jgg.hf.settings import Settings
from jgg.hf.tensors import FUSED, IN_OUT, QWEN, ROUTER, SELECTION_BIAS, as_is, experts, matrix, shared

# keys of all families that `jgg.models` has
_OF_MODELS = {
    "eos_token_id": None,
    "head_dim": None,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "num_nextn_predict_layers": 0,
    "original_max_position_embeddings": None,
    "partial_rotary_factor": None,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# the settings of the YaRN that gpt-oss has if its config has no other
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _mixtral(settings: Settings) -> dict[str, Any]:
    return read_attention(settings) | read_windows(settings)


def _qwen3_moe(settings: Settings) -> dict[str, Any]:
    for key in ("decoder_sparse_step", "qkv_bias", "shared_expert_intermediate_size", "use_qk_norm"):
        settings.only(key, settings.defaults[key])
    dense = [] if settings.get("mlp_only_layers") is None else settings.get("mlp_only_layers")
    is_first = isinstance(dense, list) and sorted(dense) == list(range(len(dense)))
    check(is_first, f"mlp_only_layers must be the first layers, such as [0, 1], or none, got {dense!r}.")
    windows = read_windows(settings, settings.flag("use_sliding_window"))
    attention = read_attention(settings, qk_norm="head", **read_biases(settings)) | windows
    return attention | read_dense_layers(settings, "mlp_only_layers", len(dense))


def _olmoe(settings: Settings) -> dict[str, Any]:
    clip = None if settings.get("clip_qkv") is None else settings.number("clip_qkv")
    check(clip is None or clip > 0, f"clip_qkv must be null or more than 0, got {clip}.")
    return read_attention(settings, qk_norm="all", clip_qkv=clip, **read_biases(settings))


def _experts_of_gpt_oss(settings: Settings) -> dict[str, Any]:
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


def _gpt_oss(settings: Settings) -> dict[str, Any]:
    num_layers, kinds = settings.int("num_hidden_layers"), ("sliding_attention", "full_attention")
    given = settings.get("layer_types")
    if given is None:
        given = [kinds[layer % 2] for layer in range(num_layers)]
    is_known = isinstance(given, list) and len(given) == num_layers and all(kind in kinds for kind in given)
    check(is_known, f"layer_types must be one of {list(kinds)} for each of {num_layers} layers, got {given!r}.")
    windows = tuple(settings.int("sliding_window") if kind == kinds[0] else None for kind in given)
    return read_attention(settings, use_sinks=True, windows=windows, **read_biases(settings))


def _granitemoe(settings: Settings) -> dict[str, Any]:
    logits_scaling = settings.number("logits_scaling")
    is_invertible = logits_scaling and math.isfinite(1 / logits_scaling)
    check(is_invertible, f"logits_scaling must be a number to divide by, got {logits_scaling}.")
    return read_attention(settings, **read_biases(settings)) | {
        "attention_scale": settings.number("attention_multiplier"),
        "embedding_scale": settings.number("embedding_multiplier"),
        "residual_scale": settings.number("residual_multiplier"),
        "logits_scale": 1 / logits_scaling,
    }


def _glm4_moe(settings: Settings) -> dict[str, Any]:
    attention = read_attention(
        settings,
        qk_norm="head" if settings.flag("use_qk_norm") else None,
        use_qkv_bias=settings.flag("attention_bias"),
    )
    key = "first_k_dense_replace"
    return attention | read_dense_layers(settings, key, settings.int(key, 0))


def _qwen3_next(settings: Settings) -> dict[str, Any]:
    shared_features = settings.int("shared_expert_intermediate_size")
    return read_normalized(settings, shared_features=shared_features, use_shared_gate=True)


def _llama4(settings: Settings) -> dict[str, Any]:
    return read_experts(
        settings,
        "num_local_experts",
        "intermediate_size",
        score="sigmoid",
        normalize=False,
        scale_input=True,
        shared_features=settings.int("intermediate_size"),
    )


_experts_of_mixtral = functools.partial(
    read_experts, experts="num_local_experts", hidden_features="intermediate_size", score="topk_softmax"
)
_DEEPSEEK = Family(
    "mlp",
    read_groups,
    QWEN | {SELECTION_BIAS: as_is("gate.e_score_correction_bias")} | shared("shared_experts"),
    defaults={"hidden_size": 7168, "hidden_act": "silu"}
    | {"moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1}
    | {"norm_topk_prob": True, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "topk_group": 4},
    lacks="has latent attention",
    aliases={"n_routed_experts": "num_local_experts"},
    fused=FUSED,
)
# The rows of defaults have the keys of the model, of attention and of experts, in this order. At the end are families
# of which jgg has the experts alone.
FAMILIES = {
    "mixtral": Family(
        "block_sparse_moe",
        _experts_of_mixtral,
        ROUTER | experts("w1", "w3", "w2"),
        defaults=_OF_MODELS
        | {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}
        | {"rms_norm_eps": 1e-5, "eos_token_id": 2}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None, "rope_theta": 1000000.0}
        | {"max_position_embeddings": 131072}
        | {"num_experts_per_tok": 2, "num_local_experts": 8},
        model=_mixtral,
        aliases={"num_local_experts": "num_experts"},
        fused=FUSED,
        fused_block="mlp",
    ),
    "qwen3_moe": Family(
        "mlp",
        read_normalized,
        QWEN,
        defaults=_OF_MODELS
        | {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 6144}
        | {"rms_norm_eps": 1e-6, "mlp_only_layers": None, "decoder_sparse_step": 1}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "attention_bias": False, "sliding_window": 4096}
        | {"use_sliding_window": False, "max_position_embeddings": 32768}
        | {"moe_intermediate_size": 768, "norm_topk_prob": False, "num_experts": 128, "num_experts_per_tok": 8}
        # of Qwen3-Coder's config, not of transformers
        | {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
        model=_qwen3_moe,
        aliases={"num_experts": "num_local_experts"},
        fused=FUSED,
    ),
    "olmoe": Family(
        "mlp",
        functools.partial(read_normalized, hidden_features="intermediate_size"),
        QWEN,
        defaults=_OF_MODELS
        | {"vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 2048}
        | {"rms_norm_eps": 1e-5, "eos_token_id": 50279}
        | {"num_attention_heads": 16, "num_key_value_heads": None, "attention_bias": False, "clip_qkv": None}
        | {"max_position_embeddings": 4096}
        | {"norm_topk_prob": False, "num_experts": 64, "num_experts_per_tok": 8},
        model=_olmoe,
        aliases={"num_experts": "num_local_experts"},
        fused=FUSED,
    ),
    "glm4_moe": dataclasses.replace(
        _DEEPSEEK,
        defaults=_OF_MODELS
        | {"vocab_size": 151552, "hidden_size": 4096, "num_hidden_layers": 46, "intermediate_size": 10944}
        | {"rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
        | {"num_attention_heads": 96, "num_key_value_heads": 8, "attention_bias": False, "use_qk_norm": False}
        | {"partial_rotary_factor": 0.5, "max_position_embeddings": 131072}
        | {"moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1}
        | {"norm_topk_prob": True, "num_experts_per_tok": 8, "routed_scaling_factor": 1.0, "topk_group": 1},
        model=_glm4_moe,
        lacks="",
        aliases={"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
        # of published checkpoints, which have 46 and 92 layers and one more, which predicts further tokens
        ignored=(*_DEEPSEEK.ignored, r"model\.layers\.(46|92)\."),
    ),
    "gpt_oss": Family(
        "mlp",
        _experts_of_gpt_oss,
        IN_OUT
        | {
            "b_router": as_is("router.bias"),
            "b_gate_up": as_is("experts.gate_up_proj_bias"),
            "b_down": as_is("experts.down_proj_bias"),
        },
        defaults=_OF_MODELS
        | {"vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 36, "intermediate_size": 2880}
        | {"rms_norm_eps": 1e-5}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True}
        | {"sliding_window": 128, "layer_types": None, "rope_parameters": _YARN, "rope_theta": 150000.0}
        | {"max_position_embeddings": 131072}
        | {"num_experts_per_tok": 4, "num_local_experts": 128, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        model=_gpt_oss,
        aliases={"num_local_experts": "num_experts"},
    ),
    "granitemoe": Family(
        "block_sparse_moe",
        _experts_of_mixtral,
        {
            "w_router": matrix("router.layer.weight"),
            "w_gate_up": matrix("input_linear.weight"),
            "w_down": matrix("output_linear.weight"),
        },
        defaults=_OF_MODELS
        | {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 11008}
        | {"rms_norm_eps": 1e-6, "eos_token_id": 2, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
        | {"logits_scaling": 1.0}
        | {"num_attention_heads": 32, "num_key_value_heads": None, "attention_bias": False}
        | {"max_position_embeddings": 2048, "attention_multiplier": 1.0}
        | {"num_experts_per_tok": 2, "num_local_experts": 8},
        model=_granitemoe,
        fused={"w_router": matrix("router.weight")} | FUSED,
    ),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "qwen3_next": Family(
        "mlp",
        _qwen3_next,
        QWEN | shared("shared_expert") | {"w_shared_gate": matrix("shared_expert_gate.weight")},
        defaults={"hidden_size": 2048, "hidden_act": "silu"}
        | {"moe_intermediate_size": 512, "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10}
        | {"shared_expert_intermediate_size": 512},
        lacks="has layers with a recurrent state",
        aliases={"num_experts": "num_local_experts"},
        fused=FUSED,
    ),
    "llama4": Family(
        "feed_forward",
        _llama4,
        IN_OUT | shared("shared_expert"),
        defaults={"hidden_size": 5120, "intermediate_size": 8192, "hidden_act": "silu"}
        | {"num_experts_per_tok": 1, "num_local_experts": 16},
        lacks="attends within chunks",
        prefix="language_model.model.",
        is_swapped=True,
    ),
}
