"""Baidu's ERNIE 4.5."""

from jgg.hf.expert_settings import read_experts
from jgg.hf.families.common import OF_MODELS
from jgg.hf.family import Family
from jgg.hf.model_settings import in_all_layers, read_attention, read_mlps
from jgg.hf.settings import Arguments, Settings
from jgg.hf.tensors import FUSED, QWEN, SELECTION_BIAS, as_row, shared


def _experts_of_ernie(settings: Settings) -> Arguments:
    return read_experts(
        settings,
        "moe_num_experts",
        "moe_intermediate_size",
        use_selection_bias=True,
        normalize=True,
        shared_features=settings.int("moe_num_shared_experts", 0) * settings.int("moe_intermediate_size"),
    )


def _ernie4_5_moe(settings: Settings) -> Arguments:
    attention = read_attention(settings, is_interleaved=True)
    num_layers, interval = settings.int("num_hidden_layers"), settings.int("moe_layer_interval")
    first, last = settings.int("moe_layer_start_index", 0), num_layers - 1
    if settings.get("moe_layer_end_index") not in (None, -1):
        last = settings.int("moe_layer_end_index", 0)
    has_experts = [first <= number <= last and (number + 1) % interval == 0 for number in range(num_layers)]
    keys = "moe_layer_start_index, moe_layer_end_index, moe_layer_interval"
    return in_all_layers(settings, attention) | read_mlps(settings, keys, [not own for own in has_experts])


ERNIE4_5_MOE = Family(
    "mlp",
    _experts_of_ernie,
    QWEN | {SELECTION_BIAS: as_row("moe_statics.e_score_correction_bias")} | shared("shared_experts"),
    defaults=OF_MODELS
    | {"vocab_size": 103424, "hidden_size": 2560, "num_hidden_layers": 28, "intermediate_size": 12288}
    | {"rms_norm_eps": 1e-5, "eos_token_id": 2, "tie_word_embeddings": True}
    | {"moe_layer_start_index": 1, "moe_layer_end_index": None, "moe_layer_interval": 1}
    | {"num_attention_heads": 20, "num_key_value_heads": 4, "rope_theta": 500000.0, "max_position_embeddings": 131072}
    | {"moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_num_shared_experts": 2, "num_experts_per_tok": 6},
    model=_ernie4_5_moe,
    aliases={"moe_num_experts": "num_experts", "num_experts_per_tok": "moe_k"},
    # moe_norm_min is the least sum that weights are divided by, which k of the softmax's probabilities are not below
    only={"moe_gate": "topk", "moe_norm_min": 1e-12, "moe_use_aux_free": True, "use_bias": False, "use_rmsnorm": True},
    without_effect=("compression_ratio", "is_quantized", "moe_capacity"),
    fused=FUSED | {SELECTION_BIAS: as_row("gate.moe_statics.e_score_correction_bias")},
    # of published checkpoints: what predicts further tokens
    ignored=(r"rotary_emb\.inv_freq", r"mtp"),
)
