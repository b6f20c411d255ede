"""Whole models give the logits that Hugging Face's transformers gives, and learn as it does."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg.models
from tests.support.models import FAMILIES, FEW_FAMILIES, MORE_FAMILIES, loaded, logits_of, reference


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family):
    expected = reference(family)
    logits = logits_of(loaded(family), expected["tokens"])
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FEW_FAMILIES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.sweep)])
def test_16_bits_give_nearly_the_same_logits(family, dtype):
    expected = reference(family)
    model = loaded(family, dtype=dtype)
    logits = logits_of(model, expected["tokens"])
    assert logits.dtype == jnp.float32
    error, size = (np.linalg.norm(array) for array in (logits - expected["logits"], expected["logits"]))
    assert error < 0.2 * size  # a token may go to another expert


def test_ids_that_the_vocabulary_lacks_are_refused_or_give_nan_in_a_traced_program():
    expected, model = reference("qwen3_moe"), loaded("qwen3_moe")
    for unknown in (64, -1, -100, 2**31 - 1):
        tokens = jnp.asarray(expected["tokens"], jnp.int32).at[1, 4].set(unknown)
        message = f"tokens must be ids from 0 to 63, the last of the model's vocabulary, got {unknown} at [1, 4]."
        with pytest.raises(ValueError, match=re.escape(message)):
            model(tokens)
        logits = logits_of(model, tokens)
        np.testing.assert_allclose(logits[0], expected["logits"][0], rtol=0, atol=1e-4)
        assert np.isnan(logits[1]).all()


@pytest.mark.parametrize("shape", [(0, 13), pytest.param((2, 0), marks=pytest.mark.sweep)])
def test_no_tokens_give_no_logits(shape):
    model, tokens = loaded("gpt_oss"), np.zeros(shape, int)
    assert jax.eval_shape(lambda: model(tokens, segments=tokens)).shape == (*shape, 64)
    graphdef, state = nnx.split(model)
    sum_of = jax.jit(jax.grad(lambda state: nnx.merge(graphdef, state).losses(tokens, tokens).sum()))
    assert not any(np.any(gradient) for gradient in jax.tree.leaves(sum_of(state)))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES + MORE_FAMILIES)
def test_a_gpu_gives_the_logits_of_transformers(family):
    expected = reference(family)
    with jax.default_matmul_precision("highest"):
        logits = logits_of(loaded(family), expected["tokens"])
        new = jgg.models.generate(loaded(family), expected["prompts"], 6, lengths=[1, 5, 9])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-3)
    np.testing.assert_array_equal(new, expected["greedy"])


@pytest.mark.parametrize("family", FEW_FAMILIES)
@pytest.mark.parametrize("length", [1, pytest.param(4, marks=pytest.mark.sweep), 9])
def test_logits_of_the_first_tokens_need_no_more(family, length):
    expected = reference(family)
    logits = logits_of(loaded(family), expected["tokens"][:, :length])
    np.testing.assert_allclose(logits, expected["logits"][:, :length], rtol=0, atol=1e-4)


def test_a_program_is_exported_for_any_number_of_sequences_and_tokens():
    expected = reference("qwen3_moe")
    graphdef, state = nnx.split(loaded("qwen3_moe"))

    @jax.jit
    def logits(state, tokens, segments):
        return nnx.merge(graphdef, state)(tokens, segments=segments)

    tokens = jax.ShapeDtypeStruct(jax.export.symbolic_shape("batch, length"), jnp.int32)
    exported = jax.export.export(logits)(state, tokens, tokens)
    tokens = jnp.asarray(expected["tokens"], jnp.int32)
    got = exported.call(state, tokens, jnp.ones_like(tokens))
    np.testing.assert_allclose(got, expected["logits"], rtol=0, atol=1e-4)
