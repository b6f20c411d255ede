"""The kernels of routing against the NumPy routers and sorts of test_routing, and bit for bit against the xla path."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
import jgg.products.logits as logits_module
from jgg.core.gpu_target import current_target
from jgg.launching.choice import How
from jgg.launching.launch import MAX_EXPERTS
from jgg.products.logits import LOGITS, Logits
from jgg.products.route_few import ROUTE_FEW, RouteFew, are_few
from jgg.products.score import SCORE, WEIGH, Score, Weigh
from jgg.products.top_k import TOP_K, TopK
from tests.support.marks import KERNELS
from tests.support.routers import BAD_TOKENS, FAMILIES, assert_routed, random_logits, reference_sort

# one of each way to choose: plain, with two groups' scores, with fewer groups of one, with no token, with one expert
CHOSEN = ["mixtral", "qwen3-next", "deepseek-v3", "groups-of-one", "kimi-k2", "no-token", "every-expert", "one-expert"]


@KERNELS
@pytest.mark.parametrize("name", CHOSEN)
def test_route(name, implementation):
    family, options, num_tokens, num_experts, topk, more = FAMILIES[name]
    logits = random_logits(num_tokens, num_experts)
    route = jax.jit(functools.partial(jgg.route, topk=topk, implementation=implementation, **(options | more)))
    assert_routed(route(logits), logits, topk, family, options)


@KERNELS
@pytest.mark.parametrize("num_experts", [1, 5, 16, 130])
def test_equal_infinite_and_bad_scores_have_the_order_of_xla(num_experts, implementation):
    rng = np.random.default_rng(num_experts)
    special = [-np.inf, np.inf, np.nan, -np.float32(np.nan), -0.0, 0.0, 1e-30, -1e-30, 3.4e38, -3.4e38, 1.0, -1.0]
    scores = jnp.asarray(rng.choice(np.array(special, np.float32), (33, num_experts)))
    topk = min(num_experts, 9)
    hows = [How(name, current_target()) for name in (implementation, "xla")]
    got, want = (TOP_K(how, TopK(scores), topk=topk) for how in hows)
    np.testing.assert_array_equal(got, want)


@KERNELS
@pytest.mark.parametrize(("num_tokens", "num_experts", "topk"), [(1, 1, 1), (1, 128, 8), (5, 130, 8), (33, 17, 17)])
def test_few_tokens_are_routed_bit_for_bit_as_by_xla(num_tokens, num_experts, topk, implementation):
    rng = np.random.default_rng(num_experts)
    logits = rng.normal(size=(num_tokens, num_experts)).round(1).astype(np.float32)  # many are equal
    logits[:, ::7], logits[-1, ::3], logits[0, ::5] = -0.0, np.nan, -np.inf
    logits = jnp.asarray(logits)
    hows = [How(name, current_target()) for name in (implementation, "xla")]
    assert are_few(logits, hows[0])
    got, want = (ROUTE_FEW(how, RouteFew(logits), topk=topk) for how in hows)
    jax.tree.map(np.testing.assert_array_equal, got, want)


SHAPES = [(1, 256, 128), (5, 300, 17), (33, 800, 32), (130, 96, 8), (3, 64, 1)]
DTYPES = [("float32", "float32", "highest"), ("float16", "float16", "default"), ("float16", "float32", "default")]


@KERNELS
@pytest.mark.parametrize(("num_tokens", "features", "num_experts"), SHAPES)
@pytest.mark.parametrize(("x_dtype", "w_dtype", "precision"), DTYPES)
def test_logits(num_tokens, features, num_experts, x_dtype, w_dtype, precision, implementation):
    rng = np.random.default_rng(features)
    x, w = (rng.normal(size=shape) for shape in ((num_tokens, features), (features, num_experts)))
    x, w = jnp.asarray(x, x_dtype), jnp.asarray(w, w_dtype)
    precision = jax.lax.Precision(precision)
    multiply = jax.jit(functools.partial(LOGITS, How(implementation, current_target()), precision=precision))
    got = multiply(Logits(x, w))
    np.testing.assert_allclose(got, np.asarray(x, np.float64) @ np.asarray(w, np.float64), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(multiply(Logits(x[-1:], w))[0], got[-1])


@pytest.mark.interpret
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_interpreted_products_add_from_the_first_feature_to_the_last(num_tokens):
    """On every processor, so that tests can compare the bits of interpreted kernels."""
    rng = np.random.default_rng(num_tokens)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((num_tokens, 300), (300, 17)))
    how = How("interpret", current_target())
    got = LOGITS(how, Logits(jnp.asarray(x), jnp.asarray(w)), precision=jax.lax.Precision.HIGHEST)
    want = np.zeros((num_tokens, 17), np.float32)
    for column, row in zip(x.T, w, strict=True):
        want += np.multiply.outer(column, row)
    np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype", "precision"),
    [
        ("bfloat16", "bfloat16", "default"),
        ("bfloat16", "float32", "default"),
        ("float16", "float32", "default"),
        ("float32", "float32", "default"),
        ("float32", "float32", "high"),
        ("float32", "float32", "highest"),
    ],
)
@pytest.mark.parametrize(("features", "num_experts"), [(2048, 128), (100, 17)])
def test_logits_have_the_same_bits_in_every_tile(features, num_experts, x_dtype, w_dtype, precision, monkeypatch):
    rng = np.random.default_rng(features)
    x, w = (rng.normal(size=shape) for shape in ((300, features), (features, num_experts)))
    x, w = jnp.asarray(x, x_dtype), jnp.asarray(w, w_dtype)
    every = []
    tiles = logits_module._TILES
    for tile in tiles:
        monkeypatch.setattr(logits_module, "_TILES", (tile,))
        multiply = functools.partial(LOGITS, How("triton", current_target()), precision=jax.lax.Precision(precision))
        every.append(np.asarray(jax.jit(lambda x, w, multiply=multiply: multiply(Logits(x, w)))(x, w)))
    np.testing.assert_allclose(every[0], np.asarray(x, np.float64) @ np.asarray(w, np.float64), rtol=2e-2, atol=0.2)
    for other in every[1:]:
        np.testing.assert_array_equal(other, every[0])


@KERNELS
@pytest.mark.parametrize(("count", "has_own_w"), [(3, False), (20, False), (3, True)])
def test_logits_under_vmap(count, has_own_w, implementation):
    rng = np.random.default_rng(count)
    x = jnp.asarray(rng.normal(size=(count, 5, 300)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(count, 300, 17) if has_own_w else (300, 17)), jnp.float32)
    how, precision = How(implementation, current_target()), jax.lax.Precision.HIGHEST
    multiply = lambda x, w: LOGITS(how, Logits(x, w), precision=precision)  # noqa: E731
    got = jax.jit(jax.vmap(multiply, in_axes=(0, 0 if has_own_w else None)))(x, w)
    wanted = np.matmul(np.asarray(x, np.float64), np.asarray(w, np.float64))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)


@KERNELS
@pytest.mark.parametrize(("score", "normalize"), [("softmax", True), ("sigmoid", True), ("sigmoid", False)])
@pytest.mark.parametrize(("num_tokens", "num_experts", "topk"), [(1, 128, 8), (70, 17, 3), (3, 1, 1)])
def test_weights(num_tokens, num_experts, topk, score, normalize, implementation):
    rng = np.random.default_rng(num_tokens)
    logits = 5 * rng.normal(size=(num_tokens, num_experts)).astype(np.float32)
    choices = rng.integers(-1, num_experts + 1, (num_tokens, topk))  # some are no experts
    weights = WEIGH(
        How(implementation, current_target()),
        Weigh(jnp.asarray(logits), jnp.asarray(choices, jnp.int32)),
        score=score,
        normalize=normalize,
        scale=1.5,
        all_are_experts=False,
    )
    is_expert = (choices >= 0) & (choices < num_experts)
    chosen = np.take_along_axis(logits.astype(np.float64), np.where(is_expert, choices, 0), axis=1)
    want = np.where(is_expert, np.exp(chosen) if score == "softmax" else 1 / (1 + np.exp(-chosen)), 0)
    if normalize:
        want /= np.maximum(want.sum(axis=1, keepdims=True), 1e-30)
    np.testing.assert_allclose(weights, 1.5 * want, rtol=1e-5)


@KERNELS
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_experts", [1, 130, MAX_EXPERTS])
def test_scores(num_experts, score, implementation):
    rng = np.random.default_rng(num_experts)
    logits, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((5, num_experts), (num_experts,)))
    compute = functools.partial(SCORE, How(implementation, current_target()), score=score)
    want = np.exp(logits) / np.exp(logits).sum(1, keepdims=True) if score == "softmax" else 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(compute(Score(jnp.asarray(logits))), want, rtol=1e-5)
    biased = compute(Score(jnp.asarray(logits), jnp.asarray(bias)))
    np.testing.assert_allclose(biased, want + bias, rtol=1e-5, atol=1e-6)


@KERNELS
def test_bad_logits_choose_different_experts(implementation):
    logits = jnp.asarray(list(BAD_TOKENS.values()), jnp.float32)
    routing = jgg.route(logits, 8, implementation=implementation)
    np.testing.assert_array_equal(np.sort(routing.topk_indices, axis=1), np.tile(np.arange(8), (len(logits), 1)))
    np.testing.assert_array_equal(routing.group_sizes, np.full(8, len(logits)))


def assert_sorted(experts, num_experts, implementation):
    got = jgg.sort_by_expert(jnp.asarray(experts), num_experts, implementation)
    for array, want in zip(got, reference_sort(experts, num_experts), strict=True):
        np.testing.assert_array_equal(array, want)
        assert array.dtype == jnp.int32


SORTS = {
    "one row": (1, 1, 0, 1),
    "one block": (60, 7, 0, 7),
    "few rows of no expert": (200, 20, -5, 40),
    "as many rows as one program sorts": (256, 130, 0, 130),
    "one row more": (257, 130, 0, 130),
    "few rows, as many experts as fit": (40, MAX_EXPERTS, 0, MAX_EXPERTS),
    "several programs": (1500, 16, 0, 16),
    "several steps of each program": (40_001, 16, 0, 16),
    "experts that have no row": (500, 100, 40, 60),
    "all rows on one expert": (700, 64, 63, 64),
    "rows of no expert": (700, 20, -5, 40),
    "no row of any expert": (70, 20, 20, 40),
    "more experts than a power of two": (300, 130, 0, 130),
    "as many experts as fit": (300, MAX_EXPERTS, 0, MAX_EXPERTS),
    "more experts than fit": (300, MAX_EXPERTS + 1, 0, MAX_EXPERTS + 1),
}


@KERNELS
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "first", "last"),
    [
        pytest.param(*sizes, id=name, marks=[pytest.mark.sweep] * name.startswith("several steps"))
        for name, sizes in SORTS.items()
    ],
)
def test_sort(num_rows, num_experts, first, last, implementation):
    experts = np.random.default_rng(num_rows).integers(first, last, num_rows).astype(np.int32)
    assert_sorted(experts, num_experts, implementation)


@KERNELS
def test_weights_and_gradients_are_those_of_xla(implementation):
    logits, d_weights = random_logits(9, 16), jnp.arange(27, dtype=jnp.float32).reshape(9, 3)
    route = functools.partial(jgg.route, topk=3, score="sigmoid", num_groups=4, topk_groups=2)

    @functools.partial(jax.jit, static_argnums=1)
    def weights_and_gradients(logits, implementation):
        weights, pull_back = jax.vjp(lambda logits: route(logits, implementation=implementation)[0], logits)
        return weights, pull_back(d_weights)

    got, want = (weights_and_gradients(logits, name) for name in (implementation, "xla"))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_array_equal(got[1], want[1])


def assert_same_routing(got, want):
    """The same choices and order, and weights but for rounding: the kernels sum in another order than XLA."""
    np.testing.assert_allclose(got.topk_weights, want.topk_weights, rtol=2e-6)
    jax.tree.map(np.testing.assert_array_equal, got[1:], want[1:])


@KERNELS
def test_under_vmap(implementation):
    logits = jnp.stack([random_logits(12, 16), random_logits(12, 16)[::-1]])
    routing = jax.jit(jax.vmap(functools.partial(jgg.route, topk=4, implementation=implementation)))(logits)
    for i in range(2):
        want = jgg.route(logits[i], 4, implementation="xla")
        assert_same_routing(jax.tree.map(lambda leaf, i=i: leaf[i], routing), want)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize(("num_tokens", "num_experts", "topk"), [(8192, 128, 8), (131_072, 512, 10), (1, 256, 8)])
def test_large_and_small_batches(num_tokens, num_experts, topk):
    logits = jax.random.normal(jax.random.key(0), (num_tokens, num_experts))
    route = jax.jit(functools.partial(jgg.route, topk=topk), static_argnames="implementation")
    first, second, by_xla = (route(logits, implementation=name) for name in ("triton", "triton", "xla"))
    jax.tree.map(np.testing.assert_array_equal, second, first)
    assert_same_routing(by_xla, first)
