"""The barrier that gradients' products are ordered by: values pass it, and those that nobody uses are not computed."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters.partial_eval import dce_rules

from jgg.primitives.barrier import barrier

X = jnp.arange(1.0, 5.0)


def dear(x):
    """What is dropped or kept, to be found in a program."""
    return jnp.sin(x)


def in_scan(function):
    return lambda x: jax.lax.scan(lambda carry, own: (carry, function(own)), 0, x[None])[1][0]


WAYS = {
    "alone": lambda function: function,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda function: lambda x: jax.vmap(function)(x[None])[0],
    "scan": in_scan,
}


@pytest.mark.parametrize("way", WAYS)
def test_what_nobody_uses_is_dropped(way):
    def lowered(select):
        return jax.jit(WAYS[way](lambda x: select(barrier((dear(x), None, x + 1))))).lower(X).as_text()

    unused, used = lowered(lambda values: values[2]), lowered(lambda values: values[0] + values[2])
    assert "sine" not in unused and "sine" in used
    # what is left of each is still behind one barrier
    operands = [re.findall(r"optimization_barrier (%\S+(?:, %\S+)*) :", text) for text in (unused, used)]
    assert [len(text.split(",")) for (text,) in operands] == [1, 2]


def test_derivatives():
    def function(x, y):
        x, y = barrier((jnp.sin(x), y))
        return jnp.sum(x * y)

    y = X + 1
    gradients = jax.grad(function, argnums=(0, 1))
    for transform in (lambda f: f, jax.jit):
        got = transform(gradients)(X, y)
        np.testing.assert_allclose(got[0], jnp.cos(X) * y, rtol=1e-6)
        np.testing.assert_allclose(got[1], jnp.sin(X), rtol=1e-6)
    np.testing.assert_allclose(jax.hessian(lambda x: function(x, y))(X), np.diag(-jnp.sin(X) * y), rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(function, (X, y), (X, X))[1], jnp.sum(jnp.cos(X) * X * y + jnp.sin(X) * X))


def test_explicit_axes_and_shard_map():
    """The types of the values stay unchanged."""
    mesh = jax.make_mesh((1,), ("a",))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.P("a"))
        assert jax.typeof(barrier(x)) == jax.typeof(x)
        assert jax.jit(barrier)(x).sharding == x.sharding
        each = jax.shard_map(lambda x: barrier((x, dear(x)))[0], in_specs=jax.P("a"), out_specs=jax.P("a"))
        np.testing.assert_array_equal(each(x), X)


def test_rule_for_dead_code_as_each_jax_calls_it():
    """JAX 0.11 hands it which results are used and the equation; JAX 0.12, between the two, what is read later."""
    (equation,) = jax.make_jaxpr(lambda x: barrier((x, x + 0))[:1])(X).eqns[-1:]
    rule: Callable = dce_rules[equation.primitive]
    for between in ((), ([True, True],)):
        used, left = rule([True, False], *between, equation)
        assert used == [True, False]
        assert left.invars == equation.invars[:1] and left.outvars == equation.outvars[:1]
        assert rule([False, False], *between, equation) == ([False, False], None)
