"""The Qwen models."""

from typing import Any

from jgg.core.arguments import check
from jgg.hf.expert_settings import read_normalized
from jgg.hf.families.common import OF_MODELS
from jgg.hf.family import Family
from jgg.hf.model_settings import in_all_layers, read_attention, read_biases, read_dense_layers, read_window
from jgg.hf.settings import Settings
from jgg.hf.tensors import FUSED, QWEN, matrix, shared


def _qwen3_moe(settings: Settings) -> dict[str, Any]:
    dense = [] if settings.get("mlp_only_layers") is None else settings.get("mlp_only_layers")
    is_first = isinstance(dense, list) and sorted(dense) == list(range(len(dense)))
    check(is_first, f"mlp_only_layers must be the first layers, such as [0, 1], or none, got {dense!r}.")
    window = read_window(settings, settings.flag("use_sliding_window"))
    attention = read_attention(settings, qk_norm="head", window=window, **read_biases(settings))
    return in_all_layers(settings, attention) | read_dense_layers(settings, "mlp_only_layers", len(dense))


def _qwen3_next(settings: Settings) -> dict[str, Any]:
    shared_features = settings.int("shared_expert_intermediate_size")
    return read_normalized(settings, shared_features=shared_features, use_shared_gate=True)


QWEN3_MOE = Family(
    "mlp",
    read_normalized,
    QWEN,
    defaults=OF_MODELS
    | {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 6144}
    | {"rms_norm_eps": 1e-6, "mlp_only_layers": None}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "attention_bias": False, "sliding_window": 4096}
    | {"use_sliding_window": False, "max_position_embeddings": 32768}
    | {"moe_intermediate_size": 768, "norm_topk_prob": False, "num_experts": 128, "num_experts_per_tok": 8},
    model=_qwen3_moe,
    aliases={"num_experts": "num_local_experts"},
    # all but the first are of Qwen3-Coder's config, not of transformers
    only={"decoder_sparse_step": 1, "qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
    fused=FUSED,
)
QWEN3_NEXT = Family(
    "mlp",
    _qwen3_next,
    QWEN | shared("shared_expert") | {"w_shared_gate": matrix("shared_expert_gate.weight")},
    defaults={"hidden_size": 2048, "hidden_act": "silu"}
    | {"moe_intermediate_size": 512, "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10}
    | {"shared_expert_intermediate_size": 512},
    lacks="has layers with a recurrent state",
    aliases={"num_experts": "num_local_experts"},
    fused=FUSED,
)
