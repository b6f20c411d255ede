"""Weights in MXFP4: every number with every scale, by plain JAX and by the kernel, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jgg
import jgg.nnx
from jgg.core import mxfp4
from jgg.core.gpu_target import current_target
from jgg.launching.choice import How
from jgg.products.unpack import UNPACK, Unpack
from tests.support.closeness import largest_error
from tests.support.packed import random_packed

LEAST = np.float32(2.0**-126)  # smaller numbers are zero where XLA computes on a CPU


def every_number():
    """A packed array [32, 256] with the numbers in the rows and the scales in the columns, and what it stands for."""
    codes = np.repeat(np.tile(np.arange(16, dtype=np.uint8), 2)[:, None], 256, axis=1)
    scales = np.arange(256, dtype=np.uint8)[None]
    numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    with np.errstate(all="ignore"):
        exact = numbers * scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return jgg.QuantizedArray(mxfp4.packed(codes, -2), scales), exact


def unpacked(array, dtype, implementation):
    how = How(implementation, current_target())
    return np.asarray(UNPACK(how, Unpack(array.values, array.scales), dtype=jnp.dtype(dtype)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_number_with_every_scale(dtype):
    array, exact = every_number()
    with np.errstate(all="ignore"):
        exact = exact.astype(dtype)
    assert np.isnan(exact[:, 255].astype("f")).all() and np.isinf(exact[:, 254].astype("f")).any()
    assert dtype == "float16" or 0 < abs(exact[1, 0]) < LEAST  # 0.5 * 2**-127
    for own, want in (array, exact), (array.mT, exact.T):
        assert own.shape == want.shape
        for got in (own.dequantize(dtype), unpacked(own, dtype, None)):
            assert got.dtype == dtype
            np.testing.assert_array_equal(np.signbit(got)[~np.isnan(want)], np.signbit(want)[~np.isnan(want)])
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_kernel_unpacks_every_number(dtype):
    array, exact = every_number()
    with np.errstate(all="ignore"):
        exact = np.where((np.abs(exact) < LEAST) | (array.scales == 0), 0, exact).astype(dtype)
    for own, want in (array, exact), (array.mT, exact.T):
        got = unpacked(jax.tree.map(lambda part: part[None], own), dtype, "interpret")[0]
        np.testing.assert_array_equal(np.where(np.abs(got) < LEAST, 0, got), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_number_on_a_gpu(dtype):
    array, exact = every_number()
    with np.errstate(all="ignore"):
        exact = exact.astype(dtype)
    for own, want in (array, exact), (array.mT, exact.T):
        got = unpacked(jax.tree.map(lambda part: jnp.asarray(part)[None], own), dtype, "triton")[0]
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((2, 96, 40), -2), ((3, 17, 288), -1), ((2, 2, 32, 300), -2), ((1, 1, 32), -1), ((0, 32, 8), -2)],
)
def test_the_kernel_unpacks_odd_sizes(shape, axis):
    array = random_packed(shape, axis)
    got = unpacked(array, "float32", "interpret")
    np.testing.assert_array_equal(got, array.dequantize("float32"))


def test_under_vmap():
    several = random_packed((3, 2, 64, 16), -2)
    run = jax.vmap(
        lambda array: UNPACK(How(None, current_target()), Unpack(array.values, array.scales), dtype="float32")
    )
    np.testing.assert_array_equal(run(several), several.dequantize("float32"))
    shared = jax.vmap(lambda scales: unpacked_in(several.values[0], scales))(several.scales)
    np.testing.assert_array_equal(
        shared[1], jgg.QuantizedArray(several.values[0], several.scales[1]).dequantize("float32")
    )


def unpacked_in(values, scales):
    return UNPACK(How(None, current_target()), Unpack(values, scales), dtype=jnp.dtype("float32"))


def test_packing_is_undone_by_unpacking():
    codes = np.random.default_rng(0).integers(0, 16, (2, 64, 6), np.uint8)
    for axis in (-2, -1):
        np.testing.assert_array_equal(mxfp4.unpacked_codes(mxfp4.packed(codes, axis), axis, np), codes)


@pytest.mark.parametrize(("w_layout", "axis"), [("ekn", -2), ("enk", -1), ("ekn", -1)])
def test_grouped_gemm(w_layout, axis):
    w = random_packed((3, 64, 96), axis)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(17, 64 if w_layout == "ekn" else 96)), jnp.float32)
    sizes = jnp.asarray([9, 0, 6])

    def of(w):
        return jax.value_and_grad(lambda x: jnp.sum(jgg.grouped_gemm(x, w, sizes, w_layout=w_layout) ** 2))(x)

    for got, want in zip(of(w), of(w.dequantize("float32")), strict=True):
        assert largest_error(got, want) < 2e-6


@pytest.mark.parametrize(
    ("num_tokens", "w_layout", "implementation"),
    [
        (9, "ekn", None),
        pytest.param(200, "enk", None, marks=pytest.mark.sweep),
        *(
            pytest.param(num_tokens, w_layout, "interpret", marks=[pytest.mark.interpret, mark])
            for num_tokens, w_layout, mark in (
                (9, "enk", pytest.mark.thorough),  # read in packed form
                (200, "ekn", pytest.mark.sweep),  # unpacked before
                (9, "ekn", pytest.mark.sweep),
                (200, "enk", pytest.mark.sweep),
            )
        ),
    ],
)
def test_layers_with_lora(num_tokens, w_layout, implementation):
    rng, axis = np.random.default_rng(1), -2 if w_layout == "ekn" else -1
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape) / 8, jnp.float32)  # noqa: E731
    up, down = (
        random_packed((4, 64, 128) if w_layout == "ekn" else (4, 128, 64), axis),
        random_packed((4, 64, 64), axis),
    )
    ranks = [((4, 64, 2), (4, 2, 128)), ((4, 64, 2), (4, 2, 64))]
    if w_layout == "enk":
        ranks = [((4, 2, 64), (4, 128, 2)), ((4, 2, 64), (4, 64, 2))]
    terms = [jgg.LowRank(normal(*a), normal(*b), 0.5) for a, b in ranks]
    x, routing = normal(num_tokens, 64), jgg.route(normal(num_tokens, 4), 2)

    @functools.partial(jax.jit, static_argnums=4)
    def run(x, terms, up, down, implementation):
        options = {"w_layout": w_layout, "implementation": implementation}

        def loss(x, terms):
            low_rank = {"low_rank_gate_up": terms[0], "low_rank_down": terms[1]}
            return jnp.sum(jgg.moe_mlp(x, up, down, routing, **low_rank, **options) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1))(x, terms)

    want = run(x, terms, up.dequantize(jnp.float32), down.dequantize(jnp.float32), "xla")
    got = run(x, terms, up, down, implementation)
    for own, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert largest_error(own, expected) < 1e-5


@pytest.mark.parametrize("quantize", [random_packed, lambda shape, _: jgg.quantize_weights(jnp.ones(shape))])
def test_the_backward_pass_has_no_barrier_before_weights(quantize):
    """Only before their scales: XLA copies what a barrier takes out of the stacked weights of a model's layers."""
    up, down = quantize((4, 128, 256), -2), quantize((4, 128, 128), -2)
    routing = jgg.route(jnp.ones((24, 4)), 2)
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(jgg.moe_mlp(x, up, down, routing, w_layout="ekn"))))
    taken = [
        [operand.aval.shape for operand in equation.invars]
        for equation in equations_of(jaxpr(jnp.ones((24, 128))).jaxpr)
        if equation.primitive.name == "jgg_barrier"
    ]
    assert [shape for shapes in taken for shape in shapes if shape == up.scales.shape]
    assert not [shape for shapes in taken for shape in shapes if shape in (up.values.shape, down.values.shape)]


def equations_of(jaxpr):
    """All equations, those of inner jaxprs too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations_of(inner)


@pytest.mark.sweep
def test_a_recipe_quantizes_packed_weights_again():
    up, down = random_packed((4, 128, 256), -2), random_packed((4, 128, 128), -2)
    rng = np.random.default_rng(0)
    x, routing = jnp.asarray(rng.normal(size=(24, 128)), jnp.float32), jgg.route(rng.normal(size=(24, 4)), 2)
    run = jax.jit(lambda *weights: jgg.moe_mlp(x, *weights, routing, w_layout="ekn", quantization=jgg.Fp8()))
    np.testing.assert_array_equal(run(up, down), run(up.dequantize("float32"), down.dequantize("float32")))


def test_what_it_says_of_itself():
    array = random_packed((2, 64, 5), -2)
    assert repr(array) == "QuantizedArray(values=uint8[2, 32, 5], scales=uint8[2, 2, 5])"
    assert array.is_packed and array.shape == (2, 64, 5) and array.mT.shape == (2, 5, 64)
    assert not jgg.quantize_weights(jnp.ones((1, 4, 4))).is_packed
    stacked = jax.tree.map(lambda part: jnp.stack([part, part]), array)
    assert stacked.shape == (2, 2, 64, 5)


def test_errors():
    array = random_packed((4, 64, 32), -2)
    wrong = jgg.QuantizedArray(array.values, array.scales[:, :1])
    with pytest.raises(
        ValueError, match=r"scales must have one row for 16 rows of bytes, .* \[4, 32, 32\], got \[4, 1, 32\]"
    ):
        wrong.dequantize()
    with pytest.raises(ValueError, match=r"^w_down\.scales must have one row"):
        x, routing = jnp.ones((2, 64)), jgg.route(jnp.ones((2, 4)), 1)
        jgg.moe_mlp(x, random_packed((4, 64, 64), -2), jgg.QuantizedArray(array.values, wrong.scales), routing)
    with pytest.raises(TypeError, match="scales must be one of uint8, got float32"):
        jgg.QuantizedArray(array.values, array.scales.astype(jnp.float32)).dequantize()
    with pytest.raises(ValueError, match=r"values must be \[\.\.\., rows, columns\], got \[32\]"):
        jgg.QuantizedArray(array.values[0, :, 0], array.scales[0, :, 0]).dequantize()
    with pytest.raises(TypeError, match="values must be one of float8"):
        jgg.grouped_gemm(jgg.quantize_tokens(jnp.ones((4, 128))), random_packed((1, 32, 128), -1), jnp.asarray([4]))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda w: {"scales": w.scales.astype(jnp.uint8)}, "scales must be one of float32, .* got uint8"),
        (lambda w: {"scales": w.scales.astype(jnp.float8_e8m0fnu)}, "scales must be one of float32, .* got float8_e8m"),
        (lambda w: {"scales": w.scales.tolist()}, "scales must be a NumPy or JAX array, got list"),
        (lambda w: {"values": w.values.astype(jnp.bfloat16)}, "values must be one of .* uint8, got bfloat16"),
        (lambda w: {"values": w.values.astype(jnp.int8)}, "values must be one of .* uint8, got int8"),
        (lambda w: {"values": None}, "values must be a NumPy or JAX array, got None"),
    ],
)
def test_dtypes_that_stand_for_nothing_are_refused(changed, message):
    """Above all FP8 values with the byte scales of MXFP4, which would be taken for the numbers 0 to 255."""
    w = jgg.quantize_weights(jnp.ones((4, 128, 128)))
    wrong = dataclasses.replace(w, **changed(w))
    x, routing, sizes = jnp.ones((2, 128)), jgg.route(jnp.ones((2, 4)), 1), jnp.array([1, 1, 0, 0])
    calls = {
        "": wrong.dequantize,
        r"w\.": lambda: jgg.grouped_gemm(x, wrong, sizes),
        r"w_down\.": lambda: jgg.moe_mlp(x, w, wrong, routing, activation="ungated_relu"),
        r"w_gate_up\.": lambda: jgg.moe_mlp(x, wrong, w, routing, activation="ungated_relu", quantization=jgg.Fp8()),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"^{name}{message}"):
            call()


def test_quantized_rows_have_scales_of_floats():
    x, w = jgg.quantize_tokens(jnp.ones((4, 128))), jgg.quantize_weights(jnp.ones((1, 128, 128)))
    wrong = jgg.QuantizedArray(x.values, jnp.ones((4, 1), jnp.uint8))
    with pytest.raises(TypeError, match=r"^x\.scales must be one of float32, .* got uint8"):
        jgg.grouped_gemm(wrong, w, jnp.asarray([4]))


@pytest.mark.sweep
def test_flax_layers_take_packed_weights():
    options = {"topk": 2, "interleaved": True, "dtype": jnp.float32}
    layer = jgg.nnx.MoE(64, 32, num_experts=4, **options, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    packed = {"w_gate_up": random_packed((4, 64, 64), -2), "w_down": random_packed((4, 32, 64), -2)}
    dense = {name: array.dequantize("float32") for name, array in packed.items()}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(10, 64)), jnp.float32)
    results = []
    for weights in (packed, dense):
        jgg.nnx.load_params(layer, params | weights)
        results.append(nnx.jit(nnx.value_and_grad(lambda layer: jnp.sum(layer(x) ** 2)))(layer))
        layer = jgg.nnx.MoE(64, 32, num_experts=4, **options, rngs=nnx.Rngs(0))
    (got, d_got), (want, d_want) = results
    assert largest_error(got, want) < 1e-5
    assert largest_error(d_got["w_router"][...], d_want["w_router"][...]) < 1e-5
