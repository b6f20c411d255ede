"""Folders in FP8, as publishers make them: everything but the routed experts is dequantized on loading."""

import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jgg
import jgg.hf
import jgg.models
from jgg.core.quantized import QuantizedArray
from tests.support.fp8_folders import HOW, dense_folder, quantized, with_fp8
from tests.support.hf import fused
from tests.support.models import DATA, logits_of, reference

Q = "model.layers.1.self_attn.q_proj.weight"


def of_groups(**weights):
    """quantization_config of llm-compressor."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


# what publishers write, the rows and columns of a block, the suffix of scales and their dtype
PUBLISHED = {
    "qwen": (HOW | {"modules_to_not_convert": ["lm_head"]}, (128, 128), "_scale_inv", jnp.bfloat16),
    "deepseek": (HOW, (128, 128), "_scale_inv", np.float32),
    "minimax": (HOW | {"fmt": "float8_e4m3fn", "ignored_layers": ["gate"]}, (128, 128), "_scale_inv", np.float32),
    "other blocks": (HOW | {"weight_block_size": [24, 20]}, (24, 20), "_scale_inv", np.float32),
    "llm-compressor": (of_groups(strategy="block", block_structure=[16, 24]), (16, 24), "_scale", jnp.bfloat16),
    "glm": (of_groups(strategy="channel"), (1, 4096), "_scale", np.float32),
}


@pytest.mark.parametrize("publisher", PUBLISHED)
def test_all_matrices_in_fp8_are_dequantized(publisher, tmp_path):
    how, block, suffix, dtype = PUBLISHED[publisher]
    keep = "lm_head" if publisher == "qwen" else "^$"
    source = DATA / "glm4_moe"
    folder = with_fp8(source, tmp_path / "fp8", how=how, block=block, suffix=suffix, dtype=dtype, keep=keep)
    model, stored = jgg.models.load(folder), jgg.hf.Checkpoint(folder)
    got = dict(jgg.models.named_tensors(model))
    assert got.keys() == jgg.hf.Checkpoint(source).keys()
    for name, array in got.items():
        wanted = stored[name].astype(np.float32)
        if name + suffix in stored:
            scales = stored[name + suffix].astype(np.float32)
            scales = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)
            wanted *= scales[: wanted.shape[0], : wanted.shape[1]]
        np.testing.assert_array_equal(array, wanted.astype(array.dtype), err_msg=name)
    assert ("lm_head.weight" + suffix in stored) == (publisher != "qwen")
    jgg.models.save(model, tmp_path / "dense")
    assert jgg.hf.read_config(tmp_path / "dense") == jgg.hf.read_config(source)


def test_experts_with_a_scale_for_each_channel_do_not_stay_as_they_are(tmp_path):
    how, block, suffix, dtype = PUBLISHED["glm"]
    folder = with_fp8(DATA / "glm4_moe", tmp_path / "fp8", how=how, block=block, suffix=suffix, dtype=dtype)
    with pytest.raises(
        ValueError, match=r"w_gate_up .* must have whole blocks .* to stay quantized, got blocks of \[all, 1\]"
    ):
        jgg.models.load(folder, experts="as stored")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """GLM-4.5 with a dense layer, shared experts and a head in FP8, whose scales are in bfloat16."""
    here = tmp_path_factory.mktemp("fp8")
    return with_fp8(dense_folder("glm4_moe", here / "dense"), here / "fp8", dtype=jnp.bfloat16)


@pytest.mark.sweep
def test_experts_alone_stay_as_they_are_stored(folder, tmp_path):
    model, dense = jgg.models.load(folder, experts="as stored"), jgg.models.load(folder)
    flat = {path: variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model))}
    in_fp8 = {path for path, value in flat.items() if isinstance(value, QuantizedArray)}
    assert in_fp8 == {("layers", "moe", "w_gate_up"), ("layers", "moe", "w_down")}
    tokens = reference("glm4_moe")["tokens"]
    np.testing.assert_allclose(logits_of(model, tokens), logits_of(dense, tokens), rtol=0, atol=0.02)
    jgg.models.save(model, tmp_path / "saved")
    new, old = jgg.hf.Checkpoint(tmp_path / "saved"), jgg.hf.Checkpoint(folder)
    for name in (name for name in old if ".experts." in name):
        assert new[name].tobytes() == old[name].tobytes()
    again = jgg.models.load(tmp_path / "saved", experts="as stored")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))


def test_experts_are_quantized_again_by_a_recipe(folder):
    model, dense = (jgg.models.load(folder, experts=experts) for experts in (jgg.Fp8(), "dense"))
    w_down = model.layers.moe.w_down.get_value()
    assert isinstance(w_down, QuantizedArray)
    want = dense.layers.moe.w_down[...].astype(jnp.float32)
    np.testing.assert_allclose(w_down.dequantize(jnp.float32), want, rtol=0, atol=float(jnp.abs(want).max()) / 16)
    np.testing.assert_array_equal(model.layers.attention.w_q[...], dense.layers.attention.w_q[...])


def test_adapters_beside_weights_in_fp8_are_merged(folder):
    targets = ("w_q", "w_dense_down", "w_shared_gate_up")
    model = jgg.models.load(folder, experts="as stored", lora_rank=1, lora_targets=targets)
    model.merge_adapters()
    assert model.layers.moe.w_shared_gate_up.dtype == jnp.bfloat16


@pytest.mark.parametrize("size", [128, 64])
def test_experts_in_fp8_and_the_format_of_transformers_5_are_read(size, tmp_path):
    """With 64 features, rows of gates and ups share a scale, which no folder of single experts can have."""
    source = dense_folder("qwen3_moe", tmp_path / "dense", moe_intermediate_size=size)
    config, tensors = jgg.hf.read_config(source), jgg.hf.Checkpoint(source)
    parts = {}
    for name, array in fused(config, tensors).items():
        parts[name] = array
        if ".experts." in name:
            values, scales = zip(*(quantized(expert, (128, 128)) for expert in array), strict=True)
            parts |= {name: np.stack(values), name + "_scale_inv": np.stack(scales)}
    folder = written(tmp_path / "fused", json.dumps(config | {"quantization_config": HOW}), parts)
    assert jgg.models.load(folder).layers.moe.w_down.shape == (2, 4, size, 128)
    if size == 64:
        with pytest.raises(ValueError, match=r"w_gate_up .* of 2 tensors side by side must have whole blocks"):
            jgg.models.load(folder, experts="as stored")
        return
    jgg.models.save(jgg.models.load(folder, experts="as stored"), tmp_path / "saved")
    new = jgg.hf.Checkpoint(tmp_path / "saved")
    for layer, expert, (row, name) in itertools.product(range(2), range(4), enumerate(("gate", "up"))):
        block = f"model.layers.{layer}.mlp.experts"
        for suffix, own in ((".weight", ""), (".weight_scale_inv", "_scale_inv")):
            want = np.split(parts[f"{block}.gate_up_proj{own}"][expert], 2)[row]
            assert new[f"{block}.{expert}.{name}_proj{suffix}"].tobytes() == want.tobytes()


def written(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(config)
    save_file(tensors, folder / "model.safetensors")
    return folder


def changed(folder, new, drop=(), **tensors):
    """A copy of a folder in FP8 with other tensors."""
    all_tensors = dict(jgg.hf.Checkpoint(folder)) | {name.replace("__", "."): array for name, array in tensors.items()}
    kept = {name: array for name, array in all_tensors.items() if name not in drop}
    return written(new, (folder / "config.json").read_text(), kept)


def test_scales_that_are_missing_or_misshapen_are_named(folder, tmp_path):
    scales, load = f"{Q}_scale_inv", jgg.models.load
    with pytest.raises(ValueError, match=f"{re.escape(scales)} is missing, the scales of {re.escape(Q)} in float8"):
        load(changed(folder, tmp_path / "0", drop=[scales]))
    wrong = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match=rf"{re.escape(scales)} must have shape \[1, 1\], got \[2, 2\]"):
        load(changed(folder, tmp_path / "1", **{scales.replace(".", "__"): wrong}))
    exponents = np.full((1, 1), 127, np.uint8)
    with pytest.raises(ValueError, match=rf"{re.escape(scales)} must have one of the dtypes .*'BF16'\), got U8"):
        load(changed(folder, tmp_path / "4", **{scales.replace(".", "__"): exponents}))
    values = np.ones((8, 8), jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match=rf"{re.escape(Q)} must have shape \[48, 128\], got \[8, 8\]"):
        load(changed(folder, tmp_path / "2", **{Q.replace(".", "__"): values}))
    with pytest.raises(ValueError, match=r"self_attn\.k_scale is not expected in"):
        load(changed(folder, tmp_path / "3", model__layers__0__self_attn__k_scale=np.ones(1, np.float32)))


def test_experts_that_are_quantized_in_some_layers_alone_are_named(tmp_path):
    source = dense_folder("qwen3_moe", tmp_path / "dense")
    folder = with_fp8(source, tmp_path / "fp8", keep="layers.1.mlp.experts")
    with pytest.raises(ValueError, match=r"moe\.w_gate_up of layer 1 must be quantized or unquantized like the first"):
        jgg.models.load(folder, experts="as stored")
    jgg.models.load(folder)
