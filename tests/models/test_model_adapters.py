"""LoRA adapters of whole models in PEFT's format (data/model_adapters): read as PEFT does, bit for bit, and errors."""

import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jgg.models
from jgg.hf.adapter_experts import pair_of
from tests.support.hf import assert_same_tensors
from tests.support.marks import thorough_but
from tests.support.models import DATA, FAMILIES, MORE_FAMILIES, OWN_PARTS, fill_adapters, loaded, logits_of, reference

ADAPTERS = DATA.parent / "model_adapters"
CASES = "qwen3_moe", "gpt_oss", "mixtral", "glm4_moe"
# test_latent.py and test_delta.py have adapters of the others of OWN_PARTS
AT_EVERY_CHANGE = "qwen3_moe", "gpt_oss", "glm4_moe", *({*OWN_PARTS} - {"deepseek_v3", "gemma4_text", "qwen3_next"})
WITH_ADAPTERS = *CASES, *(name for name in MORE_FAMILIES if (ADAPTERS / name).exists())
# what PEFT makes of seven target_modules, of patterns of ranks and alphas, and of some layers alone
VARIED = (
    "qwen3_moe-seven-rslora",
    "olmoe-seven-patterns",
    pytest.param("mixtral-all-linear", marks=pytest.mark.sweep),
    pytest.param("gemma4_text-seven", marks=pytest.mark.sweep),
    "glm4_moe-all",
    *(pytest.param(case, marks=pytest.mark.sweep) for case in ("granitemoe-seven-excluded", "glm4_moe-experts")),
    pytest.param("gpt_oss-seven-last", marks=pytest.mark.sweep),
)
SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def adapters_of(model):
    return {
        ".".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    }


@pytest.mark.parametrize("family", thorough_but(AT_EVERY_CHANGE, WITH_ADAPTERS, pytest.mark.sweep))
def test_an_adapter_of_peft_gives_its_logits(family):
    model = loaded(family)
    jgg.models.load_adapter(model, ADAPTERS / family)
    logits = logits_of(model, reference(family)["tokens"])
    wanted = np.load(ADAPTERS / family / "logits.npy")
    assert np.abs(wanted - reference(family)["logits"]).max() > 0.1
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("family", WITH_ADAPTERS)
def test_an_adapter_of_peft_is_written_bit_for_bit(family, tmp_path):
    model = loaded(family)
    jgg.models.load_adapter(model, ADAPTERS / family)
    jgg.models.save_adapter(model, tmp_path)
    assert_same_tensors(load_file(tmp_path / TENSORS), load_file(ADAPTERS / family / TENSORS))


@pytest.mark.parametrize("case", VARIED)
def test_a_model_gets_the_targets_ranks_and_scales_of_a_folder(case, tmp_path):
    family = case.partition("-")[0]
    model, again = loaded(family), loaded(family, lora_rank=5, lora_targets=("w_o", "w_gate_up"))
    jgg.models.load_adapter(model, ADAPTERS / case)
    logits, wanted = logits_of(model, reference(family)["tokens"]), np.load(ADAPTERS / case / "logits.npy")
    assert np.abs(wanted - reference(family)["logits"]).max() > 0.1
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4)
    jgg.models.save_adapter(model, tmp_path)
    jgg.models.load_adapter(again, tmp_path)  # its own adapters are replaced
    assert again.options.lora.targets == model.options.lora.targets
    assert_same_tensors(adapters_of(again), adapters_of(model))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, jnp.float32) for family in FAMILIES),
        (FAMILIES[0], jnp.bfloat16),
        *(pytest.param(family, jnp.bfloat16, marks=pytest.mark.sweep) for family in FAMILIES[1:]),
    ],
)
def test_adapters_are_read_back_bit_for_bit(family, dtype, tmp_path):
    options = {"lora_rank": 3, "lora_alpha": 7.0, "lora_param_dtype": dtype}
    model = fill_adapters(loaded(family, **options), 1.0)
    assert {array.dtype for array in adapters_of(model).values()} == {jnp.dtype(dtype)}
    jgg.models.save_adapter(model, tmp_path)
    again = loaded(family, **options)
    jgg.models.load_adapter(again, tmp_path)
    assert_same_tensors(adapters_of(again), adapters_of(model))


def test_adapters_of_attention_alone_and_of_experts_alone(tmp_path):
    for targets in (("w_q", "w_v"), ("w_down",), ("w_gate_up", "w_o")):
        model = loaded("glm4_moe", lora_rank=2, lora_targets=targets)
        jgg.models.save_adapter(model, tmp_path)
        again = loaded("glm4_moe", lora_rank=2, lora_targets=targets, rngs=nnx.Rngs(1))
        jgg.models.load_adapter(again, tmp_path)
        assert_same_tensors(adapters_of(again), adapters_of(model))


def test_an_adapter_of_each_experts_modules_is_that_of_merged_weights(tmp_path):
    """Seven target_modules as in transformers 4: attention, the dense layer, shared experts and each expert."""
    shutil.copytree(DATA / "glm4_moe", tmp_path / "merged")
    weights, rng = load_file(DATA / "glm4_moe" / "model.safetensors"), np.random.default_rng(0)
    tensors = {}
    for name, w in weights.items():
        weights[name] = w.astype(np.float32)
        if "_proj.weight" in name and ".layers.3." not in name:  # layer 3 predicts further tokens
            rank = 1 if "up_proj" in name else 2
            a, b = (0.3 * rng.standard_normal(shape) for shape in ((rank, w.shape[1]), (w.shape[0], rank)))
            weights[name] += (3 / rank * b @ a).astype(np.float32)
            a_and_b = (array.astype(np.float32) for array in (a, b))
            tensors |= zip(pair_of(name.removesuffix(".weight")), a_and_b, strict=True)
    save_file(weights, tmp_path / "merged" / "model.safetensors")
    seven = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    settings = {"r": 2, "lora_alpha": 3, "rank_pattern": {"up_proj": 1}, "target_modules": seven}
    (tmp_path / SETTINGS).write_text(json.dumps(settings | {"peft_type": "LORA", "base_model_name_or_path": None}))
    save_file(tensors, tmp_path / TENSORS)
    model, merged = loaded("glm4_moe"), jgg.models.load(tmp_path / "merged", dtype=jnp.float32)
    jgg.models.load_adapter(model, tmp_path)
    tokens = reference("glm4_moe")["tokens"]
    wanted = logits_of(merged, tokens)
    assert np.abs(wanted - reference("glm4_moe")["logits"]).max() > 0.1
    np.testing.assert_allclose(logits_of(model, tokens), wanted, rtol=0, atol=1e-4)


def test_layers_without_an_adapter_are_written_without_one(tmp_path):
    model = loaded("gpt_oss")
    jgg.models.load_adapter(model, ADAPTERS / "gpt_oss-seven-last")
    jgg.models.save_adapter(model, tmp_path)
    assert_same_tensors(load_file(tmp_path / TENSORS), load_file(ADAPTERS / "gpt_oss-seven-last" / TENSORS))


@pytest.mark.sweep
def test_layers_without_an_adapter_get_none_by_training():
    model, tokens = loaded("gpt_oss"), reference("gpt_oss")["tokens"]
    jgg.models.load_adapter(model, ADAPTERS / "gpt_oss-seven-last")
    gradient_of = nnx.grad(lambda model: model.losses(tokens, tokens).sum(), argnums=nnx.DiffState(0, nnx.LoRAParam))
    for _, gradient in nnx.to_flat_state(nnx.jit(gradient_of)(model)):
        assert not np.any(gradient[...][0]) and np.any(gradient[...][1])


def test_the_model_of_an_adapter_is_named(tmp_path):
    cached = tmp_path / "models--org--tiny" / "snapshots" / "0123"
    shutil.copytree(DATA / "mixtral", cached)
    for folder, name in ((DATA / "mixtral", str(DATA / "mixtral")), (cached, "org/tiny")):
        jgg.models.save_adapter(jgg.models.load(folder, lora_rank=1), tmp_path / "adapter")
        assert json.loads((tmp_path / "adapter" / SETTINGS).read_text())["base_model_name_or_path"] == name


def edited(folder, settings=None, tensors=None):
    """A copy of GLM-4.5's adapter with changes; None takes away the tensors whose names have a part."""
    shutil.copytree(ADAPTERS / "glm4_moe", folder)
    values = json.loads((folder / SETTINGS).read_text()) | (settings or {})
    (folder / SETTINGS).write_text(json.dumps(values))
    gone = [part for part, array in (tensors or {}).items() if array is None]
    arrays = load_file(folder / TENSORS) | (tensors or {})
    kept = {name: array for name, array in arrays.items() if not any(part in name for part in gone)}
    save_file(kept, folder / TENSORS)
    return folder


Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"
WRONG = {
    "layers.1.self_attn.q_proj.lora_A.weight is missing in": ({}, {Q: None}),
    "layers.2.self_attn.k_proj.lora_A.weight is missing in": ({}, {"layers.2.self_attn.k_proj": None}),
    "layers.0.mlp.up_proj.lora_A.weight is missing in": ({}, {"layers.0.mlp.up_proj": None}),
    "w_gate_up of layer 2 is missing in": ({}, {"layers.2.mlp.experts": None}),
    "q_proj.lora_magnitude_vector is not expected in": ({}, {Q.replace("A.weight", "magnitude_vector"): np.ones(2)}),
    "embed_tokens.lora_embedding_A is not expected in": ({}, {EMBEDDING: np.ones((2, 3))}),
    "PEFT's merge_and_unload makes a model of such an adapter": ({}, {EMBEDDING: np.ones((2, 3))}),
    "must have shape [2, 32], got [3, 32]": ({}, {Q: np.ones((3, 32), np.float32)}),
    "q_proj.lora_A.weight of": ({"target_modules": ["k_proj", "v_proj", "o_proj"]}, {}),
    "must be of a target in": ({"exclude_modules": r".*layers\.0\.self_attn\.q_proj"}, {}),
    "use_dora of": ({"use_dora": True}, {}),
    "bias of": ({"bias": "all"}, {}),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named_and_nothing_is_set(message, tmp_path):
    model = loaded("glm4_moe", lora_rank=2, lora_alpha=3.0)
    before = adapters_of(model)
    with pytest.raises(ValueError, match=re.escape(message)):
        jgg.models.load_adapter(model, edited(tmp_path / "edited", *WRONG[message]))
    assert_same_tensors(adapters_of(model), before)


def test_a_model_without_adapters_is_named(tmp_path):
    with pytest.raises(ValueError, match="model must have LoRA adapters, of a lora_rank, got a model without"):
        jgg.models.save_adapter(loaded("mixtral"), tmp_path)
    for function in (jgg.models.save_adapter, jgg.models.load_adapter):
        with pytest.raises(TypeError, match=r"model must be a jgg\.models\.Decoder, got"):
            function(None, tmp_path)


def test_adapters_of_routers_have_the_names_of_transformers_5(tmp_path):
    names = {"granitemoe": "block_sparse_moe.router", "gpt_oss": "mlp.router", "mixtral": "mlp.gate"}
    for family, name in names.items():
        model = loaded(family, lora_rank=1, lora_targets=("w_router",))
        jgg.models.save_adapter(model, tmp_path)
        targets = json.loads((tmp_path / SETTINGS).read_text())["target_parameters"]
        assert targets == [f"model.layers.{number}.{name}.weight" for number in range(model.config.num_layers)]


def test_an_adapter_is_written_where_a_link_leads(tmp_path):
    (tmp_path / "link").symlink_to("place")
    jgg.models.save_adapter(loaded("gpt_oss", lora_rank=1, lora_targets=("w_router",)), tmp_path / "link")
    assert {path.name for path in (tmp_path / "place").iterdir()} == {SETTINGS, TENSORS}
