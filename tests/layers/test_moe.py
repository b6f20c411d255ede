"""The expert MLP against a NumPy float64 oracle: values and every gradient; and the errors of its arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from tests.support import oracle
from tests.support.closeness import assert_close
from tests.support.marks import EVERYWHERE, PLAIN_JAX, RARELY_INTERPRETED, TRITON, on, thorough_but
from tests.support.moe_oracle import DATA, FUNCTIONS, expected, make
from tests.support.moe_runs import forward, indices_of, run

# test_activations.py has each of them alone; swiglu and clamped_swiglu are in the tests after test_activation
QUICK_ACTIVATIONS = "geglu", "ungated_relu_squared"
LAYOUTS = pytest.mark.parametrize(
    ("biased", "w_layout"),
    [
        (False, "enk"),
        (True, "ekn"),
        pytest.param(False, "ekn", marks=pytest.mark.sweep),
        pytest.param(True, "enk", marks=pytest.mark.sweep),
    ],
)


def assert_right(
    implementation, activation="swiglu", interleaved=False, w_layout="enk", dtype="float32", num_rows=None, **made
):
    """Compares y and the gradients of data that dtype has; weights of choices that are of no expert are NaN."""
    floats, chosen, dy = make(activation, w_layout=w_layout, **made)
    floats, dy = jax.tree.map(lambda array: array.astype(jnp.dtype(dtype)).astype(np.float32), (floats, dy))
    floats["topk_weights"][chosen >= len(floats["w_gate_up"])] = np.nan
    want = expected(floats, chosen, dy, activation, interleaved, w_layout)
    options = {"interleaved": interleaved, "w_layout": w_layout, "num_rows": num_rows}
    y, gradients = run(floats, chosen, dy, implementation, activation, dtype, **options)
    assert y.dtype == dtype
    tolerances = (1e-5, 2e-5) if dtype == "float32" else (1e-2, 2e-2)
    for got, wanted, tolerance in zip((y, gradients), want, tolerances, strict=True):
        assert_close(got, wanted, tolerance)


@on(None, TRITON)
@pytest.mark.parametrize("activation", thorough_but(QUICK_ACTIVATIONS, FUNCTIONS.keys(), pytest.mark.sweep))
def test_activation(activation, implementation):
    assert_right(implementation, activation)


@RARELY_INTERPRETED
def test_gate_and_up_in_turns(implementation):
    assert_right(implementation, "clamped_swiglu", interleaved=True)


@EVERYWHERE
@LAYOUTS
def test_layout_and_bias(biased, w_layout, implementation):
    assert_right(implementation, w_layout=w_layout, biased=biased)


CASES = {
    "one token": {"tokens": 1},
    "no token": {"tokens": 0},
    "one expert": {"experts": 1, "topk": 1},
    "every expert": {"experts": 4, "topk": 4},
    "an expert that nobody chose": {"tokens": 3, "chosen": [[0, 1], [1, 3], [3, 0]]},
    "all tokens on one expert": {"tokens": 4, "topk": 1, "chosen": [[2]] * 4},
    "features of no block": {"features": 17, "hidden": 33},
    "many": {"tokens": 70, "features": 32, "hidden": 48, "experts": 16, "topk": 4},
}


# test_contract.py shows the others of each product at every change
QUICK_CASES = "one token", "no token", "features of no block"


@RARELY_INTERPRETED
@pytest.mark.parametrize("case", thorough_but(QUICK_CASES, CASES, pytest.mark.sweep))
def test_case(case, implementation):
    assert_right(implementation, biased=True, **case)


@RARELY_INTERPRETED
@pytest.mark.parametrize(("biased", "w_layout"), [(True, "ekn"), pytest.param(False, "enk", marks=pytest.mark.sweep)])
def test_fewer_rows_than_choices(biased, w_layout, implementation):
    """With two rows to spare, of choices without an expert."""
    _, chosen, _ = make()
    chosen[::3, 1] = chosen[4] = DATA["experts"]  # no such expert
    num_rows = int(np.sum(chosen < DATA["experts"])) + 2
    assert_right(implementation, w_layout=w_layout, num_rows=num_rows, biased=biased, chosen=chosen)


@on(None, PLAIN_JAX, TRITON)
def test_bfloat16_is_as_right_as_its_products(implementation):
    assert_right(implementation, dtype="bfloat16", tokens=64, features=64, hidden=48, biased=True)


@pytest.mark.gpu
@pytest.mark.parametrize("w_layout", ["enk", "ekn"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_rows", [None, 350])
def test_sizes_of_the_warp_specialized_kernel(num_rows, biased, w_layout):
    """Large enough for it, and for it to gather x and dy as it loads them."""
    sizes = {"tokens": 200, "features": 1032, "hidden": 136}
    _, chosen, _ = make(**sizes)
    chosen.reshape(-1)[np.argsort(chosen, axis=None, kind="stable")[num_rows or chosen.size :]] = DATA["experts"]
    assert_right(
        "triton", w_layout=w_layout, dtype="bfloat16", num_rows=num_rows, biased=biased, chosen=chosen, **sizes
    )


@RARELY_INTERPRETED
def test_no_experts(implementation):
    floats, chosen, dy = make(biased=True, experts=0, chosen=np.zeros((13, 2)))
    y, gradients = run(floats, chosen, dy, implementation)
    for array, like in ((y, floats["x"]), *((gradients[name], floats[name]) for name in floats)):
        np.testing.assert_array_equal(array, np.zeros_like(like))


@RARELY_INTERPRETED
def test_nan_of_a_token_stays_there(implementation):
    floats, chosen, dy = make(biased=True)
    clean, _ = run(floats, chosen, dy, implementation)
    floats["x"][3] = np.nan
    got, grads = run(floats, chosen, dy, implementation)
    others = np.arange(len(dy)) != 3
    np.testing.assert_array_equal(got[others], clean[others])
    assert np.isnan(got[3]).all()
    assert np.isfinite(np.asarray(grads["x"])[others]).all()
    untouched = [e for e in range(DATA["experts"]) if e not in chosen[3]]
    assert np.isfinite(np.asarray(grads["w_gate_up"])[untouched]).all()


@on(None, PLAIN_JAX)
def test_vmap_with_shared_weights(implementation):
    batch = [make(seed=seed) for seed in range(3)]
    shared = {name: array for name, array in make(seed=9)[0].items() if name in ("w_gate_up", "w_down")}

    def loss(shared, own, chosen, dy):
        indices = indices_of(chosen, DATA["experts"])
        return jnp.sum(forward(shared | own, indices, implementation=implementation, precision="highest") * dy)

    own = [{name: floats[name] for name in ("x", "topk_weights")} for floats, _, _ in batch]
    arrays = [
        jax.tree.map(lambda *arrays: jnp.stack(arrays), *parts) for parts in (own, *list(zip(*batch, strict=True))[1:])
    ]
    d_shared, d_own = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(None, 0, 0, 0)))(shared, *arrays)
    for index, (floats, chosen, dy) in enumerate(batch):
        _, want = expected(floats | shared, chosen, dy, "swiglu", False, "enk")
        got = jax.tree.map(lambda array, index=index: array[index], d_shared | d_own)
        assert_close(got, {name: want[name] for name in got}, 2e-5)


def test_oracle_agrees_with_the_grouped_gemm_oracle():
    """The first product of the oracle above equals that in the grouped GEMM oracle."""
    floats, chosen, dy = make(topk=1, tokens=6, chosen=[[0], [0], [1], [3], [4], [4]])
    floats["topk_weights"][:] = 1
    y, _ = expected(floats, chosen, dy, "swiglu", False, "enk")
    sizes = np.bincount(chosen[:, 0], minlength=5)
    pre = oracle.grouped_gemm(floats["x"], floats["w_gate_up"], sizes)
    hidden = FUNCTIONS["swiglu"](*np.split(pre, 2, axis=1))
    np.testing.assert_allclose(oracle.grouped_gemm(hidden, floats["w_down"], sizes), y, rtol=1e-12)


def call(**changes):
    floats, chosen, _ = make()
    arrays = {name: jnp.asarray(floats[name]) for name in ("x", "w_gate_up", "w_down")}
    routing = jgg.Routing(jnp.asarray(floats["topk_weights"]), *indices_of(jnp.asarray(chosen), DATA["experts"]))
    parts = {name.removeprefix("routing."): changes.pop(name) for name in list(changes) if name.startswith("routing.")}
    return jgg.moe_mlp(**{**arrays, "routing": routing._replace(**parts), **changes})


ERRORS = {
    "x": ({"x": jnp.ones(24)}, ValueError, r"x must be \[T, H\], 2-dimensional, got \[24\]"),
    "x of other features": ({"x": jnp.ones((13, 25))}, ValueError, "w_gate_up must have H in-features equal to x's 25"),
    "tokens": ({"x": jnp.ones((12, 24))}, ValueError, r"routing.topk_weights must be \[T, k\] with T equal to x's 12"),
    "w_gate_up": ({"w_gate_up": jnp.ones((5, 40))}, ValueError, r"w_gate_up must be \[E, 2 \* I, H\] or"),
    "odd": ({"w_gate_up": jnp.ones((5, 41, 24))}, ValueError, "w_gate_up must have 2 \\* I out-features .* got 41"),
    "w_down": (
        {"w_down": jnp.ones((5, 24, 21))},
        ValueError,
        r"w_down must have E, I, H = \[5, 20, 24\].*\[5, 21, 24\]",
    ),
    "dtype": ({"w_down": jnp.ones((5, 24, 20), jnp.int8)}, TypeError, "w_down must be one of float32, .*, got int8"),
    "b_gate_up": ({"b_gate_up": jnp.ones((5, 20))}, ValueError, r"b_gate_up must be \[E, N\] = \[5, 40\]"),
    "b_down": ({"b_down": jnp.ones((4, 24))}, ValueError, r"b_down must be \[E, N\] = \[5, 24\]"),
    "activation": (
        {"activation": "swish"},
        ValueError,
        "activation must be an Activation or one of .*'swiglu'.*'swish'",
    ),
    "gated or not": (
        {"activation": "silu"},
        ValueError,
        r"activation must be 'swiglu', which is silu\(gate\) \* up, or 'ungated_silu', which has no gate, got 'silu'",
    ),
    "no gated one": (
        {"activation": "relu_squared"},
        ValueError,
        "activation must be 'ungated_relu_squared', which has no gate, got 'relu_squared'",
    ),
    "array in a partial": (
        {"activation": functools.partial(jax.nn.leaky_relu, negative_slope=jnp.float32(0.1))},
        TypeError,
        "activation must be hashable, and a functools.partial may hold numbers but no arrays, got functools.partial",
    ),
    "implementation": ({"implementation": "cuda"}, ValueError, "implementation must be one of"),
    "layout": ({"w_layout": "ekn"}, ValueError, "w_gate_up must have H in-features equal to x's 24"),
    "expected_rows": ({"expected_rows": 0}, ValueError, "expected_rows must be None or an int of at least 1, got 0"),
    "choices": (
        {"routing.topk_indices": jnp.zeros((13, 1), jnp.int32)},
        ValueError,
        r"routing.topk_indices must be \[T, k\] = \[13, 2\] as routing.topk_weights, got \[13, 1\]",
    ),
    "no choice": ({"routing.topk_weights": jnp.ones((13, 0))}, ValueError, "routing.topk_weights .* k at least 1, got"),
    "weights": (
        {"routing.topk_weights": jnp.ones((13, 2), jnp.int32)},
        TypeError,
        "routing.topk_weights must be one of float32, float16, bfloat16, got int32",
    ),
    "float choices": (
        {"routing.topk_indices": jnp.ones((13, 2))},
        TypeError,
        "routing.topk_indices must be an integer array, got float32",
    ),
    "no sizes": ({"routing.group_sizes": None}, TypeError, "routing.group_sizes must be an array, got None"),
    "sizes": (
        {"routing.group_sizes": jnp.zeros(4, jnp.int32)},
        ValueError,
        r"routing.group_sizes must be \[E\] = \[5\], got \[4\]",
    ),
    "rows": (
        {"routing.gather_indices": jnp.zeros(27, jnp.int32)},
        ValueError,
        r"routing.gather_indices must be \[M\] with M at most T \* k = 26, got \[27\]",
    ),
    "spare_sms": ({"spare_sms": -1}, ValueError, "spare_sms must be an int of at least 0, got -1"),
}


@pytest.mark.parametrize(("changes", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


def test_arguments_of_these_errors_are_otherwise_right():
    assert np.isfinite(np.asarray(call())).all()
