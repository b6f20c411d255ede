"""Products with a dense matrix, of one row and of more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.core.matrix import Matrix
from jgg.linear.dense import dense


def dense_product(x, w):
    return dense(x, Matrix(dense=w), implementation="xla")


@pytest.mark.parametrize("shape", [(1, 8), (1, 1, 8), (3, 8), (2, 1, 8)])
def test_it_is_the_product(shape):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(size), jnp.float32) for size in (shape, (8, 5)))
    y, pull_back = jax.vjp(dense_product, x, w)
    expected, expected_pull_back = jax.vjp(jnp.matmul, x, w)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    for gradient, wanted in zip(pull_back(y), expected_pull_back(y), strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5)


@pytest.mark.parametrize(("shape", "rows"), [((1, 1, 8), 2), ((3, 8), 3)])
def test_one_row_is_multiplied_as_two(shape, rows):
    traced = jax.make_jaxpr(dense_product)(jnp.zeros(shape), jnp.zeros((8, 5)))
    (operand,) = [eqn.invars[0].aval for eqn in traced.eqns if eqn.primitive.name == "dot_general"]
    assert operand.shape[-2:] == (rows, 8)
