"""Routing against NumPy: which experts, with which weights, in which order; and what balances the experts."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jgg
from jgg import router_losses

# compiled, as models call them, and quicker here than one operation at a time
route = jax.jit(jgg.route, static_argnames=("topk", "score", "normalize", "scale", "num_groups", "topk_groups"))
sort_by_expert = jax.jit(jgg.sort_by_expert, static_argnames="num_experts")
load_balancing_loss = jax.jit(router_losses.load_balancing_loss, static_argnames="score")
router_z_loss = jax.jit(router_losses.router_z_loss)
update_selection_bias = jax.jit(router_losses.update_selection_bias)


def softmax(x):
    exponentials = np.exp(x - max(x))
    return exponentials / sum(exponentials)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def best(scores, count, among=None):
    """Indices of the `count` highest scores, of equals the lower first."""
    among = range(len(scores)) if among is None else among
    return sorted(among, key=lambda e: (-scores[e], e))[:count]


def experts_of_groups(groups, group_size):
    return [group * group_size + i for group in groups for i in range(group_size)]


# One token's router of each family of models, in float64: its experts and their weights. `biased` is what the experts
# are chosen by.


def mixtral(logits, topk):
    """Also gpt-oss and Granite-MoE: a softmax of the chosen logits."""
    experts = best(logits, topk)
    return experts, softmax(logits[experts])


def qwen3(logits, topk):
    scores = softmax(logits)
    experts = best(scores, topk)
    return experts, scores[experts] / sum(scores[experts])


def olmoe(logits, topk):
    scores = softmax(logits)
    experts = best(scores, topk)
    return experts, scores[experts]


def deepseek_v2(logits, topk, *, scale, num_groups, topk_groups):
    scores = softmax(logits)
    group_size = len(scores) // num_groups
    group_scores = [max(scores[experts_of_groups([group], group_size)]) for group in range(num_groups)]
    eligible = experts_of_groups(best(group_scores, topk_groups), group_size)
    experts = best(scores, topk, eligible)
    return experts, scores[experts] * scale


def deepseek_v3(logits, topk, *, scale, selection_bias, num_groups=1, topk_groups=1):
    """Also Kimi-K2 and GLM-4.5, which have one group."""
    scores = sigmoid(logits)
    biased = scores + selection_bias
    group_size = len(scores) // num_groups
    group_scores = [sum(sorted(biased[experts_of_groups([group], group_size)])[-2:]) for group in range(num_groups)]
    eligible = experts_of_groups(best(group_scores, topk_groups), group_size)
    experts = best(biased, topk, eligible)
    return experts, scores[experts] / (sum(scores[experts]) + 1e-20) * scale


def llama4(logits, topk):
    experts = best(logits, topk)
    return experts, sigmoid(logits[experts])


def biased_softmax(logits, topk, *, selection_bias):
    scores = softmax(logits)
    experts = best(scores + selection_bias, topk)
    return experts, scores[experts] / sum(scores[experts])


def biased_topk_softmax(logits, topk, *, selection_bias, num_groups, topk_groups):
    biased = logits + selection_bias
    group_size = len(logits) // num_groups
    group_scores = [max(biased[experts_of_groups([group], group_size)]) for group in range(num_groups)]
    experts = best(biased, topk, experts_of_groups(best(group_scores, topk_groups), group_size))
    return experts, softmax(logits[experts])


def bias(num_experts, spread, mean=0.0):
    """Float32 numbers, different and out of order."""
    return (mean + spread * np.random.default_rng(7).standard_normal(num_experts)).astype(np.float32)


V3 = {"scale": 2.5, "selection_bias": bias(16, 0.3), "num_groups": 4, "topk_groups": 2}
SIGMOID = {"score": "sigmoid"}
SMALL_SIGMOID = {"score": "sigmoid", "normalize": False}
# name: the reference, its options, T, E, k, and what route needs besides these options
FAMILIES = {
    "mixtral": (mixtral, {}, 40, 8, 2, {"score": "topk_softmax"}),
    "gpt-oss": (mixtral, {}, 40, 128, 4, {"score": "topk_softmax"}),
    "qwen3": (qwen3, {}, 40, 16, 4, {}),
    "qwen3-next": (qwen3, {}, 9, 512, 10, {}),
    "olmoe": (olmoe, {}, 40, 64, 8, {"normalize": False}),
    "switch": (olmoe, {}, 40, 8, 1, {"normalize": False}),
    "deepseek-v2": (deepseek_v2, {"scale": 16.0, "num_groups": 8, "topk_groups": 3}, 40, 160, 6, {"normalize": False}),
    "deepseek-v3": (deepseek_v3, V3, 200, 16, 4, SIGMOID),
    "negative-bias": (deepseek_v3, V3 | {"selection_bias": bias(16, 0.3, -2.0)}, 200, 16, 4, SIGMOID),
    "all-of-the-groups": (deepseek_v3, V3, 40, 16, 8, SIGMOID),
    "every-group": (deepseek_v3, V3 | {"topk_groups": 4}, 40, 16, 4, SIGMOID),
    "groups-of-one": (deepseek_v3, V3 | {"num_groups": 16, "topk_groups": 5}, 40, 16, 3, SIGMOID),
    "kimi-k2": (deepseek_v3, {"scale": 2.827, "selection_bias": bias(384, 0.1)}, 20, 384, 8, SIGMOID),
    "no-bias": (deepseek_v3, V3 | {"selection_bias": 0.0}, 200, 16, 4, SIGMOID | {"selection_bias": None}),
    "llama4": (llama4, {}, 40, 16, 1, SMALL_SIGMOID),
    "softmax-bias": (biased_softmax, {"selection_bias": bias(16, 0.2)}, 200, 16, 4, {}),
    "topk-softmax-groups": (
        biased_topk_softmax,
        {"selection_bias": bias(16, 1.0), "num_groups": 4, "topk_groups": 2},
        200,
        16,
        4,
        {"score": "topk_softmax"},
    ),
    "one-expert": (olmoe, {}, 5, 1, 1, {"normalize": False}),
    "every-expert": (qwen3, {}, 5, 6, 6, {}),
    "no-token": (mixtral, {}, 0, 8, 2, {"score": "topk_softmax"}),
    "no-token-groups": (deepseek_v3, V3, 0, 16, 4, SIGMOID),
}


def reference_route(logits, topk, family, options):
    tokens = [family(token, topk, **options) for token in np.asarray(logits).astype(np.float64)]
    experts = np.array([experts for experts, _ in tokens]).reshape(-1, topk)
    return np.array([weights for _, weights in tokens]).reshape(-1, topk), experts


def reference_sort(topk_indices, num_experts):
    experts = np.asarray(topk_indices).reshape(-1).tolist()
    in_order = [[row for row, e in enumerate(experts) if e == expert] for expert in range(num_experts)]
    past = [row for row, e in enumerate(experts) if not 0 <= e < num_experts]
    return [len(rows) for rows in in_order], [*itertools.chain(*in_order), *past]


def assert_sorted(topk_indices, num_experts):
    group_sizes, gather_indices = sort_by_expert(jnp.asarray(topk_indices), num_experts)
    sizes, indices = reference_sort(topk_indices, num_experts)
    np.testing.assert_array_equal(group_sizes, sizes)
    np.testing.assert_array_equal(gather_indices, indices)
    assert group_sizes.dtype == gather_indices.dtype == jnp.int32


def assert_routed(routing, logits, topk, family, options):
    weights, experts = reference_route(logits, topk, family, options)
    np.testing.assert_array_equal(routing.topk_indices, experts)
    np.testing.assert_allclose(routing.topk_weights, weights, rtol=1e-5)
    sizes, indices = reference_sort(experts, logits.shape[1])
    np.testing.assert_array_equal(routing.group_sizes, sizes)
    np.testing.assert_array_equal(routing.gather_indices, indices)
    assert [leaf.dtype for leaf in routing] == [jnp.float32, jnp.int32, jnp.int32, jnp.int32]


def random_logits(num_tokens, num_experts, dtype="float32"):
    """No token has two equal logits, in bfloat16 neither."""
    rng = np.random.default_rng(num_experts)
    ranks = rng.permuted(np.tile(np.arange(num_experts), (num_tokens, 1)), axis=1)
    spread = rng.uniform(0.5, 2.0, (num_tokens, 1))
    if dtype == "bfloat16":
        return jnp.asarray(ranks / 8 - num_experts / 16, dtype)
    return jnp.asarray(spread * (ranks - num_experts / 2) * 6 / num_experts, dtype)


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


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_selection_bias_has_no_gradient(score):
    def loss(selection_bias):
        weights = route(random_logits(9, 16), 4, score=score, selection_bias=selection_bias).topk_weights
        return jnp.sum(jnp.sin(weights))

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(jnp.asarray(bias(16, 0.3))), np.zeros(16))


BAD_TOKENS = {
    "nan": [np.nan, 1, 2, 3, 4, 5, 6, 7],
    "negative-nan": [0, 1, 2, -np.float32(np.nan), 4, 5, 6, 7],
    "all-nan": [np.nan] * 8,
    "inf": [0, 1, np.inf, 3, np.inf, 5, 6, 7],
    "minus-inf": [-np.inf] * 8,
    "mixed-nan": [np.nan, -np.inf, np.inf, 3, 4, 5, np.nan, -np.inf],
}


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
        loss = router_losses.load_balancing_loss(logits, routing.topk_indices, score="sigmoid")
        loss += router_losses.router_z_loss(logits, mask=logits[:, 0] > 0) + jnp.mean(routing.topk_weights[:, 0])
        bias = router_losses.update_selection_bias(jnp.zeros(16), total(routing.group_sizes), 0.5)
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
}


@pytest.mark.parametrize(("group_sizes", "signs"), UPDATES.values(), ids=UPDATES)
def test_update_selection_bias(group_sizes, signs):
    selection_bias = jnp.linspace(-1, 1, len(signs))
    updated = update_selection_bias(selection_bias, jnp.array(group_sizes), 0.125)
    np.testing.assert_array_equal(updated, np.asarray(selection_bias) + np.float32(0.125) * np.array(signs, np.float32))


def test_updates_balance_the_experts():
    logits = jax.random.normal(jax.random.key(0), (2048, 8)) + jnp.linspace(-2, 2, 8)[None, :]

    def step(selection_bias, _):
        group_sizes = route(logits, 2, score="sigmoid", selection_bias=selection_bias).group_sizes
        return update_selection_bias(selection_bias, group_sizes, 0.01), group_sizes

    _, group_sizes = jax.lax.scan(step, jnp.zeros(8), length=200)
    largest = np.asarray(group_sizes).max(axis=1)
    assert largest[0] > 2 * 512
    assert largest[-1] < 1.1 * 512


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
}


@pytest.mark.parametrize(("options", "error", "message"), ROUTE_ERRORS.values(), ids=ROUTE_ERRORS)
def test_route_errors(options, error, message):
    options = {"logits": LOGITS, "topk": 2} | options
    with pytest.raises(error, match=re.escape(message)):
        jax.eval_shape(lambda logits: jgg.route(logits, **options), options.pop("logits"))


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
        "mask must be [T] with T equal to logits's 8, got [8, 4]",
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
