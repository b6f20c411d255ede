"""Families without files of their own: each computes, learns, generates and is saved as by transformers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg.hf
import jgg.models
from tests.support import digests
from tests.support.hf import assert_same_tensors
from tests.support.marks import thorough_but
from tests.support.models import DATA, MORE_FAMILIES, OWN_PARTS, loaded, logits_of, reference

LENGTHS = np.array([1, 5, 9])
# in CI: the families with parts of their own whose gradients compile fastest, and of the others one with latents, one
# with windows and no positions, and one with a gate of its shared expert; all generate that have parts of their own
LEARNING = "granitemoehybrid", "llama4"
COMPUTING = "glm4_moe_lite", "exaone_moe", "qwen2_moe"


@functools.cache
def model_of(family):
    """The model in float32, whose parameters stay unchanged."""
    return loaded(family)


@functools.cache
def logits_loss_and_gradients(family):
    """What the reference has of its tokens, in one program."""
    tokens = jnp.asarray(reference(family)["tokens"])
    graphdef, params, rest = nnx.split(model_of(family), nnx.Param, ...)

    @jax.jit
    def run(params, rest):
        def loss_of(params):
            logits = nnx.merge(graphdef, params, rest)(tokens)
            log_p = jax.nn.log_softmax(logits[:, :-1])
            return -jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1).mean(), logits

        return jax.value_and_grad(loss_of, has_aux=True)(params)

    (loss, logits), gradients = run(params, rest)
    return logits, loss, gradients


@pytest.mark.thorough
@pytest.mark.parametrize("family", thorough_but(LEARNING, MORE_FAMILIES, pytest.mark.sweep))
def test_logits_loss_and_all_gradients_are_those_of_transformers(family, tmp_path):
    expected = reference(family)
    logits, loss, gradients = logits_loss_and_gradients(family)
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(loss, expected["loss"], rtol=0, atol=1e-4)
    model = nnx.clone(model_of(family))
    nnx.update(model, gradients)
    jgg.models.save(model, tmp_path / "gradients")  # by the names of the folder's tensors
    own = jgg.hf.Checkpoint(DATA / family)  # what has no gradient is as in the model
    named = {
        name: array
        for name, array in jgg.hf.Checkpoint(tmp_path / "gradients").items()
        if not np.array_equal(array, own[name].astype(array.dtype))
    }
    digests.assert_close(named, expected["gradients"])


@pytest.mark.parametrize(
    "family",
    thorough_but(COMPUTING, [family for family in MORE_FAMILIES if family not in OWN_PARTS], pytest.mark.sweep),
)
def test_logits_are_those_of_transformers(family):
    expected = reference(family)
    np.testing.assert_allclose(logits_of(model_of(family), expected["tokens"]), expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", thorough_but(OWN_PARTS, MORE_FAMILIES, pytest.mark.sweep))
def test_tokens_are_generated_with_caches_as_by_transformers(family):
    expected = reference(family)
    got = jgg.models.generate(model_of(family), expected["prompts"], expected["greedy"].shape[1], lengths=LENGTHS)
    np.testing.assert_array_equal(got, expected["greedy"])


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_a_folder_is_written_back_bit_for_bit(family, tmp_path):
    jgg.models.save(jgg.models.load(DATA / family), tmp_path / "saved")
    assert (tmp_path / "saved" / "config.json").read_bytes() == (DATA / family / "config.json").read_bytes()
    assert_same_tensors(jgg.hf.Checkpoint(tmp_path / "saved"), jgg.hf.Checkpoint(DATA / family))
