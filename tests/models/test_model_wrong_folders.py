"""Folders that jgg.models.load does not take are named, before anything is read."""

import functools
import json
import os
import re

import jax.numpy as jnp
import numpy as np
import pytest

import jgg.hf
import jgg.models
from tests.support.models import DATA, changed, copied, loaded

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
    with pytest.raises(FileNotFoundError, match=r"got Qwen3-30B-A3B\. jgg\.hf\.download"):
        jgg.models.load("Qwen3-30B-A3B")


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, np.complex64, jnp.float8_e4m3fn])
def test_weights_of_another_kind_are_named(dtype, tmp_path):
    name = "model.layers.1.self_attn.q_proj.weight"
    weights = jgg.hf.Checkpoint(DATA / "qwen3_moe")[name].astype(np.float32).astype(dtype)
    folder = changed(tmp_path / "wrong", **{name.replace(".", "__"): weights})
    with pytest.raises(ValueError, match=rf"{name} of .*/model\.safetensors must have one of the dtypes .*, got"):
        jgg.models.load(folder)


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_what_is_no_file_is_named_and_not_read(kind, tmp_path):
    make = {"folder": lambda path: path.mkdir(), "pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero")}
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json", "model-1.safetensors"):
        folder = copied("qwen3_moe", tmp_path / name)
        if name in ("model.safetensors.index.json", "model-1.safetensors"):
            (folder / "model.safetensors").unlink()
            weight_map = {"weight_map": {"model.norm.weight": "model-1.safetensors"}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(weight_map))
        (folder / name).unlink(missing_ok=True)
        make[kind](folder / name)
        with pytest.raises(ValueError, match=rf"/{name} must be a regular file, got a (folder|pipe or a device)\."):
            jgg.models.load(folder)


def test_errors_of_config_json_name_the_file(tmp_path):
    for number, (message, changes) in enumerate(
        {
            "rms_norm_eps must be 0 or more": {"rms_norm_eps": -1},
            "vocab_size must be a positive int": {"vocab_size": "64"},
            "quantization_config must have quant_method 'fp8'": {"quantization_config": {"quant_method": "awq"}},
        }.items()
    ):
        folder = copied("qwen3_moe", tmp_path / str(number), **changes)
        with pytest.raises((TypeError, ValueError), match=f"{folder}/config.json: {message}"):
            jgg.models.load(folder)


def test_huge_counts_are_refused_at_once(tmp_path):
    for number, (key, value, message) in enumerate(
        [
            ("num_hidden_layers", 10_000, r"model\.layers\.2\.input_layernorm\.weight is missing"),
            ("num_local_experts", 65_536, r"model\.layers\.0\.mlp\.experts\.4\.gate_proj\.weight is missing"),
            ("num_local_experts", 10**9, r"/config\.json: num_local_experts must be at most 65536, got 1000000000"),
            ("vocab_size", 2**31 - 1, r"model\.embed_tokens\.weight of .* must have shape \[2147483647, 32\]"),
            (
                "moe_intermediate_size",
                2**31 - 1,
                r"experts\.0\.gate_proj\.weight of .* must have shape \[2147483647, 32\]",
            ),
            ("num_attention_heads", 2**31 - 2, r"self_attn\.q_proj\.weight of .* must have shape \[25769803752, 32\]"),
            ("num_hidden_layers", 10**30, r"/config\.json: num_hidden_layers must be at most 10000"),
        ]
    ):
        folder = copied("qwen3_moe", tmp_path / str(number), **{key: value})
        with pytest.raises(ValueError, match=message):
            jgg.models.load(folder)


def test_what_is_no_path_is_named():
    model = loaded("qwen3_moe", lora_rank=1)
    uses = {
        "load": jgg.models.load,
        "load_adapter": functools.partial(jgg.models.load_adapter, model),
        "save": functools.partial(jgg.models.save, model),
        "save_adapter": functools.partial(jgg.models.save_adapter, model),
    }
    for use in uses.values():
        with pytest.raises(TypeError, match=re.escape("folder must be a str or a Path, got b'here'")):
            use(b"here")
        with pytest.raises(ValueError, match="folder must be a path that the file system can have, got"):
            use("a\0b")
    for read in (jgg.hf.Checkpoint, jgg.hf.read_config):
        with pytest.raises(TypeError, match="path must be a str or a Path, got None"):
            read(None)
