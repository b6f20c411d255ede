"""Reads a ModelConfig from config.json: what each family's models have in common, and where they differ, as a table."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from jgg.core.arguments import as_finite, as_flag, as_int, check, check_instance
from jgg.hf.checkpoints import moe_layer
from jgg.hf.families import language_model
from jgg.models.config import ModelConfig
from jgg.models.rotary import ROTARY_KEYS, read_rotary

# what jgg.hf reads for the experts
_OF_EXPERTS = {
    "experts_per_token", "hidden_act", "moe_intermediate_size", "n_group", "n_routed_experts", "n_shared_experts",
    "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_local_experts", "quantization_config",
    "routed_scaling_factor", "swiglu_alpha", "swiglu_limit", "topk_group",
}  # fmt: skip
# what changes neither the logits nor what is stored
_WITHOUT_EFFECT = {
    "_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype",
    "eos_token_id", "initial_context_length", "max_position_embeddings", "max_window_layers", "model_type",
    "num_nextn_predict_layers", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "return_dict", "router_aux_loss_coef", "router_jitter_noise", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


class _Settings:
    """A config's settings, each read with a check of its type; `unread` are those that nothing has read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = language_model(config)
        self.read = {*_OF_EXPERTS, *_WITHOUT_EFFECT}

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return self.config.get(key, default)

    def int(self, key: str, least: int = 1, default: int | None = None) -> int:
        return as_int(key, self._needed(key, default), least)

    def number(self, key: str, default: float | None = None) -> float:
        return as_finite(key, self._needed(key, default))

    def flag(self, key: str, default: bool = False) -> bool:
        return as_flag(key, self.get(key, default))

    def only(self, key: str, value: object) -> None:
        """Raises unless the setting is absent or has this value, the only one that `jgg.models` has."""
        got = self.get(key, value)
        check(got == value, f"{key} must be {value!r}, got {got!r}.")

    def _needed(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        check(value is not None, f"config of model_type {self.config['model_type']!r} must have {key!r}, got none.")
        return value

    @property
    def unread(self) -> list[str]:
        return sorted(self.config.keys() - self.read)


def _common(settings: _Settings) -> dict[str, Any]:
    """What every family has."""
    features, heads = settings.int("hidden_size"), settings.int("num_attention_heads")
    kv_heads = settings.int("num_key_value_heads", default=heads)
    check(heads % kv_heads == 0, f"num_key_value_heads must divide num_attention_heads, {heads}, got {kv_heads}.")
    if settings.get("head_dim") is None:
        check(features % heads == 0, f"num_attention_heads must divide hidden_size, {features}, got {heads}.")
    head_features, num_layers = settings.int("head_dim", default=features // heads), settings.int("num_hidden_layers")
    frequencies, scale = read_rotary({key: settings.get(key) for key in ROTARY_KEYS}, head_features)
    return {
        "vocabulary": settings.int("vocab_size"),
        "features": features,
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_features": head_features,
        "attention_scale": head_features**-0.5,
        "windows": (None,) * num_layers,
        "rotary_frequencies": frequencies,
        "rotary_scale": scale,
        "norm_epsilon": settings.number("rms_norm_eps"),
        "is_tied": settings.flag("tie_word_embeddings"),
        "init_scale": settings.number("initializer_range", 0.02),
    }


def _biases(settings: _Settings) -> dict[str, Any]:
    return {"use_qkv_bias": settings.flag("attention_bias"), "use_out_bias": settings.flag("attention_bias")}


def _windows(settings: _Settings, is_used: bool = True) -> dict[str, Any]:
    """The same window in every layer, if there is one."""
    window = settings.get("sliding_window")
    if window is None or not is_used:
        return {}
    return {"windows": (settings.int("sliding_window"),) * settings.int("num_hidden_layers")}


def _dense(settings: _Settings, num_dense_layers: int) -> dict[str, Any]:
    num_layers, dense_features = settings.int("num_hidden_layers"), settings.get("intermediate_size")
    has_experts = num_dense_layers < num_layers
    check(has_experts, f"The last layer must have experts, got {num_dense_layers} dense layers of {num_layers}.")
    if not num_dense_layers:
        return {}
    return {
        "num_dense_layers": num_dense_layers,
        "dense_features": as_int("intermediate_size", dense_features, 1),
        "dense_activation": moe_layer(settings.config).activation,
    }


_OF_QWEN3_CODER = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}


def _qwen3_moe(settings: _Settings) -> dict[str, Any]:
    for key, value in {**_OF_QWEN3_CODER, "decoder_sparse_step": 1}.items():
        settings.only(key, value)
    dense = settings.get("mlp_only_layers", [])
    is_first = isinstance(dense, list) and sorted(dense) == list(range(len(dense)))
    check(is_first, f"mlp_only_layers must be the first layers, such as [0, 1], or none, got {dense!r}.")
    windows = _windows(settings, settings.flag("use_sliding_window"))
    return {"qk_norm": "head"} | _biases(settings) | windows | _dense(settings, len(dense))


def _mixtral(settings: _Settings) -> dict[str, Any]:
    settings.get("intermediate_size")  # of the experts
    return _windows(settings)


def _olmoe(settings: _Settings) -> dict[str, Any]:
    settings.get("intermediate_size")  # of the experts
    clip = settings.get("clip_qkv")
    return {"qk_norm": "all", "clip_qkv": clip and settings.number("clip_qkv")} | _biases(settings)


def _gpt_oss(settings: _Settings) -> dict[str, Any]:
    settings.get("intermediate_size")  # of the experts
    num_layers, window = settings.int("num_hidden_layers"), settings.int("sliding_window")
    kinds = {"sliding_attention": window, "full_attention": None}
    given = settings.get("layer_types", [list(kinds)[layer % 2] for layer in range(num_layers)])
    is_known = isinstance(given, list) and len(given) == num_layers and set(given) <= kinds.keys()
    check(is_known, f"layer_types must be one of {list(kinds)} for each of {num_layers} layers, got {given!r}.")
    return {"use_sinks": True, "windows": tuple(kinds[kind] for kind in given)} | _biases(settings)


def _granitemoe(settings: _Settings) -> dict[str, Any]:
    settings.get("intermediate_size")  # of the experts
    return {
        "attention_scale": settings.number("attention_multiplier", 1.0),
        "embedding_scale": settings.number("embedding_multiplier", 1.0),
        "residual_scale": settings.number("residual_multiplier", 1.0),
        "logits_scale": 1 / settings.number("logits_scaling", 1.0),
    } | _biases(settings)


def _glm4_moe(settings: _Settings) -> dict[str, Any]:
    return {
        "qk_norm": "head" if settings.flag("use_qk_norm") else None,
        "use_qkv_bias": settings.flag("attention_bias"),
    } | _dense(settings, settings.int("first_k_dense_replace", 0))


# what each family has beside `_common`
FAMILIES: dict[str, Callable[[_Settings], dict[str, Any]]] = {
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granitemoe,
    "glm4_moe": _glm4_moe,
}


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a decoder's sizes and options from the content of config.json.

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
      ValueError: the family is none of those that `jgg.models` has; or the config lacks a key, has one that
        `jgg.models` does not know, or has a value there that no model of it can have. The message names the key.
      TypeError: config is no mapping, or a value has the wrong type.
    """
    check_instance("config", config, Mapping, "a mapping, as jgg.hf.read_config returns it")
    model_type = config.get("model_type")
    if model_type in ("deepseek_v3", "kimi_k2"):
        raise ValueError(f"model_type must be one of {list(FAMILIES)}: {model_type!r} has latent attention.")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type must be one of {list(FAMILIES)}, got {model_type!r}.")
    settings, source = _Settings(config), json.dumps(dict(config), indent=2) + "\n"
    moe_layer(config)  # raises where the experts' options are wrong
    own = _common(settings) | FAMILIES[model_type](settings)
    check(
        not settings.unread,
        f"config of model_type {model_type!r} must have only keys that jgg.models knows, or null there, got "
        f"{', '.join(f'{key!r}: {settings.config[key]!r}' for key in settings.unread)}.",
    )
    return ModelConfig(model_type=model_type, source=source, **own)
