"""Makes implicit promotion of dtypes and ranks an error in every test, and names hypothesis's profiles."""

import generated
import jax
import jax.numpy as jnp
import pytest

from jgg.implementations import ahead, triton

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
generated.register_profiles()


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No thread compiles what a test has traced: it would launch kernels beside those that the test counts."""
    monkeypatch.setattr(ahead, "_is_to_compile", {})
    monkeypatch.setattr(ahead, "_num_threads", lambda: 0)


@pytest.fixture
def launched(monkeypatch):
    """(name, Launch) of each kernel that would be launched; none is compiled."""
    launches = []

    def call(compute_capability, name, launch):
        launches.append((name, launch))
        return {key: jnp.zeros(result.shape, result.dtype) for key, result in launch.result_types.items()}

    monkeypatch.setattr(triton, "call", call)
    return launches


@pytest.fixture
def optax_promotion():
    """Optax mixes dtypes in its own arithmetic."""
    with jax.numpy_dtype_promotion("standard"):
        yield
