"""The code of docs/integrations.md, docs/fine-tune.md and docs/migrate.md runs, and computes what they say."""

import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jgg.hf
import jgg.nnx
from tests.support.documents import code_of, run_code
from tests.support.hf import DATA, load
from tests.support.peft import DATA as ADAPTERS
from tests.support.peft import load_weights


@pytest.fixture(autouse=True)
def promotion():
    """Documents are of programs that do not forbid it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def assert_trains(gradients):
    leaves = jax.tree.leaves(gradients)
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert all(np.any(np.asarray(leaf)) for leaf in leaves)


@pytest.mark.thorough
def test_equinox():
    pytest.importorskip("equinox", reason="equinox is not installed; it is in the extra test")
    (code,) = code_of("integrations.md", "Equinox")
    names = run_code(code)
    assert_trains(names["gradients"])
    y, balance = names["moe"](names["x"])
    want, metrics = names["moe"].layer.apply(names["moe"].params, names["x"])
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(balance, metrics.load_balancing_loss)


@pytest.mark.thorough
def test_hugging_face(tmp_path, monkeypatch):
    _, weights, *_ = load("deepseek_v3")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((DATA / "deepseek_v3.json").read_bytes())
    others = {"model.embed_tokens.weight": np.ones((4, 4), np.float32)}
    save_file(weights | others, folder / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    in_nnx, in_linen = code_of("integrations.md", "Hugging Face")
    names = run_code(in_nnx + in_linen)
    tensors = names["tensors"]
    assert tensors.keys() == weights.keys() | others.keys()
    for name, value in (weights | others).items():
        np.testing.assert_array_equal(tensors[name], value)
    assert (tmp_path / "trained.safetensors").exists()

    (stored,) = (array for name, array in weights.items() if name.endswith("correction_bias"))
    np.testing.assert_array_equal(names["bias"]["selection_bias"], stored)
    (layer,) = names["layers"].values()
    np.testing.assert_array_equal(names["y"], layer(names["x"]))


def test_peft(tmp_path, monkeypatch):
    config, base, merged = load_weights("mixtral")
    for folder in ("model", "adapter"):
        shutil.copytree(ADAPTERS / "mixtral", tmp_path / folder)
    save_file(base, tmp_path / "model" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    _, code = code_of("integrations.md", "PEFT")  # the first makes an adapter
    names = run_code(code)
    want = jgg.hf.from_hf(config, merged, 0)
    assert names["params"].keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_allclose(names["params"][name], array, rtol=1e-6, atol=2e-6, err_msg=name)
    tensors = "adapter_model.safetensors"
    assert load_file(tmp_path / "saved" / tensors).keys() == load_file(tmp_path / "adapter" / tensors).keys()


@pytest.mark.thorough
def test_fine_tune(tmp_path, monkeypatch):
    """A step changes the adapters alone; what is saved, loaded and merged is what was trained."""
    config, base, _ = load_weights("qwen3_moe")
    (tmp_path / "model").mkdir()
    shutil.copy(ADAPTERS / "qwen3_moe" / "config.json", tmp_path / "model")
    save_file(base, tmp_path / "model" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    blocks = code_of("fine-tune.md", "Your own layers") + code_of("fine-tune.md", "Save, resume, merge")
    (train, save, load), (quantize,) = blocks, code_of("fine-tune.md", "Quantized experts")
    names = run_code(train + save)
    trained = [layer.adapters() for layer in names["layers"]]
    assert all(np.any(term.b) for terms in trained for term in terms.values())
    for index, layer in enumerate(names["layers"]):
        for name, array in jgg.hf.from_hf(config, base, index).items():
            np.testing.assert_array_equal(getattr(layer, name)[...], array.astype("bfloat16"))
        jax.tree.map(np.testing.assert_array_equal, names["adapter"].layers[index], trained[index])
        layer.w_down_lora_b[...] += 1
    exec(load, names)
    jax.tree.map(np.testing.assert_array_equal, [layer.adapters() for layer in names["layers"]], trained)
    for index, terms in enumerate(trained):
        layer, before = names["layers"][index], jgg.hf.from_hf(config, base, index)
        layer.merge_adapters()
        params = {name: getattr(layer, name)[...] for name in layer.layer.shapes}
        after = jgg.hf.from_hf(config, base | jgg.hf.to_hf(config, params, index), index)
        for name, term in terms.items():
            np.testing.assert_array_equal(after[name], term.merge(before[name].astype("bfloat16"), "ekn"))
    exec(quantize, names)
    names["step"](names["layers"], names["optimizer"], names["x"], names["x"])
    assert np.any(names["layer"].w_down_lora_b[...])


# how many comparisons of `before` and `after` a section of migrate.md has
COMPARISONS = {
    "Setup": 0,
    "jax.lax.ragged_dot": 2,
    "tokamax": 0,
    "MegaBlox": 1,
    "TransformerEngine": 1,
    "Unsloth": 1,
    "megablocks": 1,
}


@pytest.mark.thorough
def test_migrate():
    """The blocks in order, as one program: each `after` is what `before` was."""
    names, compared = {}, {}
    for section in COMPARISONS:
        compared[section] = 0
        for code in code_of("migrate.md", section):
            after = names.get("after")
            exec(compile(code, section, "exec"), names)
            if names.get("after") is not after:
                np.testing.assert_allclose(names["after"], names["before"], rtol=2e-4, atol=2e-4, err_msg=section)
                compared[section] += 1
    assert compared == COMPARISONS
