"""Symmetric products and their product with other matrices, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.linear.symmetric import apply, symmetric_product

GROUPS = (2, 3)
TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def normal(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def expected(left, right=None, scale=1.0, add=None, add_scale=1.0, diagonal=0.0):
    """The product in float64."""
    left, right, add = (None if array is None else np.asarray(array, np.float64) for array in (left, right, add))
    y = scale * left @ np.swapaxes(left if right is None else right, -1, -2) + diagonal * np.eye(left.shape[-2])
    return y if add is None else y + add_scale * add


def assert_close(got, want, dtype):
    tolerance = TOLERANCES[dtype]
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("groups", [(), GROUPS])
def test_a_polynomial_of_a_symmetric_matrix(groups, dtype):
    x = normal(*groups, 7, 11, dtype=dtype) / 4
    compute = jax.jit(symmetric_product)
    gram = compute(x)
    assert_close(gram, expected(x), dtype)
    terms = {"scale": -0.5, "add_scale": 1.5, "diagonal": 3.0}
    p = compute(gram, add=gram, **terms)
    assert_close(p, expected(gram, add=gram, **terms), dtype)
    assert_close(compute(p, gram), expected(p, gram), dtype)
    want = np.asarray(p, np.float64) @ np.asarray(x, np.float64)
    assert_close(jax.jit(apply)(p, x), want, dtype)


def test_the_result_has_the_preferred_dtype():
    x = normal(5, 8, dtype="bfloat16")
    got = symmetric_product(x, diagonal=1.0, preferred_element_type="float32")
    assert_close(got, expected(x, diagonal=1.0), "float32")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"left": jnp.ones(3)}, ValueError, r"left must be matrices, with at least two axes, got \[3\]"),
        ({"left": jnp.ones((3, 4), int)}, TypeError, "left must be one of float32, float16, bfloat16, got int32"),
        (
            {"left": jnp.ones((3, 4)), "right": jnp.ones((3, 5))},
            ValueError,
            r"right must have left's shape \[3, 4\], got \[3, 5\]",
        ),
        (
            {"left": jnp.ones((3, 4)), "right": jnp.ones((3, 4), "float16")},
            TypeError,
            "right must have the dtype of the other operand, float32, got float16",
        ),
        (
            {"left": jnp.ones((2, 3, 4)), "add": jnp.ones((3, 3))},
            ValueError,
            r"add must have left's \[..., N, N\] shape \[2, 3, 3\], got \[3, 3\]",
        ),
        ({"left": jnp.ones((3, 4)), "scale": jnp.ones(2)}, ValueError, r"scale must be a scalar, got \[2\]"),
        ({"left": jnp.ones((3, 4)), "implementation": "cuda"}, ValueError, "implementation must be one of"),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        symmetric_product(**call)


def test_wrong_arguments_of_apply_are_named():
    with pytest.raises(ValueError, match=r"p must have x's \[..., N, N\] shape \[2, 3, 3\], got \[3, 3\]"):
        apply(jnp.ones((3, 3)), jnp.ones((2, 3, 4)))


def test_coefficients_may_be_traced():
    x, coefficients = normal(*GROUPS, 5, 8), jnp.array([[1.0, 0.0], [-0.5, 2.0]])
    step = functools.partial(symmetric_product, x)
    got = jax.lax.map(lambda terms: step(scale=terms[0], diagonal=terms[1]), coefficients)
    for own, (scale, diagonal) in zip(got, coefficients.tolist(), strict=True):
        assert_close(own, expected(x, scale=scale, diagonal=diagonal), "float32")
