"""MoE layers on several devices and in several processes, in processes of their own."""

import functools
import itertools
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
import jgg.nnx
from jgg.primitives.partitioning import WAY_OUT, Axes, split_letters
from jgg.primitives.splits import Split
from jgg.sharding import MoESharding, interleave, moe_mlp_on_device, sharded_moe_mlp
from tests.support import processes
from tests.support.marks import PLAIN_JAX, on
from tests.support.moe_runs import forward, indices_of
from tests.support.sharded_cases import (
    CASES,
    FEATURES,
    LOW_RANK_CASES,
    OTHER_CASES,
    QUANTIZED,
    SEVERAL_GPUS,
    assert_case_is_right,
    assert_quantized_weights_are_right,
    make,
    make_terms,
    need_gpus,
)

MESH = jax.sharding.AbstractMesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.thorough
@pytest.mark.parametrize("which", ["few", pytest.param("others", marks=pytest.mark.sweep)])
def test_every_strategy_on_eight_devices(which):
    names = [name for name in CASES if (name in OTHER_CASES) == (which == "others")]
    assert processes.run_program("run_sharding", which).splitlines() == [*names, "all right"]


def meshes_of_gpus():
    """(case, shape of a mesh) of 2 and 4 devices, where each axis is split by the case, its experts' among them."""
    for name, (axes, _, _) in CASES.items():
        used, experts = set("".join(map("".join, axes.values()))), set(axes.get("expert", ""))
        for shape in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)):
            split = {axis for axis, size in zip("abc", shape, strict=True) if size > 1}
            if experts <= split <= used:
                yield name, shape


def mesh_of_gpus(shape):
    count = np.prod(shape)
    need_gpus(count)
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(shape), ("a", "b", "c"))


@pytest.mark.gpu
@SEVERAL_GPUS
@pytest.mark.parametrize(("name", "shape"), list(meshes_of_gpus()))
def test_every_strategy_on_gpus(name, shape):
    assert_case_is_right(name, mesh_of_gpus(shape))


@pytest.mark.gpu
@SEVERAL_GPUS
@pytest.mark.parametrize(("name", "shape"), [case for case in meshes_of_gpus() if case[0] in LOW_RANK_CASES])
def test_low_rank_terms_on_gpus(name, shape):
    assert_case_is_right(name, mesh_of_gpus(shape), terms=make_terms())


@pytest.mark.gpu
@SEVERAL_GPUS
@pytest.mark.parametrize("axis", ["fsdp", "expert", "tensor"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_on_gpus(name, axis):
    need_gpus(2)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    assert_quantized_weights_are_right(name, MoESharding(mesh, **{axis: "a"}))


@pytest.mark.gpu
@SEVERAL_GPUS
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("exchange", [None, "all_gather", "ragged_all_to_all"])
def test_a_tokens_bits_depend_on_no_device_and_no_other_token(exchange, devices):
    """In another order, and so on other devices, and among fewer tokens; without an exchange, features are split."""
    mesh = jax.sharding.Mesh(mesh_of_gpus((devices, 1, 1)).devices.reshape(-1), ("a",))
    axes = {"tensor": "a"} if exchange is None else {"expert": "a", "exchange": exchange}
    sharding = MoESharding(mesh, **axes)
    rng = np.random.default_rng(0)
    arrays = {
        name: jnp.asarray(rng.normal(size=shape) / 8, jnp.bfloat16)
        for name, shape in (("x", (1024, 96)), ("w_gate_up", (8, 96, 128)), ("w_down", (8, 64, 96)))
    }
    arrays["topk_weights"] = jnp.asarray(rng.uniform(size=(1024, 4)), jnp.float32)
    arrays["topk_indices"] = jnp.asarray(np.argsort(rng.random((1024, 8)))[:, :4], jnp.int32)

    @jax.jit
    def y_of(tokens):
        own = {name: arrays[name][tokens] for name in ("x", "topk_weights", "topk_indices")}
        y, _ = sharded_moe_mlp(**(arrays | own), sharding=sharding, interleaved=True, w_layout="ekn")
        return y

    want = np.asarray(y_of(jnp.arange(1024)).astype(jnp.float32))
    for tokens in (rng.permutation(1024), rng.permutation(1024)[: 8 * devices], np.full(256, 7)):
        np.testing.assert_array_equal(y_of(jnp.asarray(tokens)).astype(jnp.float32), want[tokens])


@pytest.mark.gpu
@SEVERAL_GPUS
@pytest.mark.parametrize(
    ("kind", "spec"), [("Auto", jax.P()), ("Auto", jax.P("a", None, "b")), ("Explicit", jax.P())], ids=str
)
def test_inside_a_mesh_of_gpus(kind, spec):
    """ragged_dot and its gradients, of whole weights or, on Auto axes, of weights split over experts and features."""
    count = 4 if jax.device_count() >= 4 else 2
    need_gpus(count)
    mesh = jax.make_mesh((2, count // 2), ("a", "b"), axis_types=(jax.sharding.AxisType[kind],) * 2)
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((40, 64), (4, 64, 48)))
    sizes = jnp.asarray([10, 0, 25, 3], jnp.int32)

    def loss(x, w):
        return jnp.sum(jnp.sin(jgg.ragged_dot(x, w, sizes, precision="highest")))

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    want = jax.device_get(step(x, w))
    with jax.set_mesh(mesh):
        got = step(x, jax.device_put(w, jax.NamedSharding(mesh, spec)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), jax.device_get(got), want)


@pytest.mark.thorough
@pytest.mark.parametrize("which", ["few", pytest.param("others", marks=pytest.mark.sweep)])
def test_plain_jit_splits_features_and_experts_and_refuses_rows(which):
    assert "all right" in processes.run_program("run_partitioned", which)


def ways_to_split(*shape):
    """An array in every way that the axes of MESH, of 2 and 4 devices, can split it, evenly or not."""
    for names in itertools.product(((), ("a",), ("b",), ("a", "b")), repeat=len(shape)):
        used = sum(names, ())
        if len(set(used)) == len(used):
            yield jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(MESH, jax.P(*names)))


def test_operands_are_split_as_the_weights_are_or_refused():
    axes = Axes((".k", "ekn", "en"), (".n",), ("ek",), None)
    for operands in itertools.product(ways_to_split(6, 8), ways_to_split(2, 8, 12), ways_to_split(2, 12)):
        x, w, _ = (array.sharding.spec for array in operands)
        if x[0]:
            refusal = "An array of rows [6, 8] must not be split over its rows, got "
        elif "b" in (w[0] or ()) or w[2] == ("a", "b"):  # 2 experts over 4 or 8 devices
            refusal = "Weights [2, 8, 12] must be split evenly, got "
        else:
            refusal = None
        try:
            results = (jax.ShapeDtypeStruct((6, 12), jnp.float32),)
            split = split_letters(axes, *([Split.of(each, MESH) for each in arrays] for arrays in (operands, results)))
        except ValueError as error:
            assert refusal and str(error).startswith(refusal) and str(error).endswith(WAY_OUT), operands
        else:
            assert not refusal, operands
            kept = jax.NamedSharding(MESH, jax.P(*(split.get(letter) for letter in "ekn")))
            assert kept.is_equivalent_to(operands[1].sharding, 3), operands


@pytest.mark.thorough
def test_two_processes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    both = [processes.start("-m", "tests.programs.run_two_processes", i, port) for i in range(2)]
    try:
        for process in both:
            assert "all right" in processes.printed(process)  # between lines of gloo
    finally:
        for process in both:
            process.kill()


@pytest.mark.parametrize("quantize", [None, jgg.quantize_weights, jgg.Fp8().weights], ids=["", "array", "weights"])
def test_on_a_device_inside_shard_map(quantize):
    """A device that gets its shards by a shard_map of the user's gives what `sharded_moe_mlp` does."""
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = MoESharding(mesh, fsdp="a")
    arrays, chosen, _ = make("uneven")
    arrays = jax.tree.map(jnp.asarray, arrays | make_terms() | {"topk_indices": chosen})
    recipe = None if quantize is None else jgg.Fp8()
    options = {"sharding": sharding, "w_layout": "ekn", "quantization": recipe}
    if quantize is not None:
        arrays |= {name: quantize(arrays[name]) for name in ("w_gate_up", "w_down")}
    on_device = jax.shard_map(
        lambda arrays: moe_mlp_on_device(**arrays, **options)[0], mesh=mesh, in_specs=jax.P(), out_specs=jax.P("a")
    )
    got, want = jax.jit(on_device)(arrays), jax.jit(lambda arrays: sharded_moe_mlp(**arrays, **options)[0])(arrays)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("exchange", ["all_gather", "ragged_all_to_all"])
def test_no_tokens(exchange):
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    floats, chosen, _ = make("uneven")
    floats |= {"x": floats["x"][:0], "topk_weights": floats["topk_weights"][:0]}

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(floats):
        sharding = MoESharding(mesh, expert="a", exchange=exchange)
        y, overflow = sharded_moe_mlp(**floats, topk_indices=chosen[:0], sharding=sharding, w_layout="ekn")
        return jnp.sum(y), (y, overflow)

    (_, (y, overflow)), gradients = run(floats)
    assert y.shape == (0, FEATURES) and int(overflow) == 0
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, np.zeros_like(floats[name]), name)


@pytest.mark.parametrize("exchange", ["all_gather", "ragged_all_to_all"])
def test_lowers_for_gpus_that_are_not_there(exchange):
    sharding = MoESharding(MESH, data="a", expert="b", exchange=exchange)
    floats, chosen, _ = make("uneven")
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in floats.items()}

    @jax.jit
    @jax.grad
    def gradients(floats):
        return jnp.sum(sharded_moe_mlp(**floats, topk_indices=chosen, sharding=sharding, w_layout="ekn")[0])

    with jgg.target(90):
        text = gradients.trace(shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton_kernel_call" in text
    assert ("ragged_all_to_all" in text) == (exchange == "ragged_all_to_all")


@pytest.mark.parametrize("axes", [{"expert": "b"}, {"tensor": "b"}], ids=str)
def test_more_than_two_devices_add_up_results_themselves(axes):
    """The collectives that add do so in an order that depends on the place of a number; the overflow is of ints."""
    sharding = MoESharding(MESH, **axes)
    floats, chosen, _ = make("uneven", hidden=12)
    chosen = np.tile(chosen, (8, 1))
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in floats.items()}
    for name in ("x", "topk_weights"):
        shapes[name] = jax.ShapeDtypeStruct((len(chosen), *floats[name].shape[1:]), jnp.float32)
    run = functools.partial(sharded_moe_mlp, topk_indices=chosen, sharding=sharding, interleaved=True, w_layout="ekn")
    with jgg.target(90):
        text = jax.jit(lambda floats: run(**floats)[0]).trace(shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "all_to_all" in text
    assert "reduce_scatter" not in text and "all_reduce" not in text


@pytest.mark.parametrize("activation", ["geglu", pytest.param("ungated_gelu", marks=pytest.mark.sweep)])
@on(None, PLAIN_JAX)
def test_gradients_of_exact_gelu_on_a_mesh(implementation, activation):
    floats, chosen, dy = make("uneven")
    if activation == "ungated_gelu":
        floats |= {name: floats[name][..., ::2] for name in ("w_gate_up", "b_gate_up")}
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = MoESharding(mesh, expert="a")
    options = {"activation": activation, "w_layout": "ekn", "implementation": implementation, "precision": "highest"}

    def on_mesh(floats):
        y, _ = sharded_moe_mlp(**floats, topk_indices=chosen, sharding=sharding, **options)
        return jnp.sum(y * dy)

    def on_one_device(floats):
        return jnp.sum(forward(floats, indices_of(chosen, 8), **options) * dy)

    got, want = (jax.jit(jax.grad(loss))(floats) for loss in (on_mesh, on_one_device))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


def test_room():
    """The buffer is the factor times the even share, T * k, and never more than all rows there are."""
    rooms = [MoESharding(MESH, expert="b", buffer_factor=factor).capacity(30) for factor in (None, 4, 9, 1, 1.25)]
    assert rooms == [120, 120, 120, 30, 38]


def test_interleave():
    array = jnp.arange(12).reshape(2, 6)
    np.testing.assert_array_equal(interleave(array), [[0, 3, 1, 4, 2, 5], [6, 9, 7, 10, 8, 11]])
    np.testing.assert_array_equal(interleave(array, 0), array)
    with pytest.raises(ValueError, match=r"array must have 2 \* I features along axis 0, got \[3\]"):
        interleave(jnp.arange(3))
