"""Whole models give the logits that Hugging Face's transformers gives, and learn as it does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.models import FAMILIES, loaded, reference


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family):
    expected = reference(family)
    logits = jax.jit(lambda model, tokens: model(tokens))(loaded(family), expected["tokens"])
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 4, 9])
def test_logits_of_the_first_tokens_need_no_more(family, length):
    expected = reference(family)
    logits = jax.jit(lambda model, tokens: model(tokens))(loaded(family), expected["tokens"][:, :length])
    np.testing.assert_allclose(logits, expected["logits"][:, :length], rtol=0, atol=1e-4)
