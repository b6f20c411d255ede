"""A layer among stacked ones: the same bits as the layer alone, read where it is, without a copy of its experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.layers import MoELayer
from tests.support.closeness import assert_close
from tests.support.marks import EVERYWHERE, INTERPRET, on

STACKED = "w_gate_up", "w_down", "b_gate_up", "b_down"
LAYERS = 3


def make_layer(**options):
    return MoELayer(in_features=64, hidden_features=48, num_experts=5, topk=2, **options)


def random_params(layer, dtype=jnp.float32):
    """Parameters of LAYERS layers by name, with the layers as their first axis."""
    rng = np.random.default_rng(0)
    shapes = (layer.shapes | layer.adapter_shapes).items()
    return {name: jnp.asarray(rng.normal(size=(LAYERS, *shape)) / 8, dtype) for name, shape in shapes}


def of_layer(params, number, but=()):
    return {name: value if name in but else value[number] for name, value in params.items()}


def tokens(dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(1).normal(size=(3, 7, 64)), dtype)


@EVERYWHERE
@pytest.mark.parametrize("use_bias", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["", "bias"])
def test_a_layer_of_a_stack(implementation, use_bias):
    layer = make_layer(use_bias=use_bias)
    params, x = random_params(layer), tokens()
    apply = jax.jit(
        lambda number, params, x: layer.apply(
            params | {name: params[name] for name in STACKED if name in params}, x, stack_index=number,
            implementation=implementation,
        )[0]
    )  # fmt: skip
    for number in range(LAYERS):
        alone, _ = layer.apply(of_layer(params, number), x, implementation=implementation)
        y = apply(jnp.int32(number), of_layer(params, number, but=STACKED), x)
        np.testing.assert_array_equal(y, alone)


def in_a_scan(layer, experts, x, params, **options):
    def body(x, inputs):
        number, own = inputs
        return x + layer.apply(own | experts, x, stack_index=number, **options)[0], None

    return jax.lax.scan(body, x, (jnp.arange(LAYERS), params))[0]


@EVERYWHERE
def test_in_a_scan(implementation):
    layer = make_layer()
    params, x = random_params(layer), tokens()
    experts = {name: params.pop(name) for name in STACKED if name in params}
    expected = x
    for number in range(LAYERS):
        expected += layer.apply(of_layer(params | experts, number), expected, implementation=implementation)[0]
    y = jax.jit(lambda *arrays: in_a_scan(layer, *arrays, implementation=implementation))(experts, x, params)
    assert_close(y, expected, 1e-5)


def test_in_a_scan_experts_are_not_sliced():
    """The program for a GPU hands kernels the experts of all layers."""
    layer = make_layer()
    params, x = random_params(layer), tokens()
    experts = {name: params.pop(name) for name in STACKED if name in params}
    with jgg.target(90):
        traced = jax.jit(lambda *arrays: in_a_scan(layer, *arrays, implementation="triton")).trace(experts, x, params)
        lines = traced.lower(lowering_platforms=("cuda",)).as_text().splitlines()
    assert any("triton_kernel_call" in line and "tensor<15x64x96xf32>" in line for line in lines)
    assert not any("slice" in line and "x5x64x96xf32" in line for line in lines)


@pytest.mark.gpu
def test_in_a_scan_experts_are_not_copied():
    """The compiled program has less temporary memory than the experts of one layer."""
    layer = MoELayer(in_features=512, hidden_features=256, num_experts=64, topk=2)
    params, x = random_params(layer, jnp.bfloat16), jnp.ones((8, 512), jnp.bfloat16)
    experts = {name: params.pop(name) for name in STACKED if name in params}
    compiled = jax.jit(lambda *arrays: in_a_scan(layer, *arrays)).lower(experts, x, params).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < experts["w_down"][0].nbytes


@EVERYWHERE
@pytest.mark.parametrize("what", ["dtype", "lora", "fp8"])
def test_what_cannot_be_read_in_place_is_copied(implementation, what):
    layer = make_layer(lora_rank=4 if what == "lora" else None)
    params, x = random_params(layer), tokens(jnp.float16 if what == "dtype" else jnp.float32)
    options = {"implementation": implementation}
    if what == "fp8":
        quantized = {name: jax.vmap(jgg.quantize_weights)(params[name]) for name in ("w_gate_up", "w_down")}
        params |= quantized
    alone = {name: jax.tree.map(lambda part: part[1], value) for name, value in params.items()}
    y, _ = layer.apply(
        alone | {name: params[name] for name in ("w_gate_up", "w_down")}, x, stack_index=1, **options
    )  # fmt: skip
    np.testing.assert_array_equal(y, layer.apply(alone, x, **options)[0])


@on(INTERPRET)
def test_gradients_need_the_layers_own_weights(implementation):
    layer = make_layer()
    params = random_params(layer)

    def loss(x):
        own = of_layer(params, 1, but=STACKED)
        return layer.apply(own, x, stack_index=1, implementation=implementation)[0].sum()

    with pytest.raises(NotImplementedError, match=r"stack_index must be None where gradients are computed"):
        jax.grad(loss)(tokens())


def test_errors():
    layer = make_layer()
    params = random_params(layer)
    own, x = of_layer(params, 0, but=STACKED), tokens()
    for index, error, message in (
        (1.0, TypeError, "stack_index must"),
        (jnp.zeros(2, jnp.int32), ValueError, r"stack_index must be \[\]"),
    ):
        with pytest.raises(error, match=message):
            layer.apply(own, x, stack_index=index)
    with pytest.raises(
        ValueError, match=r"w_gate_up, w_down must have as many layers, at least 1, with stack_index, got .*2"
    ):
        layer.apply(own | {"w_down": params["w_down"][:2]}, x, stack_index=0)
    with pytest.raises(ValueError, match=r"w_gate_up must be among params, with the shape"):
        layer.apply(of_layer(params, 0), x, stack_index=0)


def test_an_index_past_the_stack_is_the_nearest():
    layer = make_layer()
    params, x = random_params(layer), tokens()
    for implementation in (None, "interpret"):
        last, beyond = (
            layer.apply(
                of_layer(params, -1, but=STACKED), x, stack_index=number, implementation=implementation
            )[0]
            for number in (LAYERS - 1, LAYERS + 4)
        )  # fmt: skip
        np.testing.assert_array_equal(last, beyond)
