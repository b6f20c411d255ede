"""`moe_mlp` with low-rank terms: as with merged weights, and without gradients of the frozen weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from tests.support import moe_oracle
from tests.support.closeness import assert_close, distance
from tests.support.marks import RARELY_INTERPRETED, TRITON, on, thorough_but
from tests.support.moe_runs import forward, indices_of
from tests.support.passes import forward_and_backward

TERMS = {"low_rank_gate_up": "w_gate_up", "low_rank_down": "w_down"}
RANKS = (1, 8, 17, 64, 96)


def make(w_layout="enk", rank=8, dtype="float32", terms=tuple(TERMS), seed=0, **options):
    """The arrays of an MLP by name, its terms by name, dy and the indices of a routing."""
    floats, chosen, dy = moe_oracle.make(w_layout=w_layout, **options)
    arrays = {name: jnp.asarray(array, dtype) for name, array in floats.items() if array is not None}
    rng, low_rank = np.random.default_rng(seed), {}
    for name in terms:
        experts, rows, columns = arrays[TERMS[name]].shape
        left, right = rng.standard_normal((experts, rows, rank)), rng.standard_normal((experts, rank, columns))
        left, right = (jnp.asarray(part * 0.1, dtype) for part in (left, right))
        a, b = (right, left) if w_layout == "enk" else (left, right)
        low_rank[name] = jgg.LowRank(a, b, scale=2.0)
    return arrays, low_rank, jnp.asarray(dy, dtype), indices_of(jnp.asarray(chosen), len(arrays["w_down"]))


def run(arrays, low_rank, dy, indices, **options):
    """y, and the gradients of the arrays and of the terms."""
    both = forward_and_backward(lambda floats: forward(floats, indices, **options))
    return jax.jit(both)(dy, arrays | low_rank)


def merged(arrays, low_rank, w_layout):
    """The arrays with each term merged into its weights, in float32 and differentiable."""
    weights = {TERMS[name]: term.merge(arrays[TERMS[name]], w_layout) for name, term in low_rank.items()}
    return arrays | weights


@RARELY_INTERPRETED
@pytest.mark.parametrize(
    ("w_layout", "biased", "rank", "terms", "activation"),
    [
        ("enk", False, 8, tuple(TERMS), "swiglu"),
        ("ekn", True, 5, tuple(TERMS), "swiglu"),
        ("enk", True, 1, ("low_rank_down",), "swiglu"),
        ("ekn", False, 70, ("low_rank_gate_up",), "ungated_relu_squared"),
    ],
)
def test_as_merged(w_layout, biased, rank, terms, activation, implementation):
    assert_as_merged(w_layout, rank, implementation, activation, terms=terms, biased=biased)


@on(None, TRITON)
@pytest.mark.parametrize("rank", thorough_but((17,), RANKS, pytest.mark.sweep))
def test_rank(rank, implementation):
    assert_as_merged("ekn", rank, implementation)


def assert_as_merged(w_layout, rank, implementation, activation="swiglu", **options):
    arrays, low_rank, dy, indices = make(w_layout, rank, activation=activation, **options)
    options = {"w_layout": w_layout, "precision": "highest", "activation": activation}
    y, gradients = run(arrays, low_rank, dy, indices, implementation=implementation, **options)
    frozen = {TERMS[name] for name in low_rank}

    def of_merged(floats):
        terms = {name: floats[name] for name in low_rank}
        plain = {name: floats[name] for name in arrays}
        return forward(merged(plain, terms, w_layout), indices, implementation="xla", **options)

    want_y, want = jax.jit(forward_and_backward(of_merged))(dy, arrays | low_rank)
    assert_close(y, want_y, 2e-5)
    for name in frozen:
        assert not np.any(gradients[name]), name
    for name, gradient in want.items():
        if name not in frozen:
            assert_close(jax.tree.leaves(gradients[name]), jax.tree.leaves(gradient), 5e-5, name=name)


@on(None, TRITON)
@pytest.mark.parametrize(
    ("w_layout", "quantization"),
    [
        ("enk", jgg.Fp8()),
        ("ekn", None),
        *(pytest.param(*more, marks=pytest.mark.sweep) for more in (("enk", None), ("ekn", jgg.Fp8()))),
    ],
)
def test_bfloat16_and_fp8_bases(w_layout, quantization, implementation):
    assert_near_float32(w_layout, 16, quantization, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", [None, jgg.Fp8()])
@pytest.mark.parametrize("rank", RANKS)
def test_rank_beside_bfloat16_and_fp8(rank, quantization):
    assert_near_float32("ekn", rank, quantization, "triton")


def assert_near_float32(w_layout, rank, quantization, implementation):
    """Adapters are float32; the base is bfloat16, or in FP8 and not made into bfloat16 as a whole."""
    arrays, low_rank, dy, indices = make(w_layout, rank, "bfloat16", tokens=200, features=256, hidden=256, experts=4)
    low_rank = jax.tree.map(lambda array: array.astype(jnp.float32), low_rank)
    options = {"w_layout": w_layout, "implementation": implementation, "quantization": quantization}
    y, got = run(arrays, low_rank, dy, indices, **options)
    in_float32 = {name: array.astype(jnp.float32) for name, array in arrays.items()}
    exact = {"w_layout": w_layout, "implementation": "xla", "precision": "highest"}
    want_y, want = run(in_float32, low_rank, dy.astype(jnp.float32), indices, **exact)
    bound = 0.02 if quantization is None else 0.15
    assert distance(y, want_y) < bound
    for name in ("x", "topk_weights"):
        assert distance(got[name], want[name]) < bound, name
    for name in TERMS:
        for part in "ab":
            one, other = getattr(got[name], part), getattr(want[name], part)
            assert one.dtype == "float32"
            assert distance(one, other) < bound, (name, part)


def test_many_adapters_on_one_base():
    """Under `vmap` over adapters, each element is as if it were alone."""
    arrays, low_rank, _, indices = make(tokens=24)
    _, others, _, _ = make(tokens=24, seed=1)
    both = jax.tree.map(lambda *parts: jnp.stack(parts), low_rank, others)
    got = jax.vmap(lambda terms: forward(arrays | terms, indices))(both)
    for element, terms in enumerate((low_rank, others)):
        assert_close(got[element], forward(arrays | terms, indices), 1e-6)


def test_quantized_base():
    """A base in FP8 is multiplied as what it dequantizes to, and has no gradient."""
    arrays, low_rank, dy, indices = make(tokens=24, features=128, hidden=128)
    base = {name: jgg.quantize_weights(arrays[name]) for name in TERMS.values()}
    y, gradients = run(arrays | base, low_rank, dy, indices)
    dense = {name: array.dequantize(jnp.float32) for name, array in base.items()}
    want_y, want = run(arrays | dense, low_rank, dy, indices)
    assert_close(y, want_y, 1e-6)
    assert_close(jax.tree.leaves(gradients["low_rank_down"]), jax.tree.leaves(want["low_rank_down"]), 1e-6)


def test_errors():
    arrays, low_rank, _, indices = make()
    term = low_rank["low_rank_down"]
    with pytest.raises(ValueError, match=r"^low_rank_gate_up for w \[.*\] in w_layout 'enk' must have a \["):
        forward(arrays | {"low_rank_gate_up": term}, indices)
    with pytest.raises(TypeError, match=r"^low_rank_down must be a LowRank, got tuple"):
        forward(arrays | {"low_rank_down": (term.a, term.b)}, indices)
