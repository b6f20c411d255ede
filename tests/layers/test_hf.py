"""Checkpoints of Hugging Face: against the outputs and gradients of its own blocks (data/hf), and bit for bit."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jgg.hf
import jgg.linen
import jgg.nnx
from jgg.core.activations import clamped_swiglu
from jgg.hf.families import FAMILIES
from jgg.hf.quantized import quantization
from jgg.hf.tensors import SELECTION_BIAS
from tests.support.closeness import assert_close
from tests.support.hf import BLOCKS, assert_same_tensors, fused, load
from tests.support.marks import thorough_but
from tests.support.passes import forward_and_backward

EVERY_FAMILY = pytest.mark.parametrize("name", BLOCKS)
# what these compute, a family that is tested at every change does too: Qwen3-Next, or DeepSeek-V3
ALIKE = {"qwen3_moe", "kimi_k2", "glm4_moe"}


@pytest.mark.parametrize("name", thorough_but({*BLOCKS} - ALIKE, BLOCKS, pytest.mark.sweep))
def test_outputs_and_gradients_are_those_of_the_original(name):
    config, weights, gradients, data = load(name)
    params = jgg.hf.from_hf(config, weights, 0)
    selection_bias = params.pop(SELECTION_BIAS, None)
    layer = jgg.hf.moe_layer(config)

    @jax.jit
    def run(params, x, dy):
        def apply(params, x):
            bias = None if selection_bias is None else jnp.asarray(selection_bias)
            return layer.apply(params, x, bias, precision="highest")[0]

        return forward_and_backward(apply)(dy, params, x)

    y, d_params, dx = run(params, data["x"], data["dy"])
    assert_close(y, data["y"], 1e-4, name="y")
    assert_close(dx, data["dx"], 1e-4, name="dx")
    zeros = {} if selection_bias is None else {SELECTION_BIAS: np.zeros_like(selection_bias)}
    own = jgg.hf.to_hf(config, d_params | zeros, 0)
    assert gradients.keys() <= own.keys()
    assert own.keys() - gradients.keys() == {key for key in own if key.endswith("e_score_correction_bias")}
    for key, want in gradients.items():
        assert_close(own[key], want, 1e-4, name=key)


@EVERY_FAMILY
def test_experts_in_the_format_of_transformers_5_are_the_same(name):
    config, weights, _, _ = load(name)
    others = fused(config, weights)
    assert (others.keys() == weights.keys()) == (not FAMILIES[name].fused)
    wanted, got = (jgg.hf.from_hf(config, tensors, 0) for tensors in (weights, others))
    assert_same_tensors(got, wanted)


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, np.complex64, jnp.float8_e4m3fn])
def test_weights_are_floats(dtype):
    config, weights, _, _ = load("mixtral")
    key = "model.layers.0.block_sparse_moe.gate.weight"
    with pytest.raises(ValueError, match=rf"{key} must be of floats of 16, 32 or 64 bits, got {np.dtype(dtype)}"):
        jgg.hf.from_hf(config, weights | {key: weights[key].astype(dtype)}, 0)


@pytest.mark.parametrize("name", thorough_but(("mixtral", "deepseek_v3"), BLOCKS, pytest.mark.sweep))
def test_flax_layers_take_the_parameters(name):
    config, weights, _, data = load(name)
    params = jgg.hf.from_hf(config, weights, 0)
    options = vars(jgg.hf.moe_layer(config))
    layer = jgg.nnx.MoE(**options, precision="highest", rngs=nnx.Rngs(0))
    jgg.nnx.load_params(layer, params)
    assert_close(layer(jnp.asarray(data["x"])), data["y"], 1e-4, name="nnx")

    module = jgg.linen.MoE(
        precision="highest", **{key: value for key, value in options.items() if key != "in_features"}
    )
    variables = {"params": {key: value for key, value in params.items() if key != SELECTION_BIAS}}
    if SELECTION_BIAS in params:
        variables["router"] = {SELECTION_BIAS: params[SELECTION_BIAS]}
    assert_close(module.apply(variables, jnp.asarray(data["x"])), data["y"], 1e-4, name="linen")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@EVERY_FAMILY
def test_there_and_back_bit_for_bit(name, dtype):
    config, weights, _, _ = load(name)
    weights = {key: array.astype(dtype) for key, array in weights.items()}
    params = jgg.hf.from_hf(config, weights, 0)
    sizes = jgg.hf.moe_layer(config)
    assert {key: array.shape for key, array in params.items() if key != SELECTION_BIAS} == sizes.shapes
    assert_same_tensors(jgg.hf.to_hf(config, params, 0), weights)


def rename(weights, layer):
    return {key.replace("layers.0.", f"layers.{layer}."): array + layer for key, array in weights.items()}


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "llama4", "gpt_oss"])
def test_checkpoint_reads_one_layer_at_a_time(name, is_sharded, tmp_path, monkeypatch):
    config, weights, _, _ = load(name)
    layers = {layer: rename(weights, layer) for layer in (1, 3, 12)}
    everything = {key: array for layer in layers.values() for key, array in layer.items()} | {"lm_head": np.ones(3)}
    files = {"model.safetensors": everything}
    if is_sharded:
        names = sorted(everything)
        files = {f"model-{shard}.safetensors": {key: everything[key] for key in names[shard::2]} for shard in (0, 1)}
        index = {key: file for file, part in files.items() for key in part}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for file, part in files.items():
        save_file(part, tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert jgg.hf.read_config(tmp_path) == config == jgg.hf.read_config(tmp_path / "config.json")
    checkpoint = jgg.hf.Checkpoint(tmp_path)
    assert checkpoint.moe_layers(config) == [1, 3, 12]
    assert len(checkpoint) == len(everything)
    read = []
    one = jgg.hf.Checkpoint.__getitem__
    monkeypatch.setattr(jgg.hf.Checkpoint, "__getitem__", lambda self, key: read.append(key) or one(self, key))
    params = jgg.hf.from_hf(config, checkpoint, 3)
    assert sorted(read) == sorted(layers[3])
    for key, array in jgg.hf.to_hf(config, params, 3).items():
        np.testing.assert_array_equal(array, layers[3][key])


def test_errors_name_the_tensor():
    config, weights, _, _ = load("mixtral")
    key = "model.layers.0.block_sparse_moe.experts.2.w3.weight"
    without = {name: array for name, array in weights.items() if name != key}
    with pytest.raises(ValueError, match=f"{key} is missing in the MoE block"):
        jgg.hf.from_hf(config, without, 0)
    extra = key.replace("w3.weight", "w3.weight_scale_inv")
    with pytest.raises(ValueError, match=f"{extra} is not expected in the MoE block"):
        jgg.hf.from_hf(config, weights | {extra: np.ones(1)}, 0)
    with pytest.raises(ValueError, match=rf"{key} must have shape \[24, 32\], got \[24, 31\]"):
        jgg.hf.from_hf(config, weights | {key: weights[key][:, 1:]}, 0)
    with pytest.raises(ValueError, match=f"{key} must have the dtype of .*w1.weight, float32, got float16"):
        jgg.hf.from_hf(config, weights | {key: weights[key].astype(np.float16)}, 0)
    with pytest.raises(ValueError, match=r"model\.layers\.1\..* is missing"):
        jgg.hf.from_hf(config, weights, 1)
    jgg.hf.from_hf(config, weights | {"model.layers.1.block_sparse_moe.gate.weight": np.ones(1)}, 0)


def test_errors_name_the_parameter():
    config, weights, _, _ = load("deepseek_v3")
    params = jgg.hf.from_hf(config, weights, 0)
    with pytest.raises(ValueError, match="selection_bias is missing"):
        jgg.hf.to_hf(config, {key: array for key, array in params.items() if key != SELECTION_BIAS}, 0)
    with pytest.raises(ValueError, match="b_router is not expected"):
        jgg.hf.to_hf(config, params | {"b_router": np.ones(8)}, 0)
    with pytest.raises(ValueError, match=r"w_router must have shape \[32, 8\], got \[8, 32\]"):
        jgg.hf.to_hf(config, params | {"w_router": params["w_router"].T}, 0)


def test_configs_that_transformers_5_writes():
    config, _, _, _ = load("qwen3_moe")
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in config.items()}
    assert jgg.hf.moe_layer(renamed) == jgg.hf.moe_layer(config)
    config, _, _, _ = load("gpt_oss")
    assert jgg.hf.moe_layer(config | {"swiglu_alpha": 1.5}).activation == clamped_swiglu(1.5, 1.5)


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_k2", "glm4_moe"])
def test_configs_without_shared_experts(name):
    config, *_ = load(name)
    layer = jgg.hf.moe_layer(config | {"n_shared_experts": None})
    assert layer == jgg.hf.moe_layer(config | {"n_shared_experts": 0})
    assert layer.shared_features == 0


def test_null_in_a_config_is_no_text_config_and_no_quantization():
    config, *_ = load("deepseek_v3")
    layer = jgg.hf.moe_layer(config)
    assert jgg.hf.moe_layer(config | {"text_config": None}) == layer
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}}
    nested = {"model_type": "deepseek_v3", "quantization_config": None, "text_config": config | fp8}
    assert jgg.hf.moe_layer(nested) == layer
    how = quantization(nested)
    assert how is not None and how.block == (64, 128)
    assert quantization(config | {"quantization_config": None, "text_config": None}) is None
