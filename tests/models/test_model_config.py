"""What jgg.models reads of each family's config.json, in the words of transformers 4 and 5, and what it refuses."""

import dataclasses
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jgg.hf
import jgg.models
from jgg.hf.families import FAMILIES as HF_FAMILIES
from tests.support.models import config_of, copied, reference

# what tests/programs/make_config_data.py read from transformers
OF_TRANSFORMERS = json.loads((Path(__file__).parents[1] / "data" / "configs.json").read_text())
SIZES = {
    "vocab_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 8,
}


# keys without which transformers has no model of a family
NEEDED = {"dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}}

# keys with which a model of one layer has experts and all settings of ROTARY have a meaning in transformers
ONE_LAYER = NEEDED | {
    "deepseek_v3": {"first_k_dense_replace": 0},
    "ernie4_5_moe": {"moe_layer_start_index": 0},
    "exaone_moe": {"first_k_dense_replace": 0},
    "glm4_moe": {"first_k_dense_replace": 0},
    "glm4_moe_lite": {"mlp_layer_types": ["sparse"]},
    "hy_v3": {"mlp_layer_types": ["sparse"]},
    "llama4_text": {"use_qk_norm": False},
    "mixtral": {"head_dim": 16},
}


def same(one, other):
    """Whether two configs are equal but for the text that they were read from."""
    return dataclasses.replace(one, source="") == dataclasses.replace(other, source="") and one.moe == other.moe


@pytest.mark.parametrize("family", [family for family, data in OF_TRANSFORMERS.items() if "heads" in data])
def test_absent_keys_have_the_defaults_of_transformers(family):
    defaults = OF_TRANSFORMERS[family]["defaults"] | NEEDED.get(family, {})
    config = jgg.models.model_config({"model_type": family} | NEEDED.get(family, {}))
    assert same(config, jgg.models.model_config(defaults))
    attention = next(own for own in config.mixers if own.kind != "delta")
    own_features = attention.rotated_features if attention.kind == "latent" else attention.head_features
    assert own_features == OF_TRANSFORMERS[family]["heads"]
    # transformers writes a window of 0 where Qwen2-MoE has none
    given = {
        key: value for key, value in defaults.items() if value is not None and (key, value) != ("sliding_window", 0)
    }
    known = HF_FAMILIES[family].settings(defaults)
    for key in given.keys() & {*known.defaults, *known.aliases.values()} - {"rope_parameters", *NEEDED.get(family, {})}:
        rest = {name: value for name, value in given.items() if name != key}
        assert same(config, jgg.models.model_config(rest)), key
    for key, default in known.defaults.items():  # those that a ModelConfig lacks too
        name = key if key in defaults else known.aliases.get(key)
        if name in given and default is not None and key != "rope_parameters":
            assert known.get(key) == {"sliding_window": default}.get(key, default)
            assert default == defaults[name], key


@pytest.mark.parametrize("family", [family for family, data in OF_TRANSFORMERS.items() if "rotary" in data])
def test_rotary_settings_mean_what_they_do_in_transformers(family):
    sizes = {key: value for key, value in SIZES.items() if key in HF_FAMILIES[family].defaults}
    for case in OF_TRANSFORMERS[family]["rotary"]:
        own = ONE_LAYER.get(family, {})
        config = jgg.models.model_config({"model_type": family} | sizes | own | case["changes"])
        np.testing.assert_allclose(
            config.mixers[0].rotary.frequencies, case["frequencies"], rtol=1e-5, err_msg=str(case)
        )
        np.testing.assert_allclose(config.mixers[0].rotary.scale, case["scale"], rtol=1e-6, err_msg=str(case))


def test_settings_of_qwen3_coder_that_say_what_qwen3_does_are_taken():
    more = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    assert jgg.models.model_config(config_of("qwen3_moe") | more).mixers[0].qk_norm == "head"


def test_windows_are_those_of_each_layer():
    def windows(family, **changes):
        return tuple(own.window for own in jgg.models.model_config(config_of(family) | changes).mixers)

    assert windows("gpt_oss") == (4, None)
    assert windows("gpt_oss", layer_types=["full_attention", "sliding_attention"]) == (None, 4)
    assert windows("gpt_oss", layer_types=None, num_hidden_layers=3) == (4, None, 4)
    assert windows("dots1") == (None, None, 4)
    assert windows("dots1", layer_types=None, num_hidden_layers=5, max_window_layers=3) == (None, None, None, 4, 4)
    assert windows("dots1", layer_types=None, sliding_window=None) == (None, None, None)
    assert windows("qwen2_moe") == windows("qwen2_moe", layer_types=None) == (4, None, 4, None)
    assert windows("qwen2_moe", layer_types=None, use_sliding_window=False) == (None,) * 4
    assert windows("mixtral") == (6, 6)
    assert windows("mixtral", sliding_window=None) == (None, None)
    assert windows("exaone_moe", layer_types=None, num_hidden_layers=4, mlp_layer_types=None) == (4, None, 4, None)
    assert windows("exaone_moe", sliding_window=None) == (None, None, None)
    assert windows("mellum", layer_types=None) == (None, None, None)
    assert windows("qwen3_moe", sliding_window=8) == (None, None)
    assert windows("qwen3_moe", sliding_window=8, use_sliding_window=True) == (8, 8)


def test_llama4_has_chunks_where_it_rotates_unless_layer_types_say_otherwise():
    def chunks(**changes):
        config = jgg.models.model_config(config_of("llama4")["text_config"] | changes)
        return [own.chunk for own in config.mixers]

    assert chunks() == [4, None, 4]
    assert chunks(layer_types=None, no_rope_layers=[]) == [4, None, 4]
    assert chunks(layer_types=None, no_rope_layers=[1, 1, 0]) == [4, 4, None]
    assert chunks(layer_types=None, attention_chunk_size=None) == [None, None, None]
    assert chunks(layer_types=["full_attention", "chunked_attention", "full_attention"]) == [None, 4, None]


def test_layers_without_a_window_have_no_positions_in_k_exaone():
    def rotates(**changes):
        config = jgg.models.model_config(config_of("exaone_moe") | changes)
        return [any(own.rotary.frequencies) for own in config.mixers]

    assert rotates() == [True, False, True]
    assert rotates(sliding_window=None) == [True, True, True]


def test_dense_layers_are_those_of_transformers():
    def dense(family, **changes):
        return jgg.models.model_config(config_of(family) | {"intermediate_size": 40} | changes).is_dense

    assert dense("qwen3_moe", num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3]) == (1, 0, 1, 1, 1)
    assert dense("qwen2_moe") == (0, 1, 0, 0)
    of_ernie = {"num_hidden_layers": 6, "moe_layer_start_index": 1, "moe_layer_end_index": -1}
    assert dense("ernie4_5_moe", **of_ernie) == (1, 0, 0, 0, 0, 0)
    assert dense("ernie4_5_moe", **of_ernie | {"moe_layer_interval": 2, "moe_layer_end_index": 4}) == (1, 0, 1, 0, 1, 1)
    assert dense("hy_v3", mlp_layer_types=None) == (1, 0, 0)
    assert dense("dots1", first_k_dense_replace=2) == (1, 1, 0)


def test_qwen3_moe_may_begin_with_dense_layers():
    config = jgg.models.model_config(config_of("qwen3_moe") | {"mlp_only_layers": [0], "intermediate_size": 40})
    assert (config.is_dense, config.dense_features, config.dense_activation) == ((True, False), 40, "swiglu")


WRONG = {
    "], got 'llama'.": ({"model_type": "llama"}, ValueError),
    "must have only keys that jgg.models knows, or null there, got 'attn_logit_softcapping': 30.0": (
        {"attn_logit_softcapping": 30.0},
        ValueError,
    ),
    "must have no null in 'vocab_size', got null": ({"vocab_size": None}, ValueError),
    "hidden_size must be a positive int, got '32'": ({"hidden_size": "32"}, TypeError),
    "num_key_value_heads must divide num_attention_heads, 4, got 3": ({"num_key_value_heads": 3}, ValueError),
    "qkv_bias must be False, got True": ({"qkv_bias": True}, ValueError),
    "mlp_only_layers must be null or a list of numbers of the 2 layers, got [2]": (
        {"mlp_only_layers": [2]},
        ValueError,
    ),
    "must have experts, got 2 dense layers of 2": ({"mlp_only_layers": [0, 1]}, ValueError),
    "rope_type must be 'default', 'linear', 'llama3', 'proportional' or 'yarn', got 'dynamic'": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
        ValueError,
    ),
    "rope_parameters of rope_type 'linear' must have 'factor', got {}": (
        {"rope_parameters": {"rope_type": "linear"}},
        ValueError,
    ),
    "high_freq_factor must be at least low_freq_factor, 4.0, got 3.0": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 3}},
        ValueError,
    ),
    "must have only keys that jgg.models knows, got {'mscale': 1.0}": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mscale": 1.0}},
        ValueError,
    ),
    "rope_parameters must be null or an object, got str.": ({"rope_parameters": "default"}, TypeError),
    "rope_parameters of rope_type 'yarn' must have 'factor', got {}": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        ValueError,
    ),
    "rope_theta must be greater than 1, got 0.0": ({"rope_parameters": {"rope_theta": 0}}, ValueError),
    "rope_theta must be a number, got '1e4'": ({"rope_parameters": None, "rope_theta": "1e4"}, TypeError),
    **{
        f"{key} must be more than 0, got {float(value)}": (
            {
                "rope_parameters": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 32}
                | {key: value}
            },
            ValueError,
        )
        for key, value in (
            ("factor", 0),
            ("factor", -2),
            ("beta_fast", 0),
            ("beta_slow", -1),
            ("attention_factor", 0),
            ("original_max_position_embeddings", 0),
        )
    },
    "rope_parameters must give frequencies and a scale that float32 holds, got {'rope_type': 'yarn', 'factor': 1e": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 1e-320}},
        ValueError,
    ),
    "beta_fast must be finite in float32, got 1e+308": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2, "beta_fast": 1e308}},
        ValueError,
    ),
    "rope_theta must be greater than 1, got 1.0": ({"rope_theta": 1}, ValueError),  # though rope_parameters count
    "sliding_window must be a positive int, got -1": ({"sliding_window": -1}, ValueError),
    "rms_norm_eps must be finite in float32, got 1e+300": ({"rms_norm_eps": 1e300}, ValueError),
    "beta_fast must be at least beta_slow, 1.0, got 0.5": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2, "beta_fast": 0.5}},
        ValueError,
    ),
    "partial_rotary_factor must be 1, as qwen3_moe rotates all features, got 0.5": (
        {"partial_rotary_factor": 0.5},
        ValueError,
    ),
    "rms_norm_eps must be a finite number, got 1000": ({"rms_norm_eps": 10**400}, ValueError),
    "rms_norm_eps must be 0 or more, got -1.0": ({"rms_norm_eps": -1}, ValueError),
    "num_hidden_layers must be at most 10000, got 1000000": ({"num_hidden_layers": 10**30}, ValueError),
    "head_dim must be at most 65536, got 1000000": ({"head_dim": 10**9}, ValueError),
    "vocab_size must be at most 2147483647, got 1000000": ({"vocab_size": 10**30}, ValueError),
    "num_experts must be at most 65536, got 1000000": ({"num_local_experts": None, "num_experts": 10**30}, ValueError),
    "num_experts and num_local_experts must be equal: they name the same setting, got [8, 4]": (
        {"num_experts": 8},
        ValueError,
    ),
    "eos_token_id must be null, an int of at least 0, or a list of them, got -1": ({"eos_token_id": -1}, ValueError),
    "eos_token_id must be null, an int of at least 0, or a list of them, got 2.5": (
        {"eos_token_id": [1, 2.5]},
        TypeError,
    ),
    "pad_token_id must be an int, got 2.5": ({"pad_token_id": 2.5}, TypeError),
    "text_config must have 'model_type' 'qwen3_moe', got None": ({"text_config": {"hidden_size": 8}}, ValueError),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_settings_are_named(message):
    changes, error = WRONG[message]
    with pytest.raises(error, match=re.escape(message)):
        jgg.models.model_config(config_of("qwen3_moe") | changes)


def test_wrong_settings_of_one_family_are_named():
    cases = {
        "logits_scaling must be a number to divide by, got 0.0": ("granitemoe", {"logits_scaling": 0}),
        "clip_qkv must be null or more than 0, got -1.0": ("olmoe", {"clip_qkv": -1}),
        "num_nextn_predict_layers must be an int of at least 0, got 'a'": (
            "glm4_moe",
            {"num_nextn_predict_layers": "a"},
        ),
        "num_mtp_layers must be an int of at least 0, got 1.5": (
            "glm4_moe",
            {"num_nextn_predict_layers": None, "num_mtp_layers": 1.5},
        ),
        "topk_group must be at most n_group, 1, got 2": ("glm4_moe", {"topk_group": 2}),
        "num_experts_per_tok must be at most the number of experts in topk_group = 1 groups, 2, got 3": (
            "glm4_moe",
            {"n_group": 2, "num_experts_per_tok": 3},
        ),
        "swiglu_limit must be more than 0, got -1.0": ("gpt_oss", {"swiglu_limit": -1}),
        "must have experts, got 3 dense layers of 3 by first_k_dense_replace and num_hidden_layers": (
            "glm4_moe",
            {"first_k_dense_replace": 3},
        ),
        "first_k_dense_replace must be the number of dense layers by mlp_layer_types, 1, got 1": (
            "hy_v3",
            {"first_k_dense_replace": 1},
        ),
        "layer_types must be one of ['full_attention'] for each of 4 layers, got ['sliding_attention'": (
            "qwen2_moe",
            {"use_sliding_window": False},
        ),
        "n_routed_experts must be a positive int, got None": ("dots1", {"n_routed_experts": None}),
        "sliding_window must be a positive int, got None": ("gpt_oss", {"sliding_window": None}),
        "must have only keys that jgg.models knows, or null there, got 'n_group': 2": ("mixtral", {"n_group": 2}),
        "mlp_layer_types must be one of ['sparse', 'dense'] for each of 3 layers, got ['moe']": (
            "mellum",
            {"mlp_layer_types": ["moe"]},
        ),
        "use_sliding_window must be True, got False": ("mellum", {"use_sliding_window": False}),
        "truncate in rope_parameters of full_attention must be true": (
            "mellum",
            {"rope_parameters": {"full_attention": {"truncate": False}}},
        ),
        "is_moe_layer must agree with mlp_layer_types, [False, True, True], got [True]": (
            "exaone_moe",
            {"is_moe_layer": [True]},
        ),
        "rope_parameters must not scale rotated features where use_qk_norm is true, got 1.13": (
            "llama4_text",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        ),
        "no_rope_layers must have 0 or 1 for each of 3 layers, or be empty, got [1]": (
            "llama4_text",
            {"no_rope_layers": [1]},
        ),
        "moe_layers must be null or numbers of layers, got 1": ("llama4_text", {"moe_layers": 1}),
        "must have experts, got 3 dense layers of 3 by moe_layers": ("llama4_text", {"moe_layers": []}),
        "attention_chunk_size must be a number for 'chunked_attention', got null": (
            "llama4_text",
            {"attention_chunk_size": None},
        ),
        "floor_scale must be more than 0, got 0.0": ("llama4_text", {"floor_scale": 0}),
        "layer_types must be one of ['chunked_attention', 'full_attention'] for each of 3": (
            "llama4_text",
            {"layer_types": ["sliding_attention"] * 3},
        ),
        "must have no null in 'no_rope_layer_interval', got null": ("llama4_text", {"no_rope_layer_interval": None}),
        "sliding_window_pattern must be a positive int, got 'LLLG'": (
            "exaone_moe",
            {"layer_types": None, "sliding_window_pattern": "LLLG"},
        ),
    }
    for message, (family, changes) in cases.items():
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            jgg.models.model_config(
                config_of("llama4")["text_config"] | changes if family == "llama4_text" else config_of(family) | changes
            )


def test_settings_of_other_things_than_the_model_are_taken():
    config = config_of("qwen3_moe")
    others = {
        "pad_token_id": -1,
        "eos_token_id": [99, 3],
        "id2label": {"0": "a"},
        "temperature": 0.5,
        "do_sample": True,
    }
    assert same(jgg.models.model_config(config | others), jgg.models.model_config(config))


def test_a_nested_config_means_the_same():
    config = config_of("qwen3_moe")
    nested = {"model_type": "qwen3_moe", "dtype": "bfloat16", "text_config": config}
    assert same(jgg.models.model_config(nested), jgg.models.model_config(config))
    with pytest.raises(ValueError, match="or null there, got 'tie_word_embeddings': True"):
        jgg.models.model_config(nested | {"tie_word_embeddings": True})


def test_layer_types_are_known_and_as_many_as_layers():
    for types in (["full_attention"], ["full_attention", "chunked_attention"], "full_attention"):
        with pytest.raises(ValueError, match=r"layer_types must be one of .* for each of 2 layers, got"):
            jgg.models.model_config(config_of("gpt_oss") | {"layer_types": types})


def test_a_window_wider_than_the_text_changes_nothing(tmp_path):
    expected = reference("qwen3_moe")
    folder = copied("qwen3_moe", tmp_path / "wide", use_sliding_window=True, sliding_window=13)
    logits = jgg.models.load(folder, dtype=jnp.float32)(expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)
