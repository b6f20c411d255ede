"""The gated delta rule and its gradients, against a loop over tokens in float64, in every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgg.models.delta_rule import delta_rule_one
from tests.support import generated
from tests.support.closeness import assert_close, distance
from tests.support.delta_rule import EPSILON, SCALE, SIZES, random, rule64, run, run_and_gradients
from tests.support.marks import INTERPRET, RARELY_INTERPRET, TRITON, on

QUICK = "chunks with", "one chunk without", "odd with", "short without", "one token with", "none without"
GATED = 1, 70, 1, 2, 16, 8  # the sizes of what tests of gates compute
GATES = (0.0, -1e-6, -0.01, -0.5, -3.0, -8.0, -20.0, -50.0, -88.0, -103.0, -105.0, -1e3, -1e5, -1e30, -3e38)
CASES = {f"{name} {'with' if resets else 'without'}": (name, resets) for name in SIZES for resets in (True, False)}


@on("xla", INTERPRET, TRITON)
@pytest.mark.parametrize(
    ("name", "has_resets"),
    [pytest.param(*case, id=name, marks=[pytest.mark.sweep] * (name not in QUICK)) for name, case in CASES.items()],
)
def test_delta_rule(name, has_resets, implementation):
    size = SIZES[name]
    arrays, resets, dy, d_state = random(size)
    got = run_and_gradients(arrays, resets if has_resets else None, dy, d_state, implementation)
    assert_close(got, rule64(arrays, resets & has_resets, dy, d_state))


def check_gates(log_decay, resets, implementation):
    """Whether results and gradients of tokens [S] or [S, heads] with these log decays are those of float64."""
    arrays, _, dy, d_state = random(GATED)
    log_decay = np.reshape(log_decay, (1, GATED[1], -1))
    arrays[3] = jnp.asarray(np.broadcast_to(log_decay, arrays[3].shape), jnp.float32)
    resets = jnp.asarray(resets)[None]
    got = run_and_gradients(arrays, resets, dy, d_state, implementation)
    # numbers near the smallest of float32 have fewer digits
    assert_close(got, rule64(arrays, np.asarray(resets), dy, d_state), least_scale=1e-25)


def gates(name):
    """Log decays [S, heads]."""
    rng, shape = np.random.default_rng(1), (GATED[1], GATED[3])
    if name == "moderate, then weak":
        return np.where(np.arange(shape[0])[:, None] < 40, -20.0, -0.01)
    if name.startswith("all "):
        return np.full(shape, float(name.removeprefix("all ")))
    return np.where(rng.random(shape) < 0.3, float(name), -0.01)


@on("xla", INTERPRET, TRITON)
@pytest.mark.parametrize("name", ["-88", "-1e5", "-3e38", "moderate, then weak", "all -8", "all -20", "all -3e38"])
def test_strong_decays_change_nothing_after_them(name, implementation):
    """Neither do they in a sequence that begins after them."""
    check_gates(gates(name), np.arange(GATED[1]) == 50, implementation)


@on("xla", RARELY_INTERPRET, TRITON)
@generated.examples(6)
@given(
    log_decay=st.lists(st.sampled_from(GATES), min_size=GATED[1] * GATED[3], max_size=GATED[1] * GATED[3]),
    resets=st.sets(st.integers(0, GATED[1] - 1), max_size=3),
)
def test_any_gates_beside_each_other(log_decay, resets, implementation):
    check_gates(np.reshape(log_decay, (GATED[1], GATED[3])), np.isin(np.arange(GATED[1]), list(resets)), implementation)


@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [
        pytest.param("interpret", "float16", 1.5e-3, marks=[pytest.mark.interpret, pytest.mark.sweep]),
        pytest.param("triton", "float16", 1.5e-3, marks=pytest.mark.gpu),
        pytest.param("triton", "bfloat16", 1e-2, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(SIZES["chunks"], id="few"),
        pytest.param((2, 300, 2, 4, 128, 128), id="many", marks=pytest.mark.sweep),
        pytest.param(SIZES["odd"], id="odd", marks=pytest.mark.sweep),
    ],
)
def test_in_16_bits(size, implementation, dtype, tolerance):
    arrays, resets, dy, d_state = random(size, dtype=dtype)
    got = run_and_gradients(arrays, resets, dy, d_state, implementation)
    want = rule64(arrays, resets, np.asarray(dy, np.float64), d_state)
    errors = jax.tree.map(distance, got, want)
    assert max(jax.tree.leaves(errors)) < tolerance, errors


def test_without_a_state_it_is_zero():
    arrays, _, dy, d_state = random(SIZES["short"])
    arrays[-1] = None
    got, gradients = run_and_gradients(arrays, None, dy, d_state, "xla")
    arrays[-1] = jnp.zeros(d_state.shape)
    want, want_gradients = run_and_gradients(arrays, None, dy, d_state, "xla")
    assert_close((got, gradients[:-1]), (want, want_gradients[:-1]))


def test_a_state_goes_on():
    """In two parts, the second after the states of the first, the results are those of the whole."""
    arrays, resets, *_ = random(SIZES["chunks"])
    *others, state = arrays
    first, second = ([array[:, part] for array in (*others, resets)] for part in (slice(90), slice(90, None)))
    y, state_between = run([*first[:-1], state], first[-1], "xla")
    y_after, last = run([*second[:-1], state_between], second[-1], "xla")
    assert_close((jnp.concatenate([y, y_after], axis=1), last), run(arrays, resets, "xla"), 2e-5)


@on("xla", INTERPRET, TRITON)
@pytest.mark.parametrize("size", [(3, 1, 2, 4, 8, 8), (1, 1, 1, 3, 5, 70)], ids=["even", "odd"])
def test_one_token_updates_the_states_of_its_layer(size, implementation):
    (q, k, v, log_decay, beta, state), resets, dy, d_state = random(size)
    (y, last), _ = rule64([q, k, v, log_decay, beta, state], resets & False, dy, d_state)
    states = jnp.stack([state + 1, state, state + 2])
    one = jax.jit(functools.partial(delta_rule_one, scale=SCALE, epsilon=EPSILON, implementation=implementation))
    got = one(*(array[:, 0] for array in (q, k, v, log_decay, beta)), states, 1)
    assert_close(got, (y[:, 0], np.stack([states[0], last, states[2]])), 2e-5)
