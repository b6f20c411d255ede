"""Experts that stay in their quantized storage format, or that are quantized on loading."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg
import jgg.hf
import jgg.models
import jgg.nnx
from tests.models.test_model_folders import assert_holds_same
from tests.models.test_model_training import loss_and_gradients
from tests.support.closeness import largest_error
from tests.support.models import DATA, config_of, loaded, logits_of, reference, with_mxfp4

TOKENS = np.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory):
    """A folder of gpt-oss with random experts in MXFP4, of one layer."""
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    return with_mxfp4(tmp_path_factory.mktemp("mxfp4") / "model", **one_layer)


@pytest.mark.thorough
def test_experts_in_mxfp4_stay_so_or_become_dense(mxfp4, tmp_path):
    quantized = jgg.models.load(mxfp4, dtype=jnp.float32, experts="as stored")
    assert isinstance(quantized.layers.moe.w_down, jgg.nnx.Frozen)
    w_down = quantized.layers.moe.w_down.get_value()
    assert w_down.values.dtype == w_down.scales.dtype == jnp.uint8 and w_down.values.size == w_down.scales.size * 16
    assert w_down.shape == quantized.layers.moe.w_down.shape == (1, 4, 32, 32)
    dense = jgg.models.load(mxfp4, dtype=jnp.float32)
    new = jgg.models.generate(quantized, TOKENS, 3)
    whole = np.concatenate([TOKENS, new], axis=1)
    expected = logits_of(dense, whole)
    np.testing.assert_allclose(logits_of(quantized, whole), expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(new, np.argmax(expected, axis=-1)[:, 5:8])
    jgg.models.save(jgg.models.load(mxfp4, experts="as stored"), tmp_path / "quantized")
    assert_holds_same(tmp_path / "quantized", mxfp4)
    jgg.models.save(dense, tmp_path / "dense")
    assert "quantization_config" not in jgg.hf.read_config(tmp_path / "dense")
    np.testing.assert_array_equal(logits_of(jgg.models.load(tmp_path / "dense", dtype=jnp.float32), whole), expected)


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.sweep)])
def test_experts_in_fp8_are_saved_as_they_are(family, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    config = config_of(family)
    config |= {key: size for key, size in sizes.items() if key in config}
    new = jgg.models.Decoder(jgg.models.model_config(config), param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    jgg.models.save(new, tmp_path / "dense")
    model = jgg.models.load(tmp_path / "dense", experts=jgg.Fp8())
    jgg.models.save(model, tmp_path / "fp8")
    how = jgg.hf.read_config(tmp_path / "fp8")["quantization_config"]
    assert how["weight_block_size"] == [128, 128]
    assert {"lm_head", "model.layers.1.self_attn.q_proj"} <= set(how["modules_to_not_convert"])
    assert not [name for name in how["modules_to_not_convert"] if ".experts." in name]
    tensors = jgg.hf.Checkpoint(tmp_path / "fp8")
    scales = [name for name in tensors if name.endswith("_scale_inv")]
    assert scales and all(".experts." in name for name in scales)
    read = jgg.models.load(tmp_path / "fp8", experts="as stored")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(read), nnx.state(model))
    jgg.models.save(read, tmp_path / "again")
    assert_holds_same(tmp_path / "again", tmp_path / "fp8")
    dense = jgg.models.load(tmp_path / "fp8")
    w = model.layers.moe.w_down.get_value()
    np.testing.assert_array_equal(dense.layers.moe.w_down[...], jax.vmap(lambda w: w.dequantize(jnp.bfloat16))(w))


@pytest.mark.sweep
def test_gradients_beside_quantized_experts_are_those_beside_dense_ones(mxfp4):
    quantized = jgg.models.load(mxfp4, dtype=jnp.float32, experts="as stored", remat="names", lora_rank=2)
    dense = jgg.models.load(mxfp4, dtype=jnp.float32, lora_rank=2)
    (loss, got), (expected_loss, expected) = (
        loss_and_gradients(model, TOKENS, nnx.LoRAParam) for model in (quantized, dense)
    )
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), got, expected)


def test_experts_may_be_quantized_as_they_are_loaded(tmp_path):
    model, expected = loaded("qwen3_moe", experts=jgg.Fp8()), reference("qwen3_moe")
    assert model.layers.moe.w_gate_up.get_value().values.shape == (2, 4, 32, 16)
    assert model.layers.moe.quantization == jgg.Fp8()
    logits = logits_of(model, expected["tokens"])
    error, size = (np.linalg.norm(array) for array in (logits - expected["logits"], expected["logits"]))
    assert 0 < error < 0.2 * size
    assert not any("w_down" in path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)))
    with pytest.raises(ValueError, match=r"w_gate_up \[4, 32, 16\] of 2 tensors side by side must have whole blocks"):
        jgg.models.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@jax.jit
def features_of(model, ids, caches=None):
    """What follows the layers for tokens [1, S]."""
    return model.run_layers(ids, jnp.arange(ids.shape[1], dtype=jnp.int32)[None], caches)[0]


# 32 rows of an expert, and more
@pytest.mark.sweep
@pytest.mark.parametrize(("tokens", "reads_as_stored"), [(64, True), (65, False)])
def test_prompts_of_few_tokens_read_experts_in_fp8_as_they_are(tokens, reads_as_stored):
    model = loaded("qwen3_moe", experts=jgg.Fp8())
    ids = jnp.arange(tokens, dtype=jnp.int32)[None] % 64
    prompt, whole = features_of(model, ids, model.empty_caches(1, tokens)), features_of(model, ids)
    model.layers.moe.quantization = None
    as_stored = features_of(model, ids)
    assert largest_error(as_stored, whole) > 1e-3
    assert largest_error(prompt, as_stored if reads_as_stored else whole) < 1e-5


@pytest.mark.sweep
@pytest.mark.parametrize("is_loaded", [True, False])
def test_with_batch_invariant_few_rows_multiply_by_the_recipe_too(is_loaded):
    """Whether experts are stored in FP8 or quantized where they multiply; `generate` makes their FP8 form once."""
    model = loaded("qwen3_moe", experts=jgg.Fp8() if is_loaded else "dense", batch_invariant=True)
    model.layers.moe.quantization = jgg.Fp8()
    ids, weights = jnp.arange(6, dtype=jnp.int32)[None], model.layers.moe.w_gate_up
    whole, few = features_of(model, ids), features_of(model, ids, model.empty_caches(1, 6))
    assert largest_error(few, whole) < 1e-5
    tokens = jgg.models.generate(model, ids, 2)
    assert model.layers.moe.w_gate_up is weights  # the model of the call had the other form
    model.put_forms()
    forms = model.layers.moe.w_gate_up.get_value()
    assert forms.straight is None and forms.transposed.shape == (2, 4, 16, 32)
    assert largest_error(features_of(model, ids, model.empty_caches(1, 6)), few) < 1e-5
    assert tokens[0, 0] == jnp.argmax(model.logits(few[:, -1]))


@pytest.mark.parametrize("remat", ["none", pytest.param("all", marks=pytest.mark.sweep)])
def test_with_batch_invariant_experts_loaded_in_fp8_are_kept_in_one_form_that_adapters_train_with(remat):
    tokens, named = reference("qwen3_moe")["tokens"], {"experts": jgg.Fp8(), "lora_rank": 2, "remat": remat}
    model, usual = (loaded("qwen3_moe", batch_invariant=is_on, **named) for is_on in (True, False))
    in_fp8 = [array for array in jax.tree.leaves(nnx.state(model)) if array.dtype == jnp.float8_e4m3fn]
    assert sorted(array.shape for array in in_fp8) == [(2, 4, 16, 32), (2, 4, 32, 8)]
    got, want = (loss_and_gradients(each, tokens, nnx.LoRAParam) for each in (model, usual))
    limit = 1e-2 if jax.default_backend() == "gpu" else 1e-6  # where other kernels round in another order
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(one, other, rtol=limit, atol=limit)
    weights = (each.layers.moe.w_down.get_value() for each in (model, usual))
    jax.tree.map(np.testing.assert_array_equal, next(weights).array, next(weights))


def test_a_folder_without_quantization_has_none_to_keep():
    model = jgg.models.load(DATA / "mixtral", experts="as stored")
    assert isinstance(model.layers.moe.w_down, nnx.Param)


@pytest.mark.sweep
def test_adapters_beside_fp8_experts_in_periods_of_layers_have_the_gradients_of_every_remat():
    """JAX cannot keep FP8 weights that a layer takes out of those of a period: they would become infinite."""
    tokens = reference("gemma4_text")["tokens"]
    models = (loaded("gemma4_text", experts=jgg.Fp8(), lora_rank=2, remat=remat) for remat in ("none", "names"))
    none, names = (loss_and_gradients(model, tokens, nnx.LoRAParam) for model in models)
    assert np.isfinite(none[0])
    for got, want in zip(*map(jax.tree.leaves, (none, names)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
