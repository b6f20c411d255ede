"""LoRA adapters of whole models in PEFT's format (data/model_adapters): read as PEFT does, bit for bit, and errors."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jgg.models
from tests.support.models import DATA, FAMILIES, loaded, reference

ADAPTERS = DATA.parent / "model_adapters"
CASES = "qwen3_moe", "gpt_oss", "mixtral", "glm4_moe"
# what PEFT makes of seven target_modules, of patterns of ranks and alphas, and of some layers alone
VARIED = sorted(path.name for path in ADAPTERS.iterdir() if path.name not in CASES)
SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
SAME = {"lora_rank": 2, "lora_alpha": 3.0}


def adapters_of(model):
    return {
        ".".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    }


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert got[name].dtype == array.dtype, name
        np.testing.assert_array_equal(got[name], array, name)


@pytest.mark.parametrize("family", CASES)
def test_an_adapter_of_peft_gives_its_logits_and_is_written_bit_for_bit(family, tmp_path):
    model = loaded(family, **SAME)
    jgg.models.load_adapter(model, ADAPTERS / family)
    logits = jax.jit(lambda model, tokens: model(tokens))(model, reference(family)["tokens"])
    wanted = np.load(ADAPTERS / family / "logits.npy")
    assert np.abs(wanted - reference(family)["logits"]).max() > 0.1
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4)
    jgg.models.save_adapter(model, tmp_path)
    assert_same(load_file(tmp_path / TENSORS), load_file(ADAPTERS / family / TENSORS))


@pytest.mark.parametrize("case", VARIED)
def test_a_model_gets_the_targets_ranks_and_scales_of_a_folder(case, tmp_path):
    family = case.partition("-")[0]
    model, again = loaded(family), loaded(family, lora_rank=5, lora_targets=("w_o", "w_gate_up"))
    jgg.models.load_adapter(model, ADAPTERS / case)
    run = jax.jit(lambda model, tokens: model(tokens))
    logits, wanted = run(model, reference(family)["tokens"]), np.load(ADAPTERS / case / "logits.npy")
    assert np.abs(wanted - reference(family)["logits"]).max() > 0.1
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4)
    jgg.models.save_adapter(model, tmp_path)
    jgg.models.load_adapter(again, tmp_path)  # its own adapters are replaced
    assert again.options.lora.targets == model.options.lora.targets
    assert_same(adapters_of(again), adapters_of(model))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_read_back_bit_for_bit(family, dtype, tmp_path):
    options = {"lora_rank": 3, "lora_alpha": 7.0, "lora_param_dtype": dtype}
    model = loaded(family, **options)
    nnx.update(model, jax.tree.map(
        lambda value: jax.random.normal(jax.random.key(value.size), value.shape, value.dtype),
        nnx.state(model, nnx.LoRAParam),
    ))  # fmt: skip
    assert {array.dtype for array in adapters_of(model).values()} == {jnp.dtype(dtype)}
    jgg.models.save_adapter(model, tmp_path)
    again = loaded(family, **options)
    jgg.models.load_adapter(again, tmp_path)
    assert_same(adapters_of(again), adapters_of(model))


def test_adapters_of_attention_alone_and_of_experts_alone(tmp_path):
    for targets in (("w_q", "w_v"), ("w_down",), ("w_gate_up", "w_o")):
        model = loaded("glm4_moe", lora_rank=2, lora_targets=targets)
        jgg.models.save_adapter(model, tmp_path)
        again = loaded("glm4_moe", lora_rank=2, lora_targets=targets, rngs=nnx.Rngs(1))
        jgg.models.load_adapter(again, tmp_path)
        assert_same(adapters_of(again), adapters_of(model))


def edited(folder, settings=None, tensors=None):
    """A copy of GLM-4.5's adapter with changes."""
    shutil.copytree(ADAPTERS / "glm4_moe", folder)
    values = json.loads((folder / SETTINGS).read_text()) | (settings or {})
    (folder / SETTINGS).write_text(json.dumps(values))
    arrays = load_file(folder / TENSORS) | (tensors or {})
    save_file({name: array for name, array in arrays.items() if array is not None}, folder / TENSORS)
    return folder


Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
UP = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
# without what layer 0 has beside w_down
DOWN = {UP.replace("up_proj.lora_A", f"down_proj.lora_{part}"): None for part in "AB"}
WITHOUT = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate_proj.weight", "up_proj.weight"]}
WRONG = {
    "q_proj.lora_A.weight is missing in": ({}, {}, {Q: None}),
    "q_proj.lora_magnitude_vector is not expected in": (
        {}, {}, {Q.replace("A.weight", "magnitude_vector"): np.ones(2)},
    ),
    "must have shape [2, 32], got [3, 32]": ({}, {}, {Q: np.ones((3, 32), np.float32)}),
    "down_proj.lora_A.weight of": ({"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}, {}),
    "w_down of layer 2 is missing in": ({}, {"model.layers.2.mlp.experts": None}),
    "use_dora of": ({}, {"use_dora": True}, {}),
    "bias of": ({}, {"bias": "all"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named_and_nothing_is_set(message, tmp_path):
    options, settings, tensors = WRONG[message]
    model = loaded("glm4_moe", **SAME | options)
    before = adapters_of(model)
    with pytest.raises(ValueError, match=re.escape(message)):
        jgg.models.load_adapter(model, edited(tmp_path / "edited", settings, tensors))
    assert_same(adapters_of(model), before)


def test_a_model_without_adapters_is_named(tmp_path):
    for function in (jgg.models.save_adapter, jgg.models.load_adapter):
        with pytest.raises(ValueError, match="model must have LoRA adapters, of a lora_rank, got a model without"):
            function(loaded("mixtral"), tmp_path)
        with pytest.raises(TypeError, match=r"model must be a jgg\.models\.Decoder, got"):
            function(None, tmp_path)
