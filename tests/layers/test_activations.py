"""The activations alone: values and slopes against NumPy, which are equal, and which the kernels know."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.core.activations import ACTIVATIONS, Activation, clamped_swiglu, find_activation
from tests.support.closeness import assert_close
from tests.support.marks import thorough_but
from tests.support.moe_oracle import DATA, FUNCTIONS, activate, clamped, make
from tests.support.moe_runs import forward, indices_of
from tests.support.passes import forward_and_backward

PRE = np.linspace(-9, 9, 20)


def test_names_say_whether_there_is_a_gate():
    assert FUNCTIONS.keys() == ACTIVATIONS.keys()
    assert all(activation.is_gated != name.startswith("ungated_") for name, activation in ACTIVATIONS.items())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_slopes(name):
    hidden, transposed = activate(PRE, name, interleaved=False)
    d_hidden = np.cos(np.arange(len(hidden)))
    got, d_pre = jax.jit(forward_and_backward(ACTIVATIONS[name]))(jnp.asarray(d_hidden), jnp.asarray(PRE))
    assert_close((got, d_pre), (hidden, transposed(d_hidden)), 5e-5)


def test_parameters_of_the_clamped_swiglu():
    got = clamped_swiglu(limit=1.5, alpha=0.7)(jnp.asarray(PRE))
    assert_close(got, clamped(*np.split(PRE, 2), limit=1.5, alpha=0.7))
    assert clamped_swiglu(1.5, 0.7) == clamped_swiglu(1.5, 0.7)  # so that a program compiled for one serves the other


def call(activation):
    """The expert MLP, one operation at a time."""
    floats, chosen, _ = make()
    indices = indices_of(jnp.asarray(chosen), DATA["experts"])
    return forward(jax.tree.map(jnp.asarray, floats), indices, activation=activation)


def traces(make_activation):
    """How often each of three calls traces the function that `make_activation` gives."""
    count = 0

    def curve(gate, up=1.0, power=2):
        nonlocal count
        count += 1
        return gate**power * up

    counts = []
    for _ in range(3):
        call(make_activation(curve))
        counts.append(count)
    return np.diff([0, *counts]).tolist()


@pytest.mark.parametrize(
    "make",
    [
        lambda curve: curve,
        lambda curve: functools.partial(curve, power=3),
        lambda curve: Activation("own", functools.partial(curve, power=3)),
    ],
    ids=["function", "partial", "Activation"],
)
def test_an_equal_activation_is_traced_once(make):
    first, *others = traces(make)
    assert first > 0
    assert others == [0, 0]


def test_a_new_lambda_is_traced_in_each_call():
    assert min(traces(lambda curve: lambda gate: curve(gate))) > 0


@jax.jit
def jitted(gate):
    return jnp.sin(gate)


COPIED = ACTIVATIONS | {
    "parameters": clamped_swiglu(2.0),
    "gate": find_activation(jax.nn.elu),
    "partial": find_activation(functools.partial(jax.nn.leaky_relu, negative_slope=0.1)),
    "ungated": Activation("own", jnp.tanh, is_gated=False),
    "jitted": find_activation(jitted),
}


@pytest.mark.parametrize("name", COPIED)
def test_a_copy_is_equal_and_is_not_compiled_again(name):
    activation = COPIED[name]
    function = jax.jit(lambda activation, pre: activation(pre), static_argnums=0)
    want = function(activation, jnp.ones((2, 6)))
    for copied in copy.copy(activation), copy.deepcopy(activation), pickle.loads(pickle.dumps(activation)):
        assert copied == activation and copied.curve == activation.curve
        np.testing.assert_array_equal(function(copied, jnp.ones((2, 6))), want)
        assert function._cache_size() == 1


def test_a_function_without_a_name_to_import_is_copied_and_not_pickled():
    activation = find_activation(jax.jit(lambda gate: jnp.sin(gate)))
    assert copy.deepcopy(activation) == activation
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(activation)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (jax.nn.silu, "swiglu"),
        (jax.nn.relu, "reglu"),
        (jax.nn.gelu, "geglu_tanh"),
        (functools.partial(jax.nn.gelu, approximate=True), "geglu_tanh"),
        (functools.partial(jax.nn.gelu, approximate=False), "geglu"),
    ],
)
def test_functions_of_the_gate_that_kernels_know(function, name):
    """So that frameworks, which give functions, get the fused kernels."""
    found, known = find_activation(function), ACTIVATIONS[name]
    assert found.curve == known.curve is not None
    np.testing.assert_array_equal(found(jnp.asarray(PRE)), known(jnp.asarray(PRE)))


def test_functions_of_the_gate_that_kernels_do_not_know():
    assert find_activation(jnp.tanh).curve is None
    own = Activation("own", lambda gate, up: jnp.tanh(gate) * up)
    np.testing.assert_array_equal(call(jnp.tanh), call(own))


@pytest.mark.parametrize("is_gated", [True, False])
def test_an_activation_of_a_partial_with_an_array(is_gated):
    function = functools.partial(jax.nn.leaky_relu, negative_slope=np.float32([0.1]))
    with pytest.raises(TypeError, match=r"function must be hashable, and a functools\.partial may hold numbers"):
        Activation("own", function, is_gated=is_gated)


@pytest.mark.parametrize(
    "name", thorough_but(("swiglu", "geglu", "ungated_gelu", "partial"), [*ACTIVATIONS, "partial"], pytest.mark.sweep)
)
def test_derivatives_under_shard_map_and_vmap(name):
    """First and second ones, under both transformations together."""
    exact_gelu = functools.partial(jax.nn.gelu, approximate=False)
    activation = find_activation(exact_gelu if name == "partial" else name)
    plain = (lambda gate, up: exact_gelu(gate) * up) if activation.curve == ("gelu", 0.0, 0.0) else activation.function
    if name == "ungated_gelu":
        plain = exact_gelu

    def derivatives(function):
        def first(pre):
            return jax.grad(lambda pre: jnp.sum(jnp.sin(function(pre))))(pre)

        return jax.jit(lambda pre: (first(pre), jax.grad(lambda pre: jnp.sum(jnp.cos(first(pre))))(pre)))

    def on_halves(pre):
        return plain(*jnp.split(pre, 2, axis=-1)) if activation.is_gated else plain(pre)

    pre = jnp.linspace(-12, 12, 3 * 4 * 10).reshape(3, 4, 10)
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(jax.vmap(derivatives(activation)), mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))
    got, want = sharded(pre), jax.vmap(derivatives(on_halves))(pre)
    for order, one, other in zip((1, 2), got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, err_msg=f"order {order}")
