"""Ways to shard an MoE layer on eight CPU devices; prints what was right.

With "few" as an argument it leaves out what differs least from the rest, with "others" it does only that.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jgg
import jgg.linen
import jgg.nnx
from jgg.experts.sums import sum_all, sum_scatter
from jgg.layers import MoELayer
from jgg.sharding import MoESharding, interleave, sharded_moe_mlp
from tests.support.closeness import distance
from tests.support.packed import random_packed
from tests.support.sharded_cases import (
    CASES,
    LOW_RANK_CASES,
    OTHER_CASES,
    assert_case_is_right,
    assert_fp8_case_is_right,
    assert_quantized_weights_are_right,
    assert_shards_close,
    make,
    make_terms,
    on_mesh,
    on_one_device,
    place,
    program_on_mesh,
)

AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
KINDS = {"Auto": (AUTO,) * 3, "Explicit": (EXPLICIT,) * 3, "both": (EXPLICIT, AUTO, EXPLICIT)}
ALL = {"fsdp": "a", "expert": "b", "tensor": "c"}
WITHOUT_FSDP = {"data": "a", "expert": "b", "tensor": "c"}
# those options that a mesh could treat differently
LAYERS = {
    "Auto": {"activation": "ungated_relu_squared", "shared_features": 12, "use_bias": True, "use_selection_bias": True},
    "Explicit": {"topk": 1, "score": "sigmoid", "normalize": False, "scale_input": True, "interleaved": True}
    | {"lora_rank": 5, "lora_targets": ("w_gate_up",)},
}
LAYERS = {kind: options | {"use_router_scale": True} for kind, options in LAYERS.items()}
X = np.random.default_rng(0).normal(size=(4, 3, 24)).astype(np.float32)


def mesh_of(kind="Auto"):
    return jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=KINDS[kind])


def kind_of(name):
    """The kind of mesh that a case of CASES runs on."""
    axes, _, load = CASES[name]
    return "Auto" if "tensor" not in axes else "Explicit" if load == "uneven" else "both"


def check_sums():
    """Sums are those of the numbers in the order of the devices, rounded once, and derivatives those of JAX's sums."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AUTO,) * 2)
    rng = np.random.default_rng(0)
    ways = (
        (sum_scatter, lambda rows, axis: jax.lax.psum_scatter(rows, axis, scatter_dimension=0, tiled=True), jax.P("a")),
        (sum_all, jax.lax.psum, jax.P()),
    )

    def mapped(function, spec):
        on_device = lambda parts: function(parts[0], "a")  # noqa: E731
        return jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=jax.P("a"), out_specs=spec))

    for num_rows, dtype in ((4, jnp.float32), (4 * 33, jnp.bfloat16)):
        numbers = rng.normal(size=(4, num_rows, 3)) * 10.0 ** rng.integers(-3, 3, (4, num_rows, 3))
        parts, dy = jnp.asarray(numbers, dtype), jnp.asarray(rng.normal(size=(num_rows, 3)), dtype)
        one, two, three, four = parts.astype(jnp.float32)
        want = (((one + two) + three) + four).astype(dtype)
        for sums, of_jax, spec in ways:
            # an odd number of rows, where each device gets all
            rows = slice(None) if sums is sum_scatter else slice(num_rows - 1)
            got, pull_back = jax.vjp(mapped(sums, spec), parts[:, rows])
            np.testing.assert_array_equal(got, want[rows])
            _, expected = jax.vjp(mapped(of_jax, spec), parts[:, rows])
            np.testing.assert_array_equal(pull_back(dy[rows])[0], expected(dy[rows])[0])


def check_four_devices():
    """Results that more than two devices add up, and their gradients."""
    mesh, (floats, chosen, dy) = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AUTO,) * 2), make("uneven", hidden=12)
    want_y, want = on_one_device(floats, chosen, dy, np.ones(chosen.shape, bool))
    for axis in ("expert", "tensor"):
        sharding = MoESharding(mesh, **{axis: "a"})
        y, got, _ = on_mesh(*place(floats, chosen, dy, sharding), sharding)
        assert_shards_close(y, want_y, f"{axis}: y")
        for name in floats:
            assert_shards_close(got[name], want[name], f"{axis}: {name}")


def check_no_tokens():
    """Weights are gathered, and their gradients scattered, for no rows."""
    sharding, (floats, chosen, dy) = MoESharding(mesh_of(), **ALL), make("uneven")
    floats |= {name: floats[name][:0] for name in ("x", "topk_weights")}
    y, gradients, overflow = on_mesh(*place(floats, chosen[:0], dy[:0], sharding), sharding)
    assert y.shape == dy[:0].shape and int(overflow) == 0
    for name, gradient in gradients.items():
        assert gradient.shape == floats[name].shape and not np.any(gradient), name


def check_layer(kind):
    """A layer on a mesh against the same layer on one device: y, gradients and metrics. Some choices are given."""
    layer = MoELayer(24, **({"hidden_features": 20, "num_experts": 8, "topk": 2} | LAYERS[kind]))
    sharding = MoESharding(mesh_of(kind), **ALL, exchange="ragged_all_to_all")
    rng, shapes = np.random.default_rng(0), layer.shapes | layer.adapter_shapes
    params = {name: rng.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    selection_bias = np.linspace(-0.3, 0.3, 8, dtype=np.float32) if layer.use_selection_bias else None
    given = rng.integers(0, 8, (4, 3, layer.topk)).astype(np.int32)
    given[::2, 1:] = -1
    given[1, 0, 0] = 8  # no expert

    def run(params, x, given, sharding=None):
        def loss(params):
            y, metrics = layer.apply(
                params,
                x,
                selection_bias,
                router_x=jnp.flip(x, axis=-1),
                topk_indices=given,
                sharding=sharding,
                precision="highest",
            )
            return jnp.sum(jnp.square(y)) + metrics.load_balancing_loss + metrics.router_z_loss, (y, metrics)

        (_, results), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return *results, gradients

    want_y, want_metrics, want = jax.jit(run)(params, X, given)
    specs = dict.fromkeys(params, jax.P()) | sharding.weight_specs("ekn")
    split = {name: jax.device_put(array, sharding.named(specs[name])) for name, array in params.items()}
    tokens = sharding.named(jax.P(sharding.token_axes))
    x, given = jax.device_put((X, given), tokens)
    y, metrics, got = jax.jit(functools.partial(run, sharding=sharding))(split, x, given)
    assert metrics.topk_indices.sharding.is_equivalent_to(tokens, 3), metrics.topk_indices.sharding
    assert_shards_close(y, want_y, "y")
    assert int(jnp.sum(metrics.group_sizes)) == 12 * layer.topk - 1
    for name, value in metrics._asdict().items():
        assert_shards_close(value, getattr(want_metrics, name), name)
    for name in params:
        assert_shards_close(got[name], want[name], name)


def check_flax():
    """The Flax layers on a mesh give what they give without, from parameters that come into being split."""
    sharding = MoESharding(mesh_of("Explicit"), expert="b", fsdp="a")
    x = jax.device_put(X, sharding.named(jax.P(sharding.token_axes)))
    options = {"num_experts": 8, "topk": 2, "use_selection_bias": True, "lora_rank": 5, "sharding": sharding}
    layer = jgg.nnx.MoE(24, 20, **options, rngs=nnx.Rngs(0))
    by_experts = sharding.named(jax.P(("b", "a")))
    for name in ("w_gate_up", "w_gate_up_lora_a"):
        assert getattr(layer, name)[...].sharding.is_equivalent_to(by_experts, 3), name
    module = jgg.linen.MoE(20, **options)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    for name in ("w_down", "w_down_lora_b"):
        assert variables["params"][name].sharding.is_equivalent_to(by_experts, 3), name
    y, sown = jax.jit(functools.partial(module.apply, mutable=["intermediates"]))(variables, x)
    assert int(sown["intermediates"]["overflow"][0]) == 0
    (chosen,) = sown["intermediates"]["topk_indices"]
    assert chosen.sharding.is_equivalent_to(x.sharding, 3), chosen.sharding
    np.testing.assert_array_equal(jax.jit(module.apply)(variables, x, chosen), y)

    whole = module.clone(sharding=None)
    variables = jax.device_get(variables)
    assert_shards_close(y, jax.jit(whole.apply)(variables, X), "Linen")
    variables["params"] = jax.device_get({name: getattr(layer, name)[...] for name in variables["params"]})
    assert_shards_close(nnx.jit(lambda layer, x: layer(x))(layer, x), jax.jit(whole.apply)(variables, X), "NNX")


def check_load_params():
    """A float32 file goes into a sharded bfloat16 layer: no array is whole on one device, and each stays split."""
    for kind, is_abstract in (("Auto", False), ("Explicit", False), ("Explicit", True)):
        sharding = MoESharding(mesh_of(kind), **ALL)

        def make(sharding=sharding):
            return jgg.nnx.MoE(
                24,
                20,
                num_experts=8,
                topk=2,
                interleaved=True,
                use_bias=True,
                use_selection_bias=True,
                lora_rank=5,
                sharding=sharding,
                param_dtype=jnp.bfloat16,
                rngs=nnx.Rngs(0),
            )

        layer = nnx.eval_shape(make) if is_abstract else make()
        rng = np.random.default_rng(0)
        shapes = layer.layer.shapes | layer.layer.adapter_shapes | {"selection_bias": (8,)}
        params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        with jax.transfer_guard_device_to_device("disallow_explicit"):
            jgg.nnx.load_params(layer, params)
        specs = dict.fromkeys(params, jax.P()) | sharding.weight_specs("ekn")
        for name, array in params.items():
            got = getattr(layer, name)[...]
            dtype = jnp.float32 if name == "selection_bias" or "_lora_" in name else jnp.bfloat16
            assert got.sharding.is_equivalent_to(sharding.named(specs[name]), got.ndim), (kind, name, got.sharding)
            assert got.dtype == dtype, (name, got.dtype)
            np.testing.assert_array_equal(got, array.astype(dtype), name)


def check_quantized_weights():
    """Weights that were quantized beforehand, gathered, split over experts and over hidden features."""
    compiled = assert_quantized_weights_are_right("quantized once", MoESharding(mesh_of(), **ALL))
    gathered = re.findall(r"(\w+)\[4,(?:128|256),(?:128|256)\]\S* all-gather\(", compiled)
    assert gathered == ["u8"] * 4, gathered  # and scales, which are smaller


def check_split_features_of_quantized_weights():
    """The same, dequantized, with features split by fsdp."""
    axes = {"data": "a", "fsdp": "b", "expert": "c"}
    sharding = MoESharding(mesh_of("Explicit"), **axes, fsdp_splits="features", exchange="ragged_all_to_all")
    assert_quantized_weights_are_right("dequantized", sharding)


def check_fp8():
    """Rows are sent in FP8 along all axes, too many for a device."""
    recipe = jgg.Fp8(jnp.float8_e5m2, power_of_2_scales=True)
    name = "overloaded device with an even share of room, ragged_all_to_all"
    assert_fp8_case_is_right(name, mesh_of("both"), recipe)


def check_fp8_with_terms():
    """The same of frozen weights and terms of low rank."""
    assert_fp8_case_is_right("expert by all-gather", mesh_of("Explicit"), jgg.Fp8(), make_terms(256, 256))


def check_packed_weights(kind):
    """Weights in MXFP4, gathered and split over experts and hidden features, by whole bytes and scales."""

    sharding = MoESharding(mesh_of(kind), **ALL)
    floats, chosen, dy = make("uneven", features=64, hidden=64)
    packed = {name: random_packed(floats.pop(name).shape, -2) for name in ("w_gate_up", "w_down")}
    split, *_ = place(floats, chosen, dy, sharding)
    specs = sharding.weight_specs("ekn")

    def run(weights):
        def loss(floats):
            options = {"sharding": sharding, "interleaved": True, "w_layout": "ekn"}
            y, _ = sharded_moe_mlp(**floats, **weights, topk_indices=chosen, **options)
            return jnp.sum(y * dy)

        weights = {name: jax.device_put(array, sharding.named(specs[name])) for name, array in weights.items()}
        return weights, jax.jit(jax.value_and_grad(loss))(split)

    weights, got = run(packed)
    _, want = run({name: array.dequantize("float32") for name, array in packed.items()})
    assert weights["w_down"].values.addressable_shards[0].data.shape == (2, 16, 64)
    assert all(distance(*pair) < 1e-5 for pair in zip(*map(jax.tree.leaves, (got, want)), strict=True))
    try:
        sharding.check_split("w_down", random_packed((8, 32, 64), -2), sharding.weight_specs("ekn")["w_down"])
    except ValueError as error:
        assert "w_down must have a multiple of 64 along axis 1" in str(error), error
    else:
        raise AssertionError("split 32 numbers with one scale")


def check_float32_weights(axes):
    """Of tokens in bfloat16: what every device adds to a gradient is float32 too, unless fsdp scatters it."""
    sharding = MoESharding(mesh_of(), **axes)
    floats, chosen, dy = make("uneven")
    tokens = {"x": floats["x"].astype(jnp.bfloat16)}
    dy = dy.astype(jnp.bfloat16)
    split, *others = place(floats | tokens, chosen, dy, sharding)
    y, got, _ = on_mesh(split, *others, sharding)
    want_y, want = on_one_device(floats | tokens, chosen, dy, np.ones(chosen.shape, bool))
    assert y.dtype == jnp.bfloat16
    assert distance(y, want_y) < 1e-2
    for name, gradient in got.items():
        assert gradient.dtype == floats[name].dtype or name == "x", name
        assert distance(gradient, want[name]) < 1e-2, name
    rounded = got["w_down"].astype(jnp.bfloat16).astype(jnp.float32)
    assert bool(jnp.all(rounded == got["w_down"])) == ("fsdp" in axes)


def check_quantizing_on_explicit_axes():
    """Each device quantizes its own blocks, and one device would quantize them so; a block of two raises."""
    sharding = MoESharding(mesh_of("Explicit"), **ALL, fsdp_splits="features")
    spec = sharding.named(sharding.weight_specs("ekn")["w_gate_up"])
    w = np.random.default_rng(0).normal(size=(2, 256, 512)).astype(np.float32)
    got, want = jgg.Fp8().weights(jax.device_put(w, spec)), jgg.Fp8().weights(w)
    assert got.forms.straight.scales.sharding.spec == jax.P("b", "a", "c")
    assert got.forms.transposed.values.sharding.spec == jax.P("b", "c", "a")
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(np.asarray(one), np.asarray(other)), got, want)
    try:
        jgg.quantize_weights(jax.device_put(w[:, :128], spec))
    except ValueError as error:
        assert "w must have a multiple of 128 along axis 1 on each device, got [1, 64, 256]" in str(error), error
    else:
        raise AssertionError("split a block")


def check_quantized_layer():
    """A Flax layer takes a QuantizedArray into its shards, and computes what it does on one device."""
    sharding = MoESharding(mesh_of("Explicit"), **ALL)

    def make(sharding):
        options = {"interleaved": True, "quantization": jgg.Fp8(), "rngs": nnx.Rngs(0)}
        return jgg.nnx.MoE(256, 256, num_experts=8, topk=2, sharding=sharding, **options)

    whole, layer = make(None), nnx.eval_shape(lambda: make(sharding))
    params = {name: getattr(whole, name)[...] for name in whole.layer.shapes}
    params |= {name: jgg.quantize_weights(params[name]) for name in ("w_gate_up", "w_down")}
    for each in (whole, layer):
        jgg.nnx.load_params(each, params)
    expected = sharding.named(sharding.weight_specs("ekn")["w_down"])
    for part in jax.tree.leaves(layer.w_down.get_value()):
        assert part.sharding.is_equivalent_to(expected, 3), part.sharding

    @nnx.jit
    @nnx.grad
    def gradients(layer, x):
        return jnp.sum(jnp.square(layer(x)))

    x = np.random.default_rng(0).normal(size=(16, 256)).astype(np.float32)
    got = gradients(layer, jax.device_put(x, sharding.named(sharding.token_spec)))
    want = gradients(whole, x)
    assert list(got) == ["w_router"]
    assert distance(got["w_router"][...], want["w_router"][...]) < 1e-3


def check_weights_are_not_moved():
    """Forward and backward gather no weight but those of fsdp, and keep none of those gathered."""
    floats, chosen, dy = make("uneven")
    sizes = {floats[name].size // 4 for name in ("w_gate_up", "w_down")}  # of a device, fsdp gathered
    for axes, expected in ((WITHOUT_FSDP, 0), (ALL, 4)):
        sharding = MoESharding(mesh_of(), **axes)
        compiled = program_on_mesh(sharding).lower(*place(floats, chosen, dy, sharding)).compile().as_text()
        gathered = [
            np.prod([int(n) for n in re.findall(r"\d+", shape)])
            for shape in re.findall(r"f32\[([\d,]+)\]\S* all-gather\(", compiled)
        ]
        assert sum(size in sizes for size in gathered) == expected, (axes, gathered)


def check_explicit_weights_are_refused():
    """On Explicit axes, weights that are split otherwise would have to move, and raise."""
    sharding = MoESharding(mesh_of("Explicit"), expert="b")
    floats, chosen, _ = make("uneven")
    floats["w_down"] = jax.device_put(floats["w_down"], sharding.named(jax.P(None, "b")))
    try:
        sharded_moe_mlp(**floats, topk_indices=chosen, sharding=sharding, interleaved=True, w_layout="ekn")
    except ValueError as error:
        assert str(error).startswith("w_down must be split as P('b', None, None)"), error
    else:
        raise AssertionError("moved weights without a word")


def check_interleave():
    """A layer of gates and ups side by side becomes one that a tensor axis can split."""
    arrays, chosen, _ = make("uneven")

    def y(sharding, arrays, **options):
        options |= {"topk_indices": chosen, "w_layout": "ekn", "precision": "highest", "sharding": sharding}
        return jax.jit(lambda arrays: sharded_moe_mlp(**arrays, **options)[0])(arrays)

    want = y(MoESharding(mesh_of(), data="a"), arrays)
    arrays |= {name: interleave(arrays[name]) for name in ("w_gate_up", "b_gate_up")}
    assert_shards_close(y(MoESharding(mesh_of(), tensor="c"), arrays, interleaved=True), want, "y")


def main(which="all"):
    assert jax.device_count() == 8
    for name in CASES:
        with_terms = name in LOW_RANK_CASES[3:]  # with all axes; the others are for two GPUs
        if which == "all" or (name in OTHER_CASES) == (which == "others"):
            assert_case_is_right(name, mesh_of(kind_of(name)), terms=make_terms() if with_terms else None)
            print(name, flush=True)
        if which != "few" and with_terms:
            assert_case_is_right(name, mesh_of(kind_of(name)))
    if which != "others":
        check_all_else()
    if which != "few":
        check_others()
    print("all right", flush=True)


def check_all_else():
    check_sums()
    check_no_tokens()
    check_quantizing_on_explicit_axes()
    check_weights_are_not_moved()
    check_explicit_weights_are_refused()
    check_interleave()


def check_others():
    check_four_devices()
    check_fp8()
    check_float32_weights(WITHOUT_FSDP)
    check_float32_weights(ALL)
    check_quantized_layer()
    check_split_features_of_quantized_weights()
    check_fp8_with_terms()
    check_flax()
    check_packed_weights("Auto")
    check_packed_weights("Explicit")
    check_quantized_weights()
    check_load_params()
    check_layer("Auto")
    check_layer("Explicit")


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    main(*sys.argv[1:])
