"""Tensors that a model does not have, such as layers that predict further tokens, are kept on saving."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jgg.hf
import jgg.models
from tests.support.fp8_folders import HOW, dense_folder, with_fp8
from tests.support.hf import assert_same_tensors
from tests.support.models import DATA, changed

RNG = np.random.default_rng(0)
FURTHER = {
    "model.layers.3.eh_proj.weight": RNG.normal(size=(32, 64)).astype(jnp.bfloat16),
    "model.layers.3.mlp.experts.0.up_proj.weight": RNG.normal(size=(8, 32)).astype(jnp.bfloat16),
    "model.layers.46.enorm.weight": RNG.normal(size=(32,)).astype(np.float32),  # of a published folder
    "model.layers.3.scales": np.full((2, 1), 0.25, jnp.float8_e8m0fnu),
    "model.layers.3.counts": np.arange(3),
}


def with_further(folder, tensors=FURTHER):
    """A folder of GLM-4.5 with tensors that its model does not have."""
    return changed(folder, "glm4_moe", **{name.replace(".", "__"): array for name, array in tensors.items()})


def saved(model, folder, **options):
    jgg.models.save(model, folder, **options)
    return jgg.hf.Checkpoint(folder)


def test_layers_that_predict_further_tokens_are_kept(tmp_path):
    folder = with_further(tmp_path / "more")
    model = jgg.models.load(folder)
    assert_same_tensors(dict(jgg.models.named_tensors(model)), jgg.hf.Checkpoint(DATA / "glm4_moe"))
    graphdef, state = nnx.split(model)
    for number, each in enumerate((model, nnx.clone(model), nnx.merge(graphdef, state))):
        assert_same_tensors(saved(each, tmp_path / str(number)), jgg.hf.Checkpoint(folder))
    several = saved(model, tmp_path / "several", max_shard_bytes=20_000)
    assert (tmp_path / "several" / "model.safetensors.index.json").exists()
    assert_same_tensors(several, jgg.hf.Checkpoint(folder))
    again = saved(jgg.models.load(tmp_path / "several", dtype=jnp.float32), tmp_path / "float32")
    assert_same_tensors({name: again[name] for name in FURTHER}, FURTHER)


def test_shared_experts_without_features_are_kept(tmp_path):
    shapes = {"down_proj": (32, 0), "gate_proj": (0, 32), "up_proj": (0, 32)}
    empty = {
        f"model.layers.{number}.mlp.shared_experts.{name}.weight": np.zeros(shape, jnp.bfloat16)
        for number in (1, 2)
        for name, shape in shapes.items()
    }
    folder = with_further(tmp_path / "empty", empty)
    config = json.loads((folder / "config.json").read_text()) | {"n_shared_experts": 0}
    (folder / "config.json").write_text(json.dumps(config))
    model = jgg.models.load(folder)
    assert not hasattr(model.layers.moe, "shared_w_down")
    assert_same_tensors(saved(model, tmp_path / "saved"), jgg.hf.Checkpoint(folder))


def test_a_folder_may_be_named_from_where_the_process_was(tmp_path, monkeypatch):
    with_further(tmp_path / "more")
    (tmp_path / "latest").symlink_to("more")
    monkeypatch.chdir(tmp_path)
    model = jgg.models.load("latest")
    (tmp_path / "latest").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert_same_tensors(saved(model, "saved"), jgg.hf.Checkpoint(tmp_path / "more"))


def test_models_of_two_folders_keep_their_own_in_a_compiled_function(tmp_path):
    """A compiled function gives a model the config of the one that it was traced with, if theirs are equal."""
    other = {name: FURTHER[name][::-1] for name in FURTHER}
    folders = with_further(tmp_path / "one"), with_further(tmp_path / "two", other)

    @nnx.jit
    def update(model):
        model.norm[...] += 0

    for folder in folders:
        model = jgg.models.load(folder)
        update(model)
        assert_same_tensors(saved(model, tmp_path / f"saved-{folder.name}"), jgg.hf.Checkpoint(folder))
    plain = jgg.models.load(DATA / "glm4_moe")
    assert plain.config == jgg.models.load(shutil.copytree(DATA / "glm4_moe", tmp_path / "same")).config


def test_what_follows_from_other_tensors_is_not_kept(tmp_path):
    tensors = {"model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    model = jgg.models.load(with_further(tmp_path / "rotary", tensors))
    assert model.config.left_out is None


@pytest.mark.parametrize("change", ["gone", "others", "damaged"])
def test_a_warning_says_what_a_folder_no_longer_has(change, tmp_path):
    folder = with_further(tmp_path / "more")
    model, file = jgg.models.load(folder), folder / "model.safetensors"
    if change == "gone":
        shutil.rmtree(folder)
    elif change == "others":
        shutil.copy(DATA / "glm4_moe" / "model.safetensors", file)
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"writes no copies of 5 tensors .* such as model\.layers\.\d+\.") as caught:
        jgg.models.save(model, tmp_path / "saved")
    assert caught[0].filename == __file__
    assert_same_tensors(jgg.hf.Checkpoint(tmp_path / "saved"), jgg.hf.Checkpoint(DATA / "glm4_moe"))


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """GLM-4.5 in FP8, as is one layer that predicts further tokens, but for a projection."""
    here = tmp_path_factory.mktemp("fp8")
    dense = dense_folder("glm4_moe", here / "dense", num_nextn_predict_layers=1)
    own = dict(jgg.hf.Checkpoint(dense))
    further = {
        name.replace("layers.2.", "layers.3."): array
        for name, array in own.items()
        if name.startswith("model.layers.2")
    }
    further["model.layers.3.eh_proj.weight"] = RNG.normal(size=(128, 256)).astype(jnp.bfloat16)
    save_file(own | further, dense / "model.safetensors")
    return with_fp8(dense, here / "fp8", keep="eh_proj")


def test_what_is_in_fp8_is_kept_beside_experts_in_fp8(fp8, tmp_path):
    new, old = saved(jgg.models.load(fp8, experts="as stored"), tmp_path / "saved"), jgg.hf.Checkpoint(fp8)
    how = jgg.hf.read_config(tmp_path / "saved")["quantization_config"]
    for name in old:
        if name.startswith("model.layers.3.") or ".experts." in name:
            assert_same_tensors({name: new[name]}, {name: old[name]})
    matrices = {name for name, array in new.items() if array.ndim == 2 and not name.endswith("_scale_inv")}
    dense = {name.removesuffix(".weight") for name in matrices if name + "_scale_inv" not in new}
    assert dense == set(how["modules_to_not_convert"])
    assert "model.layers.3.eh_proj" in dense and "model.layers.3.self_attn.q_proj" not in dense
    assert how.keys() == HOW.keys() - {"fmt"} | {"modules_to_not_convert"}


def test_what_is_in_fp8_is_dense_beside_dense_experts(fp8, tmp_path):
    new = saved(jgg.models.load(fp8, dtype=jnp.float32), tmp_path / "saved")
    old = jgg.hf.Checkpoint(fp8)
    assert "quantization_config" not in jgg.hf.read_config(tmp_path / "saved")
    assert not [name for name in new if name.endswith("_scale_inv")]
    assert new.keys() == {name for name in old if not name.endswith("_scale_inv")}
    for name in (name for name in new if name.startswith("model.layers.3.")):
        wanted = old[name].astype(np.float32)
        if name + "_scale_inv" in old:
            wanted = (wanted * old[name + "_scale_inv"]).astype(jnp.bfloat16)
            assert new[name].dtype == jnp.float32
        np.testing.assert_array_equal(new[name], wanted)
