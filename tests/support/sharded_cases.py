"""An expert MLP with its tokens, and every strategy that must give the same on the devices of a mesh."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.sharding import MoESharding, sharded_moe_mlp
from tests.support.closeness import assert_close, distance

# one worker runs the tests of several GPUs, since collectives wait for each other and take memory on every GPU
SEVERAL_GPUS = pytest.mark.xdist_group("several GPUs")
TOKENS, FEATURES, HIDDEN, EXPERTS, TOPK = 32, 12, 10, 8, 3
RANK = 7

# name: (axes of a mesh a, b, c of 2 devices each and what they split, further options, who gets the tokens)
CASES = {
    "data": ({"data": ("a", "b", "c")}, {}, "uneven"),
    "fsdp": ({"fsdp": "a", "data": "b"}, {}, "uneven"),
    "fsdp of features": ({"fsdp": "a", "data": "b"}, {"fsdp_splits": "features", "prevent_cse": False}, "uneven"),
    "tensor": ({"tensor": "c"}, {}, "uneven"),
    "expert by all-gather": ({"expert": "b"}, {}, "uneven"),
    "expert by ragged all-to-all": ({"expert": "b"}, {"exchange": "ragged_all_to_all"}, "uneven"),
    "all-gather, room for a third": ({"data": "a", "expert": "b"}, {"buffer_factor": 2 / 3}, "uneven"),
    # so little that a token is sent for each of its choices
    "ragged, room for three in ten": (
        {"data": "a", "expert": "b"},
        {"buffer_factor": 0.6, "exchange": "ragged_all_to_all"},
        "uneven",
    ),
}
for exchange in ("all_gather", "ragged_all_to_all"):
    everything = {"fsdp": "a", "expert": "b", "tensor": "c"}, {"exchange": exchange}
    CASES |= {
        f"fsdp, expert, tensor by {exchange}": (*everything, "uneven"),
        f"idle device, {exchange}": (*everything, "idle"),
        f"overloaded device, {exchange}": (*everything, "overloaded"),
        f"overloaded device with an even share of room, {exchange}": (
            everything[0],
            everything[1] | {"buffer_factor": 1},
            "overloaded",
        ),
    }
# those of the sweep: the rest has each axis, with too little room and enough
OTHER_CASES = (
    "data",
    "fsdp",
    "fsdp of features",
    "idle device, all_gather",
    "tensor",
    "expert by all-gather",
    "expert by ragged all-to-all",
    "all-gather, room for a third",
    "fsdp, expert, tensor by all_gather",
    "idle device, ragged_all_to_all",
    "overloaded device, all_gather",
    "overloaded device, ragged_all_to_all",
    "overloaded device with an even share of room, all_gather",
    "overloaded device with an even share of room, ragged_all_to_all",
)
# those with terms of low rank too
LOW_RANK_CASES = [
    "fsdp",
    "fsdp of features",
    "tensor",
    "ragged, room for three in ten",
    "fsdp, expert, tensor by all_gather",
    "fsdp, expert, tensor by ragged_all_to_all",
]
MAY_OVERFLOW = [name for name, (_, options, _) in CASES.items() if "buffer_factor" in options]


def need_gpus(count):
    """Skips a test if there are fewer GPUs."""
    if jax.device_count() < count:
        pytest.skip(f"needs {count} GPUs, has {jax.device_count()}")


def make(load, seed=0, features=FEATURES, hidden=HIDDEN):
    """Float arrays, chosen experts [T, k] and dy, as NumPy."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    # of 2 devices along an axis the second has experts 4 to 7; k different experts of a token either way
    odds = {"uneven": np.arange(1.0, EXPERTS + 1), "idle": [1, 1, 1, 1, 0, 0, 0, 0], "overloaded": [0] * 4 + [1] * 4}
    odds = np.asarray(odds[load], float) / np.sum(odds[load])
    chosen = np.stack([rng.choice(EXPERTS, TOPK, replace=False, p=odds) for _ in range(TOKENS)])
    floats = {
        "x": normal(TOKENS, features),
        "w_gate_up": normal(EXPERTS, features, 2 * hidden) / features**0.5,
        "w_down": normal(EXPERTS, hidden, features) / hidden**0.5,
        "b_gate_up": normal(EXPERTS, 2 * hidden),
        "b_down": normal(EXPERTS, features),
        "topk_weights": rng.uniform(0.1, 1, (TOKENS, TOPK)).astype(np.float32),
    }
    return floats, chosen.astype(np.int32), normal(TOKENS, features)


def make_terms(features=FEATURES, hidden=HIDDEN):
    """The low-rank terms of the weights that `make` returns, as NumPy."""
    rng = np.random.default_rng(1)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return {
        name: jgg.LowRank(normal(EXPERTS, rows, RANK) / rows**0.5, normal(EXPERTS, RANK, columns), scale=0.5)
        for name, rows, columns in (("low_rank_gate_up", features, 2 * hidden), ("low_rank_down", hidden, features))
    }


def fitting(chosen, sharding):
    """Which rows [T, k] find room, by going through them one after the other."""
    splits, experts = math.prod(map(sharding.size, sharding.token_axes)), sharding.size(sharding.expert)
    num_tokens, num_experts = len(chosen) // splits, EXPERTS // experts
    room = math.ceil((sharding.buffer_factor or experts) * num_tokens * TOPK)
    fits = np.zeros(chosen.shape, bool)
    rows = [(token, choice) for token in range(len(chosen)) for choice in range(TOPK)]
    source = lambda row: row[0] // num_tokens  # noqa: E731
    rows.sort(key=lambda row: chosen[row])  # and so, of one expert's, by token
    taken = {}
    for row in rows:
        group = source(row) // experts  # the expert axis is the last of those that split tokens
        device = group, chosen[row] // num_experts
        taken[device] = taken.get(device, 0) + 1
        fits[row] = taken[device] <= room
    return fits


@functools.partial(jax.jit, static_argnames=("quantization", "implementation"))
def on_one_device(floats, chosen, dy, fits, quantization=None, implementation="xla"):
    """y and the gradients of sum(dy * y), without the rows that do not fit."""

    def loss(floats):
        arrays = dict(floats)
        weights = arrays.pop("topk_weights") * fits.astype(jnp.float32)
        routing = jgg.Routing(weights, chosen, *jgg.sort_by_expert(chosen, EXPERTS))
        y = jgg.moe_mlp(
            **arrays,
            routing=routing,
            interleaved=True,
            w_layout="ekn",
            precision="highest",
            implementation=implementation,
            quantization=quantization,
        )
        return jnp.sum(y * dy), y

    (_, y), gradients = jax.value_and_grad(loss, has_aux=True)(floats)
    return y, gradients


@functools.cache
def program_on_mesh(sharding, compiler_options=(), quantization=None):
    """A function to y and the overflow, and the gradients of sum(dy * y), by `sharded_moe_mlp`."""

    def loss(floats, chosen, dy):
        y, overflow = sharded_moe_mlp(
            **floats,
            topk_indices=chosen,
            sharding=sharding,
            interleaved=True,
            w_layout="ekn",
            precision="highest",
            quantization=quantization,
        )
        return jnp.sum(y * dy), (y, overflow)

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=dict(compiler_options))


def on_mesh(floats, chosen, dy, sharding, **options):
    """y, the gradients of sum(dy * y) and the overflow, by `sharded_moe_mlp`."""
    (_, (y, overflow)), gradients = program_on_mesh(sharding, **options)(floats, chosen, dy)
    return y, gradients, overflow


def place(floats, chosen, dy, sharding):
    """The arrays split over the mesh, also where each process has some of its devices."""
    specs = sharding.weight_specs("ekn")

    def split(name, array):
        if isinstance(array, jgg.LowRank):
            weights = name.replace("low_rank", "w")
            parts = {part: split(f"{weights}_lora_{part}", getattr(array, part)) for part in "ab"}
            return dataclasses.replace(array, **parts)
        spec = sharding.named(specs.get(name, sharding.token_spec))
        return jax.make_array_from_callback(array.shape, spec, lambda index: array[index])

    return {name: split(name, array) for name, array in floats.items()}, split("", chosen), split("", dy)


def assert_case_is_right(name, mesh, seed=0, compiler_options=(), terms=None):
    """Compares y, every gradient and the overflow with the result of one device; `terms` are those of low rank."""
    axes, options, load = CASES[name]
    sharding = MoESharding(mesh, **axes, **options)
    floats, chosen, dy = make(load, seed)
    floats |= terms or {}
    fits = fitting(chosen, sharding)
    assert (name in MAY_OVERFLOW) == (not fits.all()), name  # so that each case tests what it says
    y, gradients, overflow = on_mesh(*place(floats, chosen, dy, sharding), sharding, compiler_options=compiler_options)
    want_y, want = on_one_device(floats, chosen, dy, fits)
    assert int(overflow) == np.sum(~fits), name
    assert_shards_close(y, want_y, f"{name}: y")
    for argument, gradient in gradients.items():
        for own, expected in zip(jax.tree.leaves(gradient), jax.tree.leaves(want[argument]), strict=True):
            assert_shards_close(own, expected, f"{name}: gradient of {argument}")


def as_sent(floats, dy, sharding, recipe):
    """The arrays and dy, with x and dy as they arrive: quantized and dequantized where they are sent in FP8."""
    if recipe is None or sharding.size(sharding.expert) == 1:
        return floats, dy

    def sent(rows, dtype):
        quantized = jgg.quantize_tokens(rows, dtype, power_of_2_scales=recipe.power_of_2_scales)
        return np.asarray(quantized.dequantize("float32"))

    return floats | {"x": sent(floats["x"], jnp.float8_e4m3fn)}, sent(dy, recipe.gradient_dtype)


def assert_fp8_case_is_right(name, mesh, recipe, terms=None):
    """Compares y, every gradient and the overflow with one device's result for x and dy in their sent form."""
    axes, options, load = CASES[name]
    sharding = MoESharding(mesh, **axes, **options)
    floats, chosen, dy = make(load, features=256, hidden=256)
    floats |= terms or {}
    fits = fitting(chosen, sharding)
    y, got, overflow = on_mesh(*place(floats, chosen, dy, sharding), sharding, quantization=recipe)
    floats, dy = as_sent(floats, dy, sharding, recipe)
    # by the same kernels: rounding of their sums would change too many numbers that are rounded to FP8 after them
    want_y, want = on_one_device(floats, chosen, dy, fits, quantization=recipe, implementation=None)
    assert int(overflow) == np.sum(~fits), name
    results = {"y": (y, want_y)} | {argument: (got[argument], want[argument]) for argument in floats}
    for result, pair in results.items():
        for own, expected in zip(*map(jax.tree.leaves, pair), strict=True):
            # where sums differ in the last bit, some numbers are rounded to their other neighbour in FP8
            own, expected = np.asarray(own), np.asarray(expected)
            if np.any(expected):
                assert distance(own, expected) < 3e-3, f"{name}: {result}"
            else:  # of frozen weights
                assert not np.any(own), f"{name}: {result}"


# name: (how weights are quantized beforehand, the recipe that they are multiplied by)
QUANTIZED = {
    "dequantized": (jgg.quantize_weights, None),
    "multiplied": (jgg.quantize_weights, jgg.Fp8()),
    "quantized once": (jgg.Fp8().weights, jgg.Fp8()),
}


def assert_quantized_weights_are_right(name, sharding):
    """Compares y and every gradient with the result of one device, of weights that were quantized beforehand.

    Returns: the program of the mesh, as text.
    """
    quantize, recipe = QUANTIZED[name]
    floats, chosen, dy = make("uneven", features=256, hidden=256)
    for weights in ("w_gate_up", "w_down"):  # blocks with scales of their own
        scales = np.exp2(np.random.default_rng(1).integers(-3, 4, (EXPERTS, 2, floats[weights].shape[2] // 128)))
        floats[weights] *= np.repeat(np.repeat(scales, 128, axis=1), 128, axis=2).astype(np.float32)
    quantized = {weights: quantize(floats[weights]) for weights in ("w_gate_up", "w_down")}
    sent, dy_sent = as_sent(floats, dy, sharding, recipe)
    want_y, want = on_one_device(sent | quantized, chosen, dy_sent, np.ones(chosen.shape, bool), quantization=recipe)
    split, *others = place(floats, chosen, dy, sharding)
    split |= {weights: quantize(split[weights]) for weights in quantized}
    program = program_on_mesh(sharding, quantization=recipe).lower(split, *others).compile()
    (_, (y, _)), got = program(split, *others)
    results = {"y": (y, want_y)} | {argument: (got[argument], want[argument]) for argument in floats}
    for result, (own, expected) in results.items():
        if isinstance(own, jgg.QuantizedArray):
            assert not np.any(own.scales), f"{name}: gradient of {result}"
            continue
        own, expected = (getattr(array, "array", array) for array in (own, expected))
        # where sums differ in the last bit, some numbers are rounded to their other neighbour in FP8
        assert distance(own, expected) < (0.03 if recipe else 1e-5), f"{name}: {result}"
    return program.as_text()


def assert_shards_close(got, want, name):
    """Compares what this process has of an array with all of it."""
    for shard in got.addressable_shards:
        part = np.asarray(want)[shard.index]
        assert_close(shard.data, part, name=name, least_scale=np.max(np.abs(want)))
