"""What balances the experts: the router's losses and the update of its bias, against their formulas."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jgg
from tests.support.routers import random_logits, route, softmax

# compiled, as models call them, and quicker here than one operation at a time
load_balancing_loss = jax.jit(jgg.load_balancing_loss, static_argnames="score")
router_z_loss = jax.jit(jgg.router_z_loss)
update_selection_bias = jax.jit(jgg.update_selection_bias)
LOGITS = jnp.zeros((8, 4))

# name: probabilities of each token, the experts it takes, score, the loss
BALANCE = {
    "even": ([[0.5, 0.5], [0.5, 0.5]], [[0], [1]], "softmax", 1.0),
    "even-top-2": ([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]], [[0, 1], [3, 2]], "softmax", 1.0),
    "even-loads": ([[0.75, 0.25], [0.75, 0.25]], [[0], [1]], "softmax", 1.0),
    "uneven": ([[0.75, 0.25]] * 3 + [[0.25, 0.75]], [[0]] * 3 + [[1]], "softmax", 2 * (0.75 * 0.625 + 0.25 * 0.375)),
    "uneven-top-2": ([[0.4, 0.3, 0.2, 0.1]] * 2, [[0, 1], [0, 2]], "topk_softmax", 4 * (0.2 + 0.075 + 0.05)),
    "worst": ([[1.0, 1e-30, 1e-30, 1e-30]] * 5, [[0]] * 5, "softmax", 4.0),
    "sigmoid": ([[0.6, 0.2]], [[0]], "sigmoid", 2 * 0.75),
    "expert-out-of-range": ([[0.5, 0.5]], [[2]], "softmax", 0.0),
    "no-token": (np.zeros((0, 2)), np.zeros((0, 1)), "softmax", 0.0),
}


@pytest.mark.parametrize(("probabilities", "topk_indices", "score", "expected"), BALANCE.values(), ids=BALANCE)
def test_load_balancing_loss(probabilities, topk_indices, score, expected):
    probabilities = np.asarray(probabilities)
    logits = np.log(probabilities) - (np.log1p(-probabilities) if score == "sigmoid" else 3.0)
    logits, topk_indices = jnp.asarray(logits, jnp.float32), jnp.asarray(topk_indices, jnp.int32)
    loss = load_balancing_loss(logits, topk_indices, score=score)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert loss.dtype == jnp.float32 and loss.shape == ()


def test_router_z_loss():
    logits = jnp.log(jnp.array([[1, 1], [1, 3], [5, 3]], jnp.float32))
    logs = np.log([2, 4, 8])
    np.testing.assert_allclose(router_z_loss(logits), np.mean(logs**2), rtol=1e-6)
    np.testing.assert_allclose(router_z_loss(logits[:0]), 0.0)
    np.testing.assert_allclose(router_z_loss(jnp.full((2, 1), 300, jnp.float16)), 9e4)  # past float16's range
    expected = 2 / 3 * logs[:, None] * np.array([[1 / 2, 1 / 2], [1 / 4, 3 / 4], [5 / 8, 3 / 8]])
    np.testing.assert_allclose(jax.jit(jax.grad(router_z_loss))(logits), expected, rtol=1e-5)


def test_load_balancing_gradient():
    """E / T * p[t, e] * (f[e] - sum of f * p[t]), from the probabilities alone."""
    logits = random_logits(10, 6)
    routing = route(logits, 2)
    loads = np.asarray(routing.group_sizes) / 20
    probabilities = np.array([softmax(token) for token in np.asarray(logits, np.float64)])
    expected = 6 / 10 * probabilities * (loads - (probabilities * loads).sum(axis=1, keepdims=True))
    gradient = jax.jit(jax.grad(load_balancing_loss))(logits, routing.topk_indices)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)


def test_load_balancing_gradient_of_sigmoids():
    logits = random_logits(10, 6)
    topk_indices = route(logits, 2).topk_indices

    def loss(logits):
        return load_balancing_loss(logits, topk_indices, score="sigmoid")

    check_grads(loss, (logits,), order=1, modes=["rev"], eps=1e-2, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("dtype", ["bool", "int32"])
def test_losses_leave_out_masked_tokens(dtype):
    mask = np.array([1, 0, 1, 1, 0, 0], bool)
    logits = np.array(random_logits(6, 8))
    logits[1], logits[4] = np.nan, np.inf
    topk_indices = route(logits, 2).topk_indices

    def loss(logits, topk_indices, mask=None):
        return load_balancing_loss(logits, topk_indices, mask=mask) + router_z_loss(logits, mask=mask)

    loss_and_gradient = jax.jit(jax.value_and_grad(loss))
    value, gradient = loss_and_gradient(jnp.asarray(logits), topk_indices, jnp.asarray(mask, dtype))
    expected, expected_gradient = loss_and_gradient(jnp.asarray(logits[mask]), topk_indices[mask])
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient[mask], expected_gradient, rtol=1e-5, atol=1e-8)
    np.testing.assert_array_equal(gradient[~mask], 0.0)
    np.testing.assert_array_equal(loss(logits, topk_indices, jnp.zeros(6, dtype)), 0.0)


def test_losses_and_update_with_x64():
    with jax.enable_x64(True):
        logits = jnp.zeros((4, 2), jnp.float64)
        loss = load_balancing_loss(logits, jnp.array([[0], [1], [0], [1]], jnp.int64))
        assert loss.dtype == jnp.float32 and loss == 1.0
        assert router_z_loss(logits).dtype == jnp.float32
        update = update_selection_bias(jnp.zeros(2, jnp.float32), jnp.array([3, 1], jnp.int64), 0.25)
        assert update.dtype == jnp.float32 and update.tolist() == [-0.25, 0.25]


# name: rows of each expert, sign of the change of its bias
UPDATES = {
    "uneven": ([10, 2, 6, 6], [-1, 1, 0, 0]),
    "mean-between": ([1, 0, 0], [-1, 1, 1]),
    "mean-just-below": ([1, 1, 0], [-1, -1, 1]),
    "even": ([7] * 48, [0] * 48),
    "even-past-float32": ([2**24 + 1] * 3, [0] * 3),
    "nearly-even-past-float32": ([2**24, 2**24 + 1, 2**24 + 2], [1, 0, -1]),
    "no-row": ([0, 0], [0, 0]),
    "one-expert": ([5], [0]),
    "sum-past-int32": ([2**30, 2**30 + 1, 2**30 - 1, 2**30], [0, -1, 1, 0]),
    "even-at-the-end-of-int32": ([2**31 - 1] * 5, [0] * 5),
    "mean-between-at-the-end-of-int32": ([2**31 - 1, 2**31 - 1, 2**31 - 2], [-1, -1, 1]),
    "both-ends-of-int32": ([2**31 - 1, -(2**31), 0], [-1, 1, -1]),
}


@pytest.mark.parametrize(("group_sizes", "signs"), UPDATES.values(), ids=UPDATES)
def test_update_selection_bias(group_sizes, signs):
    selection_bias = jnp.linspace(-1, 1, len(signs))
    updated = update_selection_bias(selection_bias, jnp.array(group_sizes), 0.125)
    np.testing.assert_array_equal(updated, np.asarray(selection_bias) + np.float32(0.125) * np.array(signs, np.float32))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64"])
@pytest.mark.parametrize("num_experts", [1, 7, 256])
def test_update_compares_counts_exactly(num_experts, dtype):
    """Against Python's integers, with counts from all of the dtype, from its upper end, and from around one value."""
    lowest, highest = np.iinfo(dtype).min, np.iinfo(dtype).max
    rng = np.random.default_rng(0)
    ranges = (lowest, highest), (highest - 100, highest), (highest // 2 - 1, highest // 2 + 1)
    with jax.enable_x64(dtype == "int64"):
        for ends in ranges:
            counts = rng.integers(*ends, num_experts, dtype=dtype, endpoint=True)
            total = sum(counts.tolist())
            signs = [(total > num_experts * count) - (total < num_experts * count) for count in counts.tolist()]
            updated = update_selection_bias(jnp.zeros(num_experts, jnp.float32), jnp.asarray(counts), 1.0)
            assert updated.tolist() == signs, ends


def test_updates_balance_the_experts():
    logits = jax.random.normal(jax.random.key(0), (2048, 8)) + jnp.linspace(-2, 2, 8)[None, :]

    def step(selection_bias, _):
        group_sizes = route(logits, 2, score="sigmoid", selection_bias=selection_bias).group_sizes
        return update_selection_bias(selection_bias, group_sizes, 0.01), group_sizes

    _, group_sizes = jax.lax.scan(step, jnp.zeros(8), length=200)
    largest = np.asarray(group_sizes).max(axis=1)
    assert largest[0] > 2 * 512
    assert largest[-1] < 1.1 * 512


CHOICES = jnp.zeros((8, 2), jnp.int32)
OTHER_ERRORS = {
    "balance-logits": (lambda: load_balancing_loss(jnp.zeros(8), CHOICES), ValueError, "logits must be [T, E]"),
    "balance-score": (lambda: load_balancing_loss(LOGITS, CHOICES, score="relu"), ValueError, "score must be one of"),
    "balance-tokens": (
        lambda: load_balancing_loss(LOGITS, CHOICES[:7]),
        ValueError,
        "topk_indices must be [T, k] with T equal to logits's 8 and k at least 1, got [7, 2]",
    ),
    "balance-rank": (lambda: load_balancing_loss(LOGITS, CHOICES[:, 0]), ValueError, "topk_indices must be [T, k]"),
    "balance-no-choice": (lambda: load_balancing_loss(LOGITS, CHOICES[:, :0]), ValueError, "k at least 1, got [8, 0]"),
    "balance-dtype": (
        lambda: load_balancing_loss(LOGITS, LOGITS),
        TypeError,
        "topk_indices must be an integer array, got float32",
    ),
    "mask": (
        lambda: router_z_loss(LOGITS, mask=jnp.ones((8, 4), bool)),
        ValueError,
        "mask must be [T] = [8], got [8, 4]",
    ),
    "z-logits": (lambda: router_z_loss(CHOICES), TypeError, "logits must be a float array, got int32"),
    "update-sizes": (
        lambda: update_selection_bias(jnp.zeros(4), CHOICES, 0.1),
        ValueError,
        "group_sizes must be [E], 1-dimensional and not empty, got [8, 2]",
    ),
    "update-dtype": (
        lambda: update_selection_bias(jnp.zeros(4), jnp.zeros(4), 0.1),
        TypeError,
        "group_sizes must be an integer array, got float32",
    ),
    "update-bias": (
        lambda: update_selection_bias(jnp.zeros(4), CHOICES[:, 0], 0.1),
        ValueError,
        "selection_bias must be [E] = [8], got [4]",
    ),
    "update-rate": (
        lambda: update_selection_bias(jnp.zeros(8), CHOICES[:, 0], jnp.ones(8)),
        ValueError,
        "rate must be a scalar, got [8]",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), OTHER_ERRORS.values(), ids=OTHER_ERRORS)
def test_other_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
