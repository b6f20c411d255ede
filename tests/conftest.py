"""Makes implicit promotion of dtypes and ranks an error in every test."""

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def optax_promotion():
    """Optax mixes dtypes in its own arithmetic."""
    with jax.numpy_dtype_promotion("standard"):
        yield
