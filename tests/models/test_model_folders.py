"""Folders that jgg.models writes are those that it read, bit for bit, and wrong ones are named."""

import json
import re
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import save_file

import jgg.hf
import jgg.models
from tests.support.models import DATA, FAMILIES, config_of, copied


def assert_same_folder(folder, expected):
    """The same config.json and the same tensors, bit for bit."""
    assert (folder / "config.json").read_bytes() == (expected / "config.json").read_bytes()
    assert_same_tensors(folder, expected)


def assert_same_tensors(folder, expected):
    got, wanted = jgg.hf.Checkpoint(folder), jgg.hf.Checkpoint(expected)
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert got[name].dtype == wanted[name].dtype, name
        np.testing.assert_array_equal(got[name].view(np.uint8), wanted[name].view(np.uint8), name)


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


def changed(folder, family="qwen3_moe", drop=(), **tensors):
    """A copy of a family's folder with other tensors; "." in a name is written "__"."""
    copied(family, folder)
    arrays = dict(jgg.hf.Checkpoint(folder)) | {name.replace("__", "."): array for name, array in tensors.items()}
    save_file({name: array for name, array in arrays.items() if name not in drop}, folder / "model.safetensors")
    return folder


ROUTER = "model.layers.1.mlp.gate.weight"


def test_a_tensor_that_is_missing_surplus_or_misshapen_is_named(tmp_path):
    cases = {
        rf"{ROUTER} is missing in .*/0, a qwen3_moe model": {"drop": [ROUTER]},
        r"model\.layers\.1\.self_attn\.q_proj\.bias is not expected in .*/1, a qwen3_moe": {
            "model__layers__1__self_attn__q_proj__bias": np.zeros(48, np.float32)
        },
        r"model\.norm\.weight of .*/2/model\.safetensors must have shape \[32\], got \[33\]": {
            "model__norm__weight": np.zeros(33, np.float32)
        },
        rf"{ROUTER} of .*/3/model\.safetensors must have shape \[4, 32\], got \[32, 4\]": {
            ROUTER.replace(".", "__"): np.zeros((32, 4), np.float32)
        },
    }
    for number, (message, changes) in enumerate(cases.items()):
        with pytest.raises(ValueError, match=message):
            jgg.models.load(changed(tmp_path / str(number), **changes))


def test_a_file_that_is_damaged_missing_or_outside_is_named(tmp_path):
    damaged = copied("qwen3_moe", tmp_path / "damaged") / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"damaged/model\.safetensors must be a whole safetensors file"):
        jgg.models.load(damaged.parent)
    missing = copied("qwen3_moe", tmp_path / "missing")
    (missing / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"missing must have model\.safetensors or"):
        jgg.models.load(missing)
    for file, kind, message in (
        ("model-2.safetensors", FileNotFoundError, r"/model-2\.safetensors must be a file of the checkpoint, got none"),
        ("../damaged/model.safetensors", ValueError, r"must name a file inside its folder for 'model\.norm\.weight'"),
    ):
        (missing / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
        with pytest.raises(kind, match=message):
            jgg.models.load(missing)
    with pytest.raises(FileNotFoundError, match=r"got Qwen/Qwen3-30B-A3B\. huggingface_hub\.snapshot_download"):
        jgg.models.load("Qwen/Qwen3-30B-A3B")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    further = {"model__layers__3__eh_proj__weight": np.zeros((2, 2), np.float32)}
    model = jgg.models.load(changed(tmp_path / "more", "glm4_moe", **further))
    jgg.models.save(model, tmp_path / "saved")
    assert_same_tensors(tmp_path / "saved", DATA / "glm4_moe")


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


def test_progress_is_shown_on_a_terminal_alone(capsys, monkeypatch):
    jgg.models.load(DATA / "glm4_moe")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take any file for a terminal
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
    "experts must be 'dense', 'as stored' or a jgg.Fp8, got 'fp8'": (ValueError, {"experts": "fp8"}),
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
