"""The Qwen models."""

import dataclasses

from jgg.core.arguments import check
from jgg.hf.expert_settings import read_normalized
from jgg.hf.families.common import OF_MODELS
from jgg.hf.families.qwen3_next import WITH_SHARED, experts_with_shared
from jgg.hf.family import Family
from jgg.hf.model_settings import in_all_layers, in_layers, read_attention, read_biases, read_mlps, read_window
from jgg.hf.multimodal import in_multimodal
from jgg.hf.settings import Arguments, Settings
from jgg.hf.tensors import FUSED, IN_OUT, QWEN, ROUTER


def _qwen3_moe(settings: Settings) -> Arguments:
    window = read_window(settings, settings.flag("use_sliding_window"))
    attention = read_attention(settings, qk_norm="head", window=window, **read_biases(settings))
    return in_all_layers(settings, attention) | _read_dense(settings)


def _qwen3_vl_moe(settings: Settings) -> Arguments:
    settings.only("norm_topk_prob", True)
    features, own = settings.int("hidden_size"), settings.int("moe_intermediate_size")
    # else the shapes of the experts' tensors do not tell in which of two orders a folder has their axes
    fits = features not in (own, 2 * own)
    check(fits, f"moe_intermediate_size must be neither hidden_size, {features}, nor its half, got {own}.")
    return _qwen3_moe(settings)


def _qwen2_moe(settings: Settings) -> Arguments:
    attention = read_attention(settings, use_qkv_bias=settings.flag("qkv_bias"))
    kinds = {"full_attention": attention}
    num_layers, num_local = settings.int("num_hidden_layers"), 0
    if settings.flag("use_sliding_window"):
        kinds["sliding_attention"] = dataclasses.replace(attention, window=settings.int("sliding_window"))
        num_local = settings.int("max_window_layers", 0)
    # as transformers does, of the first layers every other one
    is_local = [number < num_local and number % 2 == 0 for number in range(num_layers)]
    usual = ["sliding_attention" if local else "full_attention" for local in is_local]
    return in_layers(settings, kinds, usual) | _read_dense(settings)


def _read_dense(settings: Settings) -> Arguments:
    """Returns which layers are dense: the named ones, and all except every `decoder_sparse_step`-th layer."""
    num_layers, step = settings.int("num_hidden_layers"), settings.int("decoder_sparse_step")
    named = [] if settings.get("mlp_only_layers") is None else settings.get("mlp_only_layers")
    is_known = isinstance(named, list) and all(type(number) is int and 0 <= number < num_layers for number in named)
    check(is_known, f"mlp_only_layers must be null or a list of numbers of the {num_layers} layers, got {named!r}.")
    is_dense = [number in named or (number + 1) % step != 0 for number in range(num_layers)]
    return read_mlps(settings, "mlp_only_layers, decoder_sparse_step", is_dense)


QWEN3_MOE = Family(
    "mlp",
    read_normalized,
    QWEN,
    defaults=OF_MODELS
    | {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 6144}
    | {"rms_norm_eps": 1e-6, "mlp_only_layers": None, "decoder_sparse_step": 1}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "attention_bias": False, "sliding_window": 4096}
    | {"use_sliding_window": False, "max_position_embeddings": 32768}
    | {"moe_intermediate_size": 768, "norm_topk_prob": False, "num_experts": 128, "num_experts_per_tok": 8},
    model=_qwen3_moe,
    aliases={"num_experts": "num_local_experts"},
    # of Qwen3-Coder's config, not of transformers
    only={"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
    fused=FUSED,
)
QWEN3_VL_MOE_TEXT = dataclasses.replace(
    QWEN3_MOE,
    tensors=ROUTER | {name: tensor for name, tensor in IN_OUT.items() if name != "w_router"},
    defaults={**QWEN3_MOE.defaults}
    | {"intermediate_size": 5632, "tie_word_embeddings": True}
    | {"num_attention_heads": 16, "num_key_value_heads": 16, "sliding_window": None, "rope_theta": 500000.0}
    | {"max_position_embeddings": 128000}
    | {"moe_intermediate_size": 1408, "norm_topk_prob": True, "num_experts": 60, "num_experts_per_tok": 4},
    model=_qwen3_vl_moe,
)
QWEN3_VL_MOE = in_multimodal(
    QWEN3_VL_MOE_TEXT, "qwen3_vl_moe_text", towers=("model.visual.",), outer={"tie_word_embeddings": False}
)
QWEN2_MOE = Family(
    "mlp",
    experts_with_shared,
    QWEN | WITH_SHARED,
    defaults=OF_MODELS
    | {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 5632}
    | {"rms_norm_eps": 1e-6, "mlp_only_layers": None, "decoder_sparse_step": 1}
    | {"num_attention_heads": 16, "num_key_value_heads": 16, "qkv_bias": True, "max_position_embeddings": 32768}
    | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
    | {"moe_intermediate_size": 1408, "norm_topk_prob": False, "num_experts": 60, "num_experts_per_tok": 4}
    | {"shared_expert_intermediate_size": 5632},
    model=_qwen2_moe,
    fused=FUSED,
    has_modules_in_peft=False,
)
