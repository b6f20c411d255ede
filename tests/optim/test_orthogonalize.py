"""`jgg.optim.orthogonalize` against singular values from NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.optim import orthogonalize
from jgg.optim.coefficients import coefficients_of

RNG = np.random.default_rng(3)
SPECTRA = {
    "even": lambda n: np.ones(n),
    "of random numbers": lambda n: np.linalg.svd(RNG.normal(size=(n, 2 * n)), compute_uv=False),
    "steep": lambda n: np.logspace(0, -4, n),
    "of rank 3": lambda n: np.r_[np.ones(3), np.zeros(n - 3)],
}


def stack_of(spectra, rows, columns, scale=7.0):
    """Matrices [spectra, rows, columns] with such singular values, and their decompositions."""
    n = min(rows, columns)
    u, _ = np.linalg.qr(RNG.normal(size=(len(spectra), rows, n)))
    v, _ = np.linalg.qr(RNG.normal(size=(len(spectra), columns, n)))
    s = np.stack([SPECTRA[name](n) for name in spectra])[:, None]
    return jnp.asarray(scale * (u * s) @ v.mT, jnp.float32), (u, s / np.linalg.norm(s, axis=2, keepdims=True), v)


def exact(decomposition, coefficients):
    u, s, v = decomposition
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ v.mT


def errors(got, wanted):
    """The largest singular value of each matrix's difference: each wanted matrix has one near 1."""
    return np.linalg.norm(np.asarray(got, np.float64) - wanted, ord=2, axis=(-2, -1))


def check_polynomials(name, shapes):
    """The polynomials have slopes at 0 that are up to 1000 together.

    So much larger are the errors of small singular values in the end than the roundings of x, by up to 2**-24, 2**-11
    or 2**-8 of its numbers.
    """
    coefficients = coefficients_of(name, 5)
    slope = np.prod([a for a, _, _ in coefficients])
    for rows, columns, methods in shapes:
        x, decomposition = stack_of(SPECTRA, rows, columns)
        wanted = exact(decomposition, coefficients)
        for dtype, of_slope in (("float32", 3e-7), ("float16", 2e-4), ("bfloat16", 1e-3)):
            for method in methods:
                if (dtype, method) != ("bfloat16", "gram"):
                    got = orthogonalize(x, ns_coeffs=name, ns_dtype=dtype, ns_method=method)
                    assert errors(got, wanted).max() < of_slope * slope, (rows, dtype, method)


BOTH = "standard", "gram"


@pytest.mark.parametrize("name", ["standard", "dion", "polar_express"])
def test_it_is_the_polynomial_of_the_singular_values(name):
    """Of wide, square and high matrices, by both methods."""
    check_polynomials(name, ((33, 96, BOTH), (48, 48, BOTH), (96, 33, (None,)), (300, 300, BOTH)))


@pytest.mark.gpu
@pytest.mark.xdist_group("kernels of iterations")  # one worker compiles them once
@pytest.mark.parametrize("name", ["standard", "dion", "polar_express"])
def test_kernels_compute_it(name):
    """Of sizes that no tile divides, and of many tiles."""
    check_polynomials(name, ((131, 257, BOTH), (300, 300, (None,)), (577, 264, (None,)), (768, 2048, (None,))))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_restarts_keep_the_gram_matrix_right(dtype, monkeypatch):
    """Without them errors grow with each iteration, in float16 beyond all use."""
    x, decomposition = stack_of(["steep"], 64, 160)
    wanted = exact(decomposition, coefficients_of("polar_express", 5))

    def error():
        return errors(orthogonalize(x, ns_coeffs="polar_express", ns_dtype=dtype, ns_method="gram"), wanted).max()

    restarted = error()
    monkeypatch.setattr("jgg.optim.newton_schulz._SEGMENT", 5)
    monkeypatch.setattr("jgg.optim.newton_schulz._GROWTH", np.inf)
    assert restarted < error() / 10
    assert restarted < (2e-4 if dtype == "float32" else 0.2)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 8, 9])
def test_any_number_of_steps(steps):
    x, decomposition = stack_of(["of random numbers"], 12, 40)
    for name in ("standard", "polar_express"):
        wanted = exact(decomposition, coefficients_of(name, steps))
        for method in ("standard", "gram"):
            got = orthogonalize(x, ns_coeffs=name, ns_steps=steps, ns_dtype="float32", ns_method=method)
            assert errors(got, wanted).max() < 2e-4, (name, method)


def test_polar_express_converges_to_the_polar_factor():
    x, (u, _, v) = stack_of(["of random numbers"], 20, 31)
    got = orthogonalize(x, ns_coeffs="polar_express", ns_steps=9, ns_dtype="float32")
    assert errors(got, u @ v.mT).max() < 1e-4


def best_quintic(low, high):
    """The odd quintic polynomial whose largest distance from 1 on [low, high] is least, by Remez's exchange."""
    points = np.array([low, (3 * low + high) / 4, (low + 3 * high) / 4, high])
    for _ in range(60):
        a, b, c, _ = np.linalg.solve(np.c_[points, points**3, points**5, [1, -1, 1, -1]], np.ones(4))
        points[1:3] = np.sqrt((-3 * b + np.array([1, -1]) * np.sqrt(9 * b * b - 20 * a * c)) / (10 * c))
        points[1:3].sort()
    return a, b, c


def test_polar_express_coefficients_are_the_best_of_each_step():
    """As the paper computes them, for singular values from 1e-3 on, but none below 0.024 of the largest are best."""
    low, high, cushion, safety = 1e-3, 1.0, 0.02407327424182761, 1.01
    for got in coefficients_of("polar_express", 6):
        a, b, c = best_quintic(max(low, cushion * high), high)
        ends = np.array([low, high])
        best = np.multiply((a, b, c), 2 / np.sum(a * ends + b * ends**3 + c * ends**5))
        np.testing.assert_allclose(got, best / [safety, safety**3, safety**5], rtol=1e-9)
        low = np.sum(best * low ** np.array([1, 3, 5]))
        high = 2 - low
    assert coefficients_of("polar_express", 9)[-1] == (1.875, -1.25, 0.375)


@pytest.mark.parametrize("scale", [1e-15, 1e-4, 1e6, 1e15, 1e38])
def test_numbers_of_any_size(scale):
    """float16 has none above 65,504, and loses bits below 6e-5; float32 has no norm of the largest."""
    x, decomposition = stack_of(["of random numbers"], 24, 300, scale=scale)
    got = orthogonalize(x, eps=0.0)
    assert errors(got, exact(decomposition, coefficients_of("standard", 5))).max() < 0.05


def test_zero_stays_zero_and_matrices_are_alone():
    x = jnp.asarray(np.stack([np.zeros((6, 9)), RNG.normal(size=(6, 9)), np.full((6, 9), np.nan)]), jnp.float32)
    got = orthogonalize(x)
    for eps in (1e-8, 0.0):
        np.testing.assert_array_equal(orthogonalize(x[0], eps=eps), 0)
    np.testing.assert_array_equal(got[0], 0)
    np.testing.assert_allclose(got[1], orthogonalize(x[1]), atol=1e-3)
    assert np.isnan(got[2]).all()
    assert orthogonalize(x[:0]).shape == (0, 6, 9)


def test_dtypes_vmap_and_scan():
    x = jnp.asarray(RNG.normal(size=(3, 2, 5, 8)), jnp.bfloat16)
    run = jax.jit(orthogonalize)
    got = run(x)
    assert got.dtype == jnp.bfloat16
    for other in (jax.vmap(run)(x), jax.lax.map(run, x)):
        np.testing.assert_allclose(other.astype(jnp.float32), got.astype(jnp.float32), atol=0.01)
    np.testing.assert_allclose(orthogonalize(x[0, 0].T).T.astype(jnp.float32), got[0, 0].astype(jnp.float32), atol=0.01)


def test_high_float32_matrices_under_jit_by_bfloat16():
    """XLA for CPUs refused the last product, whose result is transposed."""
    x = jnp.asarray(RNG.normal(size=(2, 9, 5)), jnp.float32)
    run = functools.partial(orthogonalize, ns_dtype="bfloat16", ns_steps=2)
    for run_all in (jax.jit(run), jax.jit(jax.vmap(run)), jax.jit(lambda x: run(x.mT).mT)):
        np.testing.assert_allclose(run_all(x), run(x), atol=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": jnp.ones(3)}, r"x must be matrices, with at least two axes, got \[3\]"),
        ({"ns_coeffs": "muon"}, r"ns_coeffs must be one of .*'polar_express'.*got 'muon'"),
        ({"ns_coeffs": (1.0, 2.0)}, r"ns_coeffs must be three numbers.*got \(1.0, 2.0\)"),
        ({"ns_coeffs": [[1, 2, 3], [4]]}, "ns_coeffs must be three numbers"),
        ({"ns_steps": 0}, "ns_steps must be"),
        ({"ns_method": "fast"}, "ns_method must be one of"),
        ({"ns_method": "gram", "ns_dtype": "bfloat16"}, "ns_method must be 'standard' where ns_dtype is bfloat16"),
        ({"implementation": "cuda"}, "implementation must be"),
    ],
)
def test_what_it_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        orthogonalize(**{"x": jnp.ones((2, 3)), **options})
    for wrong in ({"x": jnp.ones((2, 3), int)}, {"ns_dtype": "float8_e4m3fn"}):
        with pytest.raises(TypeError):
            orthogonalize(**{"x": jnp.ones((2, 3)), **wrong})


@pytest.mark.parametrize("name", ["standard", "dion", "polar_express"])
@pytest.mark.parametrize("norms", [(1.0, 1.0, 1.0), (1.0, 0.1, 0.01)])
def test_matrices_of_small_rank_stay_finite(name, norms):
    """The gradients of an expert that few tokens chose: on their Gram matrix, rounded zeros grow in each iteration."""
    rng = np.random.default_rng(3)
    for rank in (1, 2, 3):
        left, right = rng.normal(size=(32, 16, rank)), rng.normal(size=(32, rank, 64))
        x = jnp.asarray(left * np.asarray(norms[:rank]) @ right, jnp.float32)
        wanted = orthogonalize(x, ns_coeffs=name, ns_dtype="float32", ns_method="standard")
        assert errors(orthogonalize(x, ns_coeffs=name), np.asarray(wanted, np.float64)).max() < 0.2
