"""The activation kernels against XLA's derivatives of the JAX functions: extreme values, NaN, and functions unknown."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.core.activations import ACTIVATIONS, Activation, clamped_swiglu
from jgg.core.gpu_target import current_target
from jgg.core.quantized import Format, quantize
from jgg.launching.choice import How
from jgg.products.activate import ACTIVATE, ACTIVATE_BACKWARD, Activate, ActivateBackward, Hidden
from tests.support.closeness import distance
from tests.support.marks import KERNELS

OWN = Activation("own", lambda gate, up: jnp.sin(gate) * up)


def run(activation, pre, z, weights, implementation, interleaved=False, scale_hidden=True, in_group=None):
    """hidden, and d pre, hidden and row sums of the backward pass."""
    in_group = jnp.ones(len(z), bool) if in_group is None else in_group
    how, hidden = How(implementation, current_target()), Hidden(activation, interleaved)
    backward = ActivateBackward(pre, z, weights, in_group)
    return [
        ACTIVATE(how, Activate(pre), hidden=hidden).hidden,
        *jax.tree.leaves(ACTIVATE_BACKWARD(how, backward, hidden=hidden, scale_hidden=scale_hidden)),
    ]


def arrays(activation, rows=21, features=19, dtype="float32", scale=2.0):
    rng = np.random.default_rng(features)
    normal = lambda *shape: jnp.asarray(scale * rng.standard_normal(shape), dtype)  # noqa: E731
    weights = jnp.asarray(rng.uniform(0.1, 1, rows), jnp.float32)
    return normal(rows, features * (1 + activation.is_gated)), normal(rows, features), weights


def assert_equal_xla(activation, implementation, inputs, tolerance, **options):
    got, want = (run(activation, *inputs, name, **options) for name in (implementation, "xla"))
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        np.testing.assert_allclose(g.astype(jnp.float32), w.astype(jnp.float32), rtol=tolerance, atol=tolerance)


@KERNELS
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_and_option(name, implementation):
    activation = ACTIVATIONS[name]
    number = list(ACTIVATIONS).index(name)
    options = {"interleaved": number % 2 == 0 and activation.is_gated, "scale_hidden": number % 3 == 0}
    assert_equal_xla(activation, implementation, arrays(activation), 2e-5, **options)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        pytest.param("interpret", "float16", marks=pytest.mark.interpret),
        pytest.param("triton", "float16", marks=pytest.mark.gpu),
        pytest.param("triton", "bfloat16", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("features", [1, 300])
def test_sixteen_bits(features, dtype, implementation):
    inputs = arrays(ACTIVATIONS["swiglu"], 5, features, dtype)
    assert_equal_xla(ACTIVATIONS["swiglu"], implementation, inputs, 2e-2)


@KERNELS
def test_rows_of_no_group_have_no_sum(implementation):
    """Whatever is there; the last of them fill blocks of rows of their own."""
    activation, in_group = ACTIVATIONS["swiglu"], np.arange(300) % 7 > 0
    in_group[200:] = False
    pre, z, weights = (np.asarray(array).copy() for array in arrays(activation, rows=300))
    want = run(activation, pre, z, weights, "xla", in_group=in_group)[1:]
    for array in (pre, z, weights):
        array[~in_group] = np.nan
    got = run(activation, *map(jnp.asarray, (pre, z, weights)), implementation, in_group=jnp.asarray(in_group))[1:]
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g[in_group], w[in_group], rtol=2e-5, atol=2e-5)
    assert (np.asarray(got[-1])[~in_group] == 0).all() and (np.asarray(want[-1])[~in_group] == 0).all()


@KERNELS
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_large_values_and_nan(name, implementation):
    """Finite where XLA is; each NaN only in its own element, and its row's sum."""
    activation = ACTIVATIONS[name]
    special = np.array([-1e30, -200.0, -88.0, -9.0, -0.0, 0.0, 9.0, 88.0, 200.0, 1e5], np.float32)
    gate = np.tile(special, (3, 1))
    gate[1, 4] = np.nan
    up = [np.full((3, 10), 0.5, np.float32)] * activation.is_gated
    pre = jnp.asarray(np.concatenate([gate, *up], axis=1))
    got, want = (run(activation, pre, jnp.ones((3, 10)), jnp.ones(3), by) for by in (implementation, "xla"))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g[::2], w[::2], rtol=2e-5, atol=2e-5)
    hidden, _, _, row_sums = got
    np.testing.assert_array_equal(np.isnan(hidden), np.isnan(gate))
    np.testing.assert_array_equal(np.isnan(row_sums), [False, True, False])


@KERNELS
def test_parameters_of_the_clamped_swiglu(implementation):
    activation = clamped_swiglu(limit=1.25, alpha=0.7)
    assert_equal_xla(activation, implementation, arrays(activation), 2e-5)


@KERNELS
def test_a_function_of_ones_own_is_left_to_xla(implementation):
    assert OWN.curve is None
    got, want = (run(OWN, *arrays(OWN), name) for name in (implementation, "xla"))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_an_activation_has_the_curve_of_its_function():
    known = [activation for activation in ACTIVATIONS.values() if activation.curve]
    assert len(known) >= 10  # others are left to plain JAX
    for activation in known:
        assert dataclasses.replace(activation, name="other").curve == activation.curve
        assert dataclasses.replace(activation, function=OWN.function).curve is None
    assert clamped_swiglu(2, 3).curve == ("clamped_silu", 2.0, 3.0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["swiglu", "clamped_swiglu", "geglu", "ungated_relu_squared", "own"])
@pytest.mark.parametrize(("columns", "interleaved"), [(768, False), (300, False), (128, True)])
def test_in_fp8(name, columns, interleaved):
    activation = ACTIVATIONS.get(name, OWN)
    halves = 2 if activation.is_gated else 1
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(2 * rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    pre, z, weights = normal(37, halves * columns), normal(37, columns), jnp.asarray(rng.uniform(size=37), jnp.float32)
    kept = quantize(pre.reshape(37, halves, -1), (1, 128), Format())
    hidden = Hidden(activation, interleaved and halves == 2, keeps=True, stored_as=Format())
    results = []
    for implementation in ("triton", "xla"):
        how = How(implementation, current_target())
        activated = ACTIVATE(how, Activate(pre), hidden=hidden)
        stored_as = Format(jnp.dtype(jnp.float8_e5m2), power_of_2_scales=True)
        backward, of_gradients = ActivateBackward(kept, z, weights), hidden._replace(stored_as=stored_as)
        d_pre, d, features, sums = ACTIVATE_BACKWARD(how, backward, hidden=of_gradients, scale_hidden=True)
        quantized = activated.hidden, activated.kept, d
        results.append([*(array.dequantize("float32") for array in quantized), d_pre, features, sums])
    for number, (got, want) in enumerate(zip(*results, strict=True)):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        # the third was quantized from bfloat16, whose last bit may differ, to the 3 bits of float8_e5m2
        assert distance(got, want) < (0.05 if number == 2 else 1e-2), number
