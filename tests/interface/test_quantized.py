"""FP8 with a scale for each block, and MXFP4: quantized, dequantized, and multiplied as what it dequantizes to."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jgg
from jgg.core.mxfp4 import MAGNITUDES
from jgg.core.program_memory import planned_memory
from tests.support.passes import forward_and_backward

DTYPES = {"float8_e4m3fn": (448, 4, 9), "float8_e5m2": (57344, 3, 16)}  # the largest, and -log2 of the errors
KINDS = pytest.mark.parametrize(
    ("quantize", "shape", "block"),
    [
        (jgg.quantize_tokens, (5, 256), (1, 128)),
        (jgg.quantize_tokens, (3, 200), (1, 128)),
        (jgg.quantize_tokens, (1, 1), (1, 128)),
        (jgg.quantize_weights, (2, 256, 128), (128, 128)),
        (jgg.quantize_weights, (3, 130, 300), (128, 128)),
        (jgg.quantize_weights, (2, 0, 40), (128, 128)),
    ],
)


def blocks_of(shape, block):
    """Each block's place."""
    starts = [range(0, size, step) for size, step in zip(shape[-2:], block, strict=True)]
    for *outer, (i, row), (j, column) in itertools.product(
        *(range(size) for size in shape[:-2]), enumerate(starts[0]), enumerate(starts[1])
    ):
        yield (*outer, i, j), (*outer, slice(row, row + block[0]), slice(column, column + block[1]))


def there_and_back(x, quantize, dtype, power_of_2_scales, own="float32"):
    """An array quantized, and dequantized in float32 and in a dtype of one's own, in one program."""

    @jax.jit
    def run(x):
        q = quantize(x, dtype, power_of_2_scales=power_of_2_scales)
        return q, q.dequantize("float32"), q.dequantize(own)

    return run(x)


@pytest.mark.parametrize("power_of_2_scales", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@KINDS
def test_values_scales_and_errors(quantize, shape, block, dtype, power_of_2_scales):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape) * 3)).astype(np.float32)
    q, y, _ = jax.tree.map(np.asarray, there_and_back(x, quantize, dtype, power_of_2_scales))
    largest, digits, floor = DTYPES[dtype]
    assert (q.values.dtype, q.scales.dtype, q.shape) == (dtype, "float32", shape)
    for place, own in blocks_of(shape, block):
        scale, highest = float(q.scales[place]), np.abs(x[own]).max()
        if power_of_2_scales:
            assert np.log2(scale) % 1 == 0
            assert 0.999 * highest / largest <= scale <= 2.001 * highest / largest
        else:
            assert scale == np.float32(highest) * np.float32(1 / largest)
        np.testing.assert_array_equal(y[own], q.values[own].astype(np.float32) * np.float32(scale))
        assert (np.abs(y[own] - x[own]) <= np.maximum(np.abs(x[own]) * 2.0**-digits, scale * 2.0**-floor) * 1.001).all()
    assert q.scales.size == len(list(blocks_of(shape, block)))


@KINDS
def test_the_same_bits_every_time_and_transposed(quantize, shape, block):
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    q = quantize(x)
    compiled = jax.jit(quantize)
    for other in (quantize(x), compiled(x), compiled(x)):
        jax.tree.map(np.testing.assert_array_equal, other, q)
    if block[0] == block[1]:
        jax.tree.map(np.testing.assert_array_equal, quantize(x.mT), q.mT)
        np.testing.assert_array_equal(q.mT.dequantize(), q.dequantize().mT)


@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_to_the_nearest_in_one_program(dtype, platform):
    """Also where XLA sees that values are converted to FP8 and back; and ties go to even values."""
    numbers = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    ties = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, *(np.nextafter(ties, np.float32(to)) for to in (-np.inf, np.inf)), ties])
    x = np.resize(x, (9, 128))
    x[:, 0] = numbers[-1]  # for scales of one
    with jax.default_device(jax.devices(platform)[0]):
        y = jax.jit(lambda x: jgg.quantize_tokens(x, dtype, power_of_2_scales=True).dequantize(jnp.float32))(x)
    np.testing.assert_array_equal(y, x.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_zeros_outliers_and_what_is_not_finite_stay_in_their_blocks(bad):
    x = np.random.default_rng(1).standard_normal((4, 384)).astype(np.float32)
    x[0, :128] = 0
    x[1, 130] = 1e30
    x[2, 256] = bad
    y = np.asarray(jgg.quantize_tokens(x).dequantize(jnp.float32))
    assert (y[0, :128] == 0).all()
    assert y[1, 130] == np.float32(1e30)
    assert (np.delete(y[1, 128:256], 2) == 0).all()
    assert np.isnan(y[2, 256:]).all()
    for row, columns in (
        (0, slice(128, None)),
        (1, slice(128)),
        (1, slice(256, None)),
        (2, slice(256)),
        (3, slice(None)),
    ):
        np.testing.assert_allclose(y[row, columns], x[row, columns], rtol=1 / 16, atol=1e-2)
    tiny = jgg.quantize_tokens(np.full((1, 4), 1e-40, np.float32))
    assert np.isfinite(tiny.dequantize(jnp.float32)).all()


@pytest.mark.parametrize("power_of_2_scales", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own", ["float32", "bfloat16", "float16"])
def test_largest_and_least_numbers(own, dtype, power_of_2_scales):
    """What FP8 rounds up past the largest number of a dtype is that number; what is less than the least is zero."""
    info, (_, digits, _) = ml_dtypes.finfo(own), DTYPES[dtype]
    largest, least = (np.asarray(number, own).astype(np.float64) for number in (info.max, info.smallest_subnormal))
    normal = float(np.finfo(np.float32).smallest_normal)
    x = np.zeros((4, 128))
    x[0, :4] = largest * np.array([1, -1, 0.97, 0.4])
    x[1, :3] = 512 * normal * np.array([1, -0.6, 0.3])
    x[2, :2] = least, -least
    x = np.asarray(x, own)
    for quantize in (jgg.quantize_tokens, lambda x, *args, **own: jgg.quantize_weights(x[:, None], *args, **own)):
        _, *results = there_and_back(x, quantize, dtype, power_of_2_scales, own)
        for got in results:
            got, want = np.asarray(got, np.float64).reshape(x.shape), x.astype(np.float64)
            # zeros for what is subnormal in float32
            assert (np.abs(got - want) <= 1.001 * np.maximum(np.abs(want) * 2.0**-digits, normal)).all()


def test_an_overflow_that_is_none_of_rounding():
    """Values, scales and products that are infinite stay so."""
    values = jnp.array([[256, -256, 448, 1]], jnp.float8_e4m3fn)
    q = jgg.QuantizedArray(values, jnp.full((1, 1), 256.0))
    np.testing.assert_array_equal(q.dequantize("float16"), np.array([[65504, -65504, np.inf, 256]], np.float16))
    q = jgg.QuantizedArray(jnp.array([[np.inf, 1]], jnp.float8_e5m2), jnp.ones((1, 1)))
    np.testing.assert_array_equal(q.dequantize("float16"), np.array([[np.inf, 1]], np.float16))
    q = jgg.QuantizedArray(values, jnp.full((1, 1), np.inf))
    np.testing.assert_array_equal(q.dequantize("float32"), np.array([[1, -1, 1, 1]], np.float32) * np.inf)


def test_under_transformations():
    w = jax.random.normal(jax.random.key(0), (3, 2, 130, 140))
    q = jax.vmap(jgg.quantize_weights)(w)
    for layer, own in enumerate(w):
        own = jgg.quantize_weights(own)
        np.testing.assert_array_equal(q.values[layer], own.values)
        np.testing.assert_array_equal(q.scales[layer], own.scales)
    _, scanned = jax.lax.scan(lambda carry, one: (carry, one.dequantize()), 0, q)
    np.testing.assert_array_equal(scanned, jax.vmap(lambda one: one.dequantize())(q))
    assert (jax.grad(lambda w: jnp.sum(jgg.quantize_weights(w).dequantize(jnp.float32)))(w[0]) == 0).all()


def layer_arrays():
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {
        "x": (40, 160),
        "w_gate_up": (4, 2 * 96, 160),
        "w_down": (4, 160, 96),
        "w_router": (160, 4),
        "dy": (40, 160),
    }
    return {name: jax.random.normal(key, shape) / 8 for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.sweep), "bfloat16"])
def test_products_multiply_what_it_dequantizes_to(dtype):
    arrays = {name: array.astype(dtype) for name, array in layer_arrays().items()}
    q, sizes = jgg.quantize_weights(arrays["w_down"]), jnp.array([10, 0, 25, 3])
    w, hidden = q.dequantize(dtype), arrays["x"][:, :96]
    assert w.dtype == dtype

    def run(w):
        both = forward_and_backward(lambda x: jgg.grouped_gemm(x, w, sizes))(arrays["dy"], hidden)
        own = (
            jgg.grouped_gemm_forward(hidden, w, group_sizes=sizes),
            jgg.grouped_gemm_dx(arrays["dy"], w, group_sizes=sizes),
        )
        return both, own

    jax.tree.map(np.testing.assert_array_equal, run(q), run(w))
    gradient = jax.grad(lambda q: jnp.sum(jgg.grouped_gemm(hidden, q, sizes).astype(jnp.float32)))(q)
    assert (gradient.scales == 0).all()


def test_layers_multiply_what_it_dequantizes_to():
    arrays = layer_arrays()
    routing = jgg.route(arrays["x"] @ arrays["w_router"], 2)
    q = {name: jgg.quantize_weights(arrays[name]) for name in ("w_gate_up", "w_down")}

    def run(weights):
        return forward_and_backward(lambda x: jgg.moe_mlp(x, routing=routing, **weights))(arrays["dy"], arrays["x"])

    jax.tree.map(np.testing.assert_array_equal, run(q), run({key: w.dequantize(jnp.float32) for key, w in q.items()}))


def test_errors():
    with pytest.raises(ValueError, match=r"x must be \[T, K\], 2-dimensional, got \[4\]"):
        jgg.quantize_tokens(np.ones(4))
    with pytest.raises(ValueError, match=r"w must be \[E, N, K\] or \[E, K, N\], 3-dimensional, got \[4, 4\]"):
        jgg.quantize_weights(np.ones((4, 4)))
    with pytest.raises(TypeError, match=r"x.dtype must be a float dtype, got int32"):
        jgg.quantize_tokens(np.ones((4, 4), np.int32))
    with pytest.raises(TypeError, match=r"dtype must be one of .*float8_e4m3fn.*, got bfloat16"):
        jgg.quantize_tokens(np.ones((4, 4)), jnp.bfloat16)
    with pytest.raises(TypeError, match="power_of_2_scales must be True or False, got 1"):
        jgg.quantize_tokens(np.ones((4, 4)), power_of_2_scales=1)
    wrong = jgg.QuantizedArray(jnp.ones((2, 256, 256), ml_dtypes.float8_e4m3fn), jnp.ones((2, 3, 2)))
    with pytest.raises(ValueError, match=r"scales must be of blocks of \(1, 32, 128\) rows .* got \[2, 3, 2\]"):
        jgg.grouped_gemm(np.ones((4, 256), np.float32), wrong, np.array([2, 2]))
    with pytest.raises(ValueError, match=r"values must be \[..., rows, columns\], got \[4\]"):
        jgg.QuantizedArray(jnp.ones(4, ml_dtypes.float8_e4m3fn), jnp.ones(1)).dequantize()


class QArray(NamedTuple):
    """A test double of qwix's; tests/frameworks/test_qwix.py has the real one."""

    qvalue: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None


@pytest.mark.parametrize("scale_shape", [(2, 1, 96), (2, 160, 1), (1, 1, 1), (2, 5, 3), (2, 1, 6), (1, 10, 96)])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", pytest.param("float8_e5m2", marks=pytest.mark.sweep)])
def test_qwix_arrays(scale_shape, dtype):
    shape = (2, 160, 96)
    values = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    scale = jax.random.uniform(jax.random.key(1), scale_shape, minval=0.5)
    converted = jgg.QuantizedArray.from_qwix(QArray(values, scale))
    for axis, size in enumerate(shape):
        scale = np.repeat(scale, size // scale.shape[axis], axis)
    np.testing.assert_array_equal(converted.dequantize(jnp.float32), np.asarray(values, np.float32) * scale)
    np.testing.assert_array_equal(converted.values, values)


def test_qwix_arrays_that_it_cannot_be():
    values, scale = jnp.ones((2, 4, 4), jnp.float8_e4m3fn), jnp.ones((2, 1, 4))
    with pytest.raises(TypeError, match=r"array must be a QArray with qvalue, got ArrayImpl"):
        jgg.QuantizedArray.from_qwix(values)
    with pytest.raises(TypeError, match=r"array.qvalue must be one of float8_e4m3fn, float8_e5m2, got int8"):
        jgg.QuantizedArray.from_qwix(QArray(values.astype(jnp.int8), scale))
    with pytest.raises(ValueError, match=r"array must be symmetric, without a zero_point, got one"):
        jgg.QuantizedArray.from_qwix(QArray(values, scale, scale))


def best_of_every_scale(groups):
    """The least sum of squared errors of groups of 32 numbers, in float64."""
    bounds = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    least = np.full(groups.shape[:-1], np.inf)
    for exponent in range(-127, 126):
        scaled = np.abs(groups) / 2.0**exponent
        rounded = np.take(MAGNITUDES, np.searchsorted(bounds, scaled))
        least = np.minimum(least, np.sum((scaled - rounded) ** 2, axis=-1) * 4.0**exponent)
    return least


@pytest.mark.parametrize("scale", [1e-30, 0.02, 1e37])
def test_mxfp4_has_the_least_error_of_every_scale(scale):
    draw = np.random.default_rng(0)
    w = (scale * draw.standard_normal((3, 64, 40)) * np.exp(draw.standard_normal((3, 64, 40)) / 2)).astype(np.float32)
    got = jgg.quantize_mxfp4(w)
    assert (got.values.shape, got.scales.shape) == ((3, 32, 40), (3, 2, 40))
    back = np.asarray(got.dequantize(jnp.float32))
    exact, of_groups = w.astype(np.float64), (3, 2, 32, 40)
    errors = np.sum((back - exact).reshape(of_groups) ** 2, axis=2)
    np.testing.assert_allclose(errors, best_of_every_scale(exact.reshape(of_groups).swapaxes(2, 3)), 1e-5)
    np.testing.assert_array_equal(jgg.quantize_mxfp4(back).dequantize(jnp.float32), back)


def test_mxfp4_rounds_halves_to_even_and_makes_a_group_with_a_nan_nan():
    halves = np.array([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    w = np.stack([np.concatenate([halves, -halves, 0 * halves, 0 * halves])] * 3, axis=1)
    w[9, 1], w[3, 2] = np.nan, np.inf
    got = np.asarray(jgg.quantize_mxfp4(w[None]).dequantize(jnp.float32))[0]
    even = np.array([6, 0, 1, 1, 2, 2, 4, 4])
    np.testing.assert_array_equal(got[:, 0], [*even, *-even, *[0] * 16])
    assert np.isnan(got[:, 1:]).all()


@pytest.mark.parametrize("number", [np.nan, -np.inf])
def test_mxfp4_makes_only_groups_with_a_nan_or_an_infinity_nan(number):
    """Wherever it is in its group: XLA's maximum on a CPU leaves most NaNs out."""
    w, groups = np.ones((2, 1024, 16), np.float32), np.random.default_rng(0).permutation(2 * 32 * 16)[::7]
    expert, group, column = np.unravel_index(groups, (2, 32, 16))
    w[expert, group * 32 + groups % 32, column] = number
    want = np.isnan(np.where(np.isfinite(w), 0, np.nan).reshape(2, 32, 32, 16).sum(2))
    np.testing.assert_array_equal(np.asarray(jgg.quantize_mxfp4(w).scales) == 255, want)


@pytest.mark.parametrize("shape", [(0, 64, 3), (2, 0, 3), (2, 64, 0)])
def test_mxfp4_of_no_numbers(shape):
    experts, rows, columns = shape
    got = jgg.quantize_mxfp4(jnp.zeros(shape))
    assert (got.values.shape, got.scales.shape) == ((experts, rows // 2, columns), (experts, rows // 32, columns))
    assert got.dequantize(jnp.float32).shape == shape


@pytest.mark.parametrize("spec", [jax.P("a"), jax.P(None, "a"), jax.P(None, None, "a")])
def test_mxfp4_over_explicit_axes(spec):
    w = np.random.default_rng(0).standard_normal((2, 64, 3)).astype(np.float32)
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    got = jax.jit(jgg.quantize_mxfp4)(jax.device_put(w, jax.NamedSharding(mesh, spec)))
    for part in (got.values, got.scales):
        assert jax.typeof(part).sharding.spec == jax.P(*spec, *[None] * (3 - len(spec)))
    jax.tree.map(np.testing.assert_array_equal, got, jgg.quantize_mxfp4(w))


def test_mxfp4_of_many_matrices_needs_little_memory_besides():
    w = jax.ShapeDtypeStruct((16, 256, 256), jnp.bfloat16)
    memory = planned_memory(jax.jit(jgg.quantize_mxfp4).lower(w).compile())
    assert memory.temporaries < memory.arguments


def test_mxfp4_refuses_what_has_no_whole_groups():
    with pytest.raises(ValueError, match=r"w must have a multiple of 32 rows, got \[1, 40, 2\]"):
        jgg.quantize_mxfp4(jnp.zeros((1, 40, 2)))
    with pytest.raises(ValueError, match=r"w must be \[E, K, N\], 3-dimensional, got"):
        jgg.quantize_mxfp4(jnp.zeros((32, 2)))
