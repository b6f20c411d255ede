"""Makes tests/data/configs.json: what transformers' configuration classes take for keys that config.json lacks.

    pip install torch transformers
    python -m tests.programs.make_config_data [FAMILY ...]

For each family that `jgg.models` has: "defaults", attributes of its class without arguments, "heads", the features of
a head without head_dim, and for most "rotary", the frequencies and the factor for the settings of ROTARY with SIZES.
Made with torch 2.13.0 and transformers 5.24.0.
"""

import argparse
import json
from pathlib import Path

from transformers import AutoModel, logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

OUT = Path(__file__).parents[1] / "data" / "configs.json"
MODELS = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "granitemoe", "glm4_moe")
MORE = (
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "glm4_moe_lite",
    "granitemoeshared",
    "hy_v3",
    "llama4_text",
    "mellum",
    "minimax_m2",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "qwen3_vl_moe_text",
    "solar_open",
)
WITHOUT_ROTARY = ("mellum", "qwen3_next", "qwen3_5_moe_text")  # have several embeddings, or layers without one
SIZES = {
    "vocab_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 8,
}
OWN = {
    "mixtral": {"head_dim": 16},  # without which transformers has no YaRN for it
    "exaone_moe": {"first_k_dense_replace": 0},
    "glm4_moe": {"first_k_dense_replace": 0},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hy_v3": {"mlp_layer_types": ["sparse"]},
    "ernie4_5_moe": {"moe_layer_start_index": 0},
    # small experts in the one layer
    "deepseek_v3": {"first_k_dense_replace": 0, "n_routed_experts": 8},
    "glm4_moe_lite": {"mlp_layer_types": ["sparse"], "n_routed_experts": 8},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
V4 = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
# changes of a config
ROTARY = (
    {},
    {"rope_theta": 500.0},
    {"rope_scaling": None, "rope_theta": 700.0},
    {"rope_parameters": None},
    {"rope_parameters": {}},
    {"rope_scaling": {}},
    {"rope_parameters": {"rope_theta": 300.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "rope_theta": 900.0},
    {"rope_parameters": YARN},
    {"rope_parameters": YARN | {"rope_theta": 500.0, "type": "yarn"}},
    {"rope_parameters": YARN | {"type": "linear"}},
    {"rope_scaling": V4, "rope_theta": 500.0},
    {"rope_scaling": V4, "rope_parameters": YARN | {"rope_theta": 300.0}},
    {"rope_scaling": {"rope_type": "default", "type": "default"}, "rope_theta": 500.0},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 128},
    {"rope_parameters": YARN | {"factor": None}, "max_position_embeddings": 512},
    {"rope_parameters": YARN, "original_max_position_embeddings": 16},
    {"rope_parameters": YARN | {"beta_fast": 8, "beta_slow": 2.0, "truncate": False}},
    {"rope_parameters": YARN | {"beta_fast": None, "attention_factor": None}},
    {"rope_parameters": YARN | {"attention_factor": 1.5}},
    {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}},
    {"rope_parameters": YARN | {"mscale": 0.7}},
    {"rope_parameters": YARN | {"factor": 0.5}},
    {"rope_parameters": YARN | {"rope_theta": 2.0, "original_max_position_embeddings": 4096}},
    {"head_dim": 24},
    {"head_dim": 24, "rope_parameters": YARN},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 500.0},
    {"rope_parameters": LLAMA3},
    {"rope_parameters": LLAMA3 | {"rope_theta": 500.0, "low_freq_factor": 2, "factor": 3}, "head_dim": 24},
    {"rope_parameters": LLAMA3, "original_max_position_embeddings": 16},
    {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}},
)
FEW = ({}, {"rope_theta": 500.0}, {"rope_scaling": V4})
# of families that rotate a part of the features
PARTIAL = {
    "glm4_moe": (
        {"partial_rotary_factor": 0.25},
        {"partial_rotary_factor": 0.35},
        {"partial_rotary_factor": None},
        {"rope_parameters": {"partial_rotary_factor": 0.75}},
        {"rope_parameters": YARN | {"partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.75},
        {"rope_scaling": V4, "partial_rotary_factor": 0.75},
    ),
    "minimax_m2": (
        {"rotary_dim": 6, "head_dim": 12},
        {"rotary_dim": 6, "head_dim": 12, "partial_rotary_factor": 0.25},
        {"rotary_dim": 6, "head_dim": 12, "rope_parameters": {"partial_rotary_factor": 0.25}},
    ),
}


def configured(family, changes):
    """A config of a family with changes, which it may change."""
    return CONFIG_MAPPING[family](**json.loads(json.dumps(changes)))


def rotary(family, changes):
    """The frequencies and the factor of a model's rotary embedding."""
    config = configured(family, SIZES | OWN.get(family, {}) | changes)
    embedding = AutoModel.from_config(config).rotary_emb
    frequencies = [float(f"{number:.8g}") for number in embedding.inv_freq.tolist()]
    return {"changes": changes, "frequencies": frequencies, "scale": embedding.attention_scaling}


def main():
    logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(MODELS + MORE), metavar="FAMILY")
    data = json.loads(OUT.read_text())
    for family in parser.parse_args().families:
        config = configured(family, {})
        data[family] = {"defaults": config.to_dict()}
        data[family]["heads"] = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if family not in WITHOUT_ROTARY:
            cases = (ROTARY if family in MODELS else FEW) + PARTIAL.get(family, ())
            data[family]["rotary"] = [rotary(family, changes) for changes in cases]
    OUT.write_text(json.dumps(data) + "\n")


if __name__ == "__main__":
    main()
