"""Attention of one token to cached latents, against NumPy float64: the kernel and plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.core.gpu_target import current_target
from jgg.launching.choice import How
from jgg.models.operations.attend_latents import ATTEND_LATENTS, AttendLatents
from tests.support.marks import EVERYWHERE

# heads, rank, rest, capacity, positions
CASES = {
    "one part": (4, 16, 8, 40, (0, 17, 39)),
    "several parts, heads of several tiles": (70, 24, 4, 600, (599, 255, 256)),
}


def operands_of(case, dtype):
    """Random operands, with NaN in the cache after each position."""
    heads, rank, rest, capacity, positions = CASES[case]
    rng = np.random.default_rng(0)
    q = rng.normal(size=(len(positions), heads, rank + rest))
    latents = rng.normal(size=(2, len(positions), capacity, 1, rank + rest))
    latents[:, np.arange(capacity)[None] > np.asarray(positions)[:, None]] = np.nan
    return AttendLatents(
        jnp.asarray(q, dtype), jnp.asarray(latents, dtype), jnp.int32(1), jnp.asarray(positions, jnp.int32)
    )


def reference(operands, rank):
    q, latents = (np.asarray(array, np.float64) for array in operands[:2])
    result = np.empty((*q.shape[:2], rank))
    for row, position in enumerate(np.asarray(operands.positions)):
        own = latents[1, row, : position + 1, 0]
        weights = np.exp(q[row] @ own.T * 0.2)
        result[row] = weights / weights.sum(axis=1, keepdims=True) @ own[:, :rank]
    return result


@EVERYWHERE
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_float64(case, implementation):
    operands, rank = operands_of(case, jnp.float32), CASES[case][1]
    wanted = reference(operands, rank)
    if implementation in (None, "xla"):  # plain JAX reads the whole cache
        operands = operands._replace(latents=jnp.nan_to_num(operands.latents))
    run = jax.jit(functools.partial(ATTEND_LATENTS, How(implementation, current_target()), scale=0.2, rank=rank))
    np.testing.assert_allclose(run(operands), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_on_a_gpu(case):
    operands, rank = operands_of(case, jnp.bfloat16), CASES[case][1]
    run = jax.jit(functools.partial(ATTEND_LATENTS, How("triton", current_target()), scale=0.2, rank=rank))
    np.testing.assert_allclose(run(operands).astype(jnp.float32), reference(operands, rank), rtol=0.02, atol=0.02)
