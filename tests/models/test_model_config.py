"""What jgg.models reads of each family's config.json, in the words of transformers 4 and 5, and what it refuses."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import jgg.models
from tests.support.models import config_of, copied, reference

# transformers 4 has these keys in the place of rope_parameters
OLD_ROTARY = {
    "qwen3_moe": {"rope_theta": 10000.0, "rope_scaling": None},
    "glm4_moe": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "gpt_oss": {"rope_theta": 1000.0, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 1.0,
        "truncate": False,
    }},
}  # fmt: skip


@pytest.mark.parametrize("family", OLD_ROTARY)
def test_rotary_settings_of_transformers_4_mean_the_same(family):
    config = config_of(family)
    old = {key: value for key, value in config.items() if key != "rope_parameters"} | OLD_ROTARY[family]
    new, same = jgg.models.model_config(config), jgg.models.model_config(old)
    assert new.rotary_frequencies == same.rotary_frequencies
    assert new.rotary_scale == same.rotary_scale


def test_settings_of_qwen3_coder_that_say_what_qwen3_does_are_taken():
    more = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    assert jgg.models.model_config(config_of("qwen3_moe") | more).qk_norm == "head"


def test_windows_are_those_of_each_layer():
    def windows(family, **changes):
        return jgg.models.model_config(config_of(family) | changes).windows

    assert windows("gpt_oss") == (4, None)
    assert windows("gpt_oss", layer_types=["full_attention", "sliding_attention"]) == (None, 4)
    assert windows("gpt_oss", layer_types=None, num_hidden_layers=3) == (4, None, 4)
    assert windows("mixtral") == (6, 6)
    assert windows("mixtral", sliding_window=None) == (None, None)
    assert windows("qwen3_moe", sliding_window=8) == (None, None)
    assert windows("qwen3_moe", sliding_window=8, use_sliding_window=True) == (8, 8)


def test_qwen3_moe_may_begin_with_dense_layers():
    config = jgg.models.model_config(config_of("qwen3_moe") | {"mlp_only_layers": [0], "intermediate_size": 40})
    assert (config.num_dense_layers, config.dense_features, config.dense_activation) == (1, 40, "swiglu")


WRONG = {
    "model_type must be one of ['qwen3_moe', ": ({"model_type": "llama"}, ValueError),
    "'deepseek_v3' has latent attention": ({"model_type": "deepseek_v3"}, ValueError),
    "must have only keys that jgg.models knows, or null there, got 'attn_logit_softcapping': 30.0": (
        {"attn_logit_softcapping": 30.0}, ValueError,
    ),
    "must have 'vocab_size', got none": ({"vocab_size": None}, ValueError),
    "must have 'num_experts_per_tok', got none": ({"num_experts_per_tok": None}, ValueError),
    "hidden_size must be a positive int, got '32'": ({"hidden_size": "32"}, TypeError),
    "num_key_value_heads must divide num_attention_heads, 4, got 3": ({"num_key_value_heads": 3}, ValueError),
    "decoder_sparse_step must be 1, got 2": ({"decoder_sparse_step": 2}, ValueError),
    "qkv_bias must be False, got True": ({"qkv_bias": True}, ValueError),
    "mlp_only_layers must be the first layers, such as [0, 1], or none, got [1]": (
        {"mlp_only_layers": [1]}, ValueError,
    ),
    "must have experts, got 2 dense layers of 2": ({"mlp_only_layers": [0, 1]}, ValueError),
    "rope_type must be 'default' or 'yarn', got 'llama3'": (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, ValueError,
    ),
    "must have only keys that jgg.models knows, got {'mscale': 1.0}": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mscale": 1.0}}, ValueError,
    ),
    "config must have 'rope_theta', got none": ({"rope_parameters": None}, ValueError),
    "rope_parameters must be null or an object, got str.": ({"rope_parameters": "default"}, TypeError),
    "rope_parameters of type 'yarn' must have ('factor', 'original_max_position_embeddings'), got {'factor': 2}": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2}}, ValueError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_settings_are_named(message):
    changes, error = WRONG[message]
    with pytest.raises(error, match=re.escape(message)):
        jgg.models.model_config(config_of("qwen3_moe") | changes)


def test_layer_types_are_known_and_as_many_as_layers():
    for types in (["full_attention"], ["full_attention", "chunked_attention"], "full_attention"):
        with pytest.raises(ValueError, match=r"layer_types must be one of .* for each of 2 layers, got"):
            jgg.models.model_config(config_of("gpt_oss") | {"layer_types": types})


def test_a_window_wider_than_the_text_changes_nothing(tmp_path):
    expected = reference("qwen3_moe")
    folder = copied("qwen3_moe", tmp_path / "wide", use_sliding_window=True, sliding_window=13)
    logits = jgg.models.load(folder, dtype=jnp.float32)(expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)
