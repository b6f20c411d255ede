"""Hugging Face checkpoints in FP8 and MXFP4: read in bfloat16, kept quantized, written bit for bit or refused."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jgg.hf
import jgg.nnx
from jgg.hf.tensors import SELECTION_BIAS
from tests.support.closeness import assert_close
from tests.support.hf import DATA, assert_same_tensors, load


def in_fp8(weights, block):
    """Weights of experts with a scale for each block, as DeepSeek-V3's, and what they stand for."""
    quantized, exact = {}, {}
    for key, w in weights.items():
        if w.ndim < 2 or ".gate." in key:
            quantized[key] = exact[key] = w
            continue
        rows, columns = (range(0, size, step) for size, step in zip(w.shape, block, strict=True))
        values, scales = np.empty(w.shape, ml_dtypes.float8_e4m3fn), np.empty((len(rows), len(columns)), np.float32)
        exact[key] = np.empty(w.shape, ml_dtypes.bfloat16)
        for i, j in np.ndindex(scales.shape):
            own = np.s_[rows[i] : rows[i] + block[0], columns[j] : columns[j] + block[1]]
            scales[i, j] = np.max(np.abs(w[own])) / 448
            values[own] = w[own] / scales[i, j]
            exact[key][own] = values[own].astype(np.float32) * scales[i, j]
        quantized |= {key: values, key + "_scale_inv": scales}
    return quantized, exact


@pytest.mark.parametrize("block", [(128, 128), (16, 20)])
@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_k2"])
def test_fp8_checkpoints_are_read_in_bfloat16(name, block, tmp_path):
    config, weights, _, _ = load(name)
    quantized, exact = in_fp8(weights, block)
    save_file(quantized, tmp_path / "model.safetensors")
    config |= {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}}
    checkpoint = jgg.hf.Checkpoint(tmp_path)
    assert checkpoint.moe_layers(config) == [0]
    params = jgg.hf.from_hf(config, checkpoint, 0)
    original = jgg.hf.from_hf(config, weights, 0)
    assert params["w_gate_up"].dtype == params["w_shared_down"].dtype == ml_dtypes.bfloat16
    assert params["w_router"].dtype == np.float32
    back = jgg.hf.to_hf(config, params, 0)
    assert back.keys() == exact.keys()
    for key, array in exact.items():
        np.testing.assert_array_equal(back[key], array)
    for key, array in original.items():
        np.testing.assert_allclose(params[key].astype(np.float32), array, rtol=0.07, atol=2e-3 * np.abs(array).max())


def test_fp8_stays_as_it_is_there_and_back():
    config, _, _, _ = load("deepseek_v3")
    config |= {"hidden_size": 160, "moe_intermediate_size": 128, "n_shared_experts": 2, "n_routed_experts": 4}
    config |= {"n_group": 2, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    layer, rng = jgg.hf.moe_layer(config), np.random.default_rng(0)
    shapes = layer.shapes | {SELECTION_BIAS: (4,)}
    weights = {key: rng.standard_normal(shape, np.float32) / 16 for key, shape in shapes.items()}
    tensors, _ = in_fp8(jgg.hf.to_hf(config, weights, 0), (128, 128))
    params = jgg.hf.from_hf(config, tensors, 0, keep_quantized=True)
    quantized = {key for key, param in params.items() if isinstance(param, jgg.QuantizedArray)}
    assert quantized == {key for key in layer.shapes if key != "w_router"}
    check_there_and_back(config, params, tensors)
    in_flax = jgg.nnx.MoE(**vars(layer), rngs=nnx.Rngs(0))
    jgg.nnx.load_params(in_flax, params)
    check_there_and_back(config, nnx.to_pure_dict(nnx.state(in_flax)), tensors)
    x = rng.standard_normal((20, 160)).astype(ml_dtypes.bfloat16)
    bias = params.pop(SELECTION_BIAS)
    kept, _ = layer.apply(params, x, bias)
    read = jgg.hf.from_hf(config, tensors, 0)
    y, _ = layer.apply({key: read[key] for key in params}, x, bias)
    np.testing.assert_array_equal(kept, y)
    assert_close(in_flax(x), y, 1e-2)


def check_there_and_back(config, params, tensors):
    """What was kept is stored as it was, and dequantizes to what would have been read."""
    assert_same_tensors(jgg.hf.to_hf(config, params, 0), tensors)
    for key, array in jgg.hf.from_hf(config, tensors, 0).items():
        if isinstance(params[key], jgg.QuantizedArray):
            is_packed = config["quantization_config"]["quant_method"] == "mxfp4"
            assert params[key].is_packed == is_packed and params[key].shape == array.shape
            assert params[key].values.dtype == (np.uint8 if is_packed else ml_dtypes.float8_e4m3fn)
            assert not is_packed or params[key].values.nbytes == array.size // 2
            dense = jgg.QuantizedArray(*map(jnp.asarray, (params[key].values, params[key].scales))).dequantize()
            np.testing.assert_array_equal(dense, array)


def test_mxfp4_checkpoints():
    """jgg reads the bytes as transformers 5.23 does: its `convert_moe_packed_tensors` made the weights in mxfp4.npz."""
    with np.load(DATA / "mxfp4.npz") as file:
        arrays = dict(file)
    experts, hidden, features = arrays["w_down"].shape
    config, weights, _, _ = load("gpt_oss")
    config |= {"hidden_size": features, "intermediate_size": hidden, "num_local_experts": experts}
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    block = "model.layers.0.mlp."
    tensors = {
        block + "router.weight": np.ones((experts, features), np.float32),
        block + "router.bias": np.ones(experts, np.float32),
        block + "experts.gate_up_proj_bias": np.ones((experts, 2 * hidden), np.float32),
        block + "experts.down_proj_bias": np.ones((experts, features), np.float32),
    }
    assert tensors.keys() < weights.keys()
    for name in ("gate_up", "down"):
        tensors |= {f"{block}experts.{name}_proj_{of}": arrays[f"{name}_{of}"] for of in ("blocks", "scales")}
    params = jgg.hf.from_hf(config, tensors, 0)
    assert {key: array.shape for key, array in params.items()} == jgg.hf.moe_layer(config).shapes
    for key in ("w_gate_up", "w_down"):
        assert params[key].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(params[key].astype(np.float32), arrays[key])
    params = jgg.hf.from_hf(config, tensors, 0, keep_quantized=True)
    assert params["w_down"].scales.shape == (experts, hidden // 32, features)
    check_there_and_back(config, params, tensors)


def test_errors_of_quantized_checkpoints():
    config, weights, _, _ = load("deepseek_v3")
    quantized, _ = in_fp8(weights, (128, 128))
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(ValueError, match="scale_inv is not expected in the MoE block"):
        jgg.hf.from_hf(config, quantized, 0)
    for message, other in {
        r"weights in FP8, or 'mxfp4' .*, got \{'quant_method': 'awq'": {"quant_method": "awq"},
        r"must be two positive ints, got None\. .* one scale for each tensor are not read": {"quant_method": "fp8"},
        r"activation_scheme of quantization_config must be 'dynamic', got 'static'": fp8
        | {"activation_scheme": "static"},
        r"strategy: 'channel', or 'block' with a block_structure .*\. Got None": {"quant_method": "compressed-tensors"},
        r"with experts='mxfp4'\)\. Got \{'group_0': \{'weights': \{'type': 'int'": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"type": "int"}}},
        },
    }.items():
        with pytest.raises(ValueError, match=message):
            jgg.hf.from_hf(config | {"quantization_config": other}, quantized, 0)
    key = "model.layers.0.mlp.experts.3.up_proj.weight"
    wrong = quantized | {f"{key}_scale_inv": np.ones((2, 1), np.float32)}
    with pytest.raises(ValueError, match=rf"The scales of {key} must have shape \[1, 1\], got \[2, 1\]"):
        jgg.hf.from_hf(config | {"quantization_config": fp8}, wrong, 0)
    first, last = "model.layers.0.mlp.experts.0.gate_proj.weight", "model.layers.0.mlp.experts.7.down_proj.weight"
    for without in {first}, {key}, {first, last}, {name for name in quantized if name.endswith("weight")}:
        gone = {f"{name}_scale_inv" for name in without}
        left = {name: array for name, array in quantized.items() if name not in gone}
        with pytest.raises(ValueError, match=r"weight_scale_inv is missing, the scales of .* in float8_e4m3fn"):
            jgg.hf.from_hf(config | {"quantization_config": fp8}, left, 0)
    fp8 = {"quantization_config": fp8}
    with pytest.raises(ValueError, match=r"w_gate_up \[8, 32, 48\] of 2 tensors .* got blocks of \[128, 128\]"):
        jgg.hf.from_hf(config | fp8, quantized, 0, keep_quantized=True)
    kept = jgg.hf.from_hf(config, weights, 0)
    kept["w_down"] = jgg.quantize_weights(kept["w_down"])
    with pytest.raises(ValueError, match="w_down must be no QuantizedArray if config has no quantization_config"):
        jgg.hf.to_hf(config, kept, 0)
    kept["w_down"] = jgg.QuantizedArray(kept["w_down"].values, np.ones((8, 1, 2), np.float32))
    with pytest.raises(ValueError, match=r"scales of w_down must have shape \[8, 1, 1\], got \[8, 1, 2\]"):
        jgg.hf.to_hf(config | fp8, kept, 0)


def small_gpt_oss():
    """A config in MXFP4, and parameters with experts of ones that are quantized."""
    config, _, _, _ = load("gpt_oss")
    config |= {"hidden_size": 32, "intermediate_size": 32, "num_local_experts": 2, "num_experts_per_tok": 1}
    config["quantization_config"] = {"quant_method": "mxfp4"}
    params = {key: np.ones(shape, np.float32) for key, shape in jgg.hf.moe_layer(config).shapes.items()}
    for key in ("w_gate_up", "w_down"):
        experts, rows, columns = params[key].shape
        values = params[key].astype(ml_dtypes.float8_e4m3fn)
        params[key] = jgg.QuantizedArray(values, np.ones((experts, rows // 32, columns), np.float32))
    return config, params


def with_one(array, value):
    changed = np.array(array)
    changed[1, 0, 3] = value
    return changed


def test_mxfp4_takes_each_number_and_scale_that_it_holds():
    config, params = small_gpt_oss()
    held = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(ml_dtypes.float8_e4m3fn)
    values = np.tile(np.repeat(held, 2)[:, None], (2, 1, 32))
    scales = np.tile(np.float32([2.0**-127, 2.0**127, 1, np.nan]), (2, 1, 8))
    written = jgg.hf.to_hf(config, params | {"w_down": jgg.QuantizedArray(values, scales)}, 0)
    read = jgg.hf.from_hf(config, written, 0, keep_quantized=True)["w_down"]
    assert read.values.dtype == read.scales.dtype == np.uint8
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(read.dequantize(jnp.float32), values.astype(np.float32) * scales)
    np.testing.assert_array_equal(read.scales[0, 0, :4], [0, 254, 127, 255])
    assert_same_tensors(jgg.hf.to_hf(config, params | {"w_down": read}, 0), written)


@pytest.mark.parametrize("value", [448.0, 5.0, 0.25, 2.0**-9, -8.0, np.nan])
def test_values_that_mxfp4_cannot_hold_are_refused(value):
    config, params = small_gpt_oss()
    values = with_one(params["w_down"].values, value)
    with pytest.raises(ValueError, match=rf"values of w_down must be .* MXFP4 .*got {value:g}"):
        jgg.hf.to_hf(config, params | {"w_down": jgg.QuantizedArray(values, params["w_down"].scales)}, 0)


@pytest.mark.parametrize("scale", [0.0, 0.99, 3.0, -2.0, np.inf, 2.0**-128])
def test_scales_that_mxfp4_cannot_hold_are_refused(scale):
    config, params = small_gpt_oss()
    scales = with_one(params["w_gate_up"].scales, scale)
    with pytest.raises(ValueError, match=rf"scales of w_gate_up must be powers of 2 .*MXFP4.*got {scale:g}"):
        jgg.hf.to_hf(config, params | {"w_gate_up": jgg.QuantizedArray(params["w_gate_up"].values, scales)}, 0)


def test_a_rest_of_a_block_is_refused_by_mxfp4():
    config, _ = small_gpt_oss()
    config |= {"hidden_size": 48}
    shapes = jgg.hf.moe_layer(config).shapes
    dense = {key: np.ones(shape, np.float32) for key, shape in shapes.items()}
    values = np.ones(shapes["w_gate_up"], ml_dtypes.float8_e4m3fn)
    quantized = jgg.QuantizedArray(values, np.ones((2, 2, 64), np.float32))
    with pytest.raises(ValueError, match="values of w_gate_up must have a multiple of 32 rows in MXFP4, got 48"):
        jgg.hf.to_hf(config, dense | {"w_gate_up": quantized}, 0)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_values_in_another_fp8_than_checkpoints_are_refused(name):
    config, params = small_gpt_oss()
    if name == "deepseek_v3":
        config, weights, _, _ = load(name)
        params = jgg.hf.from_hf(config, weights, 0)
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        params["w_down"] = jgg.quantize_weights(params["w_down"])
        jgg.hf.to_hf(config, params, 0)
    values = np.asarray(params["w_down"].values).astype(ml_dtypes.float8_e5m2)
    with pytest.raises(ValueError, match="values of w_down must be float8_e4m3fn, got float8_e5m2"):
        jgg.hf.to_hf(config, params | {"w_down": jgg.QuantizedArray(values, params["w_down"].scales)}, 0)


def test_tensors_that_are_not_of_their_format_are_named():
    config, params = small_gpt_oss()
    tensors = jgg.hf.to_hf(config, params, 0)
    for suffix, wanted in (("blocks", r"uint8 \[\.\.\., groups, 16\]"), ("scales", "uint8")):
        name = f"model.layers.0.mlp.experts.down_proj_{suffix}"
        wrong = tensors | {name: tensors[name].astype(np.float32)}
        for keep in (False, True):
            with pytest.raises(ValueError, match=f"{name} must be {wanted} in MXFP4, got float32"):
                jgg.hf.from_hf(config, wrong, 0, keep_quantized=keep)
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    with pytest.raises(ValueError, match=rf"{name} must be uint8 .* got uint8 \[2, 32, 2, 8\]"):
        jgg.hf.from_hf(config, tensors | {name: tensors[name].reshape(2, 32, 2, 8)}, 0)
    config, weights, _, _ = load("deepseek_v3")
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors, _ = in_fp8(weights, (128, 128))
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    with pytest.raises(ValueError, match=f"{name} must be float8_e4m3fn, got int8"):
        jgg.hf.from_hf(config, tensors | {name: tensors[name].view(np.int8)}, 0)
