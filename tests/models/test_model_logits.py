"""Whole models give the logits that Hugging Face's transformers gives, and learn as it does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg.models
from tests.support.models import FAMILIES, FEW_FAMILIES, loaded, reference


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family):
    expected = reference(family)
    logits = jax.jit(lambda model, tokens: model(tokens))(loaded(family), expected["tokens"])
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FEW_FAMILIES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.thorough)])
def test_16_bits_give_nearly_the_same_logits(family, dtype):
    expected = reference(family)
    model = loaded(family, dtype=dtype)
    logits = jax.jit(lambda model, tokens: model(tokens))(model, expected["tokens"])
    assert logits.dtype == jnp.float32
    error, size = (np.linalg.norm(array) for array in (logits - expected["logits"], expected["logits"]))
    assert error < 0.2 * size  # a token may go to another expert


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_gives_the_logits_of_transformers(family):
    expected = reference(family)
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(lambda model, tokens: model(tokens))(loaded(family), expected["tokens"])
        new = jgg.models.generate(loaded(family), expected["prompts"], 6, lengths=[1, 5, 9])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-3)
    np.testing.assert_array_equal(new, expected["greedy"])


@pytest.mark.parametrize("family", FEW_FAMILIES)
@pytest.mark.parametrize("length", [1, 4, 9])
def test_logits_of_the_first_tokens_need_no_more(family, length):
    expected = reference(family)
    logits = jax.jit(lambda model, tokens: model(tokens))(loaded(family), expected["tokens"][:, :length])
    np.testing.assert_allclose(logits, expected["logits"][:, :length], rtol=0, atol=1e-4)
