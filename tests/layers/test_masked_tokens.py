"""Tokens that a mask leaves out go to no expert: no rows, no losses, no gradients; the others do not notice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg
import jgg.linen
import jgg.nnx
from jgg.layers import MoELayer
from jgg.sharding import MoESharding
from tests.support.closeness import assert_close
from tests.support.marks import PLAIN_JAX, TRITON, on, thorough_but

SIZES = {"hidden_features": 20, "num_experts": 8, "topk": 2}
LAYERS = {
    "defaults": {},
    "biases": {"score": "topk_softmax", "use_bias": True, "use_router_bias": True},
    "groups": {
        "score": "sigmoid",
        "num_groups": 4,
        "topk_groups": 2,
        "use_selection_bias": True,
        "shared_features": 12,
        "use_shared_gate": True,
    },
    "scaled input": {"topk": 1, "score": "sigmoid", "normalize": False, "scale_input": True},
    "adapters": {"lora_rank": 3, "lora_targets": ("w_gate_up", "w_down", "w_router")},
}
X = np.random.default_rng(0).normal(size=(3, 5, 24)).astype(np.float32)
MASK = np.array([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0]], bool)


def arguments_of(layer):
    """Parameters by name, and the selection bias."""
    rng = np.random.default_rng(0)
    shapes = layer.shapes | layer.adapter_shapes
    params = {name: rng.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    return params, np.linspace(-0.3, 0.3, 8, dtype=np.float32) if layer.use_selection_bias else None


@functools.partial(jax.jit, static_argnames=("layer", "implementation", "quantization"))
def apply(layer, params, x, selection_bias, mask=None, implementation=None, quantization=None):
    """(y and metrics), and the gradients of sum(y**2) of the tokens that count and of the losses."""

    def loss(params, x):
        y, metrics = layer.apply(
            params,
            x,
            selection_bias,
            mask=mask,
            precision="highest",
            quantization=quantization,
            implementation=implementation,
        )
        counted = y if mask is None else jnp.where(mask[..., None], y, 0)
        return jnp.sum(jnp.square(counted)) + metrics.load_balancing_loss + metrics.router_z_loss, (y, metrics)

    (_, results), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
    return results, gradients


def as_near_as_xla(got, want):
    """Of rows that XLA multiplies at other places of a product, where it may add in another order."""
    assert_close(got, want, 1e-6)


def shared_part(layer, params, tokens):
    """The shared experts' result in float64."""
    if not layer.shared_features:
        return np.zeros_like(tokens)
    gate, up = np.split(tokens @ np.float64(params["w_shared_gate_up"]), 2, axis=-1)
    gates = 1 / (1 + np.exp(-(tokens @ np.float64(params["w_shared_gate"]))))
    return gates * ((gate / (1 + np.exp(-gate)) * up) @ np.float64(params["w_shared_down"]))


@on(PLAIN_JAX, None, TRITON)
@pytest.mark.parametrize("options", thorough_but(("groups", "scaled input", "adapters"), LAYERS, pytest.mark.sweep))
def test_the_tokens_that_count_are_as_if_they_were_alone(options, implementation):
    layer = MoELayer(24, **(SIZES | options))
    params, selection_bias = arguments_of(layer)
    run = functools.partial(apply, layer, params, implementation=implementation)
    (y, metrics), (d_params, dx) = run(X, selection_bias, MASK)
    (whole, of_whole), _ = run(X, selection_bias)
    (alone, of_alone), (d_alone, dx_alone) = run(X[MASK], selection_bias)

    same = np.testing.assert_array_equal if implementation == "triton" else as_near_as_xla
    same(y[MASK], whole[MASK])
    assert_close(y[MASK], alone)
    assert_close(y[~MASK] + 1, shared_part(layer, params, X[~MASK]) + 1)
    assert_close((d_params, dx[MASK]), (d_alone, dx_alone))
    assert not np.any(dx[~MASK])
    np.testing.assert_array_equal(metrics.group_sizes, of_alone.group_sizes)
    np.testing.assert_array_equal(metrics.topk_indices, np.where(MASK[..., None], of_whole.topk_indices, -1))
    for name in ("load_balancing_loss", "router_z_loss"):
        np.testing.assert_allclose(getattr(metrics, name), getattr(of_alone, name), rtol=1e-5)


@on(PLAIN_JAX, None, TRITON)
@pytest.mark.parametrize("options", thorough_but(("groups", "scaled input", "adapters"), LAYERS, pytest.mark.sweep))
def test_what_masked_tokens_hold_reaches_nothing(options, implementation):
    """Padding that nobody wrote may hold anything."""
    layer = MoELayer(24, **(SIZES | options))
    params, selection_bias = arguments_of(layer)
    anything = np.resize(np.array([np.nan, np.inf, -np.inf, 3e38], np.float32), X.shape)
    run = functools.partial(apply, layer, params, implementation=implementation)
    got, want = (run(np.where(MASK[..., None], X, held), selection_bias, MASK) for held in (anything, 0))
    (y, metrics), gradients = got
    (y_of_zeros, metrics_of_zeros), gradients_of_zeros = want
    assert_close((y[MASK], metrics, gradients), (y_of_zeros[MASK], metrics_of_zeros, gradients_of_zeros))


def test_what_the_router_sees_of_masked_tokens_reaches_nothing():
    layer = MoELayer(24, **SIZES, use_router_scale=True)
    params, _ = arguments_of(layer)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(params, router_x):
        y, metrics = layer.apply(params, X, router_x=router_x, mask=MASK)
        return jnp.sum(jnp.square(y)) + metrics.load_balancing_loss + metrics.router_z_loss

    got, want = (gradients(params, np.where(MASK[..., None], 2 * X, held)) for held in (np.nan, 0))
    assert_close(got, want)


@on(None, TRITON)
def test_in_fp8(implementation):
    layer = MoELayer(32, hidden_features=32, num_experts=4, topk=2)
    params, _ = arguments_of(layer)
    x = np.random.default_rng(1).normal(size=(15, 32)).astype(np.float32)
    options = {"quantization": jgg.Fp8(), "implementation": implementation}
    (y, _), (d_params, dx) = apply(layer, params, x, None, MASK.reshape(-1), **options)
    (alone, _), (d_alone, dx_alone) = apply(layer, params, x[MASK.reshape(-1)], None, **options)
    assert_close(y[MASK.reshape(-1)], alone)
    assert not np.any(y[~MASK.reshape(-1)])
    assert_close((d_params, dx[MASK.reshape(-1)]), (d_alone, dx_alone), 1e-3)


@pytest.mark.parametrize("implementation", ["xla", None])
def test_where_no_token_counts(implementation):
    layer = MoELayer(24, **SIZES, use_bias=True)
    params, _ = arguments_of(layer)
    (y, metrics), gradients = apply(layer, params, X, None, np.zeros((3, 5), bool), implementation)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((y, gradients, metrics._replace(topk_indices=0))))
    assert np.all(metrics.topk_indices == -1)


def test_given_choices_of_masked_tokens_are_not_used():
    layer = MoELayer(24, **SIZES)
    params, _ = arguments_of(layer)
    given = np.random.default_rng(0).integers(0, 8, (3, 5, 2))
    got, want = (layer.apply(params, X, topk_indices=own, mask=MASK) for own in (given, given * MASK[..., None]))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    np.testing.assert_array_equal(got[1].topk_indices, np.where(MASK[..., None], given, -1))


def test_under_vmap_and_scan():
    layer = MoELayer(24, **SIZES)
    params, _ = arguments_of(layer)
    call = lambda x, mask: layer.apply(params, x, mask=mask)  # noqa: E731
    want = [call(x, mask) for x, mask in zip(X, MASK, strict=True)]
    want = jax.tree.map(lambda *leaves: np.stack(leaves), *want)
    assert_close(jax.vmap(call)(X, MASK), want)
    assert_close(jax.lax.scan(lambda _, own: (None, call(*own)), None, (X, MASK))[1], want)


@pytest.mark.parametrize("exchange", ["all_gather", "ragged_all_to_all"])
def test_masked_tokens_take_no_room_of_other_devices(exchange):
    layer, mask = MoELayer(24, **SIZES), np.arange(16).reshape(2, 8) % 2 > 0
    x = np.random.default_rng(1).normal(size=(2, 8, 24)).astype(np.float32)
    params, _ = arguments_of(layer)
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = MoESharding(mesh, expert="a", exchange=exchange, buffer_factor=0.5)
    call = jax.jit(lambda mask: layer.apply(params, x, mask=mask, sharding=sharding, precision="highest"))
    y, metrics = call(mask)
    assert metrics.overflow == 0 and call(np.ones_like(mask))[1].overflow == 16
    assert_close(y, layer.apply(params, x, mask=mask, precision="highest")[0])
    assert metrics.group_sizes.sum() == 16


def modules(**options):
    """The NNX layer and a function that calls the Linen layer with its parameters."""
    own = jgg.nnx.MoE(24, rngs=nnx.Rngs(0), **SIZES, **options)
    names = own.layer.shapes | own.layer.adapter_shapes
    for name in own.layer.adapter_shapes:
        getattr(own, name)[...] += 0.1
    variables = {"params": {name: getattr(own, name)[...] for name in names}}
    return own, functools.partial(jgg.linen.MoE(**SIZES, **options).apply, variables)


def test_flax_layers_take_a_mask():
    own, linen = modules()
    as_near_as_xla(own(X, mask=MASK), np.where(MASK[..., None], own(X), 0))
    np.testing.assert_array_equal(linen(X, mask=MASK), own(X, mask=MASK))


@pytest.mark.parametrize("quantization", [None, jgg.Fp8()], ids=["dense", "fp8"])
def test_flax_layers_without_their_adapters(quantization):
    targets = ("w_down", "w_shared_gate_up", "w_router")
    options = {"shared_features": 12, "quantization": quantization}
    own, linen = modules(lora_rank=2, lora_targets=targets, **options)
    base = jgg.nnx.MoE(24, rngs=nnx.Rngs(0), **SIZES, **options)  # the first draws are those of the same matrices
    want = base(X)
    assert np.abs(own(X) - want).max() > 0.1
    np.testing.assert_array_equal(own(X, adapters=False), want)
    np.testing.assert_array_equal(linen(X, adapters=False), want)
    np.testing.assert_array_equal(nnx.jit(lambda layer, x: layer(x, adapters=False))(own, X), nnx.jit(base)(X))


def test_the_gradient_of_a_difference_from_the_layer_without_adapters():
    """As of a KL divergence: the reference gives the adapters none."""
    own, _ = modules(lora_rank=2)
    of_adapters = nnx.DiffState(0, nnx.LoRAParam)
    got = nnx.grad(lambda layer: jnp.sum((layer(X) - layer(X, adapters=False)) ** 2), argnums=of_adapters)(own)
    reference = own(X, adapters=False)
    want = nnx.grad(lambda layer: jnp.sum((layer(X) - reference) ** 2), argnums=of_adapters)(own)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(want))
    assert_close(got, want)


def test_adapters_must_be_a_flag():
    own, linen = modules(lora_rank=2)
    for call in (own, linen):
        with pytest.raises(TypeError, match="adapters must be True or False, got 1"):
            call(X, adapters=1)
