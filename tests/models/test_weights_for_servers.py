"""Weights and adapters by the names that servers know: those of published checkpoints, with each expert's modules."""

import json
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jgg.hf
import jgg.models
from jgg.core.choices import TARGETS
from tests.support.marks import thorough_but
from tests.support.models import DATA, fill_adapters, loaded, logits_of, reference

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
WITH_MODULES = (
    *("qwen3_moe", "glm4_moe"),
    *(pytest.param(family, marks=pytest.mark.sweep) for family in ("mixtral", "olmoe")),
)
RANKS, ALPHAS = tuple(range(1, len(TARGETS) + 1)), tuple(float(2 + number) for number in range(len(TARGETS)))


def with_random_adapters(family, **options):
    return fill_adapters(loaded(family, **({"lora_rank": RANKS, "lora_alpha": ALPHAS} | options)))


@pytest.mark.filterwarnings("ignore:PEFT leaves out")
@pytest.mark.parametrize("family", WITH_MODULES)
def test_adapters_by_expert_are_terms_of_the_published_names(family, tmp_path):
    model = with_random_adapters(family)
    jgg.models.save_adapter(model, tmp_path / "adapter", by_expert=True)
    tensors = load_file(tmp_path / "adapter" / TENSORS)
    settings = json.loads((tmp_path / "adapter" / SETTINGS).read_text())
    assert not settings.get("target_parameters") and not settings.get("rank_pattern")
    scale, before = settings["lora_alpha"] / settings["r"], dict(jgg.hf.Checkpoint(DATA / family))
    model.merge_adapters()
    after, changed = dict(jgg.models.named_tensors(model)), set()
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[name.replace("lora_A", "lora_B")]
            assert a.shape[0] == b.shape[1] == settings["r"]
            assert module.rpartition(".")[2] in settings["target_modules"]
            term = scale * b.astype(np.float64) @ a.astype(np.float64)
            assert np.abs(term).max() > 1e-3
            np.testing.assert_allclose(after[f"{module}.weight"], before[f"{module}.weight"] + term, rtol=0, atol=1e-5)
            changed.add(f"{module}.weight")
    assert {name for name, array in after.items() if not np.array_equal(array, before[name])} == changed
    assert any(".experts.1." in name for name in changed)


@pytest.mark.filterwarnings("ignore:PEFT leaves out")
@pytest.mark.parametrize("family", WITH_MODULES)
def test_adapters_by_expert_are_read_back(family, tmp_path):
    model = with_random_adapters(family)
    jgg.models.save_adapter(model, tmp_path, by_expert=True)
    again = loaded(family)
    jgg.models.load_adapter(again, tmp_path)
    tokens = reference(family)["tokens"]
    wanted = logits_of(model, tokens)
    assert np.abs(wanted - reference(family)["logits"]).max() > 1e-2
    np.testing.assert_allclose(logits_of(again, tokens), wanted, rtol=0, atol=1e-4)


OF_EXPERTS = {"lora_targets": ("w_q", "w_gate_up", "w_down")}
LEFT_OUT = {  # as PEFT 0.21.2 was seen to do with transformers 5.24
    "hy_v3": "experts",
    "qwen2_moe": "experts",
    "qwen3_5_moe_text": "experts",
    "glm4_moe": "dense layers and shared experts",
    "mellum": "dense layers and shared experts",
    "qwen3_moe": None,
}
QUICK = "hy_v3", "glm4_moe", "qwen3_moe"


@pytest.mark.parametrize("family", thorough_but(QUICK, list(LEFT_OUT), pytest.mark.sweep))
def test_what_peft_leaves_out_is_said(family, tmp_path):
    def warnings_of(**options):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            jgg.models.save_adapter(with_random_adapters(family, **options), tmp_path, by_expert=True)
        return [str(warning.message) for warning in told]

    one = {"lora_rank": 2, "lora_alpha": 4.0}
    message = f"PEFT leaves out the adapters of {LEFT_OUT[family]} from what by_expert=True writes for {family}; "
    message += "for PEFT, save the adapter without by_expert."
    assert warnings_of() == ([message] if LEFT_OUT[family] else [])
    assert warnings_of(**one, **OF_EXPERTS) == ([message] if LEFT_OUT[family] == "experts" else [])
    assert warnings_of(**one, lora_targets=("w_q", "w_o")) == []


def test_families_whose_experts_have_no_modules_are_named(tmp_path):
    model = with_random_adapters("gpt_oss", lora_rank=2, lora_alpha=4.0)
    with pytest.raises(ValueError, match="model must have modules for each expert, got gpt_oss"):
        jgg.models.save_adapter(model, tmp_path, by_expert=True)
    assert not list(tmp_path.iterdir())
    of_attention = with_random_adapters("gpt_oss", lora_rank=2, lora_alpha=4.0, lora_targets=("w_q", "w_o"))
    jgg.models.save_adapter(of_attention, tmp_path, by_expert=True)
    assert json.loads((tmp_path / SETTINGS).read_text())["target_modules"] == ["o_proj", "q_proj"]
    with pytest.raises(TypeError, match="by_expert must be"):
        jgg.models.save_adapter(of_attention, tmp_path, by_expert="yes")


def test_named_tensors_are_those_of_the_folder():
    wanted = dict(jgg.hf.Checkpoint(DATA / "qwen3_moe"))
    got = dict(jgg.models.named_tensors(jgg.models.load(DATA / "qwen3_moe", dtype=jnp.float32)))
    assert got.keys() == wanted.keys()
    assert all(np.array_equal(got[name], wanted[name]) for name in wanted)
    with pytest.raises(ValueError, match="must be zero, as merge_adapters"):
        jgg.models.named_tensors(with_random_adapters("qwen3_moe"))
    with pytest.raises(TypeError, match=r"model must be a jgg\.models\.Decoder"):
        jgg.models.named_tensors(None)
