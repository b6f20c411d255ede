"""The activation between dense products, by the kernel and in plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.core.activations import ACTIVATIONS, Activation, find_activation
from jgg.linear.activated import activated
from tests.support.closeness import assert_close
from tests.support.marks import EVERYWHERE, INTERPRET, TRITON, on

NAMES = ["swiglu", "clamped_swiglu", "ungated_relu_squared"]


def pre_activation(activation, shape, dtype="float32"):
    columns = shape[-1] * (1 + activation.is_gated)
    return jnp.asarray(np.random.default_rng(0).standard_normal((*shape[:-1], columns)), dtype)


@EVERYWHERE
@pytest.mark.parametrize("shape", [(2, 3, 17), (5, 40), (0, 8)])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(name, shape, implementation):
    activation = ACTIVATIONS[name]
    pre = pre_activation(activation, shape)

    def run(compute, pre):
        y, pull_back = jax.vjp(compute, pre)
        return y, pull_back(jnp.cos(y))

    got = jax.jit(functools.partial(run, lambda pre: activated(pre, activation, implementation)))(pre)
    want = jax.jit(functools.partial(run, activation))(pre)
    assert got[0].shape == shape
    assert_close(got, want, 1e-5)


def in_a_scan(run, pre):
    return jax.lax.scan(jax.checkpoint(lambda none, row: (none, run(row))), None, pre)[1]


def mapped(run, pre):
    return jax.vmap(run)(pre)


def on_each_device(run, pre):
    mesh = jax.make_mesh((1,), ("tokens",), (jax.sharding.AxisType.Auto,))
    return jax.shard_map(run, mesh=mesh, in_specs=jax.P("tokens"), out_specs=jax.P("tokens"))(pre)


@on(None, INTERPRET, TRITON)
@pytest.mark.parametrize("transformed", [in_a_scan, mapped, on_each_device])
def test_transformations(transformed, implementation):
    activation = ACTIVATIONS["swiglu"]
    pre = pre_activation(activation, (3, 4, 16))
    run = functools.partial(activated, activation=activation, implementation=implementation)
    got = jax.jit(jax.value_and_grad(lambda pre: jnp.sum(jnp.sin(transformed(run, pre)))))(pre)
    want = jax.jit(jax.value_and_grad(lambda pre: jnp.sum(jnp.sin(activation(pre.reshape(12, 32))))))(pre)
    assert_close(got, want, 1e-5)


def test_results_have_the_dtype_of_the_pre_activation():
    for activation in (ACTIVATIONS["swiglu"], find_activation(jax.nn.silu), Activation("half", halved)):
        pre = pre_activation(activation, (2, 8), "bfloat16")
        y = activated(pre, activation)
        assert y.dtype == "bfloat16"
        np.testing.assert_array_equal(y, activation(pre).astype("bfloat16"))


def halved(gate, up):
    return gate * up * 0.5
