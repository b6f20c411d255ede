"""LowRank against float64: the delta, merging and unmerging in both layouts, transformations and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from tests.support.passes import forward_and_backward

E, N, K, R = 3, 10, 7, 2
LAYOUTS = pytest.mark.parametrize("w_layout", ["enk", "ekn"])


def make(w_layout, dtype=np.float32, scale=0.75):
    """w, a LowRank and their sum in float64, all in a layout."""
    rng = np.random.default_rng(0)
    w, a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((E, N, K), (E, R, K), (E, N, R)))
    total = w.astype(float) + scale * np.einsum("enr,erk->enk", b.astype(float), a.astype(float))
    if w_layout == "ekn":
        w, a, b, total = (array.swapaxes(1, 2) for array in (w, a, b, total))
    return w, jgg.LowRank(a, b, scale), total


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@LAYOUTS
def test_merge_adds_the_delta_and_unmerge_takes_it_away(w_layout, dtype):
    w, low_rank, total = make(w_layout, dtype)
    merged = low_rank.merge(w, w_layout)
    assert merged.dtype == dtype
    rounding = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(merged.astype(np.float32), total, rtol=rounding, atol=1e-6)
    back = low_rank.unmerge(merged, w_layout)
    assert back.dtype == dtype
    np.testing.assert_allclose(
        back.astype(np.float32), w.astype(np.float32), rtol=0, atol=2 * rounding * abs(total).max()
    )
    delta = low_rank.delta(w_layout)
    assert delta.dtype == np.float32
    np.testing.assert_allclose(delta, total - w.astype(float), rtol=1e-6, atol=1e-6)


@LAYOUTS
def test_gradients_are_those_of_the_formula(w_layout):
    w, low_rank, total = make(w_layout)
    dw = np.random.default_rng(1).standard_normal(w.shape).astype(np.float32)

    def merge(w, low_rank):
        return low_rank.merge(w, w_layout)

    merged, d_w, d_low_rank = jax.jit(forward_and_backward(merge))(dw, w, low_rank)
    np.testing.assert_allclose(merged, total, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(d_w, dw)
    left, right = ("enr,enk->erk", "erk,enk->enr") if w_layout == "enk" else ("ern,ekn->ekr", "ekr,ekn->ern")
    assert d_low_rank.scale == low_rank.scale
    for got, formula, other in ((d_low_rank.a, left, low_rank.b), (d_low_rank.b, right, low_rank.a)):
        want = low_rank.scale * np.einsum(formula, other.astype(float), dw.astype(float))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_vmap_over_terms_of_one_base():
    w, low_rank, _ = make("ekn")
    many = jax.tree.map(lambda array: np.stack([array, -array, 2 * array]), low_rank)
    merged = jax.vmap(lambda own: own.merge(w, "ekn"))(many)
    for index in range(3):
        own = jax.tree.map(lambda array, index=index: array[index], many)
        np.testing.assert_allclose(merged[index], own.merge(w, "ekn"), rtol=1e-6, atol=1e-6)


def test_is_a_pytree_of_two_arrays():
    _, low_rank, _ = make("enk")
    leaves, structure = jax.tree.flatten(low_rank)
    assert [leaf.shape for leaf in leaves] == [(E, R, K), (E, N, R)]
    assert jax.tree.unflatten(structure, leaves).scale == 0.75
    assert repr(low_rank) == "LowRank(a=float32[3, 2, 7], b=float32[3, 10, 2], scale=0.75)"
    assert "scale=0.75" in repr(jax.tree.map(type, low_rank))


W, LOW_RANK, _ = make("enk")
A, B = LOW_RANK.a, LOW_RANK.b
WRONG = {
    "rank of b": ((A, B[..., :1]), W, "enk", r"w_layout 'enk' must have a \[3, 1, 7\] .*got a \[3, 2, 7\]"),
    "rows of w": ((A, B), W[:, :9], "enk", r"LowRank for w \[3, 9, 7\] .* and b \[3, 9, 2\], got .* \[3, 10, 2\]"),
    "experts": ((A[:2], B[:2]), W, "enk", r"must have a \[3, 2, 7\] and b \[3, 10, 2\], got a \[2, 2, 7\]"),
    "the other layout": ((A, B), W, "ekn", r"LowRank for w \[3, 10, 7\] in w_layout 'ekn' must have"),
    "an unknown layout": ((A, B), W, "kn", r"w_layout must be one of \('enk', 'ekn'\), got 'kn'"),
    "axes of a": ((A[0], B), W, "enk", r"LowRank\.a must be \[E, r, K\], 3-dimensional, got \[2, 7\]"),
    "axes of w": ((A, B), W[0], "enk", r"w must be \[E, N, K\] or \[E, K, N\], 3-dimensional, got \[10, 7\]"),
    "integers": ((A.astype(int), B), W, "enk", r"LowRank\.a must be a float array, got int"),
    "an integer w": ((A, B), W.astype(int), "enk", r"w must be a float array, got int"),
    "no array": ((A, None), W, "enk", r"LowRank\.b must be an array, got None"),
    "an infinite scale": ((A, B, float("inf")), W, "enk", r"LowRank\.scale must be a finite number, got inf"),
    "a scale of text": ((A, B, "1"), W, "enk", r"LowRank\.scale must be a number, got '1'"),
    "quantized": ((A, B), jgg.QuantizedArray(W, W), "enk", "w must be a float array, such as .*, got a QuantizedArray"),
}


def test_a_delta_needs_no_weights_to_be_checked():
    with pytest.raises(ValueError, match=r"^LowRank in w_layout 'enk' must have a \[3, 1, 7\] .*got a \[3, 2, 7\]"):
        jgg.LowRank(A, B[..., :1]).delta()


@pytest.mark.parametrize(("arrays", "w", "w_layout", "message"), WRONG.values(), ids=WRONG)
def test_errors_name_the_array(arrays, w, w_layout, message):
    for add in (jgg.LowRank(*arrays).merge, jgg.LowRank(*arrays).unmerge):
        with pytest.raises((TypeError, ValueError), match=message):
            add(w, w_layout)
