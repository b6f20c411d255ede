"""Generated layers, routers and ragged_dot: any choices and offsets, against the oracles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jgg
from jgg.core.activations import ACTIVATIONS
from tests.support import marks, moe_oracle, oracle
from tests.support.cases import MAX_INT, MIN_INT
from tests.support.closeness import assert_close
from tests.support.generated import examples, on
from tests.support.moe_runs import run
from tests.support.passes import forward_and_backward
from tests.support.routers import SIGMOID, assert_routed, deepseek_v3, mixtral, olmoe, qwen3, reference_sort

IMPLEMENTATIONS = marks.on("xla", None, marks.TRITON)
INT32 = st.one_of(st.integers(-2, 20), st.integers(MIN_INT, MAX_INT))
SEEDS = st.integers(0, 2**32 - 1)


def static_mlp(number):
    """Sizes and options of a layer."""
    rng = np.random.default_rng([2, number])

    def choose(*values):
        return values[rng.integers(len(values))]

    experts = choose(1, 2, 5, 17)
    sizes = {
        "tokens": choose(1, 5, 13) if number % 8 != 3 else 0,
        "features": choose(1, 8, 17, 24),
        "hidden": choose(1, 12, 20),
    }
    sizes |= {"experts": experts, "topk": choose(1, 2, 3)}
    options = {"activation": choose(*moe_oracle.FUNCTIONS), "w_layout": choose("enk", "ekn")}
    options["interleaved"] = bool(rng.integers(2)) and ACTIVATIONS[options["activation"]].is_gated
    return sizes, options, bool(rng.integers(2))


@pytest.mark.parametrize(
    ("implementation", "number"), [*on("xla", 3), *on(None, 4), *on("interpret", 1), *on("triton", 12)]
)
def test_moe_mlp(implementation, number):
    """With choices of no expert, whose weights are NaN."""
    sizes, options, biased = static_mlp(number)

    @examples(4 if implementation == "interpret" else 6)
    @given(SEEDS, st.lists(st.tuples(st.integers(0, 38), INT32), max_size=4))
    def check(seed, replaced):
        rng, experts = np.random.default_rng(seed), sizes["experts"]
        chosen = rng.integers(0, experts + 1, (sizes["tokens"], sizes["topk"])).astype(np.int32)  # or of none
        for at, expert in replaced:
            chosen.reshape(-1)[at : at + 1] = expert
        made = {name: options[name] for name in ("activation", "w_layout")}
        floats, _, dy = moe_oracle.make(**made, biased=biased, seed=seed, chosen=chosen, **sizes)
        is_chosen = (chosen >= 0) & (chosen < experts)
        floats["topk_weights"][~is_chosen] = np.nan
        got = run(floats, chosen, dy, implementation, **options)
        expected = moe_oracle.expected(floats, np.where(is_chosen, chosen, experts), dy, **options)
        assert_close(got, expected, 2e-5, least_scale=1)

    check()


@IMPLEMENTATIONS
def test_sort_by_expert(implementation):
    sort = jax.jit(jgg.sort_by_expert, static_argnums=(1, 2))
    experts_and_rows = st.sampled_from([(1, 1), (3, 40), (300, 64), (17, 0)])

    @examples(40)
    @given(experts_and_rows, SEEDS, st.lists(st.tuples(st.integers(0, 63), INT32), max_size=4))
    def check(experts_and_rows, seed, replaced):
        experts, rows = experts_and_rows
        chosen = np.random.default_rng(seed).integers(0, experts, rows).astype(np.int32)
        for at, expert in replaced:
            chosen[at : at + 1] = expert
        got = sort(jnp.asarray(chosen), experts, implementation)
        jax.tree.map(np.testing.assert_array_equal, got, tuple(map(np.asarray, reference_sort(chosen, experts))))

    check()


ROUTERS = (
    (mixtral, {}, {"score": "topk_softmax"}, (9, 8, 3)),
    (qwen3, {}, {}, (9, 300, 8)),
    (olmoe, {}, {"normalize": False}, (1, 17, 17)),
    (
        deepseek_v3,
        {"scale": 2.5, "num_groups": 4, "topk_groups": 2, "selection_bias": np.zeros(16)},
        SIGMOID,
        (9, 16, 4),
    ),
)


@IMPLEMENTATIONS
def test_route(implementation):
    """Logits with many ties; they are eighths, so that float32 and float64 order them alike."""
    static = ("topk", "score", "normalize", "scale", "num_groups", "topk_groups", "implementation")
    route = jax.jit(jgg.route, static_argnames=static)

    @examples(40)
    @given(st.sampled_from(ROUTERS), SEEDS, st.integers(0, 40))
    def check(router, seed, spread):
        family, options, more, (tokens, experts, topk) = router
        eighths = np.random.default_rng(seed).integers(-spread, spread + 1, (tokens, experts))
        logits = (eighths / 8).astype(np.float32)
        given_options = options | ({"selection_bias": jnp.zeros(16)} if "selection_bias" in options else {})
        routing = route(jnp.asarray(logits), topk, implementation=implementation, **given_options, **more)
        assert_routed(routing, logits, topk, family, options)

    check()


@functools.cache
def _ragged_dot(implementation):
    @jax.jit
    def run(lhs, rhs, group_sizes, group_offset, dy):
        options = {"precision": "highest", "group_offset": group_offset, "implementation": implementation}
        return forward_and_backward(functools.partial(jgg.ragged_dot, group_sizes=group_sizes, **options))(dy, lhs, rhs)

    return run


@IMPLEMENTATIONS
def test_ragged_dot(implementation):
    shapes = st.sampled_from([(0, 8, 5, 3, 4), (1, 1, 1, 1, 1), (40, 24, 17, 3, 5), (64, 16, 24, 30, 300)])

    @examples(30)
    @given(shapes, SEEDS, st.lists(st.tuples(st.integers(0, 299), INT32), max_size=3), st.integers(0, MAX_INT))
    def check(shape, seed, replaced, group_offset):
        rows, features, columns, matrices, groups = shape
        rng = np.random.default_rng(seed)
        lhs, rhs, dy = (
            rng.standard_normal(shape).astype(np.float32)
            for shape in ((rows, features), (matrices, features, columns), (rows, columns))
        )
        group_sizes = rng.multinomial(rows, rng.dirichlet(np.full(groups, 0.5))).astype(np.int32)
        for at, size in replaced:
            group_sizes[at : at + 1] = size
        # an offset past all groups in half of the examples only
        first = group_offset % (groups + 1) if seed % 2 else group_offset
        got = _ragged_dot(implementation)(*map(jnp.asarray, (lhs, rhs, group_sizes, np.int32(first), dy)))
        y = oracle.ragged_dot(lhs, rhs, group_sizes, first)
        d_lhs = oracle.ragged_dot(dy, rhs.swapaxes(1, 2), group_sizes, first)
        d_rhs = np.zeros(rhs.shape)
        ranges = oracle.group_ranges(group_sizes, rows)[first : first + matrices]
        for group, own in enumerate(ranges):
            d_rhs[group] = lhs[own].astype(np.float64).T @ dy[own]
        assert_close(got, (y, d_lhs, d_rhs), 2e-5, least_scale=1)

    check()
