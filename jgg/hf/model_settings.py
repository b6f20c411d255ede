"""Reads settings of a whole model that several families share into the arguments of `jgg.models.ModelConfig`."""

from collections.abc import Mapping, Sequence
from typing import Any

from jgg.core.arguments import as_int, check
from jgg.core.mixers import AttentionConfig, LatentConfig, MixerConfig
from jgg.hf.expert_settings import ACTIVATIONS
from jgg.hf.family import Family
from jgg.hf.multimodal import OF_TOWERS
from jgg.hf.rotary import read_logits_factor, read_rotary
from jgg.hf.settings import LARGEST, Arguments, Settings, language_model

# keys that change neither the logits nor what is stored, and those of generation that older versions of transformers
# wrote into config.json
_NAMES = """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures attention_dropout
    attn_implementation auto_map aux_loss_alpha bos_token_id chunk_size_feed_forward dtype ep_size
    experts_implementation experts_per_token for_llm_compressor id2label initial_context_length is_encoder_decoder
    label2id max_position_embeddings max_window_layers model_type name_or_path num_labels output_attentions
    output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type quantization_config
    return_dict router_aux_loss_coef router_jitter_noise seq_aux tokenizer_class torch_dtype transformers_version
    use_cache

    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty
    do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate
    suppress_tokens target_lookbehind temperature top_k top_p typical_p
"""
_WITHOUT_EFFECT = set(_NAMES.split())
# host memory has a number for each layer, and for each pair of features of a head
_MOST_LAYERS, _MOST_HEAD_FEATURES = 10_000, 65_536


def read_model(settings: Settings) -> Arguments:
    """Returns the arguments of `jgg.models.ModelConfig` that every family has."""
    num_layers = settings.int("num_hidden_layers", most=_MOST_LAYERS)
    epsilon, init_scale = settings.number("rms_norm_eps"), settings.number("initializer_range")
    check(epsilon >= 0, f"rms_norm_eps must be 0 or more, got {epsilon}.")
    check(init_scale >= 0, f"initializer_range must be 0 or more, got {init_scale}.")
    _check_unused(settings)
    return {
        "vocabulary": settings.int("vocab_size"),
        "features": settings.int("hidden_size"),
        "num_layers": num_layers,
        "num_further_layers": settings.int("num_nextn_predict_layers", 0),
        "is_dense": (False,) * num_layers,
        "norm_epsilon": epsilon,
        "is_tied": settings.flag("tie_word_embeddings"),
        "init_scale": init_scale,
    }


def read_attention(settings: Settings, *, layer_type: str | None = None, **others: Any) -> AttentionConfig:
    """Returns attention with grouped queries and rotary embeddings, with other options that a family has.

    Args:
      settings: the settings.
      layer_type: the kind of layer, such as "sliding_attention", where rotary embeddings differ between kinds.
      others: more arguments of AttentionConfig, which precede those read here.
    """
    heads = settings.int("num_attention_heads")
    kv_heads = heads if settings.get("num_key_value_heads") is None else settings.int("num_key_value_heads")
    check(heads % kv_heads == 0, f"num_key_value_heads must divide num_attention_heads, {heads}, got {kv_heads}.")
    head_features = _head_features(settings)
    read: Arguments = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_features": head_features,
        "scale": head_features**-0.5,
        "rotary": read_rotary(settings, head_features, layer_type),
    }
    return AttentionConfig(**read | others)


def read_latent(settings: Settings) -> LatentConfig:
    """Returns latent attention, read from DeepSeek-V3's keys."""
    heads = settings.int("num_attention_heads")
    if settings.given.get("num_key_value_heads") is not None:
        got = settings.int("num_key_value_heads")
        check(got == heads, f"num_key_value_heads must be num_attention_heads, {heads}, with a latent, got {got}.")
    keys = "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    plain, rotated, values = (settings.int(key, most=_MOST_HEAD_FEATURES) for key in keys)
    rotary_key = settings.name("qk_rope_head_dim")
    check(rotated % 2 == 0, f"{rotary_key} must be even, as pairs of features are rotated, got {rotated}.")
    if settings.get("qk_head_dim") is not None:
        got = settings.int("qk_head_dim")
        check(got == plain + rotated, f"qk_head_dim must be the sum of {keys[0]} and {rotary_key}, got {got}.")
    return LatentConfig(
        num_heads=heads,
        q_rank=None if settings.get("q_lora_rank") is None else settings.int("q_lora_rank"),
        kv_rank=settings.int("kv_lora_rank"),
        plain_features=plain,
        rotated_features=rotated,
        value_features=values,
        rotary=read_rotary(settings, rotated),
        scale=(plain + rotated) ** -0.5 * read_logits_factor(settings),
        is_interleaved=settings.flag("rope_interleave"),
        use_bias=settings.flag("attention_bias"),
    )


def in_all_layers(settings: Settings, mixer: MixerConfig) -> Arguments:
    """Returns the mixer of each layer, the same in all."""
    return {"mixers": (mixer,) * settings.int("num_hidden_layers")}


def in_layers(settings: Settings, by_type: Mapping[str, MixerConfig], types: Sequence[str]) -> Arguments:
    """Returns the mixer of each layer, as "layer_types" names it, by default `types`.

    Args:
      settings: the settings.
      by_type: the mixers by the names in "layer_types".
      types: what transformers takes for "layer_types" if the key is absent or null, a name for each layer.
    """
    return {"mixers": tuple(by_type[kind] for kind in read_layer_types(settings, list(by_type), types))}


def read_layer_types(settings: Settings, kinds: Sequence[str], usual: Sequence[str]) -> list[str]:
    """Returns the kind of each layer, one of `kinds`, as "layer_types" names it, by default `usual`."""
    num_layers = settings.int("num_hidden_layers")
    given = usual if settings.get("layer_types") is None else settings.get("layer_types")
    is_known = isinstance(given, list | tuple) and len(given) == num_layers and all(kind in kinds for kind in given)
    check(is_known, f"layer_types must be one of {kinds} for each of {num_layers} layers, got {given!r}.")
    return list(given)


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
    """Raises if a setting is wrong that only some models use, or that no model uses but its users read."""
    for key in ("intermediate_size", "max_position_embeddings", "sliding_window"):
        value = settings.get(key) if settings.defaults.get(key) is not None else None
        if value is not None and (key, value) != ("sliding_window", 0):  # transformers writes 0 where Qwen2 has none
            settings.int(key)
    for key in ("bos_token_id", "pad_token_id"):  # some published configs have -1
        if settings.given.get(key) is not None:
            as_int(key, settings.given[key])
    stops = settings.get("eos_token_id")  # of the vocabulary or not
    for token in stops if isinstance(stops, list) else [] if stops is None else [stops]:
        token = as_int("eos_token_id", token, 0, "null, an int of at least 0, or a list of them")
        check(token <= LARGEST, f"eos_token_id must be at most {LARGEST}, got {token}.")


def read_biases(settings: Settings) -> Arguments:
    """Returns whether the projections of attention have biases, if one key says so for all of them."""
    return {"use_qkv_bias": settings.flag("attention_bias"), "use_out_bias": settings.flag("attention_bias")}


def read_window(settings: Settings, is_used: bool = True) -> int | None:
    """Returns the window that all layers have, or None."""
    if not is_used or settings.get("sliding_window") is None:
        return None
    return settings.int("sliding_window")


def read_dense_layers(settings: Settings, key: str, num_dense_layers: int) -> Arguments:
    """Returns which layers have a dense MLP, the first `num_dense_layers`, and their sizes; messages name `key`."""
    num_layers = settings.int("num_hidden_layers")
    return read_mlps(settings, key, [number < num_dense_layers for number in range(num_layers)])


def read_mlp_types(settings: Settings, is_dense: Sequence[bool], *, also: str | None = None) -> Arguments:
    """Returns which layers have a dense MLP, by "mlp_layer_types" or else `is_dense`, and their sizes.

    Args:
      settings: the settings.
      is_dense: what transformers takes if the key is absent.
      also: a key for the number of leading dense layers. transformers does not read it, but it must agree if present.
    """
    key, kinds = "mlp_layer_types", {"sparse": False, "dense": True}
    given, num_layers = settings.get(key), len(is_dense)
    if given is not None:
        is_known = isinstance(given, list) and len(given) == num_layers and all(kind in list(kinds) for kind in given)
        check(is_known, f"{key} must be one of {list(kinds)} for each of {num_layers} layers, got {given!r}.")
        is_dense = [kinds[kind] for kind in given]
    if also is not None and settings.get(also) is not None:
        first = settings.int(also, 0)
        is_so = list(is_dense) == [number < first for number in range(num_layers)]
        check(is_so, f"{also} must be the number of dense layers by {key}, {sum(is_dense)}, got {first}.")
    return read_mlps(settings, key, is_dense)


def read_mlps(settings: Settings, key: str, is_dense: Sequence[bool]) -> Arguments:
    """Returns which layers have a dense MLP, `is_dense`, and their sizes; messages name `key`."""
    what = f"{sum(is_dense)} dense layers of {len(is_dense)}"
    check(not all(is_dense), f"One layer at least must have experts, got {what} by {key} and num_hidden_layers.")
    if not any(is_dense):
        return {}
    return {
        "is_dense": tuple(is_dense),
        "dense_features": settings.int("intermediate_size"),
        "dense_activation": ACTIVATIONS[settings.get("hidden_act")],
    }


def check_keys(config: Mapping[str, object], own: Family) -> None:
    """Raises ValueError for a key that is neither read nor known to have no effect, since it could change the model."""
    text, settings = language_model(config), own.settings(config)
    for key, value in own.only.items():
        settings.only(key, value)
    parts = [(text, _WITHOUT_EFFECT | settings.known | {*own.only, *own.without_effect})]
    if own.text_type is not None or text is not config:
        outer = _WITHOUT_EFFECT | {"text_config", *own.outer} | (set() if own.text_type is None else OF_TOWERS)
        parts = [*parts[text is config :], (config, outer)]
    if text is not config:
        expected, got = own.text_type or settings.model_type, text.get("model_type")
        is_usual = got is None and own.text_type is not None
        check(got == expected or is_usual, f"text_config must have 'model_type' {expected!r}, got {got!r}.")
    unknown = {key: part[key] for part, known in parts for key in sorted(part.keys() - known) if part[key] is not None}
    check(
        not unknown,
        f"config of model_type {settings.model_type!r} must have only keys that jgg.models knows, or null there, got "
        f"{', '.join(f'{key!r}: {value!r}' for key, value in unknown.items())}.",
    )
