"""The config.json of published models opens: keys that transformers does not read are taken or refused by name."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jgg.hf
import jgg.models
from tests.layers.test_hf_quantized import in_fp8
from tests.support.models import DATA, config_of, copied

FP8 = {"quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# what each config has beside token ids and keys that all models have, and what is read of it
PUBLISHED = {
    "MiniMaxAI/MiniMax-M2": {
        "model_type": "minimax_m2",
        "attn_type_list": [1] * 62,
        "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "max_position_embeddings": 196608,
        "mlp_intermediate_size": 8192,
        "mtp_transformer_layers": 1,
        "num_attention_heads": 48,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "quantization_config": FP8 | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": 200064,
    },
}


def read(name, **changes):
    """What of a published model's config, with changes, follows from keys that not all families have."""
    config = jgg.models.model_config(PUBLISHED[name] | changes)
    mixer, moe = config.mixers[-1], config.moe
    return {
        "rotated": 2 * len(mixer.rotary.frequencies),
        "head_features": mixer.head_features,
        "qk_norm": mixer.qk_norm,
        "dense": sum(config.is_dense),
        "further": config.num_further_layers,
        "experts": (moe.num_experts, moe.topk, moe.hidden_features, moe.shared_features),
        "score": (moe.score, moe.normalize, moe.scale, moe.use_selection_bias),
        "is_tied": config.is_tied,
    }


EXPECTED = {
    "MiniMaxAI/MiniMax-M2": {
        "rotated": 64,
        "head_features": 128,
        "qk_norm": "all",
        "dense": 0,
        "further": 3,
        "experts": (256, 8, 1536, 0),
        "score": ("sigmoid", None, 1.0, True),
        "is_tied": False,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name):
    assert read(name) == EXPECTED[name]


# keys by which a model would be another one than jgg has
REFUSED = {
    "MiniMaxAI/MiniMax-M2": {
        "attn_type_list": [0] + [1] * 61,
        "scoring_func": "softmax",
        "use_routing_bias": False,
        "shared_intermediate_size": 1536,
        "use_qk_norm": False,
        "qk_norm_type": "per_head",
        "layernorm_mlp_beta": 2.0,
        "sliding_window": 4096,
    },
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in REFUSED.items() for key in keys])
def test_what_would_be_another_model_is_refused_by_the_name_of_its_key(name, key):
    with pytest.raises(ValueError, match=re.escape(key)):
        read(name, **{key: REFUSED[name][key]})


def test_a_folder_in_fp8_is_read_as_what_it_stands_for(tmp_path):
    """As MiniMax publishes them: attention and experts have scales, the router and the head have none."""
    how = PUBLISHED["MiniMaxAI/MiniMax-M2"]["quantization_config"]
    names = "embed_tokens", *how["modules_to_not_convert"]
    tensors = dict(jgg.hf.Checkpoint(DATA / "minimax_m2"))
    plain = {name: array for name, array in tensors.items() if any(f"{own}." in f"{name}." for own in names)}
    quantized, exact = in_fp8({name: array for name, array in tensors.items() if name not in plain}, (128, 128))
    assert {"model.layers.1.self_attn.o_proj.weight_scale_inv"} <= quantized.keys()
    assert {"model.layers.1.block_sparse_moe.gate.weight", "lm_head.weight"} <= plain.keys()
    for name, own in ("fp8", quantized), ("exact", exact):
        save_file(plain | own, copied("minimax_m2", tmp_path / name) / "model.safetensors")
    config = config_of("minimax_m2") | {"quantization_config": how}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    got, wanted = (jgg.models.load(tmp_path / name, dtype=jnp.float32) for name in ("fp8", "exact"))
    tokens = np.arange(12).reshape(2, 6)
    np.testing.assert_array_equal(got(tokens), wanted(tokens))
