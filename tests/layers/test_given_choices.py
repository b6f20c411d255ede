"""Routers and layers that are given their experts: against NumPy, and replayed against their own choice."""

import functools
import re

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify

import jgg
import jgg.linen
import jgg.nnx
from jgg.layers import MoELayer
from tests.support.closeness import assert_close
from tests.support.marks import PLAIN_JAX, TRITON, on, thorough_but
from tests.support.routers import FAMILIES, SIGMOID, STATIC, V3, random_logits, reference_sort, sigmoid, softmax

QUICK = "qwen3", "deepseek-v2", "deepseek-v3", "llama4", "topk-softmax-groups", "no-token-groups"


@functools.partial(jax.jit, static_argnames=STATIC)
def route(logits, topk, d_weights, **options):
    """The routing, and the gradient of sum(d_weights * topk_weights)."""

    def loss(logits):
        routing = jgg.route(logits, topk, **options)
        return jnp.sum(routing.topk_weights * d_weights), routing

    (_, routing), gradient = jax.value_and_grad(loss, has_aux=True)(logits)
    return routing, gradient


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def draw_choices(num_tokens, num_experts, topk):
    """Experts, repeated ones among them, -1 and what is no expert; the first tokens have one kind of these each."""
    rng = np.random.default_rng(num_experts)
    experts = rng.integers(0, num_experts, (num_tokens, topk))
    none = rng.choice([-2, num_experts, 2**31 - 1, -(2**31)], experts.shape)
    kind = rng.choice(3, experts.shape, p=[0.5, 0.4, 0.1])
    kind[:3] = np.arange(3)[:num_tokens, None]
    return np.choose(kind, [experts, -1, none]).astype(np.int32)


def fill(given, ranking):
    """A token's choices, each -1 replaced by the first expert of the ranking that the token has not."""
    free = [expert for expert in ranking if expert not in given]
    return [free.pop(0) if expert == -1 else expert for expert in given]


def weigh(logits, choices, score="softmax", normalize=True, scale=1.0):
    """The weights of a token's choices, in float64."""
    of_all = sigmoid(logits) if score == "sigmoid" else softmax(logits)
    scores = np.array([of_all[expert] if 0 <= expert < len(logits) else 0 for expert in choices])
    return scale * scores / (np.sum(scores) + (1e-20 if score == "sigmoid" else 1e-300) if normalize else 1)


def gradient_of(function, x, step=1e-5):
    """The gradient of a function of a vector, by central differences in float64."""
    return np.array([(function(x + unit) - function(x - unit)) / (2 * step) for unit in step * np.eye(len(x))])


def cotangents(num_tokens, topk):
    return np.random.default_rng(1).standard_normal((num_tokens, topk)).astype(np.float32)


@on(PLAIN_JAX, None, TRITON)
@pytest.mark.parametrize("case", thorough_but(QUICK, FAMILIES, pytest.mark.sweep))
def test_given_choices_and_their_weights(case, implementation):
    family, options, num_tokens, num_experts, topk, more = case
    num_tokens = min(num_tokens, 20)
    logits, d_weights = random_logits(num_tokens, num_experts), cotangents(num_tokens, topk)
    given = draw_choices(num_tokens, num_experts, topk)
    routing, gradient = route(
        logits, topk, d_weights, topk_indices=given, implementation=implementation, **(options | more)
    )

    eligible = num_experts // options.get("num_groups", 1) * options.get("topk_groups", 1)
    weights_of = functools.partial(
        weigh,
        score=more.get("score", "softmax"),
        normalize=more.get("normalize", topk > 1),
        scale=options.get("scale", 1),
    )
    expected = np.zeros((num_tokens, topk), np.int32), np.zeros((num_tokens, topk)), np.zeros(logits.shape)
    for t, token in enumerate(np.asarray(logits, np.float64)):
        ranking, _ = family(token, eligible, **options)
        choices = fill(given[t].tolist(), ranking)
        weights = functools.partial(weights_of, choices=choices)
        loss = lambda token, t=t, weights=weights: np.sum(d_weights[t] * weights(token))  # noqa: E731
        expected[0][t], expected[1][t], expected[2][t] = choices, weights(token), gradient_of(loss, token)
    np.testing.assert_array_equal(routing.topk_indices, expected[0])
    np.testing.assert_allclose(routing.topk_weights, expected[1], rtol=1e-5, atol=1e-30)
    assert_close(gradient, expected[2], 1e-4)
    is_expert = (expected[0] >= 0) & (expected[0] < num_experts)
    assert not np.any(np.asarray(routing.topk_weights)[~is_expert])
    sizes, indices = reference_sort(expected[0], num_experts)
    np.testing.assert_array_equal(routing.group_sizes, sizes)
    np.testing.assert_array_equal(routing.gather_indices, indices)


@on(PLAIN_JAX, None, TRITON)
@pytest.mark.parametrize("case", thorough_but(QUICK, FAMILIES, pytest.mark.sweep))
def test_a_router_given_its_own_choices_or_none_routes_as_without(case, implementation):
    _, options, num_tokens, num_experts, topk, more = case
    arguments = random_logits(num_tokens, num_experts), topk, cotangents(num_tokens, topk)
    options = options | more | {"implementation": implementation}
    own = route(*arguments, **options)
    assert_equal(route(*arguments, topk_indices=own[0].topk_indices, **options), own)
    assert_equal(route(*arguments, topk_indices=jnp.full((num_tokens, topk), -1), **options), own)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_choices_of_any_integers(dtype):
    given = np.array([[3, 1], [0, 2]])
    given[1, 0] = -1 if dtype in ("int8", "int64") else np.iinfo(dtype).max
    logits = np.array([[0, 1, 2, 3], [3, 2, 1, 0]], np.float32)
    with jax.enable_x64(dtype == "int64"):
        routing = jgg.route(logits, 2, topk_indices=jnp.asarray(given, dtype))
    none = 0 if dtype in ("int8", "int64") else min(np.iinfo(dtype).max, 2**31 - 1)
    assert routing.topk_indices.tolist() == [[3, 1], [none, 2]] and routing.topk_indices.dtype == jnp.int32


def test_transformations_of_a_router_given_its_choices():
    logits = jnp.stack([random_logits(12, 16), random_logits(12, 16)[::-1]])
    given = jnp.stack([draw_choices(12, 16, 4), draw_choices(12, 16, 4)[::-1]])
    d_weights = cotangents(12, 4)
    router = functools.partial(route, topk=4, d_weights=d_weights, **SIGMOID, **V3)
    want = [router(logits[i], topk_indices=given[i]) for i in range(2)]
    got = jax.vmap(lambda logits, given: router(logits, topk_indices=given))(logits, given)
    for i in range(2):
        assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], got), want[i], 1e-6)

    def gradient(logits, given):
        weights = jax.checkpoint(lambda logits: jgg.route(logits, 4, topk_indices=given, **SIGMOID, **V3).topk_weights)
        return jax.grad(lambda logits: jnp.sum(weights(logits) * d_weights))(logits)

    exported = jax.export.export(jax.jit(gradient))(logits[0], given[0])
    for function in (jax.jit(gradient), jax.export.deserialize(exported.serialize()).call):
        assert_close(function(logits[0], given[0]), want[0][1], 1e-6)


def test_checkify_reports_no_choice_that_is_no_expert():
    logits, given, d_weights = random_logits(12, 16), draw_choices(12, 16, 4), cotangents(12, 4)
    router = functools.partial(route, topk=4, d_weights=d_weights, topk_indices=given, **SIGMOID, **V3)
    error, got = jax.jit(checkify.checkify(router, checkify.all_checks))(logits)
    error.throw()
    assert_close(got, router(logits), 1e-6)


SIZES = {"hidden_features": 20, "num_experts": 8, "topk": 2}
LAYERS = {
    "defaults": {},
    "biases": {"score": "topk_softmax", "use_bias": True, "use_router_bias": True},
    "groups": {
        "score": "sigmoid",
        "num_groups": 4,
        "topk_groups": 2,
        "use_selection_bias": True,
        "shared_features": 12,
    },
    "scaled input": {"topk": 1, "score": "sigmoid", "normalize": False, "scale_input": True},
}
X = np.random.default_rng(0).normal(size=(3, 5, 24)).astype(np.float32)


def arguments_of(layer):
    """Parameters by name, and the selection bias."""
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape).astype(np.float32) / 4 for name, shape in layer.shapes.items()}
    return params, np.linspace(-0.3, 0.3, 8, dtype=np.float32) if layer.use_selection_bias else None


def apply(layer, given, implementation=None):
    """y and metrics of the layer, and the gradients of sum(y**2) and the losses."""

    @jax.jit
    def run(params, x, selection_bias, given):
        def loss(params, x):
            y, metrics = layer.apply(
                params, x, selection_bias, topk_indices=given, precision="highest", implementation=implementation
            )
            return jnp.sum(jnp.square(y)) + metrics.load_balancing_loss + metrics.router_z_loss, (y, metrics)

        (_, results), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return *results, gradients

    params, selection_bias = arguments_of(layer)
    return run(params, X, selection_bias, given)


@on(PLAIN_JAX, None, TRITON)
@pytest.mark.parametrize("options", thorough_but(("groups", "scaled input"), LAYERS, pytest.mark.sweep))
def test_a_layer_that_replays_its_own_choices(options, implementation):
    layer = MoELayer(24, **(SIZES | options))
    own = apply(layer, None, implementation)
    chosen = own[1].topk_indices
    assert chosen.shape == (3, 5, layer.topk) and chosen.dtype == jnp.int32
    assert_equal(apply(layer, chosen, implementation), own)
    assert_equal(apply(layer, jnp.full_like(chosen, -1), implementation), own)


@pytest.mark.parametrize("options", thorough_but(("groups", "scaled input"), LAYERS, pytest.mark.sweep))
def test_a_layer_given_its_choices(options):
    """Against its parts one by one: the router given the choices, the experts, the shared experts, the losses."""
    layer = MoELayer(24, **(SIZES | options))
    params, selection_bias = arguments_of(layer)
    given = np.stack([np.roll(np.arange(8), t)[: layer.topk] for t in range(15)]).reshape(3, 5, -1).astype(np.int32)
    given[0, 0], given[1, 1, 0] = -1, 100
    y, metrics, _ = apply(layer, given)
    tokens = X.reshape(15, 24)
    logits = jgg.router_logits(tokens, params["w_router"], params.get("b_router"), precision="highest")
    routing = jgg.route(
        logits,
        layer.topk,
        score=layer.score,
        normalize=layer.normalize,
        selection_bias=selection_bias,
        num_groups=layer.num_groups,
        topk_groups=layer.topk_groups,
        topk_indices=given.reshape(15, -1),
    )
    if layer.scale_input:
        tokens, routing = tokens * routing.topk_weights, routing._replace(topk_weights=jnp.ones((15, 1)))
    want = jgg.moe_mlp(
        tokens,
        params["w_gate_up"],
        params["w_down"],
        routing,
        b_gate_up=params.get("b_gate_up"),
        b_down=params.get("b_down"),
        w_layout="ekn",
        precision="highest",
    )
    if layer.shared_features:
        gate, up = np.split(X.reshape(15, 24) @ params["w_shared_gate_up"], 2, axis=1)
        want += (jax.nn.silu(gate) * up) @ params["w_shared_down"]
    assert_close(y, want.reshape(X.shape))
    np.testing.assert_array_equal(metrics.topk_indices.reshape(15, -1), routing.topk_indices)
    np.testing.assert_array_equal(metrics.group_sizes, routing.group_sizes)
    loss = jgg.load_balancing_loss(logits, routing.topk_indices, score=layer.score)
    assert_close((metrics.load_balancing_loss, metrics.router_z_loss), (loss, jgg.router_z_loss(logits)))


def test_flax_layers_replay_what_they_sow():
    own = jgg.nnx.MoE(24, rngs=nnx.Rngs(0), **SIZES)
    module = jgg.linen.MoE(**SIZES)
    variables = {"params": {name: getattr(own, name)[...] for name in own.layer.shapes}}
    y, sown = nnx.capture(own, nnx.Intermediate)(X)
    linens, linens_sown = module.apply(variables, X, mutable="intermediates")
    (chosen,) = sown["topk_indices"]
    assert_equal((linens, linens_sown["intermediates"]["topk_indices"]), (y, (chosen,)))
    other = (chosen + 1) % 8
    for given in (chosen, other):
        want, _ = own.layer.apply(variables["params"], X, topk_indices=given)
        assert np.array_equal(want, y) == (given is chosen)
        assert_equal(own(X, topk_indices=given), want)
        assert_equal(module.apply(variables, X, given), want)


def test_a_flax_model_replays_layer_by_layer():
    """The sown choices of stacked layers are the arguments of the replay."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, choices=(None, None)):
            for i, given in enumerate(choices):
                x = x + jgg.linen.MoE(**SIZES, name=f"moe_{i}")(x, given)
            return x

    model = Model()
    variables = model.init(jax.random.key(0), X)
    y, sown = model.apply(variables, X, mutable="intermediates")
    choices = [sown["intermediates"][f"moe_{i}"]["topk_indices"][0] for i in range(2)]
    assert_equal(model.apply(variables, X, choices), y)
    assert not np.array_equal(model.apply(variables, X, choices[::-1]), y)


ERRORS = {
    "shape": (np.zeros((3, 5), np.int32), ValueError, "topk_indices must be [..., k] = [3, 5, 2], got [3, 5]."),
    "k": (np.zeros((3, 5, 3), np.int32), ValueError, "topk_indices must be [..., k] = [3, 5, 2], got [3, 5, 3]."),
    "merged": (np.zeros((15, 2), np.int32), ValueError, "topk_indices must be [..., k] = [3, 5, 2], got [15, 2]."),
    "dtype": (np.zeros((3, 5, 2), np.float32), TypeError, "topk_indices must be an integer array, got float32."),
}


@pytest.mark.parametrize(("given", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(given, error, message):
    with pytest.raises(error, match=re.escape(message)):
        jgg.nnx.MoE(24, rngs=nnx.Rngs(0), **SIZES)(X, given)
