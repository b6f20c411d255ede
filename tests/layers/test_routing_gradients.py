"""Routing under JAX's transformations: gradients against formulas and differences, vmap, shard_map."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.test_util import check_grads

import jgg
from tests.support.routers import (
    BAD_TOKENS,
    V3,
    assert_routed,
    bias,
    deepseek_v3,
    random_logits,
    reference_route,
    route,
    sigmoid,
)


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
