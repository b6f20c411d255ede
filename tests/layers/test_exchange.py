"""What exchanges of rows between devices are made of; tests/layers/test_sharding.py tests them whole."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.experts.exchange import devices_of
from jgg.experts.moves import _cut
from jgg.layers import MoELayer
from jgg.sharding import MoESharding, sharded_moe_mlp
from tests.support.closeness import assert_close
from tests.support.marks import RARELY_INTERPRETED
from tests.support.passes import forward_and_backward
from tests.support.sharded_cases import CASES, SEVERAL_GPUS, assert_case_is_right, make, need_gpus


def test_runs_are_of_one_expert_and_even():
    """The example of `_cut`'s docstring, with an expert between them that has no row and one that is cut off."""
    counts, fitting, arrivals = (jnp.asarray(each, jnp.int32) for each in ([3, 0, 5], [3, 0, 4], [10, 20, 30]))
    runs = _cut(2, counts, fitting, arrivals)
    rows = [
        (start + i, arrival + i)
        for start, size, arrival in zip(*map(np.asarray, runs), strict=True)
        for i in range(size)
    ]
    assert rows == [(0, 10), (1, 11), (2, 12), (3, 30), (4, 31), (5, 32), (6, 33)]
    assert max(runs.sizes) <= 4


def test_runs_of_no_row():
    nothing = jnp.zeros(3, jnp.int32)
    assert not np.any(_cut(4, nothing, nothing, nothing).sizes)


def test_devices_of_a_token():
    """The example of `devices_of`'s docstring, and choices that are no expert."""
    experts = jnp.asarray([[1, 0], [3, 1], [-1, 4]], jnp.int32)
    np.testing.assert_array_equal(devices_of(experts, 2, 2), [[0, 2], [0, 1], [2, 2]])


@pytest.mark.parametrize(("factor", "rows"), [(None, 2 * 16), (0.6, 29)])
def test_a_token_is_sent_once_to_each_device_if_there_is_room(factor, rows):
    """With room for the 16 tokens of both devices; otherwise there are as many rows as the buffer has."""
    mesh = jax.sharding.AbstractMesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = MoESharding(mesh, expert="expert", exchange="ragged_all_to_all", buffer_factor=factor)
    shapes = {"x": (32, 8), "w_gate_up": (4, 12, 8), "w_down": (4, 8, 6), "topk_weights": (32, 3)}
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    arrays["topk_indices"] = jax.ShapeDtypeStruct((32, 3), jnp.int32)
    program = str(jax.make_jaxpr(lambda arrays: sharded_moe_mlp(**arrays, sharding=sharding))(arrays))
    arrives = re.findall(r"f32\[(\d+),8\]\S* = ragged_all_to_all\[", program)
    assert arrives and arrives[0] == str(rows)


@pytest.mark.parametrize(("biased", "quantization"), [(True, None), (False, jgg.Fp8())])
@RARELY_INTERPRETED
def test_tokens_in_expert_order_need_no_indices(implementation, biased, quantization):
    """The same as with indices that name each row in turn; NaN of a row of no group reaches nothing."""
    rng = np.random.default_rng(0)
    sizes, features, hidden = np.array([5, 0, 9, 3], np.int32), 32, 48
    num_rows = sizes.sum() + 2
    shapes = {"x": (num_rows, features), "w_gate_up": (4, 2 * hidden, features), "w_down": (4, features, hidden)}
    if biased:
        shapes |= {"b_gate_up": (4, 2 * hidden), "b_down": (4, features)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    weights, dy = rng.uniform(0.5, 1, (num_rows, 1)).astype(np.float32), rng.normal(size=shapes["x"])
    dy = dy.astype(np.float32)
    for array in (arrays["x"], dy, weights):
        array[sizes.sum() :] = np.nan

    def run(arrays, weights, dy, indices):
        def forward(arrays, weights):
            routing = jgg.Routing(weights, jnp.zeros_like(weights, jnp.int32), jnp.asarray(sizes), indices)
            return jgg.moe_mlp(
                **arrays, routing=routing, precision="highest", implementation=implementation, quantization=quantization
            )

        return forward_and_backward(forward)(dy, arrays, weights)

    y, grads, d_weights = jax.jit(functools.partial(run, indices=None))(arrays, weights, dy)
    with_indices = jax.jit(functools.partial(run, indices=jnp.arange(num_rows, dtype=jnp.int32)))
    want_y, want, want_d_weights = with_indices(arrays, weights, dy)
    assert not np.any(y[sizes.sum() :]) and not np.any(grads["x"][sizes.sum() :])
    d_weights, want_d_weights = (array[: sizes.sum()] for array in (d_weights, want_d_weights))
    assert_close((y, grads, d_weights), (want_y, want, want_d_weights))


def test_tokens_of_several_choices_need_indices():
    routing = jgg.route(jnp.ones((3, 4)), 2)._replace(gather_indices=None)
    message = r"routing.gather_indices must be given unless k is 1 .* got None for topk_weights \[3, 2\]"
    with pytest.raises(ValueError, match=message):
        jgg.moe_mlp(jnp.ones((3, 8)), jnp.ones((4, 8, 8)), jnp.ones((4, 8, 4)), routing)


@pytest.mark.parametrize("axes", [(0, None), (0, 0)], ids=["same choices", "own choices"])
@pytest.mark.parametrize("factor", [None, pytest.param(0.6, marks=pytest.mark.sweep)])
def test_a_batch_of_exchanges_is_a_loop_of_them(factor, axes):
    """Elements send the same runs of rows, or each its own: once to each device, or once for each choice."""
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = MoESharding(mesh, expert="a", exchange="ragged_all_to_all", buffer_factor=factor)
    floats, chosen, dy = make("uneven")
    x = jnp.stack([floats["x"], 2 * floats["x"]])
    own = chosen if axes[1] is None else np.stack([chosen, (chosen + 3) % 8])

    def gradient(x, chosen):
        def loss(x):
            options = {"sharding": sharding, "w_layout": "ekn", "precision": "highest"}
            y, overflow = sharded_moe_mlp(**(floats | {"x": x}), topk_indices=chosen, **options)
            return jnp.sum(y * dy), (y, overflow)

        return jax.grad(loss, has_aux=True)(x)

    got, one = jax.jit(jax.vmap(gradient, axes))(x, own), jax.jit(gradient)
    for number in range(2):
        want = one(x[number], own if axes[1] is None else own[number])
        assert_close(jax.tree.map(lambda array: array[number], got), want)  # noqa: B023


RAGGED = [name for name, (_, options, _) in CASES.items() if options.get("exchange") == "ragged_all_to_all"]


def mesh_of_gpus(count, *names):
    need_gpus(count)
    shape = (1, count, 1)[: len(names)] if len(names) > 1 else (count,)
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(shape), names)


@pytest.mark.gpu
@SEVERAL_GPUS
@pytest.mark.parametrize("hides_latency", [False, True])
@pytest.mark.parametrize("name", RAGGED)
def test_gradients_by_either_scheduler(name, hides_latency):
    """Uneven loads, a device without a row, one with all, and buffers that overflow, however XLA orders collectives."""
    mesh = mesh_of_gpus(2, "a", "b", "c")
    options = (("xla_gpu_enable_latency_hiding_scheduler", hides_latency),)
    for seed in range(3):
        assert_case_is_right(name, mesh, seed, options)


@pytest.mark.gpu
@SEVERAL_GPUS
@pytest.mark.parametrize("hides_latency", [False, True])
def test_scanned_layers_do_not_copy_buffers(hides_latency):
    """Values and gradients are those of all_gather, and no array of a buffer's size is copied in the loop."""
    mesh = mesh_of_gpus(2, "expert")
    layer = MoELayer(64, 32, num_experts=8, topk=3)
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=(3, *shape)) / 8, "float32") for name, shape in layer.shapes.items()}
    x = jnp.asarray(rng.normal(size=(256, 64)), "float32")

    def program(exchange):
        sharding = MoESharding(mesh, expert="expert", exchange=exchange, buffer_factor=1.75)

        def loss(params, x):
            def body(x, params):
                return x + layer.apply(params, x, sharding=sharding, precision="highest")[0], None

            return jnp.sum(jnp.square(jax.lax.scan(body, x, params)[0]))

        options = {"xla_gpu_enable_latency_hiding_scheduler": hides_latency}
        return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(params, x).compile(compiler_options=options)

    ragged = program("ragged_all_to_all")
    assert not re.findall(r"= f32\[256,64\]\S* copy\(", str(ragged.as_text()))  # all tokens
    got, want = ragged(params, x), program("all_gather")(params, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), *map(jax.device_get, (got, want)))
