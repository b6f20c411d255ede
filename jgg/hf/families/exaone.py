"""LG's K-EXAONE."""

import dataclasses

from jgg.core.arguments import check
from jgg.hf.expert_settings import read_groups
from jgg.hf.families.common import OF_MODELS
from jgg.hf.family import Family
from jgg.hf.model_settings import in_layers, read_attention, read_mlp_types
from jgg.hf.settings import Arguments, Settings
from jgg.hf.tensors import FUSED, QWEN, SELECTION_BIAS, as_is, shared


def _exaone_moe(settings: Settings) -> Arguments:
    settings.only("scoring_func", "sigmoid")
    settings.only("topk_method", "noaux_tc")
    local = read_attention(settings, qk_norm="head")
    everywhere = local
    if settings.get("sliding_window") is not None:
        local = dataclasses.replace(local, window=settings.int("sliding_window"))
        everywhere = dataclasses.replace(everywhere, rotary=everywhere.rotary and everywhere.rotary.unrotated)
    kinds = {"sliding_attention": local, "full_attention": everywhere}
    num_layers, num_dense = settings.int("num_hidden_layers"), settings.int("first_k_dense_replace", 0)
    read = in_layers(settings, kinds, _usual_types(settings, num_layers))
    read |= read_mlp_types(settings, [number < num_dense for number in range(num_layers)])
    has_experts = [not is_dense for is_dense in read.get("is_dense", [False] * num_layers)]
    given = settings.get("is_moe_layer")
    check(given in (None, has_experts), f"is_moe_layer must agree with mlp_layer_types, {has_experts}, got {given}.")
    return read


def _usual_types(settings: Settings, num_layers: int) -> list[str]:
    """The kinds of layers if "layer_types" is absent: one layer per period attends to all tokens."""
    if settings.get("layer_types") is not None:
        return []
    period = settings.int("sliding_window_pattern")
    kinds = "sliding_attention", "full_attention"
    return [kinds[number % period == 0] for number in range(1, num_layers + 1)]


EXAONE_MOE = Family(
    "mlp",
    read_groups,
    QWEN | {SELECTION_BIAS: as_is("e_score_correction_bias")} | shared("shared_experts"),
    defaults=OF_MODELS
    | {"vocab_size": 102400, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 16384}
    | {"rms_norm_eps": 1e-5, "eos_token_id": 53, "first_k_dense_replace": 1, "mlp_layer_types": None}
    | {"num_attention_heads": 32, "num_key_value_heads": 32}
    | {"sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None}
    | {"max_position_embeddings": 2048}
    | {"moe_intermediate_size": 1024, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1}
    | {"norm_topk_prob": True, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "topk_group": 1}
    # of published configs, not of transformers
    | {"is_moe_layer": None, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    model=_exaone_moe,
    aliases={
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "first_k_dense_replace": "first_last_k_dense_replace",
    },
    fused=FUSED | {SELECTION_BIAS: as_is("gate.e_score_correction_bias")},
    ignored=(r"rotary_emb\.inv_freq", r"^mtp\."),
)
