"""Flax layers with experts that are not trained: in FP8, or left out of the gradient by a filter."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jgg
import jgg.linen
import jgg.nnx
from tests.support.closeness import assert_close, distance
from tests.support.packed import random_packed

pytestmark = pytest.mark.xdist_group("flax")
EXPERTS = ("w_down", "w_gate_up")
SIZES = {"hidden_features": 136, "num_experts": 4, "topk": 2}
X = np.random.default_rng(0).normal(size=(3, 5, 144)).astype(np.float32)


def make(seed=0, quantization=None, **options):
    return jgg.nnx.MoE(144, rngs=nnx.Rngs(seed), quantization=quantization, **SIZES, **options)


def with_quantized_experts(layer):
    """The layer, with each of its experts' matrices as a QuantizedArray."""
    for name in EXPERTS:
        setattr(layer, name, jgg.nnx.Frozen(jgg.quantize_weights(getattr(layer, name)[...])))
    return layer


def in_linen(layer):
    """The Linen layer, and its parameters, of an NNX layer."""
    module = jgg.linen.MoE(quantization=layer.quantization, **SIZES)
    return module, {name: getattr(layer, name).get_value() for name in layer.layer.shapes}


def loss(layer, x):
    return jnp.sum(jnp.square(layer(x)))


@pytest.mark.parametrize("recipe", [None, jgg.Fp8()], ids=["", "fp8"])
def test_quantized_experts_stay_quantized_between_passes(recipe):
    """What a layer's forward pass keeps for the backward pass has the experts' 8 bits, and no dense copy of them."""
    layer = with_quantized_experts(make(quantization=recipe, dtype=jnp.bfloat16, implementation="triton"))
    size = layer.w_down.get_value().values.size

    def kept(x):
        return jax.vjp(lambda x: loss(layer, x), x)[1]

    with jgg.target(90):
        leaves = jax.tree.leaves(jax.eval_shape(kept, X))
    large = [leaf for leaf in leaves if leaf.size >= size]
    assert large
    assert all(leaf.dtype.itemsize == 1 for leaf in large), large


@pytest.mark.parametrize("recipe", [None, pytest.param(jgg.Fp8(), marks=pytest.mark.sweep)], ids=["", "fp8"])
def test_quantized_experts(recipe):
    """The result, dx and the router's gradient are those of the numbers that are stored; experts have none."""
    layer = with_quantized_experts(make(quantization=recipe))
    dense = make(quantization=recipe)
    for name in EXPERTS:
        getattr(dense, name)[...] = getattr(layer, name).get_value().dequantize(jnp.float32)

    both = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))
    (y, (got, dx)), (dense_y, (want, dense_dx)) = (both(each, X) for each in (layer, dense))
    assert list(got) == ["w_router"]
    # quantized again, the numbers differ in their last bit
    tolerance = 1e-5 if recipe is None else 1e-2
    assert distance(y, dense_y) < tolerance
    assert distance(dx, dense_dx) < tolerance
    assert distance(got["w_router"][...], want["w_router"][...]) < tolerance

    module, params = in_linen(layer)
    linens = jax.jit(jax.value_and_grad(lambda params: jnp.sum(jnp.square(module.apply({"params": params}, X)))))
    linen_y, gradients = linens(params)
    assert_close((linen_y, gradients["w_router"]), (y, got["w_router"][...]))
    assert not any(np.any(leaf) for name in EXPERTS for leaf in jax.tree.leaves(gradients[name]))


@pytest.mark.sweep
def test_linen_takes_packed_experts():
    """Their bytes have another shape than the parameters that Flax expects."""
    module = jgg.linen.MoE(hidden_features=32, num_experts=4, topk=2)
    x = X[..., :64]
    dense = jax.jit(module.init)(jax.random.key(0), x)["params"]
    packed = {"w_gate_up": random_packed((4, 64, 64), -2), "w_down": random_packed((4, 32, 64), -2)}

    def run(router, weights):
        params = dense | weights | {"w_router": router}
        return jnp.sum(jnp.square(module.apply({"params": params}, x)))

    def in_boxes(router, weights):
        return run(router, {name: nn.Partitioned(w, (None,) * len(w.shape)) for name, w in weights.items()})

    both = jax.jit(jax.value_and_grad(run))
    expected = both(dense["w_router"], {name: w.dequantize(jnp.float32) for name, w in packed.items()})
    assert_close(both(dense["w_router"], packed), expected)
    assert_close(jax.jit(in_boxes)(dense["w_router"], packed), expected[0])
    with pytest.raises(ValueError, match=r"w_down must have the layer's shape \[4, 32, 64\], got \[4, 64, 64\]"):
        run(dense["w_router"], packed | {"w_down": packed["w_gate_up"]})


def test_a_param_that_is_quantized_has_a_gradient_of_zeros():
    layer = make()
    layer.w_down.set_value(jgg.quantize_weights(layer.w_down[...]))
    gradients = nnx.jit(nnx.grad(loss))(layer, X)
    assert isinstance(gradients["w_down"].get_value(), jgg.QuantizedArray)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients["w_down"].get_value()))
    assert np.any(gradients["w_gate_up"][...])


def test_optimizers_leave_quantized_experts_alone(optax_promotion):
    layer = with_quantized_experts(make())
    before = nnx.to_pure_dict(nnx.state(layer))
    optimizer = nnx.Optimizer(layer, optax.adamw(1e-2), wrt=nnx.Param)
    nnx.jit(lambda optimizer, layer: optimizer.update(layer, nnx.grad(loss)(layer, X)))(optimizer, layer)
    after = nnx.to_pure_dict(nnx.state(layer))
    jax.tree.map(np.testing.assert_array_equal, *({name: each[name] for name in EXPERTS} for each in (before, after)))
    assert np.any(after["w_router"] != before["w_router"])


def test_checkpoints_of_quantized_experts(tmp_path):
    """Orbax stores values and scales, and restores them into the state of an NNX layer and the variables of Linen's."""
    layer = with_quantized_experts(make())
    _, params = in_linen(layer)
    with ocp.StandardCheckpointer() as checkpointer:
        packed = {"w_down": random_packed((2, 64, 8), -2)}
        for name, stored in (("nnx", nnx.state(layer)), ("linen", params), ("packed", packed)):
            checkpointer.save(tmp_path / name, stored)
            checkpointer.wait_until_finished()
            abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), stored)
            restored = checkpointer.restore(tmp_path / name, abstract)
            assert jax.tree.structure(restored) == jax.tree.structure(stored)
            jax.tree.map(np.testing.assert_array_equal, restored, stored)
            if name == "nnx":
                again = with_quantized_experts(make(seed=1))
                nnx.update(again, restored)
                assert type(again.w_down) is jgg.nnx.Frozen
                jax.tree.map(np.testing.assert_array_equal, nnx.state(again), stored)


@pytest.mark.thorough
def test_a_stack_of_layers_is_loaded_and_scanned():
    layers = [with_quantized_experts(make(seed)) for seed in range(3)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(nnx.to_pure_dict(nnx.state(layer)) for layer in layers))
    stack = nnx.vmap(lambda key: jgg.nnx.MoE(144, rngs=nnx.Rngs(key), **SIZES))(jax.random.split(jax.random.key(0), 3))
    jgg.nnx.load_params(stack, params)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def forward(x, layer):
        return x + layer(x)

    @nnx.jit
    @functools.partial(nnx.grad, has_aux=True)
    def run(stack):
        y = forward(jnp.asarray(X), stack)
        return jnp.sum(y), y

    one, want = nnx.jit(lambda x, layer: x + layer(x)), jnp.asarray(X)
    for layer in layers:
        want = one(want, layer)
    gradients, y = run(stack)
    assert_close(y, want)
    assert list(gradients) == ["w_router"] and np.any(gradients["w_router"][...])


def test_load_params_makes_each_quantized_array_frozen():
    """Bit for bit, also over one that was there; other parameters are cast, and metadata stay."""
    quantized = with_quantized_experts(make())
    params = nnx.to_pure_dict(nnx.state(quantized))
    layer = make(1, param_dtype=jnp.bfloat16, kernel_metadata={"out_sharding": ("x",), "eager_sharding": False})
    for _ in range(2):
        jgg.nnx.load_params(layer, jax.device_get(params))
        for name in EXPERTS:
            variable = getattr(layer, name)
            assert type(variable) is jgg.nnx.Frozen and variable.get_metadata("out_sharding") == ("x",)
            jax.tree.map(np.testing.assert_array_equal, variable.get_value(), params[name])
        assert layer.w_router.dtype == jnp.bfloat16


def wrong(**parts):
    values, scales = np.ones((4, 136, 144), jnp.float8_e4m3fn), np.ones((4, 2, 2), np.float32)
    return jgg.QuantizedArray(**{"values": values, "scales": scales} | parts)


@pytest.mark.parametrize(
    ("error", "name", "array", "message"),
    [
        (ValueError, "w_down", wrong(values=np.ones((4, 144, 136), jnp.float8_e4m3fn)), "w_down must have the layer's"),
        (ValueError, "w_down", wrong(scales=np.ones((4, 3, 2), "f")), "w_down.scales must be of blocks of (1, 32, "),
        (TypeError, "w_down", wrong(values=np.ones((4, 136, 144), "f")), "w_down.values must be one of float8_e4m3fn"),
        (TypeError, "w_down", np.ones((4, 136, 144)), "w_down must be a QuantizedArray, as the layer's is, got ndarra"),
        (TypeError, "b_down", wrong(), "b_down must be a NumPy or JAX array, got QuantizedArray."),
    ],
    ids=["shape", "scales", "dtype", "dense", "bias"],
)
def test_wrong_quantized_params(error, name, array, message):
    layer = with_quantized_experts(make(use_bias=True))
    params = nnx.to_pure_dict(nnx.state(layer)) | {name: array}
    with pytest.raises(error) as raised:
        jgg.nnx.load_params(layer, params)
    assert str(raised.value).startswith(message) and len(str(raised.value)) < 200


def test_errors_name_shapes_and_print_no_array():
    layer = make()
    quantized = jgg.quantize_weights(layer.w_down[...])
    types = "QuantizedArray(values=float8_e4m3fn[4, 136, 144], scales=float32[4, 2, 2])"
    assert repr(quantized) == types
    once = jgg.Fp8().weights(layer.w_down[...])
    assert repr(once).startswith(f"QuantizedWeights(array=float32[4, 136, 144], forms=WeightForms(straight={types}")
    with pytest.raises(TypeError, match=re.escape(types)) as raised:
        layer.w_down[...] = quantized
    assert len(str(raised.value)) < 300
    layer.w_down = quantized
    with pytest.raises(
        TypeError, match=r"w_down must be an nnx\.Variable, such as jgg\.nnx\.Frozen for a QuantizedArr"
    ):
        layer(X)


@pytest.mark.sweep
def test_frozen_layers_beside_trained_ones():
    """Layers of equal sizes share what JAX keeps of one; each gets its own gradients, in any order of programs."""
    layers = nnx.List([make(seed) for seed in range(2)])
    plain = nnx.List([make(seed, implementation="xla") for seed in range(2)])

    def loss_of_all(layers, x):
        for layer in layers:
            x = x + layer(x)
        return jnp.sum(jnp.square(x))

    want = nnx.to_pure_dict(nnx.jit(nnx.grad(loss_of_all))(plain, jnp.asarray(X)))
    for trained, remat in (((0, 1), False), ((0,), False), ((0, 1), True)):
        wrt = nnx.All(nnx.Param, nnx.Any(*map(nnx.PathContains, trained)))
        loss = nnx.remat(loss_of_all) if remat else loss_of_all
        got = nnx.to_pure_dict(nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, wrt)))(layers, jnp.asarray(X)))
        assert got.keys() == set(trained)
        assert_close(got, {layer: want[layer] for layer in trained}, 1e-4)


@pytest.mark.parametrize(
    "platform", [pytest.param("cpu", marks=pytest.mark.thorough), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def test_frozen_experts_leave_no_dw_in_the_compiled_program(platform, keyed_by_names):
    """Neither if a filter leaves them out, nor if they are quantized; test_moe_backward.py has the recipe FP8."""

    def kernels_of_dw(layer, trained):
        gradient = nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, trained)))
        text = gradient.lower(layer, x).compile().as_text()
        assert "jgg.forward[" in text
        return set(re.findall(r"jgg\.dw\[[^]]*", text))

    trained = nnx.All(nnx.Param, nnx.Not(nnx.Any(*map(nnx.PathContains, EXPERTS))))
    with jax.default_device(jax.devices(platform)[0]):
        layer, x = make(dtype=jnp.bfloat16), jnp.asarray(X, jnp.bfloat16)
        assert len(kernels_of_dw(layer, nnx.Param)) == 2
        assert not kernels_of_dw(layer, trained)
        assert not kernels_of_dw(with_quantized_experts(layer), nnx.Param)
