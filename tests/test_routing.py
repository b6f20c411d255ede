"""Routing against NumPy: which experts, with which weights, in which order."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jgg


def reference_route(logits, topk, normalize, scale):
    logits = np.asarray(logits).astype(np.float64)
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores /= scores.sum(axis=1, keepdims=True)
    # of equal scores the lower expert goes first
    experts = np.argsort(-logits, axis=1, kind="stable")[:, :topk]
    weights = np.take_along_axis(scores, experts, axis=1)
    if normalize:
        weights /= weights.sum(axis=1, keepdims=True)
    return weights * scale, experts


def reference_sort(topk_indices, num_experts):
    experts = np.asarray(topk_indices).reshape(-1).tolist()
    in_order = [[row for row, e in enumerate(experts) if e == expert] for expert in range(num_experts)]
    past = [row for row, e in enumerate(experts) if not 0 <= e < num_experts]
    return [len(rows) for rows in in_order], [*itertools.chain(*in_order), *past]


def assert_sorted(topk_indices, num_experts):
    group_sizes, gather_indices = jgg.sort_by_expert(jnp.asarray(topk_indices), num_experts)
    sizes, indices = reference_sort(topk_indices, num_experts)
    np.testing.assert_array_equal(group_sizes, sizes)
    np.testing.assert_array_equal(gather_indices, indices)
    assert group_sizes.dtype == gather_indices.dtype == jnp.int32


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("topk", [1, 2, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_route(dtype, topk, normalize):
    rng = np.random.default_rng(topk)
    logits = jnp.asarray(rng.standard_normal((50, 8)), dtype)
    routing = jax.jit(lambda logits: jgg.route(logits, topk, normalize=normalize, scale=2.5))(logits)
    weights, experts = reference_route(logits, topk, normalize, 2.5)
    np.testing.assert_array_equal(routing.topk_indices, experts)
    np.testing.assert_allclose(routing.topk_weights, weights, rtol=1e-5)
    assert routing.topk_weights.dtype == jnp.float32
    assert routing.topk_indices.dtype == jnp.int32
    sizes, indices = reference_sort(experts, 8)
    np.testing.assert_array_equal(routing.group_sizes, sizes)
    np.testing.assert_array_equal(routing.gather_indices, indices)


def test_route_takes_the_lower_of_equal_experts():
    logits = jnp.array([[1, 2, 2, 2], [0, 0, 0, 0], [3, 1, 3, 1]], jnp.float32)
    routing = jgg.route(logits, 2)
    assert routing.topk_indices.tolist() == [[1, 2], [0, 1], [0, 2]]
    np.testing.assert_allclose(routing.topk_weights, np.full((3, 2), 0.5))


def test_route_of_large_logits():
    routing = jgg.route(jnp.array([[1e4, -1e4, 0, 1e4]], jnp.float32), 2)
    np.testing.assert_allclose(routing.topk_weights, [[0.5, 0.5]])
    half = jgg.route(jnp.array([[6e4, 6e4, 0]], jnp.float16), 1, normalize=False)
    np.testing.assert_allclose(half.topk_weights, [[0.5]])


@pytest.mark.parametrize("normalize", [True, False])
def test_route_gradient(normalize):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((5, 6)), jnp.float32)

    def weights(logits):
        return jgg.route(logits, 2, normalize=normalize, scale=0.5).topk_weights

    check_grads(weights, (logits,), order=2, eps=1e-3, atol=1e-2, rtol=1e-2)


def test_route_is_a_pytree():
    routing = jgg.route(jnp.zeros((3, 4)), 2)
    assert len(jax.tree.leaves(routing)) == 4
    assert isinstance(jax.tree.map(lambda leaf: leaf, routing), jgg.Routing)


@pytest.mark.parametrize("shape", [(0, 2), (1, 1), (40, 1), (40, 2), (13, 8), (60,)])
@pytest.mark.parametrize("num_experts", [1, 7, 64])
def test_sort_by_expert(shape, num_experts):
    rng = np.random.default_rng(0)
    assert_sorted(rng.integers(0, num_experts, shape), num_experts)


def test_sort_by_expert_is_stable():
    topk_indices = jnp.array([2, 0, 2, 1, 0, 2, 0])
    group_sizes, gather_indices = jgg.sort_by_expert(topk_indices, 4)
    assert group_sizes.tolist() == [3, 1, 3, 0]
    assert gather_indices.tolist() == [1, 4, 6, 3, 0, 2, 5]


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "uint32"])
def test_sort_by_expert_puts_unknown_experts_last(dtype):
    limits = np.iinfo(dtype)
    rng = np.random.default_rng(1)
    topk_indices = rng.integers(0, 5, 64).astype(dtype)
    topk_indices[::5] = limits.max
    topk_indices[1::5] = limits.min  # 0 where the dtype has no negative numbers
    topk_indices[2::7] = 5
    assert_sorted(topk_indices, 5)


def test_sort_by_expert_with_more_experts_than_the_dtype_counts():
    topk_indices = np.random.default_rng(2).integers(0, 127, 64).astype("int8")
    assert_sorted(topk_indices, 300)
