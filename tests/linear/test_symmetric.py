"""Symmetric products and their product with other matrices, against NumPy in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.core.triangle import lower_tiles
from jgg.launching import requirements
from jgg.launching.heuristic import hopper_config
from jgg.launching.kernel_configs import KernelConfigForward
from jgg.linear.symmetric import apply, symmetric_product

GROUPS = (2, 3)
HOPPER = hopper_config(KernelConfigForward, "enk")
TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def normal(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def expected(left, right=None, scale=1.0, add=None, add_scale=1.0, diagonal=0.0):
    """The product in float64."""
    left, right, add = (None if array is None else np.asarray(array, np.float64) for array in (left, right, add))
    y = scale * left @ np.swapaxes(left if right is None else right, -1, -2) + diagonal * np.eye(left.shape[-2])
    return y if add is None else y + add_scale * add


def assert_close(got, want, dtype):
    tolerance = TOLERANCES[dtype]
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("groups", [(), GROUPS])
def test_a_polynomial_of_a_symmetric_matrix(groups, dtype):
    x = normal(*groups, 7, 11, dtype=dtype) / 4
    compute = jax.jit(symmetric_product)
    gram = compute(x)
    assert_close(gram, expected(x), dtype)
    terms = {"scale": -0.5, "add_scale": 1.5, "diagonal": 3.0}
    p = compute(gram, add=gram, **terms)
    assert_close(p, expected(gram, add=gram, **terms), dtype)
    assert_close(compute(p, gram), expected(p, gram), dtype)
    want = np.asarray(p, np.float64) @ np.asarray(x, np.float64)
    assert_close(jax.jit(apply)(p, x), want, dtype)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("interpret", marks=pytest.mark.interpret)])
def test_the_result_is_symmetric_to_the_last_bit(implementation):
    """Even where left @ right^T is not: iterations on Gram matrices would make such a difference larger."""
    left, right = (normal(2, 150, 20, dtype="float16", seed=seed) for seed in (1, 2))
    got = symmetric_product(left, right, implementation=implementation)
    np.testing.assert_array_equal(got, got.mT)
    lower = np.tri(150, dtype=bool)
    assert_close(np.where(lower, got, 0), np.where(lower, expected(left, right), 0), "float16")


def test_the_result_has_the_preferred_dtype():
    x = normal(5, 8, dtype="bfloat16")
    got = symmetric_product(x, diagonal=1.0, preferred_element_type="float32")
    assert_close(got, expected(x, diagonal=1.0), "float32")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"left": jnp.ones(3)}, ValueError, r"left must be matrices, with at least two axes, got \[3\]"),
        ({"left": jnp.ones((3, 4), int)}, TypeError, "left must be one of float32, float16, bfloat16, got int32"),
        (
            {"left": jnp.ones((3, 4)), "right": jnp.ones((3, 5))},
            ValueError,
            r"right must have left's shape \[3, 4\], got \[3, 5\]",
        ),
        (
            {"left": jnp.ones((3, 4)), "right": jnp.ones((3, 4), "float16")},
            TypeError,
            "right must have the dtype of the other operand, float32, got float16",
        ),
        (
            {"left": jnp.ones((2, 3, 4)), "add": jnp.ones((3, 3))},
            ValueError,
            r"add must have left's \[..., N, N\] shape \[2, 3, 3\], got \[3, 3\]",
        ),
        ({"left": jnp.ones((3, 4)), "scale": jnp.ones(2)}, ValueError, r"scale must be a scalar, got \[2\]"),
        ({"left": jnp.ones((3, 4)), "implementation": "cuda"}, ValueError, "implementation must be one of"),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        symmetric_product(**call)


def test_wrong_arguments_of_apply_are_named():
    with pytest.raises(ValueError, match=r"p must have x's \[..., N, N\] shape \[2, 3, 3\], got \[3, 3\]"):
        apply(jnp.ones((3, 3)), jnp.ones((2, 3, 4)))


def test_coefficients_may_be_traced():
    x, coefficients = normal(*GROUPS, 5, 8), jnp.array([[1.0, 0.0], [-0.5, 2.0]])
    step = functools.partial(symmetric_product, x)
    got = jax.lax.map(lambda terms: step(scale=terms[0], diagonal=terms[1]), coefficients)
    for own, (scale, diagonal) in zip(got, coefficients.tolist(), strict=True):
        assert_close(own, expected(x, scale=scale, diagonal=diagonal), "float32")


@pytest.mark.parametrize(
    ("size", "rows", "columns", "band"), [(9, 2, 4, 2), (9, 4, 2, 3), (16, 4, 4, 8), (1, 16, 16, 1)]
)
def test_tiles_cover_the_lower_triangle_once(size, rows, columns, band):
    covered = np.zeros((size, size), int)
    for row, column in zip(*lower_tiles(size, rows, columns, band), strict=True):
        tile = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
        assert np.tri(size)[tile].any()
        covered[tile] += 1
    assert (covered[np.tri(size, dtype=bool)] == 1).all()


def test_tiles_run_down_bands():
    row_tiles, column_tiles = lower_tiles(9, 2, 4, 2)
    assert row_tiles.tolist() == [0, 1, 2, 3, 2, 3, 4, 4, 4]
    assert column_tiles.tolist() == [0, 0, 0, 0, 1, 1, 0, 1, 2]


def small_tiles(rows, columns, **options):
    return KernelConfigForward(block_m=rows, block_n=columns, block_k=16, num_warps=4, **options)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("size", "reduced", "config", "dtype"),
    [
        (40, 24, small_tiles(16, 16), "float32"),
        (48, 32, small_tiles(16, 32, band=2), "float16"),
        (33, 17, small_tiles(32, 16), "float32"),
        (17, 40, None, "float16"),
        (1, 1, None, "float32"),
    ],
)
def test_interpreted_kernels(size, reduced, config, dtype):
    """The interpreter fills results with NaN first, so that an element that is not stored would show."""
    x = normal(*GROUPS, size, reduced, dtype=dtype) / reduced**0.5
    compute = jax.jit(functools.partial(symmetric_product, kernel_config=config, implementation="interpret"))
    gram = compute(x)
    assert_close(gram, expected(x), dtype)
    terms = {"scale": -0.5, "add_scale": 1.5, "diagonal": 3.0}
    p = compute(gram, add=gram.astype("float32"), **terms)
    assert_close(p, expected(gram, add=gram, **terms), dtype)
    assert_close(compute(p, gram, diagonal=1.0), expected(p, gram, diagonal=1.0), dtype)
    want = np.asarray(p, np.float64) @ np.asarray(x, np.float64)
    assert_close(jax.jit(functools.partial(apply, implementation="interpret"))(p, x), want, dtype)


@pytest.mark.interpret
def test_what_is_asked_for_decides_the_dtype_of_the_result():
    x = normal(2, 20, 24, dtype="float16")
    got = symmetric_product(x, preferred_element_type="float32", implementation="interpret")
    assert_close(got, expected(x), "float32")


@pytest.mark.interpret
def test_not_a_number_stays_in_its_matrix():
    x = normal(3, 20, 24).at[1, 7].set(jnp.nan)
    got = symmetric_product(x, implementation="interpret")
    assert_close(got[::2], expected(x)[::2], "float32")
    is_nan = np.zeros((20, 20), bool)
    is_nan[7], is_nan[:, 7] = True, True
    np.testing.assert_array_equal(jnp.isnan(got[1]), is_nan)


@pytest.mark.parametrize("implementation", [None, pytest.param("interpret", marks=pytest.mark.interpret)])
def test_under_vmap_and_scan(implementation):
    x, p = normal(3, *GROUPS, 5, 8), normal(3, *GROUPS, 5, 5, seed=1)
    p = p + jnp.swapaxes(p, -1, -2)
    product = functools.partial(symmetric_product, implementation=implementation)
    compute = lambda p, x: apply(product(x, add=p, diagonal=2.0), x, implementation=implementation)  # noqa: E731
    want = expected(x, add=p, diagonal=2.0) @ np.asarray(x, np.float64)
    for mapped in (compute, jax.vmap(compute), lambda *arrays: jax.lax.map(lambda one: compute(*one), arrays)):
        assert_close(jax.jit(mapped)(p, x), want, "float32")
    shared = jax.vmap(compute, in_axes=(None, 0))(p[0], x)
    assert_close(
        shared, expected(x, add=np.broadcast_to(p[0], p.shape), diagonal=2.0) @ np.asarray(x, float), "float32"
    )


def test_the_derivative_is_that_of_the_whole_product():
    x = normal(5, 8)
    got = jax.grad(lambda x: jnp.sum(symmetric_product(x, diagonal=1.0)[0]))(x)
    want = jax.grad(lambda x: jnp.sum((x @ x.T)[0]))(x)
    np.testing.assert_allclose(got, want, rtol=1e-5)


# G, N and K with more tiles than multiprocessors; N of the last is smaller than a tile
STACKS = [(4, 1536, 2048), (24, 768, 2048), (40, 520, 200), (20, 1000, 136), (200, 64, 72)]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["plain", "hopper"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", STACKS)
def test_kernels_on_a_gpu(shape, dtype, kernel):
    check_on_a_gpu(shape, dtype, PLAIN if kernel == "plain" else HOPPER)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"), [((9, 513, 257), "bfloat16"), ((9, 520, 200), "float32"), ((300, 17, 33), "float16")]
)
def test_other_sizes_on_a_gpu(shape, dtype):
    check_on_a_gpu(shape, dtype, None)


PLAIN = KernelConfigForward(block_m=128, block_n=128, num_warps=8, num_stages=3)


def check_on_a_gpu(shape, dtype, config):
    """Results begin as NaN, in the memory of an array that is given away, so that what is not stored would show."""
    options = {"precision": "highest" if dtype == "float32" else None, "implementation": "triton"}

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def compute(unwritten, *arrays, **terms):
        del unwritten
        return symmetric_product(*arrays, **terms, kernel_config=config, **options)

    def run(*arrays, **terms):
        return compute(jnp.full((*shape[:2], shape[1]), jnp.nan, dtype), *arrays, **terms)

    x = normal(*shape, dtype=dtype) / shape[-1] ** 0.5
    gram = run(x)
    assert_close(gram, expected(x), dtype)
    terms = {"scale": -0.5, "add_scale": 1.5, "diagonal": 3.0}
    p = run(gram, add=gram, **terms)
    assert_close(p, expected(gram, add=gram, **terms), dtype)
    product = run(p, gram)
    assert_close(product, expected(p, gram), dtype)
    for symmetric in (gram, p, product):  # also where left and right, rounded, do not commute
        np.testing.assert_array_equal(symmetric, symmetric.mT)
    np.testing.assert_array_equal(p, run(gram, add=gram, **terms))
    want = np.asarray(p, np.float64) @ np.asarray(x, np.float64)
    assert_close(jax.jit(functools.partial(apply, **options))(p, x), want, dtype)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("kernel", ["plain", "hopper"])
def test_offsets_past_two_billion_elements_on_a_gpu(kernel):
    """Only the last matrices, which are past 2**31 elements, are not zero."""
    size, reduced = 8192, 64
    config = PLAIN if kernel == "plain" else HOPPER
    x = jnp.zeros((34, size, reduced), "bfloat16").at[33].set(normal(size, reduced, dtype="bfloat16"))
    y = jax.jit(functools.partial(symmetric_product, kernel_config=config, implementation="triton"))(x)
    assert not jnp.any(y[:33])
    assert_close(y[33, -300:], expected(x[33])[-300:], "bfloat16")
    assert_close(y[33, :, -300:], expected(x[33])[:, -300:], "bfloat16")


def lower(compute, *shapes, dtype="bfloat16"):
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    with jgg.target(90):
        jax.jit(functools.partial(compute, implementation="triton")).trace(*arrays).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("config", "options", "size", "kernel"),
    [
        (None, {}, 128, "symmetric_kernel"),
        (None, {}, 264, "hopper_symmetric_kernel"),
        (None, {}, 260, "symmetric_kernel"),
        (HOPPER, {}, 128, "hopper_symmetric_kernel"),
        (PLAIN, {}, 264, "symmetric_kernel"),
        (HOPPER, {"preferred_element_type": "float32"}, 128, "symmetric_kernel"),
        (HOPPER, {"add": jnp.ones((2, 128, 128))}, 128, "symmetric_kernel"),
        (dataclasses.replace(HOPPER, block_n=128), {}, 128, "symmetric_kernel"),
    ],
)
def test_a_configuration_chooses_the_kernel(config, options, size, kernel, launched, monkeypatch):
    """Where the warp-specialized kernel is asked for and cannot run, the one of every GPU does."""
    monkeypatch.setattr(requirements, "unlike", lambda asked: None)
    lower(functools.partial(symmetric_product, kernel_config=config, **options), (2, size, 64))
    assert [name for name, _ in launched] == [kernel]


def test_a_polynomial_is_applied_by_one_grouped_product(launched):
    lower(apply, (2, 3, 256, 256), (2, 3, 256, 512))
    ((_, launch),) = launched
    assert launch.outputs[next(iter(launch.outputs))].shape == (2 * 3 * 256, 512)
