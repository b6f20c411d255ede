"""Arrays of more than 2**32 elements: the layer and the weights of DeepSeek-V3, whole, and a layer of very many rows.

Each is compared where addresses are largest, with the oracles of a few tokens and of the last expert. The small sizes
check these tests themselves.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from tests.support import moe_oracle
from tests.support.passes import forward_and_backward

GPU = (pytest.mark.gpu, pytest.mark.large)
PRODUCTS = {
    # E, K, N, rows; the first expert has most rows, the others two each
    "small": (5, 24, 40, 40),
    "deepseek-v3-up": (256, 7168, 4096, 640),
    "many-rows": (3, 1040, 1040, 2**21 + 70),  # x, y and dy pass 2**31 elements
}
LAYERS = {
    # tokens, features, hidden, experts, topk
    "small": (40, 24, 20, 6, 2),
    "deepseek-v3": (512, 7168, 2048, 256, 2),
    "many-rows": (2**17, 256, 1056, 16, 8),  # 2**20 rows of 2,112 features before the activation
}


def on(cases):
    for name, sizes in cases.items():
        small = name == "small"
        yield pytest.param("xla" if small else "triton", *sizes, id=name, marks=() if small else GPU)


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(key, shape, scale=1.0):
    """Random bfloat16 [E, ...], one expert after the other: no array of wider numbers is as large."""

    def one(key):
        return (scale * jax.random.normal(key, shape[1:])).astype(jnp.bfloat16)

    return jax.lax.map(one, jax.random.split(key, shape[0]))


def float64(array):
    return np.asarray(array).astype(np.float64)


def assert_near(got, expected, tolerance=8e-3):
    """Compares with the oracle; the default tolerance allows for the rounding of bfloat16, which has 8 bits."""
    error = np.abs(float64(got) - expected)
    assert np.max(error) <= tolerance * np.max(np.abs(expected))


@pytest.mark.parametrize("permuted", [False, True], ids=["in-order", "permuted"])
@pytest.mark.parametrize(("implementation", "experts", "in_features", "out_features", "rows"), [*on(PRODUCTS)])
def test_products(implementation, experts, in_features, out_features, rows, permuted):
    """In expert order, or with the last rows first in token order."""
    keys = jax.random.split(jax.random.key(0), 3)
    w = normal(keys[0], (experts, out_features, in_features))
    x, dy = normal(keys[1], (rows, in_features)), normal(keys[2], (rows, out_features))
    first = rows - 2 * (experts - 1) - 3  # and 3 rows of no expert
    group_sizes = jnp.full(experts, 2, jnp.int32).at[0].set(first)
    options = {"implementation": implementation, "group_sizes": group_sizes, "gather_indices": None}
    if permuted:
        options |= {"gather_indices": jnp.arange(rows, dtype=jnp.int32)[::-1], "permute_x": True, "permute_y": True}
    y = jax.jit(functools.partial(jgg.grouped_gemm_forward, **options))(x, w)
    dx = jax.jit(functools.partial(jgg.grouped_gemm_dx, **options))(dy, w)
    of_no_expert = slice(0, 3) if permuted else slice(rows - 3, rows)
    assert not jnp.any(y[of_no_expert]) and not jnp.any(dx[of_no_expert])
    dw = jax.jit(functools.partial(jgg.grouped_gemm_dw, **options))(x, dy)
    for expert in {0, experts // 2, experts - 2, experts - 1}:
        start, count = (0, min(first, 300)) if expert == 0 else (first + 2 * (expert - 1), 2)
        own = slice(rows - start - count, rows - start) if permuted else slice(start, start + count)
        matrix, some_x, some_dy = float64(w[expert]), float64(x[own]), float64(dy[own])
        assert_near(y[own], some_x @ matrix.T)
        assert_near(dx[own], some_dy @ matrix)
        if expert != 0 or count == first:  # of more rows the sum would take a minute on a CPU
            assert_near(dw[expert], some_dy.T @ some_x)


@pytest.mark.parametrize(("implementation", "tokens", "features", "hidden", "experts", "topk"), [*on(LAYERS)])
def test_layer(implementation, tokens, features, hidden, experts, topk):
    keys = iter(jax.random.split(jax.random.key(0), 6))
    floats = {
        "x": normal(next(keys), (tokens, features)),
        "w_gate_up": normal(next(keys), (experts, 2 * hidden, features), features**-0.5),
        "w_down": normal(next(keys), (experts, features, hidden), hidden**-0.5),
        "topk_weights": jax.random.uniform(next(keys), (tokens, topk), minval=0.1),
    }
    dy = normal(next(keys), (tokens, features))
    # the last expert only gets the last tokens, so that all that it does can be computed here
    own = 4
    chosen = np.argsort(np.random.default_rng(0).random((tokens, experts - 1)), axis=1)[:, :topk].astype(np.int32)
    chosen[-own:, 0] = experts - 1
    group_sizes, gather_indices = jgg.sort_by_expert(jnp.asarray(chosen), experts)

    def forward(floats):
        routing = jgg.Routing(floats["topk_weights"], jnp.asarray(chosen), group_sizes, gather_indices)
        arrays = {name: array for name, array in floats.items() if name != "topk_weights"}
        return jgg.moe_mlp(**arrays, routing=routing, implementation=implementation)

    some_dy = float64(dy[-own:])
    y, gradients = jax.jit(forward_and_backward(forward), donate_argnums=0)(dy, floats)

    # the last tokens, with those experts only that they have
    some = chosen[-own:]
    present = np.unique(some)
    few = {name: float64(floats[name][-own:]) for name in ("x", "topk_weights")}
    few |= {name: np.stack([float64(floats[name][e]) for e in present]) for name in ("w_gate_up", "w_down")}
    few |= {"b_gate_up": None, "b_down": None}
    expected_y, expected = moe_oracle.expected(few, np.searchsorted(present, some), some_dy, "swiglu", False, "enk")
    assert_near(y[-own:], expected_y, 1e-2)
    for name in ("x", "topk_weights"):
        assert_near(gradients[name][-own:], expected[name], 2e-2)
    for name in ("w_gate_up", "w_down"):
        assert_near(gradients[name][experts - 1], expected[name][-1], 2e-2)  # which only these tokens chose
    assert all(bool(jnp.all(jnp.isfinite(g[0]))) for g in gradients.values())
