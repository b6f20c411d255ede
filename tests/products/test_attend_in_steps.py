"""Attention in a fixed order of keys, against a loop over queries in NumPy float64: the kernels and plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.core.gpu_target import current_target
from jgg.launching.choice import How
from jgg.products.attend import ATTEND, Attend
from tests.support.marks import EVERYWHERE

SCALE = 0.2
STARTS = [[0] * 5 + [5] * 30 + [35] * 40, [0] * 70 + [70] * 5]
# heads, kv heads, features; window and whether it holds, which None leaves out; sinks
CASES = {
    "grouped": (4, 2, 16, None, None, False),
    "one key head, features padded": (3, 1, 48, None, None, False),
    "window": (2, 1, 16, 5, None, False),
    "window that holds, sinks": (4, 2, 16, 40, True, True),
    "window that does not hold, sinks": (4, 2, 16, 40, False, True),
}


def operands_of(case, length=75, dtype=jnp.float32, starts=None, batch=2):
    heads, kv_heads, features, _, is_local, has_sinks = CASES[case]
    rng = np.random.default_rng(5)

    def random(*shape):
        return jnp.asarray(rng.normal(size=shape) * 2, dtype)

    return Attend(
        random(batch, length, heads, features),
        *(random(1, batch, length, kv_heads, features) for _ in "kv"),
        starts=None if starts is None else jnp.asarray(starts, jnp.int32),
        is_local=None if is_local is None else jnp.asarray(is_local),
        sinks=jnp.asarray(rng.normal(size=heads), jnp.float32) if has_sinks else None,
    )


def reference(operands, window):
    layer, offset = (0 if index is None else int(index) for index in (operands.layer, operands.offset))
    q, k, v = np.asarray(operands.q, np.float64), *(np.asarray(a[layer], np.float64) for a in operands[1:3])
    has_window = window is not None and (operands.is_local is None or bool(operands.is_local))
    attended, log_sums = np.empty_like(q), np.empty(np.take(q.shape, (0, 2, 1)))
    for b, s, head in np.ndindex(*q.shape[:3]):
        first = 0 if operands.starts is None else int(operands.starts[b, s])
        first = max(first, offset + s + 1 - window) if has_window else first
        seen = slice(first, offset + s + 1)
        kv_head = head // (q.shape[2] // k.shape[2])
        weights = np.exp(k[b, seen, kv_head] @ q[b, s, head] * SCALE)
        total = weights.sum() + (0 if operands.sinks is None else np.exp(np.float64(operands.sinks[head])))
        attended[b, s, head], log_sums[b, head, s] = weights @ v[b, seen, kv_head] / total, np.log(total)
    return attended, log_sums


def compute(operands, implementation, window):
    how = How(implementation, current_target())
    return jax.jit(functools.partial(ATTEND, how, scale=SCALE, window=window))(operands)


def check(operands, implementation, window, tolerance=3e-5):
    for got, wanted in zip(compute(operands, implementation, window), reference(operands, window), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


@EVERYWHERE
@pytest.mark.parametrize("starts", [None, STARTS], ids=["one sequence", "several"])
@pytest.mark.parametrize("case", CASES)
def test_attends_as_float64_does(case, starts, implementation):
    check(operands_of(case, starts=starts), implementation, CASES[case][3])
