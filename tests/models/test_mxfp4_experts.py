"""`load(experts="mxfp4")`: any family's experts in 4 bits, quantized as they are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg
import jgg.hf
import jgg.models
from jgg.core.quantized import QuantizedArray
from tests.support.fp8_folders import dense_folder
from tests.support.models import DATA, FAMILIES, fill_adapters, logits_of, with_mxfp4


@pytest.fixture(scope="module", params=["qwen3_moe", *(pytest.param(f, marks=pytest.mark.sweep) for f in FAMILIES[1:])])
def folder(request, tmp_path_factory):
    """A family's folder with experts of 128 features."""
    return dense_folder(request.param, tmp_path_factory.mktemp("models") / request.param)


def tokens_of(model):
    return jnp.asarray(np.random.default_rng(0).integers(0, model.config.vocabulary, (2, 12)), jnp.int32)


def test_experts_are_those_of_quantize_mxfp4_and_are_saved_as_what_they_stand_for(folder, tmp_path):
    model, dense = (jgg.models.load(folder, dtype=jnp.float32, experts=experts) for experts in ("mxfp4", "dense"))
    for of_model, of_dense in zip(nnx.iter_modules(model), nnx.iter_modules(dense), strict=True):
        for name in ("w_gate_up", "w_down"):
            if not hasattr(of_model[1], name):
                continue
            got, want = getattr(of_model[1], name).get_value(), getattr(of_dense[1], name).get_value()
            assert isinstance(got, QuantizedArray) and got.is_packed and got.shape == want.shape
            assert 4.2 < 8 * sum(part.nbytes for part in (got.values, got.scales)) / want.size < 4.3
            jax.tree.map(np.testing.assert_array_equal, got, jax.vmap(jgg.quantize_mxfp4)(want))
            getattr(of_dense[1], name).set_value(jax.vmap(lambda own: own.dequantize(jnp.float32))(got))
    tokens = tokens_of(model)
    np.testing.assert_allclose(logits_of(model, tokens), logits_of(dense, tokens), rtol=0, atol=2e-5)
    jgg.models.save(model, tmp_path / "saved")
    assert jgg.hf.read_config(tmp_path / "saved") == jgg.hf.read_config(folder) | {"dtype": "float32"}
    again = jgg.models.load(tmp_path / "saved", dtype=jnp.float32, experts="mxfp4")
    np.testing.assert_array_equal(logits_of(again, tokens), logits_of(model, tokens))


def test_adapters_learn_beside_them(folder):
    model = fill_adapters(jgg.models.load(folder, dtype=jnp.float32, experts="mxfp4", lora_rank=2))
    graphdef, own, rest = nnx.split(model, nnx.LoRAParam, ...)
    tokens = tokens_of(model)
    gradients = jax.jit(jax.grad(lambda own: nnx.merge(graphdef, own, rest).loss(tokens[:, :-1], tokens[:, 1:])))(own)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(gradients))


def test_experts_in_mxfp4_stay_as_they_are(tmp_path):
    folder = with_mxfp4(tmp_path / "gpt_oss")
    model, stored = (jgg.models.load(folder, dtype=jnp.float32, experts=experts) for experts in ("mxfp4", "as stored"))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(stored))  # negative zeros too
    jgg.models.save(model, tmp_path / "saved")
    assert jgg.hf.read_config(tmp_path / "saved")["quantization_config"]["quant_method"] == "mxfp4"


def test_a_merge_that_is_refused_changes_nothing(tmp_path):
    """Not even in the dense layers, which come first."""
    folder = dense_folder("glm4_moe", tmp_path / "folder")
    model = fill_adapters(jgg.models.load(folder, dtype=jnp.float32, experts="mxfp4", lora_rank=2))
    before = jax.tree.map(np.asarray, nnx.state(model))
    with pytest.raises(TypeError, match="w_gate_up must be a float array, to be merged into, got QuantizedArray"):
        model.merge_adapters()
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)


def test_sizes_without_whole_groups_are_refused():
    with pytest.raises(ValueError, match=r"experts='mxfp4' needs a multiple of 32 rows of w_down, got 8"):
        jgg.models.load(DATA / "qwen3_moe", experts="mxfp4")
