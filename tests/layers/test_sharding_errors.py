"""What a mesh refuses: axes, arrays and calls inside shard_map, before anything is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg
import jgg.nnx
from jgg.sharding import MoESharding, moe_mlp_on_device, sharded_moe_mlp
from tests.support.sharded_cases import make

MESH = jax.sharding.AbstractMesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


# what is wrong: (arguments of MoESharding, the message's beginning)
WRONG_AXES = {
    "no such axis": ({"expert": "c"}, "expert must be of the mesh's axes ('a', 'b'), got 'c'"),
    "no such data axis": ({"data": ("a", "c")}, "data must be of the mesh's axes ('a', 'b'), got 'c'"),
    "an axis twice": ({"fsdp": "a", "tensor": "a"}, "fsdp must name an axis that no other does, got 'a'"),
    "no such exchange": ({"exchange": "mail"}, "exchange must be one of ('all_gather', 'ragged_all_to_all'), got"),
    "nothing to split": ({"fsdp_splits": "tokens"}, "fsdp_splits must be one of ('experts', 'features'), got"),
    "no room": ({"buffer_factor": 0}, "buffer_factor must be None or a number greater than 0, got 0"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG_AXES.values(), ids=WRONG_AXES)
def test_wrong_axes(arguments, message):
    with pytest.raises(ValueError) as error:
        MoESharding(MESH, **arguments)
    assert str(error.value).startswith(message)


def zeros(**shapes):
    return {name: np.zeros(shape, np.int32 if name == "topk_indices" else np.float32) for name, shape in shapes.items()}


# what is wrong: (axes, changed arrays or options, the message's beginning)
WRONG_ARRAYS = {
    "tokens do not divide": (
        {"data": ("a", "b")},
        zeros(x=(30, 12), topk_weights=(30, 3), topk_indices=(30, 3)),
        "x must have a multiple of 8 along axis 0, the devices along 'a' and 'b' of the mesh, got [30, 12]",
    ),
    "experts do not divide": (
        {"expert": "b"},
        zeros(w_gate_up=(6, 12, 20), w_down=(6, 10, 12), b_gate_up=(6, 20), b_down=(6, 12)),
        "w_gate_up must have a multiple of 4 along axis 0, the devices along 'b' of the mesh, got [6, 12, 20]",
    ),
    "stored experts do not divide": (
        {"fsdp": "b", "expert": "a"},
        zeros(w_gate_up=(12, 12, 20), w_down=(12, 10, 12), b_gate_up=(12, 20), b_down=(12, 12)),
        "w_gate_up must have a multiple of 8 along axis 0, the devices along 'a' and 'b' of the mesh, got [12, 12, 20]",
    ),
    "stored features do not divide": (
        {"fsdp": "b", "fsdp_splits": "features"},
        zeros(x=(32, 10), w_gate_up=(8, 10, 20), w_down=(8, 10, 10), b_down=(8, 10)),
        "w_gate_up must have a multiple of 4 along axis 1",
    ),
    "too few axes": ({"tensor": "a"}, zeros(w_down=8), "w_down must be [E, H, I] or [E, I, H], 3-dimensional, got [8]"),
    "gates and ups apart": ({"tensor": "a"}, {"interleaved": False}, "interleaved must be True with a tensor axis"),
    "no such layout": ({"tensor": "a"}, {"w_layout": "nek"}, "w_layout must be one of ('enk', 'ekn'), got 'nek'"),
    "blocks on two devices": (
        {"tensor": "a"},
        {"w_down": jgg.QuantizedArray(np.zeros((8, 10, 12), jnp.float8_e4m3fn), np.ones((8, 1, 1), np.float32))},
        "w_down must have a multiple of 256 along axis 1, the devices along 'a' of the mesh, by blocks of 128 with one "
        "scale, got [8, 10, 12].",
    ),
    "no blocks": (
        {"expert": "b"},
        {"w_down": jgg.QuantizedArray(np.zeros((8, 10, 12), jnp.float8_e4m3fn), np.ones((8, 2, 1), np.float32))},
        "w_down.scales must be of blocks of (1, 32, 128) rows and columns of values [8, 10, 12], got [8, 2, 1].",
    ),
    "quantized once, without a recipe": (
        {"expert": "b"},
        {"w_down": jgg.Fp8().weights(np.zeros((8, 10, 12), np.float32))},
        "w_down must be an array or a QuantizedArray without quantization, got QuantizedWeights.",
    ),
    "another axis of a term": (
        {"tensor": "a"},
        {"low_rank_down": jgg.LowRank(np.zeros((8, 12, 4), np.float32), np.zeros((8, 4, 12), np.float32))},
        "low_rank_down for w [8, 10, 12] in w_layout 'ekn' must have a [8, 10, 4] and b [8, 4, 12], got a [8",
    ),
    "features disagree": ({"expert": "b"}, zeros(x=(32, 11)), "w_gate_up must have H in-features equal to x's 11"),
}


WRONG_DTYPES = {}
for exchange in ("all_gather", "ragged_all_to_all"):
    axes = {"expert": "b", "exchange": exchange}
    WRONG_ARRAYS |= {
        f"fewer weights than choices, {exchange}": (
            axes,
            zeros(topk_weights=(32, 2)),
            "topk_indices must be [T, k] = [32, 2] as topk_weights, got [32, 3]",
        ),
        f"fewer tokens of choices, {exchange}": (
            axes,
            zeros(topk_weights=(16, 3), topk_indices=(16, 3)),
            "topk_weights must be [T, k] with T equal to x's 32 and k at least 1, got [16, 3]",
        ),
        f"more tokens of weights, {exchange}": (
            axes,
            zeros(topk_weights=(64, 3)),
            "topk_weights must be [T, k] with T equal to x's 32",
        ),
        f"biases, {exchange}": (axes, zeros(b_down=(8, 11)), "b_down must be [E, N] = [8, 12], got [8, 11]"),
    }
    WRONG_DTYPES |= {
        f"float choices, {exchange}": (
            axes,
            {"topk_indices": np.zeros((32, 3), np.float32)},
            "topk_indices must be an integer array, got float32",
        ),
        f"integer weights, {exchange}": (
            axes,
            {"topk_weights": np.zeros((32, 3), np.int32)},
            "topk_weights must be one of float32, float16, bfloat16, got int32",
        ),
        f"weights of integers, {exchange}": (
            axes,
            {"w_down": np.zeros((8, 10, 12), np.int8)},
            "w_down must be one of float32, float16, bfloat16, got int8",
        ),
    }


@pytest.mark.parametrize(("axes", "changes", "message"), WRONG_ARRAYS.values(), ids=WRONG_ARRAYS)
def test_wrong_arrays(axes, changes, message):
    assert message_of(ValueError, axes, changes).startswith(message)


@pytest.mark.parametrize(("axes", "changes", "message"), WRONG_DTYPES.values(), ids=WRONG_DTYPES)
def test_wrong_dtypes(axes, changes, message):
    assert message_of(TypeError, axes, changes).startswith(message)


def message_of(error, axes, changes):
    floats, chosen, _ = make("uneven")
    arguments = {**floats, "topk_indices": chosen, "interleaved": True, "w_layout": "ekn"} | changes
    sharding = MoESharding(MESH, **axes)
    with pytest.raises(error) as raised:
        jax.eval_shape(lambda: sharded_moe_mlp(**arguments, sharding=sharding))
    return str(raised.value)


SCALES = jgg.QuantizedArray(np.zeros((8, 10, 12), jnp.float8_e4m3fn), np.ones((8, 2, 1), np.float32))


# what is wrong with a call inside shard_map: (function, changed arguments, error, the message's beginning)
WRONG_INSIDE = {
    "the arrays of all devices": (
        sharded_moe_mlp,
        {},
        ValueError,
        "sharding must split over axes of the mesh that no jax.shard_map around",
    ),
    "a mesh": (moe_mlp_on_device, {"sharding": MESH}, TypeError, "sharding must be a jgg.sharding.MoESharding, got A"),
    "an axis of none": (
        moe_mlp_on_device,
        {"sharding": MoESharding(MESH, data="b")},
        ValueError,
        "sharding must split over axes of the jax.shard_map around this call, 'b' over 4 devices, got no such axis.",
    ),
    "more devices": (
        moe_mlp_on_device,
        {"sharding": MoESharding(MESH, data="a")},
        ValueError,
        "sharding must split over axes of the jax.shard_map around this call, 'a' over 2 devices, got 1.",
    ),
    "tokens": (moe_mlp_on_device, {"x": [1.0]}, ValueError, "x must be [T, H], 2-dimensional, got [1]."),
    "a bias": (moe_mlp_on_device, {"b_down": [1.0]}, ValueError, "b_down must be [E, N] = [8, 12], got [1]."),
    "blocks": (moe_mlp_on_device, {"w_down": SCALES}, ValueError, "w_down.scales must be of blocks of (1, 32, 128) "),
}


@pytest.mark.parametrize(("function", "changes", "error", "message"), WRONG_INSIDE.values(), ids=WRONG_INSIDE)
def test_what_is_wrong_inside_shard_map(function, changes, error, message):
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    arrays, chosen, _ = make("uneven")
    arguments = {**arrays, "topk_indices": chosen, "w_layout": "ekn", "sharding": MoESharding(mesh, data="a")} | changes
    call = jax.shard_map(lambda: function(**arguments)[0], mesh=mesh, in_specs=(), out_specs=jax.P("a"))
    with pytest.raises(error) as raised:
        jax.eval_shape(call)
    assert str(raised.value).startswith(message)


def test_a_layer_inside_shard_map_names_what_to_call():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    layer = jgg.nnx.MoE(8, 8, num_experts=4, topk=2, sharding=MoESharding(mesh, data="a"), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"call jgg\.sharding\.moe_mlp_on_device"):
        jax.eval_shape(jax.shard_map(layer, mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a")), jnp.ones((4, 8)))
