"""Reads a ModelConfig from config.json: what each family's models have in common, and where they differ, as a table."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from jgg.core.arguments import as_int, check, check_instance
from jgg.hf.checkpoints import family, moe_layer
from jgg.hf.options import ACTIVATIONS
from jgg.hf.settings import LARGEST, Settings
from jgg.models.config import ModelConfig
from jgg.models.rotary import read_rotary

# what changes neither the logits nor what is stored
_OF_OTHERS = {
    "_attn_implementation",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "experts_implementation",
    "experts_per_token",
    "id2label",
    "initial_context_length",
    "is_encoder_decoder",
    "label2id",
    "max_position_embeddings",
    "max_window_layers",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "quantization_config",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
# settings of generation, which configs of older versions of transformers may have
_OF_GENERATION = {
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
}
_WITHOUT_EFFECT = _OF_OTHERS | _OF_GENERATION
# host memory has a number for each layer, and for each pair of features of a head
_MOST_LAYERS, _MOST_HEAD_FEATURES = 10_000, 65_536


def _common(settings: Settings) -> dict[str, Any]:
    """What every family has."""
    features, heads = settings.int("hidden_size"), settings.int("num_attention_heads")
    kv_heads = heads if settings.get("num_key_value_heads") is None else settings.int("num_key_value_heads")
    check(heads % kv_heads == 0, f"num_key_value_heads must divide num_attention_heads, {heads}, got {kv_heads}.")
    num_layers, head_features = settings.int("num_hidden_layers", most=_MOST_LAYERS), _head_features(settings)
    epsilon, init_scale = settings.number("rms_norm_eps"), settings.number("initializer_range")
    check(epsilon >= 0, f"rms_norm_eps must be 0 or more, got {epsilon}.")
    check(init_scale >= 0, f"initializer_range must be 0 or more, got {init_scale}.")
    _check_unused(settings)
    frequencies, scale = read_rotary(settings, head_features)
    return {
        "vocabulary": settings.int("vocab_size"),
        "features": features,
        "num_layers": num_layers,
        "num_further_layers": settings.int("num_nextn_predict_layers", 0),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_features": head_features,
        "attention_scale": head_features**-0.5,
        "windows": (None,) * num_layers,
        "rotary_frequencies": frequencies,
        "rotary_scale": scale,
        "norm_epsilon": epsilon,
        "is_tied": settings.flag("tie_word_embeddings"),
        "init_scale": init_scale,
    }


def _head_features(settings: Settings) -> int:
    if settings.get("head_dim") is not None:
        return settings.int("head_dim", most=_MOST_HEAD_FEATURES)
    features, heads = settings.int("hidden_size"), settings.int("num_attention_heads")
    own, most = features // heads, _MOST_HEAD_FEATURES
    check(
        own, f"num_attention_heads must be at most hidden_size, {features}, where head_dim is not given, got {heads}."
    )
    check(own <= most, f"hidden_size must be at most {most} for each of num_attention_heads, {heads}, got {features}.")
    return own


def _check_unused(settings: Settings) -> None:
    """Raises where a setting is wrong that not all models use, or that none does but its users read."""
    for key in ("intermediate_size", "max_position_embeddings", "sliding_window"):
        if settings.defaults.get(key) is not None and settings.get(key) is not None:
            settings.int(key)
    for key in ("bos_token_id", "pad_token_id"):  # some published configs have -1
        if settings.given.get(key) is not None:
            as_int(key, settings.given[key])
    stops = settings.get("eos_token_id")  # of the vocabulary or not
    for token in stops if isinstance(stops, list) else [] if stops is None else [stops]:
        token = as_int("eos_token_id", token, 0, "null, an int of at least 0, or a list of them")
        check(token <= LARGEST, f"eos_token_id must be at most {LARGEST}, got {token}.")


def _biases(settings: Settings) -> dict[str, Any]:
    return {"use_qkv_bias": settings.flag("attention_bias"), "use_out_bias": settings.flag("attention_bias")}


def _windows(settings: Settings, is_used: bool = True) -> dict[str, Any]:
    """The same window in every layer, if there is one."""
    window = settings.get("sliding_window")
    if window is None or not is_used:
        return {}
    return {"windows": (settings.int("sliding_window"),) * settings.int("num_hidden_layers")}


def _dense(settings: Settings, key: str, num_dense_layers: int) -> dict[str, Any]:
    num_layers = settings.int("num_hidden_layers")
    has_experts = num_dense_layers < num_layers
    what = f"{num_dense_layers} dense layers of {num_layers}"
    check(has_experts, f"The last layer must have experts, got {what} by {key} and num_hidden_layers.")
    if not num_dense_layers:
        return {}
    return {
        "num_dense_layers": num_dense_layers,
        "dense_features": settings.int("intermediate_size"),
        "dense_activation": ACTIVATIONS[settings.get("hidden_act")],
    }


def _qwen3_moe(settings: Settings) -> dict[str, Any]:
    for key in ("decoder_sparse_step", "qkv_bias", "shared_expert_intermediate_size", "use_qk_norm"):
        settings.only(key, settings.defaults[key])
    dense = [] if settings.get("mlp_only_layers") is None else settings.get("mlp_only_layers")
    is_first = isinstance(dense, list) and sorted(dense) == list(range(len(dense)))
    check(is_first, f"mlp_only_layers must be the first layers, such as [0, 1], or none, got {dense!r}.")
    windows = _windows(settings, settings.flag("use_sliding_window"))
    return {"qk_norm": "head"} | _biases(settings) | windows | _dense(settings, "mlp_only_layers", len(dense))


def _mixtral(settings: Settings) -> dict[str, Any]:
    return _windows(settings)


def _olmoe(settings: Settings) -> dict[str, Any]:
    clip = None if settings.get("clip_qkv") is None else settings.number("clip_qkv")
    check(clip is None or clip > 0, f"clip_qkv must be null or more than 0, got {clip}.")
    return {"qk_norm": "all", "clip_qkv": clip} | _biases(settings)


def _gpt_oss(settings: Settings) -> dict[str, Any]:
    num_layers, kinds = settings.int("num_hidden_layers"), ("sliding_attention", "full_attention")
    given = settings.get("layer_types")
    if given is None:
        given = [kinds[layer % 2] for layer in range(num_layers)]
    is_known = isinstance(given, list) and len(given) == num_layers and all(kind in kinds for kind in given)
    check(is_known, f"layer_types must be one of {list(kinds)} for each of {num_layers} layers, got {given!r}.")
    windows = tuple(settings.int("sliding_window") if kind == kinds[0] else None for kind in given)
    return {"use_sinks": True, "windows": windows} | _biases(settings)


def _granitemoe(settings: Settings) -> dict[str, Any]:
    logits_scaling = settings.number("logits_scaling")
    is_invertible = logits_scaling and math.isfinite(1 / logits_scaling)
    check(is_invertible, f"logits_scaling must be a number to divide by, got {logits_scaling}.")
    return {
        "attention_scale": settings.number("attention_multiplier"),
        "embedding_scale": settings.number("embedding_multiplier"),
        "residual_scale": settings.number("residual_multiplier"),
        "logits_scale": 1 / logits_scaling,
    } | _biases(settings)


def _glm4_moe(settings: Settings) -> dict[str, Any]:
    return {
        "qk_norm": "head" if settings.flag("use_qk_norm") else None,
        "use_qkv_bias": settings.flag("attention_bias"),
    } | _dense(settings, "first_k_dense_replace", settings.int("first_k_dense_replace", 0))


# what each family has beside `_common`
FAMILIES: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granitemoe,
    "glm4_moe": _glm4_moe,
}


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a decoder's sizes and options from the content of config.json.

    A key that config lacks has the default of transformers' configuration class.

    Examples:
      >>> import jgg.models
      >>> config = jgg.models.model_config({
      ...     "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
      ...     "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
      ...     "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
      ...     "rms_norm_eps": 1e-6, "rope_theta": 1e6,
      ... })
      >>> config.features, config.moe.num_experts
      (32, 4)

    Args:
      config: content of config.json, as `jgg.hf.read_config` returns it.

    Raises:
      ValueError: the family is none of those that `jgg.models` has; or the config has a key that `jgg.models` does not
        know, or a value that no model of it can have. The message names the key.
      TypeError: config is no mapping, or a value has the wrong type.
    """
    check_instance("config", config, Mapping, "a mapping, as jgg.hf.read_config returns it")
    model_type = config.get("model_type")
    if model_type in ("deepseek_v3", "kimi_k2"):
        raise ValueError(f"model_type must be one of {list(FAMILIES)}: {model_type!r} has latent attention.")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type must be one of {list(FAMILIES)}, got {model_type!r}.")
    settings, source = family(config).settings(config), json.dumps(dict(config), indent=2) + "\n"
    _check_keys(config, settings)
    moe_layer(config)  # raises where the experts' options are wrong
    return ModelConfig(model_type=model_type, source=source, **_common(settings) | FAMILIES[model_type](settings))


def _check_keys(config: Mapping[str, Any], settings: Settings) -> None:
    """Raises if a key is none that is read or has no effect, as it may change the model."""
    model_type, given = settings.model_type, settings.given
    unknown = {key: given[key] for key in settings.unknown if key not in _WITHOUT_EFFECT}
    if given is not config:
        own = given.get("model_type")
        check(own == model_type, f"text_config must have 'model_type' {model_type!r}, got {own!r}.")
        others = config.keys() - _WITHOUT_EFFECT - {"text_config"}
        unknown |= {key: config[key] for key in sorted(others) if config[key] is not None}
    check(
        not unknown,
        f"config of model_type {model_type!r} must have only keys that jgg.models knows, or null there, got "
        f"{', '.join(f'{key!r}: {value!r}' for key, value in unknown.items())}.",
    )
