"""Rednote's dots.llm1, whose experts are DeepSeek-V3's."""

import dataclasses

from jgg.hf.families.common import OF_MODELS
from jgg.hf.families.deepseek import GLM4_MOE
from jgg.hf.model_settings import in_layers, read_attention, read_biases, read_dense_layers
from jgg.hf.settings import Arguments, Settings


def _dots1(settings: Settings) -> Arguments:
    attention = read_attention(settings, qk_norm="head", **read_biases(settings))
    kinds, num_layers = {"full_attention": attention}, settings.int("num_hidden_layers")
    num_global = num_layers
    if settings.get("sliding_window") is not None:
        kinds["sliding_attention"] = dataclasses.replace(attention, window=settings.int("sliding_window"))
        num_global = settings.int("max_window_layers", 0)
    usual = ["full_attention" if number < num_global else "sliding_attention" for number in range(num_layers)]
    key = "first_k_dense_replace"
    return in_layers(settings, kinds, usual) | read_dense_layers(settings, key, settings.int(key, 0))


DOTS1 = dataclasses.replace(
    GLM4_MOE,
    defaults=OF_MODELS
    | {"vocab_size": 152064, "hidden_size": 4608, "num_hidden_layers": 62, "intermediate_size": 10944}
    | {"rms_norm_eps": 1e-6, "first_k_dense_replace": 0}
    | {"num_attention_heads": 32, "num_key_value_heads": 32, "attention_bias": False, "sliding_window": 4096}
    | {"max_window_layers": 62, "layer_types": None, "max_position_embeddings": 2048}
    | {"moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": None, "n_shared_experts": None}
    | {"norm_topk_prob": False, "num_experts_per_tok": None, "routed_scaling_factor": 1.0, "topk_group": 1},
    model=_dots1,
    only={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    without_effect=("aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux"),
)
