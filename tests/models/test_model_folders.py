"""Folders that jgg.models writes are those that it read, bit for bit, and wrong ones are named."""

import errno
import json
import re
import shutil
import sys
import tracemalloc
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import save_file

import jgg.hf
import jgg.models
from jgg.models.tensors import expected_shapes
from tests.support.hf import assert_same_tensors, fused
from tests.support.models import DATA, FAMILIES, MORE_FAMILIES, changed, config_of, copied


def assert_same_folder(folder, expected):
    """The same config.json and the same tensors, bit for bit."""
    assert (folder / "config.json").read_bytes() == (expected / "config.json").read_bytes()
    assert_holds_same(folder, expected)


def assert_holds_same(folder, expected):
    assert_same_tensors(jgg.hf.Checkpoint(folder), jgg.hf.Checkpoint(expected))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_written_back_bit_for_bit(family, tmp_path):
    model = jgg.models.load(DATA / family)
    assert model.layers.moe.w_down.dtype == jnp.bfloat16
    jgg.models.save(model, tmp_path / "one")
    assert {path.name for path in (tmp_path / "one").iterdir()} == {"config.json", "model.safetensors"}
    assert_same_folder(tmp_path / "one", DATA / family)
    jgg.models.save(model, tmp_path / "several", max_shard_bytes=20_000)
    assert (tmp_path / "several" / "model.safetensors.index.json").exists()
    assert_same_folder(tmp_path / "several", DATA / family)


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_experts_in_the_format_of_transformers_5_are_read(family, tmp_path):
    config, folder = config_of(family), shutil.copytree(DATA / family, tmp_path / "fused")
    tensors = fused(config, jgg.hf.Checkpoint(DATA / family))
    got = {name: [[*array.shape], zlib.crc32(array.astype(np.float32))] for name, array in tensors.items()}
    assert got == json.loads((DATA / family / "fused.json").read_text())
    save_file(tensors, folder / "model.safetensors")
    assert jgg.hf.Checkpoint(folder).moe_layers(config) == jgg.hf.Checkpoint(DATA / family).moe_layers(config)
    jgg.models.save(jgg.models.load(folder), tmp_path / "saved")
    assert_holds_same(tmp_path / "saved", DATA / family)


def test_what_transformers_ignores_is_ignored(tmp_path):
    rotary = {"model__layers__1__self_attn__rotary_emb__inv_freq": np.ones(4, np.float32)}
    jgg.models.save(jgg.models.load(changed(tmp_path / "rotary", **rotary)), tmp_path / "qwen3")
    assert_holds_same(tmp_path / "qwen3", DATA / "qwen3_moe")


def test_a_tied_head_may_be_stored(tmp_path):
    """As transformers does: the head that is stored counts if it differs, or if it is all there is."""
    embedding = jgg.hf.Checkpoint(DATA / "granitemoe")["model.embed_tokens.weight"]
    both = jgg.models.load(changed(tmp_path / "both", "granitemoe", lm_head__weight=embedding))
    jgg.models.save(both, tmp_path / "one")
    assert_holds_same(tmp_path / "one", DATA / "granitemoe")
    drop = ["model.embed_tokens.weight"]
    head = jgg.models.load(changed(tmp_path / "head", "granitemoe", drop=drop, lm_head__weight=embedding))
    np.testing.assert_array_equal(head.w_embedding[...], embedding)
    other = changed(tmp_path / "other", "granitemoe", lm_head__weight=-embedding)
    model = jgg.models.load(other)
    np.testing.assert_array_equal(model.w_head[...], -embedding.T)
    jgg.models.save(model, tmp_path / "two")
    assert_holds_same(tmp_path / "two", other)


def test_a_single_file_counts_beside_an_index(tmp_path):
    folder = copied("qwen3_moe", tmp_path / "both")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"old": "gone.safetensors"}}))
    jgg.models.save(jgg.models.load(folder), tmp_path / "saved")
    assert_holds_same(tmp_path / "saved", DATA / "qwen3_moe")


def test_an_empty_folder_is_filled(tmp_path, monkeypatch):
    """One that cannot be replaced: a mount point, the working folder, or what a link leads to."""
    model = jgg.models.load(DATA / "qwen3_moe")
    mount, working = tmp_path / "mount", tmp_path / "working"
    for folder in (mount, working):
        folder.mkdir()
    (tmp_path / "link").symlink_to(mount)
    (tmp_path / "dangling").symlink_to(tmp_path / "new" / "folder")
    monkeypatch.chdir(working)
    number = mount.stat().st_ino
    for folder, place in (("../link", mount), (".", working), (tmp_path / "dangling", tmp_path / "new" / "folder")):
        jgg.models.save(model, folder)
        assert_same_folder(place, DATA / "qwen3_moe")
        assert {path.name for path in place.iterdir()} == {"config.json", "model.safetensors"}
    assert mount.stat().st_ino == number and (tmp_path / "link").is_symlink()


def test_an_empty_folder_stays_empty_after_an_error(tmp_path, monkeypatch):
    model = jgg.models.load(DATA / "qwen3_moe")

    def fails(tensors, path, **metadata):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", fails)
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(OSError, match="No space left"):
            jgg.models.save(model, folder)
    assert not any(tmp_path.iterdir())
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(FileExistsError, match="folder must be new or an empty folder"):
        jgg.models.save(model, tmp_path / "loop")


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("is_mount", [False, True])
def test_a_model_goes_next_to_a_folder_that_is_taken_while_it_is_written(is_there, is_mount, tmp_path, monkeypatch):
    """Or into it, where the folder around it is on another file system."""
    model, folder, rename = jgg.models.load(DATA / "qwen3_moe"), tmp_path / "new", Path.rename
    if is_there:
        folder.mkdir()
    (tmp_path / "new-2").touch()

    def taken(*arguments, **options):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("another's")
        save_file(*arguments, **options)

    def cannot_leave(path, target):
        if is_mount and path.parent == folder and target.parent != folder:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(path, target)

    monkeypatch.setattr("safetensors.numpy.save_file", taken)
    monkeypatch.setattr(Path, "rename", cannot_leave)
    place = folder / "new-2" if is_there and is_mount else tmp_path / "new-3"
    with pytest.warns(UserWarning, match=f"new was not empty any longer .* so it is in {place}$") as warned:
        jgg.models.save(model, folder)
    assert warned[0].filename == __file__
    assert_same_folder(place, DATA / "qwen3_moe")
    assert (folder / "config.json").read_text() == "another's"
    assert not any(path.name.startswith(".") for path in (*folder.iterdir(), *tmp_path.iterdir()))


FIRST_TENSORS = """
    model.embed_tokens.weight model.norm.weight lm_head.weight
    input_layernorm.weight post_attention_layernorm.weight self_attn.q_norm.weight self_attn.k_norm.weight
    mlp.gate_proj.weight mlp.up_proj.weight mlp.down_proj.weight
    self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight self_attn.o_proj.weight
    self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias
"""


def test_shards_have_the_tensors_in_the_same_order_in_every_run(tmp_path):
    """The names are spelled out: an order that depends on PYTHONHASHSEED is the same wherever it is computed again."""
    model = jgg.models.load(DATA / "glm4_moe")
    jgg.models.save(model, tmp_path / "several", max_shard_bytes=1)
    files = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())["weight_map"]
    in_order = sorted(files, key=files.__getitem__)
    assert [name.removeprefix("model.layers.0.") for name in in_order[:17]] == FIRST_TENSORS.split()
    assert in_order == [name for name, _ in expected_shapes(model)]


def test_nothing_is_written_over_or_half_written(tmp_path, monkeypatch):
    model = jgg.models.load(DATA / "qwen3_moe")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for path in (tmp_path / "full", tmp_path / "full" / "file"):
        with pytest.raises(FileExistsError, match=f"folder must be new or an empty folder, got {path}"):
            jgg.models.save(model, path)

    def fails(tensors, path, **metadata):
        raise SafetensorError("no space left")

    monkeypatch.setattr("safetensors.numpy.save_file", fails)
    with pytest.raises(OSError, match=r"could not be written: no space left"):
        jgg.models.save(model, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


ROUTER = "model.layers.1.mlp.gate.weight"


def test_parameters_have_the_dtype_that_load_is_asked_for(tmp_path):
    model = jgg.models.load(DATA / "glm4_moe", dtype=jnp.float16, param_dtype=jnp.float32)
    assert model.options.dtype == jnp.float16
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(model))} == {"float32"}
    model = jgg.models.load(DATA / "glm4_moe")
    assert model.layers.moe.w_router.dtype == jnp.bfloat16
    assert model.layers.moe.selection_bias.dtype == jnp.float32
    folder = changed(tmp_path / "wide", "glm4_moe", **{ROUTER.replace(".", "__"): np.ones((4, 32), np.float32)})
    with pytest.raises(ValueError, match="must have the dtype of its first layer, float32, got bfloat16"):
        jgg.models.load(folder)
    jgg.models.save(jgg.models.load(DATA / "glm4_moe", dtype=jnp.float32), tmp_path / "float32")
    assert jgg.hf.read_config(tmp_path / "float32") == config_of("glm4_moe") | {"dtype": "float32"}
    both = copied("glm4_moe", tmp_path / "both", torch_dtype="bfloat16")  # transformers 5 takes "dtype"
    jgg.models.save(jgg.models.load(both, dtype=jnp.float32), tmp_path / "both32")
    saved = jgg.hf.read_config(tmp_path / "both32")
    assert saved == jgg.hf.read_config(both) | {"dtype": "float32", "torch_dtype": "float32"}


def test_progress_is_shown_on_a_terminal_alone(capsys, monkeypatch):
    jgg.models.load(DATA / "glm4_moe")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take any file for a terminal; notebooks set it
    jgg.models.load(DATA / "glm4_moe")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    jgg.models.load(DATA / "glm4_moe", show_progress=False)
    assert capsys.readouterr() == ("", "")
    jgg.models.load(DATA / "glm4_moe")
    out, err = capsys.readouterr()
    assert not out
    assert "Loading layers" in err


def test_a_decoder_needs_rngs():
    with pytest.raises(TypeError, match=r"rngs must be an nnx\.Rngs, got None"):
        jgg.models.Decoder(jgg.models.model_config(config_of("qwen3_moe")), rngs=None)


def test_host_memory_holds_one_parameter_of_a_layer_at_a_time(tmp_path):
    config = config_of("qwen3_moe") | {"num_hidden_layers": 8, "num_local_experts": 16, "moe_intermediate_size": 128}
    model = jgg.models.Decoder(jgg.models.model_config(config), param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    jgg.models.save(model, tmp_path / "large")
    largest = model.layers.moe.w_gate_up[...].nbytes // 8
    jgg.models.load(tmp_path / "large")  # compiles, and imports what is needed
    tracemalloc.start()
    jgg.models.load(tmp_path / "large")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * largest  # all layers have 12 times as much


WRONG_ARGUMENTS = {
    "experts must be 'dense', 'as stored', 'mxfp4' or a jgg.Fp8, got 'fp8'": (ValueError, {"experts": "fp8"}),
    "dtype must be one of float32, float16, bfloat16, got float64": (TypeError, {"dtype": "float64"}),
    "param_dtype must be one of float32, float16, bfloat16, got float8_e4m3fn": (
        TypeError,
        {"param_dtype": jnp.float8_e4m3fn},
    ),
    "lora_param_dtype must be one of float32, float16, bfloat16, got float64": (
        TypeError,
        {"lora_rank": 2, "lora_param_dtype": "float64"},
    ),
    "remat must be one of ": (ValueError, {"remat": "some"}),
    "unroll must be ": (ValueError, {"unroll": 0}),
    "unroll must be 1 with remat='offload', got 2": (ValueError, {"unroll": 2, "remat": "offload"}),
    "lora_rank must be None or a positive int, got 0": (ValueError, {"lora_rank": 0}),
    "lora_targets must be a tuple of some of": (ValueError, {"lora_targets": ("w_gate",)}),
    "rngs must be an nnx.Rngs or None, got": (TypeError, {"rngs": 0}),
    "implementation must be": (ValueError, {"implementation": "cuda"}),
}


@pytest.mark.parametrize("message", WRONG_ARGUMENTS)
def test_wrong_arguments_are_named(message):
    error, options = WRONG_ARGUMENTS[message]
    with pytest.raises(error, match=re.escape(message)):
        jgg.models.load(DATA / "qwen3_moe", **options)
