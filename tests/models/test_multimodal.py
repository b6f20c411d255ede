"""Folders with a language model and a vision tower, and folders of the language model alone."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jgg.hf
import jgg.models
from jgg.hf.families import FAMILIES
from tests.support.models import DATA, config_of, loaded, logits_of, reference

FAMILY = "qwen3_vl_moe"


def written(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def text_tensors(**changes):
    """The tensors of the language model by their names in a folder of its own."""
    tensors = jgg.hf.Checkpoint(DATA / FAMILY)
    own = FAMILIES[FAMILY]
    names = [name for name in tensors if not any(re.search(pattern, name) for pattern in own.ignored)]
    return {name.replace(own.prefix, "model."): tensors[name] for name in names} | changes


def test_a_folder_of_the_language_model_alone_gives_the_same_logits(tmp_path):
    config = config_of(FAMILY)["text_config"] | {"tie_word_embeddings": False}
    folder = written(tmp_path / "text", config, text_tensors())
    model = jgg.models.load(folder, dtype=jnp.float32)
    wanted = logits_of(loaded(FAMILY), reference(FAMILY)["tokens"])
    np.testing.assert_array_equal(logits_of(model, reference(FAMILY)["tokens"]), wanted)
    jgg.models.save(jgg.models.load(folder), tmp_path / "saved")
    assert jgg.hf.Checkpoint(tmp_path / "saved").keys() == text_tensors().keys()


def test_the_shape_says_in_which_order_experts_have_their_axes(tmp_path):
    tensors = dict(jgg.hf.Checkpoint(DATA / FAMILY))
    turned = {name: tensor.swapaxes(1, 2) if ".experts." in name else tensor for name, tensor in tensors.items()}
    model = jgg.models.load(written(tmp_path / "turned", config_of(FAMILY), turned), dtype=jnp.float32)
    for name in ("w_gate_up", "w_down"):
        np.testing.assert_array_equal(getattr(model.layers.moe, name), getattr(loaded(FAMILY).layers.moe, name))
    one = jgg.hf.from_hf(config_of(FAMILY), turned, 1)
    np.testing.assert_array_equal(one["w_down"], jgg.hf.from_hf(config_of(FAMILY), tensors, 1)["w_down"])


def test_the_outer_config_says_whether_the_head_is_tied():
    config = config_of(FAMILY)
    assert config["text_config"]["tie_word_embeddings"]  # transformers' default there, which it does not look at
    assert not jgg.models.model_config(config).is_tied
    assert not jgg.models.model_config({**config, "tie_word_embeddings": None}).is_tied
    assert jgg.models.model_config({**config, "tie_word_embeddings": True}).is_tied


@pytest.mark.parametrize("where", ["text_config", None])
def test_the_dtype_is_written_where_the_config_has_one(where, tmp_path):
    config = config_of(FAMILY)
    del config["dtype"]
    (config if where is None else config[where])["torch_dtype"] = "float16"
    model = jgg.models.load(written(tmp_path / "model", config, dict(jgg.hf.Checkpoint(DATA / FAMILY))))
    jgg.models.save(model, tmp_path / "saved")
    (config if where is None else config[where])["torch_dtype"] = "bfloat16"
    assert jgg.hf.read_config(tmp_path / "saved") == config


WRONG = {
    "text_config must have 'model_type' 'qwen3_vl_moe_text', got 'qwen3_moe'": {
        "text_config": {"model_type": "qwen3_moe"}
    },
    "must have only keys that jgg.models knows, or null there, got 'hidden_size': 32": {"hidden_size": 32},
    "got 'mystery': 1": {"text_config": {"mystery": 1}},
    "text_config must be an object, got 5": {"text_config": 5},
    "moe_intermediate_size must be neither hidden_size, 32, nor its half, got 16": {
        "text_config": {"hidden_size": 32, "moe_intermediate_size": 16}
    },
    "norm_topk_prob must be True, got False": {"text_config": {"norm_topk_prob": False}},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_configs_are_named(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jgg.models.model_config(config_of(FAMILY) | WRONG[message])


def test_keys_of_the_language_model_beside_no_text_config_are_refused():
    with pytest.raises(ValueError, match="got 'hidden_size': 32"):
        jgg.models.model_config({"model_type": FAMILY, "hidden_size": 32})
