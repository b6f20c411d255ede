"""Weights of another float dtype than x: multiplied in the dtype of x, with gradients in their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals  # jax.ad_checkpoint only prints them

import jgg
from jgg.layers import MoELayer
from tests.support import moe_oracle
from tests.support.closeness import distance
from tests.support.marks import PLAIN_JAX, TRITON, on, thorough_but
from tests.support.moe_runs import forward, indices_of
from tests.support.passes import forward_and_backward

IMPLEMENTATIONS = on(None, PLAIN_JAX, TRITON)
EXPERTS = 5
WEIGHTS = "w_gate_up", "w_down"
CHOSEN = np.random.default_rng(0).integers(EXPERTS - 1, size=(96, 1)) + np.array([[0, 1]])
CHOSEN %= EXPERTS - 1  # nobody chooses the last expert


def make(dtype="bfloat16", w_dtype="float32", tokens=96, **options):
    """The arrays of an MLP by name, the weights in w_dtype and all others in dtype, and the indices of a routing."""
    sizes = {"tokens": tokens, "features": 144, "hidden": 136, "experts": EXPERTS, "topk": 2} | options
    floats, chosen, dy = moe_oracle.make(**sizes, chosen=CHOSEN[:tokens])
    arrays = {
        name: jnp.asarray(a, w_dtype if name in WEIGHTS else dtype) for name, a in floats.items() if a is not None
    }
    return arrays | {"dy": jnp.asarray(dy, dtype)}, indices_of(chosen, EXPERTS)


def run(arrays, indices, **options):
    """y and the gradients, by name."""
    floats = {name: array for name, array in arrays.items() if name != "dy"}
    both = forward_and_backward(lambda floats: forward(floats, indices, **options))
    y, gradients = jax.jit(both)(arrays["dy"], floats)
    return {"y": y, **gradients}


def cast(arrays, dtype):
    return arrays | {name: arrays[name].astype(dtype) for name in WEIGHTS}


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("dtype", "w_dtype", "w_layout", "biased"),
    [
        pytest.param("bfloat16", "float32", "enk", False, marks=pytest.mark.sweep),
        ("bfloat16", "float32", "ekn", True),
        pytest.param("float16", "bfloat16", "ekn", False, marks=pytest.mark.sweep),
        ("float32", "bfloat16", "enk", True),
    ],
)
def test_as_if_cast(dtype, w_dtype, w_layout, biased, implementation):
    """y and dx are those of weights in the dtype of x; dW, rounded to it, is theirs too, but not rounded twice."""
    arrays, indices = make(dtype, w_dtype, w_layout=w_layout, biased=biased)
    options = {"w_layout": w_layout, "implementation": implementation}
    got, want = run(arrays, indices, **options), run(cast(arrays, dtype), indices, **options)
    for name, array in want.items():
        if name not in WEIGHTS:
            np.testing.assert_array_equal(got[name], array, name)
            continue
        assert got[name].dtype == w_dtype
        if jnp.finfo(w_dtype).bits > jnp.finfo(dtype).bits:
            np.testing.assert_array_equal(got[name].astype(dtype), array, name)
            assert np.mean(got[name] == array.astype(w_dtype)) < 0.3  # zeros of the expert without rows, and chance
        else:
            assert distance(got[name], array) < 1e-2, name
        assert (got[name][EXPERTS - 1] == 0).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("w_layout", thorough_but(["ekn"], ["enk", "ekn"], pytest.mark.sweep))
def test_fp8_quantizes_what_was_given(w_layout, implementation):
    """FP8 of float32 weights is not FP8 of the same weights in bfloat16, and both passes multiply by the same."""
    arrays, indices = make(w_layout=w_layout)
    options = {"w_layout": w_layout, "implementation": implementation, "quantization": jgg.Fp8()}
    got, in_bfloat16 = run(arrays, indices, **options), run(cast(arrays, "bfloat16"), indices, **options)
    once = {name: jgg.Fp8().weights(arrays[name]) for name in WEIGHTS}
    want = run(arrays | once, indices, **options)
    for name in ("y", "x"):
        np.testing.assert_array_equal(got[name], want[name], name)
        assert 1e-5 < distance(got[name], in_bfloat16[name]) < 0.05
    for name in WEIGHTS:
        assert got[name].dtype == "float32"
        np.testing.assert_array_equal(got[name], want[name].array, name)
    del arrays["dy"]
    np.testing.assert_array_equal(forward(arrays, indices, **options), got["y"])


def test_forward_mode_and_second_derivatives_in_plain_jax():
    arrays, indices = make("float32", "bfloat16", tokens=8, features=6, hidden=4)

    def loss(w_down):
        y = forward(arrays | {"w_down": w_down}, indices, implementation="xla")
        return jnp.sum(y * y)

    del arrays["dy"]

    tangent = jnp.ones_like(arrays["w_down"])
    gradient, slope = jax.jvp(jax.grad(loss), (arrays["w_down"],), (tangent,))
    assert gradient.dtype == slope.dtype == "bfloat16"
    _, change = jax.jvp(loss, (arrays["w_down"],), (tangent,))
    assert distance(change, jnp.sum(gradient.astype(jnp.float32))) < 0.03


@pytest.mark.parametrize("quantization", [None, jgg.Fp8()])
def test_policies_know_what_the_weights_were_made_into(quantization):
    """Without a policy it is kept; a policy may leave it out, so that the backward pass makes it again."""
    arrays, indices = make()
    name = "jgg_weights" if quantization is None else "jgg_fp8_weights"

    def loss(floats):
        y = forward(floats, indices, quantization=quantization)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    floats = {name: array for name, array in arrays.items() if name != "dy"}
    want = jax.grad(loss)(floats)
    policies = jax.checkpoint_policies
    for policy, is_kept in (
        (policies.save_only_these_names(name), True),
        (policies.nothing_saveable, False),
        (policies.everything_saveable, True),
    ):
        function = jax.checkpoint(loss, policy=policy)
        kept = [aval for aval, source in saved_residuals(function, floats) if "argument" not in source]
        sizes = [aval.size for aval in kept if aval.dtype.itemsize < 4]
        assert all((arrays[each].size in sizes) == is_kept for each in WEIGHTS), kept
        jax.tree.map(np.testing.assert_array_equal, jax.grad(function)(floats), want)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_layers_keep_float32_parameters(kind):
    """Gradients of a layer that computes in bfloat16 are float32, and not rounded to bfloat16 on their way."""
    x = jax.random.normal(jax.random.key(1), (6, 5, 64), jnp.bfloat16)
    options = {"num_experts": 4, "topk": 2, "shared_features": 48, "dtype": jnp.bfloat16}
    square = lambda y: jnp.sum(y.astype(jnp.float32) ** 2)  # noqa: E731
    if kind == "nnx":
        from flax import nnx

        import jgg.nnx

        layer = jgg.nnx.MoE(64, 128, rngs=nnx.Rngs(0), **options)
        params = {name: getattr(layer, name)[...] for name in layer.layer.shapes}
        gradients = nnx.jit(nnx.grad(lambda layer: square(layer(x))))(layer)
        gradients = {name: gradients[name][...] for name in params}
    else:
        import jgg.linen

        layer = jgg.linen.MoE(hidden_features=128, **options)
        params = jax.jit(layer.init)(jax.random.key(0), x)["params"]
        gradients = jax.jit(jax.grad(lambda params: square(layer.apply({"params": params}, x))))(params)
    own = MoELayer(64, 128, 4, 2, shared_features=48)
    want = jax.jit(jax.grad(lambda params: square(own.apply(params, x)[0])))(params)
    for name, gradient in gradients.items():
        assert gradient.dtype == "float32"
        np.testing.assert_array_equal(gradient, want[name], name)
    for name in WEIGHTS:
        assert (gradients[name] != gradients[name].astype(jnp.bfloat16).astype("float32")).any(), name
