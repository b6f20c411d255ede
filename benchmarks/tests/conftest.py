"""Tests of the benchmarks alone, run by `make test-benchmarks`; they compile as quickly as those of tests/ do."""

import jax
import pytest

from jgg.tuning import ways
from jgg.tuning.timing import Timing
from tests.support import workers

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
workers.compile_quickly()
workers.share_programs()


@pytest.fixture
def no_timing(monkeypatch):
    """A call takes 2 ms, whatever it computes, so that only results are measured."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(ways, "measure", lambda function, arrays, *_, **__: Timing(2e-3, jax.jit(function)(arrays)))
