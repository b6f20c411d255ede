"""The code of docs/models.md runs, and does what the page says."""

import shutil

import jax
import numpy as np
import pytest

import jgg.models
from tests.support.documents import code_of, run_code
from tests.support.models import DATA


@pytest.mark.parametrize("family", ["gpt_oss"])
def test_the_page_loads_trains_saves_and_generates(family, tmp_path, monkeypatch):
    shutil.copytree(DATA / family, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    code = [block for section in ("Load and save", "Train", "Generate") for block in code_of("models.md", section)]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        names = run_code("\n".join(code))
    assert names["losses"][-1] < names["losses"][0]
    assert names["new"].shape == names["drawn"].shape == (2, 16)
    tuned = jgg.models.load(tmp_path / "tuned")
    np.testing.assert_array_equal(jgg.models.generate(tuned, names["prompts"], 16, lengths=[3, 2]), names["new"])


def test_adapters_are_saved_and_loaded_as_the_page_on_fine_tuning_says(tmp_path, monkeypatch):
    shutil.copytree(DATA / "glm4_moe", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    (code,) = code_of("fine-tune.md", "Whole models")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        names = run_code(code)
    assert names["losses"][-1] < names["losses"][0]
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
