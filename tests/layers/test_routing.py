"""Routing against NumPy: which experts, with which weights, in which order."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
import jgg.layers
from tests.support.routers import (
    FAMILIES,
    SIGMOID,
    V3,
    assert_routed,
    deepseek_v3,
    random_logits,
    reference_sort,
    route,
    sigmoid,
    softmax,
)

sort_by_expert = jax.jit(jgg.sort_by_expert, static_argnames="num_experts")


def assert_sorted(topk_indices, num_experts):
    group_sizes, gather_indices = sort_by_expert(jnp.asarray(topk_indices), num_experts)
    sizes, indices = reference_sort(topk_indices, num_experts)
    np.testing.assert_array_equal(group_sizes, sizes)
    np.testing.assert_array_equal(gather_indices, indices)
    assert group_sizes.dtype == gather_indices.dtype == jnp.int32


@pytest.mark.parametrize(
    ("family", "options", "num_tokens", "num_experts", "topk", "more"), FAMILIES.values(), ids=FAMILIES
)
def test_route(family, options, num_tokens, num_experts, topk, more):
    logits = random_logits(num_tokens, num_experts)
    routing = route(logits, topk, **(options | more))
    assert_routed(routing, logits, topk, family, options)


@pytest.mark.parametrize(
    ("name", "dtype"), [("mixtral", "float16"), ("olmoe", "bfloat16"), ("deepseek-v3", "bfloat16")]
)
def test_route_computes_in_float32(name, dtype):
    family, options, num_tokens, num_experts, topk, more = FAMILIES[name]
    logits = random_logits(num_tokens, num_experts, dtype)
    assert_routed(route(logits, topk, **(options | more)), logits, topk, family, options)


def test_route_with_x64():
    with jax.enable_x64(True):
        logits = random_logits(200, 16, "float64")
        assert logits.dtype == jnp.float64
        options = V3 | {"selection_bias": jnp.asarray(V3["selection_bias"], jnp.float64)}
        assert_routed(route(logits, 4, **options, **SIGMOID), logits, 4, deepseek_v3, V3)


def test_topk_softmax_is_the_normalized_softmax():
    logits = random_logits(50, 32)
    for options in ({}, {"num_groups": 8, "topk_groups": 3}):
        chosen, normalized = (route(logits, 4, score=score, **options) for score in ("topk_softmax", "softmax"))
        np.testing.assert_array_equal(chosen.topk_indices, normalized.topk_indices)
        np.testing.assert_allclose(chosen.topk_weights, normalized.topk_weights, rtol=1e-6)


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
def test_route_takes_the_lower_of_equal_experts(score, biased):
    selection_bias = jnp.zeros(4) if biased else None
    logits = jnp.array([[1, 2, 2, 2], [0, 0, 0, 0], [3, 1, 3, 1], [-0.0, 0.0, -0.0, 0.0]], jnp.float32)
    routing = route(logits, 2, score=score, selection_bias=selection_bias)
    assert routing.topk_indices.tolist() == [[1, 2], [0, 1], [0, 2], [0, 1]]
    np.testing.assert_allclose(routing.topk_weights, np.full((4, 2), 0.5))


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_route_takes_the_lower_of_equal_groups(score):
    logits = jnp.array([[0, 1, 2, 3, 3, 2, 3, 2], [3, 2, 2, 3, 0, 0, 3, 2]], jnp.float32)
    routing = route(logits, 4, score=score, num_groups=4, topk_groups=2)
    assert routing.topk_indices.tolist() == [[3, 4, 2, 5], [0, 3, 1, 2]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_route_takes_the_lower_of_equal_experts_in_a_lesser_group(score):
    logits = jnp.array([[1, 0, 2, 1, -9, -9], [2, 1, 2, 2, -9, -9]], jnp.float32)
    assert route(logits, 2, score=score, num_groups=3, topk_groups=2).topk_indices.tolist() == [[2, 0], [0, 2]]


def test_groups_are_scored_by_their_two_best_or_their_best():
    logits = jnp.array([[9, -9, -9, 2, 1, -9]], jnp.float32)  # the best expert in one group, the best two in the other
    options = {"num_groups": 2, "topk_groups": 1}
    assert route(logits, 2, score="sigmoid", **options).topk_indices.tolist() == [[3, 4]]
    assert route(logits, 2, score="softmax", **options).topk_indices.tolist() == [[0, 1]]
    assert route(logits, 2, score="topk_softmax", **options).topk_indices.tolist() == [[0, 1]]


def test_groups_are_scored_by_as_many_as_are_asked_for():
    logits = jnp.array([[3, 0, -4, 2, 2, -4, 1, 1, 1]], jnp.float32)

    def group_of(score, scores_per_group):
        options = {"num_groups": 3, "topk_groups": 1, "scores_per_group": scores_per_group}
        return route(logits, 1, score=score, **options).topk_indices[0, 0] // 3

    for score, groups, default in (
        ("softmax", [0, 0, 0], 0),
        ("topk_softmax", [0, 1, 2], 0),
        ("sigmoid", [0, 1, 2], 1),
    ):
        assert [group_of(score, number) for number in (1, 2, 3, None)] == [*groups, default]


def test_group_bias_counts():
    selection_bias = jnp.array([0, 0, 1, 0], jnp.float32)
    options = {"score": "sigmoid", "selection_bias": selection_bias, "num_groups": 2}
    routing = route(jnp.array([[3, 2, 1, 0]], jnp.float32), 2, **options)
    assert routing.topk_indices.tolist() == [[2, 3]]
    weights = sigmoid(np.array([1.0, 0.0]))
    np.testing.assert_allclose(routing.topk_weights[0], weights / sum(weights), rtol=1e-6)


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
@pytest.mark.parametrize("lowest", [-1e30, -np.inf])
def test_ineligible_experts_are_never_chosen(score, lowest):
    selection_bias = np.array([0, 0, lowest, lowest, 0, lowest, lowest, lowest], np.float32)
    logits = np.array([[0, 0, 0, 0, -1, 0, 0, 0]], np.float32)
    options = {"score": score, "selection_bias": selection_bias, "num_groups": 2, "topk_groups": 1}
    # group 0 is chosen; its experts 2 and 3 are as low as, or lower than, any that masks the others
    assert route(logits, 4, **options).topk_indices.tolist() == [[0, 1, 2, 3]]


def test_bias_chooses_and_does_not_weigh():
    logits = jnp.array([[2, 1, 0, -1]], jnp.float32)
    selection_bias = jnp.array([-5, 0, 5, 0], jnp.float32)
    for score, score_of in (("sigmoid", sigmoid), ("softmax", softmax)):
        routing = route(logits, 2, score=score, normalize=False, selection_bias=selection_bias)
        assert routing.topk_indices.tolist() == [[2, 1]]
        np.testing.assert_allclose(routing.topk_weights[0], score_of(np.array([2.0, 1, 0, -1]))[[2, 1]], rtol=1e-6)


def test_route_of_large_logits():
    logits = jnp.array([[1e4, -1e4, 0, 1e4]], jnp.float32)
    for score in ("softmax", "topk_softmax", "sigmoid"):
        np.testing.assert_allclose(route(logits, 2, score=score).topk_weights, [[0.5, 0.5]])
    half = route(jnp.array([[6e4, 6e4, 0]], jnp.float16), 1, normalize=False)
    np.testing.assert_allclose(half.topk_weights, [[0.5]])


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_logits_whose_float32_scores_are_equal_keep_their_order(score):
    logits = jnp.array([[20, 30, -200, 40, -150]], jnp.float32)  # sigmoids of 1, 1, 0, 1, 0
    assert route(logits, 5, score=score).topk_indices.tolist() == [[3, 1, 0, 4, 2]]
    assert route(logits - 40, 5, score=score).topk_indices.tolist() == [[3, 1, 0, 4, 2]]


def test_a_layer_with_another_topk_has_its_default():
    """A layer does not keep what `normalize` was for the topk that it replaces."""
    one = jgg.layers.MoELayer(in_features=4, hidden_features=4, num_experts=4, topk=1)
    assert one.normalize is None
    assert dataclasses.replace(one, topk=2) == dataclasses.replace(one, topk=2, normalize=None)
    assert dataclasses.replace(one, normalize=True, topk=2).normalize is True


def test_route_is_a_pytree():
    routing = route(jnp.zeros((3, 4)), 2)
    assert len(jax.tree.leaves(routing)) == 4
    assert isinstance(jax.tree.map(lambda leaf: leaf, routing), jgg.Routing)


@pytest.mark.parametrize("shape", [(0, 2), (1, 1), (40, 1), (40, 2), (13, 8), (60,)])
@pytest.mark.parametrize("num_experts", [1, 7, 64])
def test_sort_by_expert(shape, num_experts):
    rng = np.random.default_rng(0)
    assert_sorted(rng.integers(0, num_experts, shape), num_experts)


def test_sort_by_expert_is_stable():
    topk_indices = jnp.array([2, 0, 2, 1, 0, 2, 0])
    group_sizes, gather_indices = sort_by_expert(topk_indices, 4)
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


LOGITS = jnp.zeros((8, 4))
ROUTE_ERRORS = {
    "rank": ({"logits": jnp.zeros(8)}, ValueError, "logits must be [T, E], 2-dimensional, got [8]"),
    "dtype": ({"logits": jnp.zeros((8, 4), jnp.int32)}, TypeError, "logits must be a float array, got int32"),
    "topk": ({"topk": 5}, ValueError, "topk must be between 1 and the number of experts, 4, got 5"),
    "topk-zero": ({"topk": 0}, ValueError, "topk must be between 1 and the number of experts, 4, got 0"),
    "topk-float": ({"topk": 2.0}, TypeError, "topk must be an int, got 2.0"),
    "topk-eligible": (
        {"topk": 3, "num_groups": 4, "topk_groups": 2},
        ValueError,
        "topk must be between 1 and the number of experts in topk_groups of num_groups=4 groups, 2, got 3",
    ),
    "num-groups": ({"num_groups": 3}, ValueError, "num_groups must divide the number of experts, 4, got 3"),
    "num-groups-zero": ({"num_groups": 0}, ValueError, "num_groups must divide the number of experts, 4, got 0"),
    "num-groups-negative": ({"num_groups": -2}, ValueError, "num_groups must divide the number of experts, 4, got -2"),
    "topk-groups": (
        {"num_groups": 2, "topk_groups": 3},
        ValueError,
        "topk_groups must be between 1 and num_groups, 2, got 3",
    ),
    "topk-groups-zero": ({"topk_groups": 0}, ValueError, "topk_groups must be between 1 and num_groups, 1, got 0"),
    "scores-per-group": (
        {"num_groups": 2, "scores_per_group": 3},
        ValueError,
        "scores_per_group must be None or between 1 and the experts of a group, 2, got 3",
    ),
    "scores-per-group-zero": (
        {"scores_per_group": 0},
        ValueError,
        "scores_per_group must be None or between 1 and the experts of a group, 4, got 0",
    ),
    "score": ({"score": "relu"}, ValueError, "score must be one of ('softmax', 'topk_softmax', 'sigmoid'), got 'relu'"),
    "normalize": (
        {"score": "topk_softmax", "normalize": False},
        ValueError,
        "normalize must be True with score='topk_softmax', whose weights sum to 1, got False",
    ),
    "scale-nan": ({"scale": float("nan")}, ValueError, "scale must be a finite number, got nan"),
    "scale-inf": ({"scale": float("-inf")}, ValueError, "scale must be a finite number, got -inf"),
    "scale-text": ({"scale": "2.5"}, TypeError, "scale must be a number, got '2.5'"),
    "bias-shape": ({"selection_bias": jnp.zeros(3)}, ValueError, "selection_bias must be [E] = [4], got [3]"),
    "bias-rank": ({"selection_bias": LOGITS}, ValueError, "selection_bias must be [E] = [4], got [8, 4]"),
    "bias-dtype": (
        {"selection_bias": jnp.zeros(4, jnp.int32)},
        TypeError,
        "selection_bias must be a float array, got int32",
    ),
    "given-shape": (
        {"topk_indices": jnp.zeros((8, 3), jnp.int32)},
        ValueError,
        "topk_indices must be [T, k] = [8, 2], got [8, 3]",
    ),
    "given-dtype": (
        {"topk_indices": jnp.zeros((8, 2))},
        TypeError,
        "topk_indices must be an integer array, got float32",
    ),
}


@pytest.mark.parametrize(("options", "error", "message"), ROUTE_ERRORS.values(), ids=ROUTE_ERRORS)
def test_route_errors(options, error, message):
    options = {"logits": LOGITS, "topk": 2} | options
    with pytest.raises(error, match=re.escape(message)):
        jax.eval_shape(lambda logits: jgg.route(logits, **options), options.pop("logits"))
