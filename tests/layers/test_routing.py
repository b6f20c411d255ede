"""Routing against NumPy: which experts, with which weights, in which order."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.test_util import check_grads

import jgg
import jgg.layers
from tests.support.routers import (
    BAD_TOKENS,
    FAMILIES,
    SIGMOID,
    V3,
    assert_routed,
    bias,
    deepseek_v3,
    random_logits,
    reference_route,
    reference_sort,
    sigmoid,
    softmax,
)

# compiled, as models call them, and quicker here than one operation at a time
route = jax.jit(jgg.route, static_argnames=("topk", "score", "normalize", "scale", "num_groups", "topk_groups"))
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


@pytest.mark.parametrize("low", [-30.0, -46.0, -60.0, -100.0])
def test_sigmoids_near_zero(low):
    """Their sum plus 1e-20: weights smaller than 1 in all and gradients that are finite."""
    logits = np.array([[low, low - 1, low - 2]])
    scores = sigmoid(logits[0, :2])
    total = scores.sum() + 1e-20

    def first(logits):
        return route(logits, 2, score="sigmoid").topk_weights[0, 0]

    value, gradient = jax.jit(jax.value_and_grad(first))(jnp.asarray(logits, jnp.float32))
    np.testing.assert_allclose(value, scores[0] / total, rtol=1e-5, atol=1e-37)
    # d(s0 / total) = ds0 / total - s0 (ds0 + ds1) / total**2
    expected = [scores[0] * (total - scores[0]) / total**2, -scores[0] * scores[1] / total**2, 0]
    np.testing.assert_allclose(gradient[0], expected, rtol=1e-4, atol=1e-37)


GRADIENTS = {
    "softmax": {},
    "softmax-as-it-is": {"normalize": False},
    "topk-softmax": {"score": "topk_softmax"},
    "sigmoid": {"score": "sigmoid"},
    "sigmoid-as-it-is": {"score": "sigmoid", "normalize": False},
    "groups": {"score": "sigmoid", "num_groups": 3, "topk_groups": 2},
}


@pytest.mark.parametrize(("name", "order"), [(name, 2 if name == "sigmoid" else 1) for name in GRADIENTS])
def test_route_gradient(name, order):
    logits = random_logits(5, 6)  # far enough apart that a finite difference changes no choice
    selection_bias = jnp.asarray(bias(6, 0.5)) if name == "groups" else None

    def weights(logits):
        return route(logits, 2, scale=0.5, selection_bias=selection_bias, **GRADIENTS[name]).topk_weights

    check_grads(weights, (logits,), order=order, modes=["rev"], eps=1e-3, atol=1e-2, rtol=1e-2)


def test_route_in_forward_mode_twice_and_checked():
    logits, topk_indices = random_logits(5, 6), np.asarray(route(random_logits(5, 6), 2).topk_indices)

    def reference(logits):
        return jnp.square(jax.nn.softmax(jnp.take_along_axis(logits, topk_indices, axis=1)))

    def squares(logits):
        return jnp.square(jgg.route(logits, 2).topk_weights)

    for derivative in (jax.jacfwd, jax.hessian, lambda function: jax.jacrev(jax.jacrev(function))):
        got, want = (jax.jit(derivative(function))(logits) for function in (squares, reference))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda logits: jnp.sum(squares(logits)))
    error, got = jax.jit(checkify.checkify(gradient, checkify.all_checks))(logits)
    error.throw()
    np.testing.assert_allclose(got, gradient(logits), rtol=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
def test_sigmoid_gradient_formula(normalize):
    logits = random_logits(30, 16)
    cotangents = np.random.default_rng(0).standard_normal((30, 4))
    options = V3 | {"normalize": normalize, "score": "sigmoid"}

    def loss(logits):
        return jnp.sum(route(logits, 4, **options).topk_weights * jnp.asarray(cotangents, jnp.float32))

    _, experts = reference_route(logits, 4, deepseek_v3, V3)
    expected = np.zeros((30, 16))
    for t in range(30):
        scores = sigmoid(np.asarray(logits, np.float64)[t, experts[t]])
        g = cotangents[t] * V3["scale"]
        if normalize:
            g = (g - (g * scores).sum() / scores.sum()) / scores.sum()
        expected[t, experts[t]] = g * scores * (1 - scores)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(logits), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
def test_gradient_of_the_weights_sorts_no_scores_and_takes_no_array_for_each_choice(normalize):
    logits = jax.ShapeDtypeStruct((8192, 128), jnp.float32)  # XLA fuses smaller ones in another way

    def loss(logits):
        return jnp.sum(jnp.sin(jgg.route(logits, 8, normalize=normalize).topk_weights))

    program = jax.jit(jax.grad(loss)).lower(logits).compile()
    assert " sort(" not in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 3 * logits.size * 4


def test_one_choice_trains_the_router_unless_its_weight_is_normalized():
    logits = random_logits(5, 6)
    logits64 = np.asarray(logits, np.float64)

    def gradient(**options):
        return jax.grad(lambda logits: jnp.sum(route(logits, 1, **options).topk_weights))(logits)

    scores, chosen = np.exp(logits64) / np.sum(np.exp(logits64), 1, keepdims=True), np.eye(6)[np.argmax(logits64, 1)]
    best = np.max(scores, 1, keepdims=True)
    np.testing.assert_allclose(gradient(), best * (chosen - scores), rtol=1e-4, atol=1e-6)
    scores = sigmoid(logits64)
    np.testing.assert_allclose(gradient(score="sigmoid"), chosen * scores * (1 - scores), rtol=1e-4, atol=1e-6)
    for options in ({"normalize": True}, {"score": "sigmoid", "normalize": True}, {"score": "topk_softmax"}):
        np.testing.assert_array_equal(gradient(**options), np.zeros((5, 6)))


def test_a_layer_with_another_topk_has_its_default():
    """A layer does not keep what `normalize` was for the topk that it replaces."""
    one = jgg.layers.MoELayer(in_features=4, hidden_features=4, num_experts=4, topk=1)
    assert one.normalize is None
    assert dataclasses.replace(one, topk=2) == dataclasses.replace(one, topk=2, normalize=None)
    assert dataclasses.replace(one, normalize=True, topk=2).normalize is True


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_selection_bias_has_no_gradient(score):
    def loss(selection_bias):
        weights = route(random_logits(9, 16), 4, score=score, selection_bias=selection_bias).topk_weights
        return jnp.sum(jnp.sin(weights))

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(jnp.asarray(bias(16, 0.3))), np.zeros(16))


@pytest.mark.parametrize("name", ["softmax", "topk-softmax", "sigmoid", "groups"])
@pytest.mark.parametrize("biased", [False, True])
def test_bad_logits_stay_in_their_token(biased, name):
    selection_bias = bias(12, 0.3) if biased else None
    good = np.asarray(random_logits(2 * len(BAD_TOKENS), 12))
    logits = good.copy()
    logits[1::2, :8] = list(BAD_TOKENS.values())

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss_and_gradient(logits):
        routing = route(logits, 4, selection_bias=selection_bias, **GRADIENTS[name])
        return jnp.sum(jnp.square(routing.topk_weights)), routing

    (_, routing), gradient = loss_and_gradient(logits)
    (_, expected), expected_gradient = loss_and_gradient(good)
    for rows, expected_rows in zip((*routing[:2], gradient), (*expected[:2], expected_gradient), strict=True):
        np.testing.assert_array_equal(rows[::2], expected_rows[::2])
    assert routing.group_sizes.sum() == routing.topk_indices.size
    for token, bad in enumerate(BAD_TOKENS, 1):
        experts = set(routing.topk_indices[2 * token - 1].tolist())
        assert len(experts) == 4 and experts <= set(range(12)), bad
        if "nan" in bad:
            assert np.isnan(routing.topk_weights[2 * token - 1]).any(), bad


def test_route_under_vmap():
    logits = jnp.stack([random_logits(12, 16), random_logits(12, 16)[::-1]])
    routing = jax.vmap(lambda logits: route(logits, 4, score="sigmoid", **V3))(logits)
    for i in range(2):
        assert_routed(jax.tree.map(lambda leaf, i=i: leaf[i], routing), logits[i], 4, deepseek_v3, V3)


def test_route_and_losses_under_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shard = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=jax.P("data"), out_specs=(jax.P(), (jax.P("data"), jax.P())), check_vma=True
    )

    def on_device(logits, mean=jnp.asarray, total=jnp.asarray):
        routing = jgg.route(logits, 4, score="sigmoid", **V3)
        loss = jgg.load_balancing_loss(logits, routing.topk_indices, score="sigmoid")
        loss += jgg.router_z_loss(logits, mask=logits[:, 0] > 0) + jnp.mean(routing.topk_weights[:, 0])
        bias = jgg.update_selection_bias(jnp.zeros(16), total(routing.group_sizes), 0.5)
        return mean(loss), (routing, bias)

    sharded = shard(
        functools.partial(on_device, mean=lambda x: jax.lax.pmean(x, "data"), total=lambda x: jax.lax.psum(x, "data"))
    )
    logits = random_logits(12, 16)
    (loss, (routing, new_bias)), gradient = jax.jit(jax.value_and_grad(sharded, has_aux=True))(logits)
    (expected, _), expected_gradient = jax.jit(jax.value_and_grad(on_device, has_aux=True))(logits)
    assert_routed(routing, logits, 4, deepseek_v3, V3)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_array_equal(new_bias, 0.5 * np.sign(3 - np.asarray(routing.group_sizes)))
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


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
    "score": (
        {"score": "relu"},
        ValueError,
        "score must be one of ('softmax', 'topk_softmax', 'sigmoid'), got 'relu'",
    ),
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
