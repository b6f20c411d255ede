"""Checkpoints of Hugging Face: against the outputs and gradients of its own blocks (data/hf), and bit for bit."""

import json
from pathlib import Path

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
from jgg.activations import clamped_swiglu
from jgg.hf_families import FAMILIES, SELECTION_BIAS
from jgg.hf_quantized import quantization

DATA = Path(__file__).parents[1] / "data" / "hf"
EVERY_FAMILY = pytest.mark.parametrize("name", FAMILIES)


def load(name):
    """config, weights, and the rest of the reference data of a family."""
    config = json.loads((DATA / f"{name}.json").read_text())
    with np.load(DATA / f"{name}.npz") as file:
        arrays = dict(file)
    groups = {
        group: {key.removeprefix(f"{group}/"): array for key, array in arrays.items() if key.startswith(f"{group}/")}
        for group in ("weights", "grads")
    }
    return config, groups["weights"], groups["grads"], {key: arrays[key] for key in ("x", "dy", "y", "dx")}


def close(got, want, what):
    error = np.max(np.abs(np.asarray(got) - want)) / max(np.max(np.abs(want)), 1e-30)  # zeros of an expert unchosen
    assert error <= 1e-4, f"{what}: {error:.1e}"


@EVERY_FAMILY
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

        y, vjp = jax.vjp(apply, params, x)
        return y, *vjp(dy)

    y, d_params, dx = run(params, data["x"], data["dy"])
    close(y, data["y"], "y")
    close(dx, data["dx"], "dx")
    zeros = {} if selection_bias is None else {SELECTION_BIAS: np.zeros_like(selection_bias)}
    own = jgg.hf.to_hf(config, d_params | zeros, 0)
    assert gradients.keys() <= own.keys()
    assert own.keys() - gradients.keys() == {key for key in own if key.endswith("e_score_correction_bias")}
    for key, want in gradients.items():
        close(own[key], want, key)


@pytest.mark.thorough
@EVERY_FAMILY
def test_flax_layers_take_the_parameters(name):
    config, weights, _, data = load(name)
    params = jgg.hf.from_hf(config, weights, 0)
    options = vars(jgg.hf.moe_layer(config))
    layer = jgg.nnx.MoE(**options, precision="highest", rngs=nnx.Rngs(0))
    jgg.nnx.load_params(layer, params)
    close(layer(jnp.asarray(data["x"])), data["y"], "nnx")

    module = jgg.linen.MoE(
        precision="highest", **{key: value for key, value in options.items() if key != "in_features"}
    )
    variables = {"params": {key: value for key, value in params.items() if key != SELECTION_BIAS}}
    if SELECTION_BIAS in params:
        variables["router"] = {SELECTION_BIAS: params[SELECTION_BIAS]}
    close(module.apply(variables, jnp.asarray(data["x"])), data["y"], "linen")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@EVERY_FAMILY
def test_there_and_back_bit_for_bit(name, dtype):
    config, weights, _, _ = load(name)
    weights = {key: array.astype(dtype) for key, array in weights.items()}
    params = jgg.hf.from_hf(config, weights, 0)
    sizes = jgg.hf.moe_layer(config)
    assert {key: array.shape for key, array in params.items() if key != SELECTION_BIAS} == sizes.shapes
    back = jgg.hf.to_hf(config, params, 0)
    assert back.keys() == weights.keys()
    for key, array in weights.items():
        assert (back[key].dtype, back[key].shape) == (array.dtype, array.shape), key
        assert back[key].tobytes() == array.tobytes(), key


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


def test_null_in_a_config_is_a_key_that_is_not_there():
    config, *_ = load("deepseek_v3")
    layer = jgg.hf.moe_layer(config)
    assert jgg.hf.moe_layer(config | {"text_config": None, "hidden_act": None}) == layer
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}}
    nested = {"model_type": "deepseek_v3", "quantization_config": None, "text_config": config | fp8}
    assert jgg.hf.moe_layer(nested) == layer
    how = quantization(nested)
    assert how is not None and how.block == (64, 128)
    assert quantization(config | {"quantization_config": None, "text_config": None}) is None


def test_errors_of_configs():
    config, _, _, _ = load("qwen3_moe")
    with pytest.raises(ValueError, match=r"model_type must be one of .*'mixtral'.*got 'bert'"):
        jgg.hf.moe_layer(config | {"model_type": "bert"})
    with pytest.raises(ValueError, match="'qwen3_moe' must have 'moe_intermediate_size', got none"):
        jgg.hf.moe_layer(config | {"moe_intermediate_size": None})
    with pytest.raises(ValueError, match="config of model_type 'qwen3_moe' must have 'num_experts', got none"):
        jgg.hf.moe_layer({key: value for key, value in config.items() if key != "num_experts"})
    with pytest.raises(ValueError, match=r"hidden_act must be one of .*got 'tanh'"):
        jgg.hf.moe_layer(config | {"hidden_act": "tanh"})


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
    x = rng.standard_normal((20, 160)).astype(ml_dtypes.bfloat16)
    bias = params.pop(SELECTION_BIAS)
    kept, _ = layer.apply(params, x, bias)
    read = jgg.hf.from_hf(config, tensors, 0)
    y, _ = layer.apply({key: read[key] for key in params}, x, bias)
    np.testing.assert_array_equal(kept, y)


def check_there_and_back(config, params, tensors):
    """What was kept is stored as it was, and dequantizes to what would have been read."""
    back = jgg.hf.to_hf(config, params, 0)
    assert back.keys() == tensors.keys()
    for key, array in tensors.items():
        assert (back[key].dtype, back[key].shape) == (array.dtype, array.shape), key
        assert back[key].tobytes() == array.tobytes(), key
    for key, array in jgg.hf.from_hf(config, tensors, 0).items():
        if isinstance(params[key], jgg.QuantizedArray):
            assert params[key].values.dtype == ml_dtypes.float8_e4m3fn
            dense = jgg.QuantizedArray(*map(jnp.asarray, (params[key].values, params[key].scales))).dequantize()
            np.testing.assert_array_equal(dense, array)


def test_mxfp4_checkpoints():
    """As transformers 5.23 reads the same bytes: its `convert_moe_packed_tensors` made the weights of data/hf/mxfp4."""
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
    for other in {"quant_method": "awq"}, {"quant_method": "fp8"}, fp8 | {"weight_block_size": [128]}:
        with pytest.raises(ValueError, match=r"weight_block_size of rows and columns, or 'mxfp4', got \{'quant_"):
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
