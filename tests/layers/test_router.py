"""The router's projection against float64, and that tokens in bfloat16 are not converted."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from tests.support.closeness import distance, float64
from tests.support.marks import thorough_but
from tests.support.passes import forward_and_backward

T, H, E = 64, 96, 10


def arrays(x_dtype="bfloat16", w_dtype="float32"):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"x": (T, H), "w_router": (H, E), "bias": (E,), "d_logits": (T, E)}
    floats = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
    dtypes = {"x": x_dtype, "w_router": w_dtype, "bias": w_dtype, "d_logits": "float32"}
    return {name: array.astype(dtypes[name]) for name, array in floats.items()}


@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"),
    [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float16"), ("float32", "float32")],
)
def test_against_float64(x_dtype, w_dtype):
    x, w, bias, d_logits = arrays(x_dtype, w_dtype).values()
    logits, dx, dw, dbias = jax.jit(forward_and_backward(jgg.router_logits))(d_logits, x, w, bias)
    x64, w64, d64 = (float64(array) for array in (x, w, d_logits))
    assert logits.dtype == jnp.float32
    assert distance(logits, x64 @ w64 + float64(bias)) < 1e-5
    for got, want, like in ((dx, d64 @ w64.T, x), (dw, x64.T @ d64, w), (dbias, d64.sum(0), bias)):
        assert got.dtype == like.dtype
        assert distance(got, want) < (1e-5 if like.dtype == jnp.float32 else 2.0**-8)


@pytest.mark.gpu
def test_on_a_gpu():
    x, w, _, d_logits = arrays().values()
    logits, dx, dw = forward_and_backward(jax.jit(jgg.router_logits))(d_logits, x, w)
    x64, w64, d64 = (float64(array) for array in (x, w, d_logits))
    for got, want, bound in ((logits, x64 @ w64, 1e-5), (dx, d64 @ w64.T, 2.0**-8), (dw, x64.T @ d64, 1e-5)):
        assert distance(got, want) < bound


def test_tokens_are_not_converted():
    @jax.jit
    def gradients(x, w, d_logits):
        return jax.vjp(jgg.router_logits, x, w)[1](d_logits)

    def on_a_gpu():
        return gradients.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()

    x, w, _, d_logits = arrays().values()
    arguments = x, w, d_logits
    in_float32 = f"tensor<{T}x{H}xf32>"
    assert in_float32 not in on_a_gpu()
    with jax.default_matmul_precision("highest"):
        assert in_float32 in on_a_gpu()


def test_bad_numbers_stay_with_their_token_or_expert():
    x, w, _, _ = arrays().values()
    x = x.at[3, 5].set(jnp.nan).at[7, 2].set(jnp.inf)
    w = w.at[4, 1].set(jnp.inf)
    logits = jgg.router_logits(x, w)
    assert jnp.all(jnp.isnan(logits[3])) and not jnp.any(jnp.isfinite(logits[jnp.array([7]), :]))
    others = jnp.delete(jnp.delete(logits, jnp.array([3, 7]), axis=0), 1, axis=1)
    assert jnp.all(jnp.isfinite(others)) and not jnp.any(jnp.isfinite(logits[:, 1]))


def test_infinity_is_not_made_nan_by_low_terms_that_are_zero():
    x, w, _, d_logits = arrays(w_dtype="bfloat16").values()
    x = x.at[3, 5].set(jnp.inf).at[7, 2].set(-jnp.inf)
    w, d_logits = w.astype(jnp.float32), d_logits.astype(jnp.bfloat16).astype(jnp.float32)
    logits, _, dw = forward_and_backward(jgg.router_logits)(d_logits, x, w)
    with np.errstate(invalid="ignore"):
        want, want_dw = float64(x) @ float64(w), float64(x).T @ float64(d_logits)
    for got, wanted in ((logits, want), (dw, want_dw)):
        assert np.isinf(wanted).any()
        infinite = ~np.isfinite(wanted)
        np.testing.assert_array_equal(np.asarray(got)[infinite], wanted[infinite])
        assert np.isfinite(np.asarray(got)[~infinite]).all()


def test_large_weights_stay_finite():
    largest = jnp.full((1, 1), 3.4e38)  # which rounds to infinity in bfloat16
    assert jnp.isfinite(jgg.router_logits(jnp.ones((1, 1), jnp.bfloat16), largest))


def test_vmap_and_shard_map():
    x, w, _, d_logits = arrays().values()
    gradient = jax.grad(lambda w, x, d: jnp.sum(jgg.router_logits(x, w) * d))
    whole = gradient(w, x, d_logits)
    halves = jax.vmap(gradient, (None, 0, 0))(w, x.reshape(2, -1, H), d_logits.reshape(2, -1, E))
    np.testing.assert_allclose(halves.sum(0), whole, rtol=1e-4, atol=1e-4)
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.P(), jax.P("a"), jax.P("a")
    mapped = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=jax.P()))
    np.testing.assert_allclose(mapped(w, x, d_logits), whole, rtol=1e-6)


@jax.jit
def to_second_order(x, w, d_logits):
    def gradients(x, w, d_logits):
        return forward_and_backward(jgg.router_logits)(d_logits, x, w)

    def loss(*arrays):
        return sum(jnp.sum(jnp.sin(part.astype(jnp.float32))) for part in gradients(*arrays))

    return gradients(x, w, d_logits), jax.grad(loss, (0, 1, 2))(x, w, d_logits)


@pytest.mark.parametrize("w_dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    "batched",
    thorough_but(["x", "w d_logits"], ["x", "w", "d_logits", "x w", "x d_logits", "w d_logits"], pytest.mark.sweep),
)
def test_vmap_over_some_arguments(batched, w_dtype):
    """Checks logits, their gradients and the second derivatives, for tokens in bfloat16."""
    x, w, _, d_logits = arrays(w_dtype=w_dtype).values()
    one = {"x": x, "w": w, "d_logits": d_logits}
    axes = [0 if name in batched.split() else None for name in one]
    batch = [jnp.stack([a, -a]) if axis == 0 else a for a, axis in zip(one.values(), axes, strict=True)]
    got = jax.vmap(to_second_order, axes)(*batch)
    for index in range(2):
        want = to_second_order(*(a if axis is None else a[index] for a, axis in zip(batch, axes, strict=True)))
        for part, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert distance(part[index], float64(wanted)) < 2.0**-7


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto])
@pytest.mark.parametrize("spec", [jax.P("a"), jax.P()])
def test_tokens_split_over_an_axis(kind, spec):
    x, w, _, d_logits = arrays().values()
    gradient = jax.jit(jax.grad(lambda x, w, d: jnp.sum(jgg.router_logits(x, w) * d), (0, 1)))
    whole = gradient(x, w, d_logits)
    mesh = jax.make_mesh((1,), ("a",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x, d_logits = (jax.device_put(array, jax.NamedSharding(mesh, spec)) for array in (x, d_logits))
        w = jax.device_put(w, jax.NamedSharding(mesh, jax.P()))
        split = gradient(x, w, d_logits)
    for got, want in zip(split, whole, strict=True):
        np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))


def test_second_and_forward_derivatives():
    x, w, _, _ = arrays().values()

    def loss(w, implementation):
        return jnp.sum(jnp.sin(jgg.router_logits(x, w, implementation=implementation)))

    def curvature(w, implementation):
        return jnp.sum(jax.grad(loss)(w, implementation) ** 2)

    got, want = (jax.grad(curvature)(w, implementation) for implementation in (None, "xla"))
    np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2 * float(jnp.max(jnp.abs(want))))
    _, tangent = jax.jvp(lambda w: loss(w, "xla"), (w,), (jnp.ones_like(w),))
    np.testing.assert_allclose(tangent, jnp.sum(jax.grad(loss)(w, "xla")), rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": jnp.ones(H)}, ValueError, "x must be [T, H]"),
        ({"w_router": jnp.ones((H + 1, E))}, ValueError, f"w_router must be [H, E] with H = {H}, got [{H + 1}, {E}]."),
        ({"w_router": jnp.ones((H, E), jnp.int32)}, TypeError, "w_router must be a float array, got int32."),
        ({"bias": jnp.ones(E + 1)}, ValueError, f"bias must be [E] = [{E}], got [{E + 1}]."),
        ({"bias": jnp.ones(E, bool)}, TypeError, "bias must be a float array, got bool."),
    ],
)
def test_errors(changes, error, message):
    given = arrays() | changes
    with pytest.raises(error, match=re.escape(message)):
        jgg.router_logits(given["x"], given["w_router"], given["bias"])
