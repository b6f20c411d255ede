"""8-bit floats with an exponent per block: how far they round, what they keep, and what is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.optim.eight_bits import Code, block_of, decoded, encoded, exponents_of

RNG = np.random.default_rng(3)
PRECISE = {Code.FLOAT: 14, Code.POSITIVE: 29}  # powers of two below a block's own
ALL = pytest.mark.parametrize("code", Code)


def small(array, salt=0, code=Code.FLOAT):
    """The codes and the exponents of an array."""
    exponents = exponents_of(array, code)
    return encoded(array, exponents, jnp.uint32(salt), code), exponents


def rounded(array, salt=0, code=Code.FLOAT):
    return decoded(*small(array, salt, code), code)


def powers_of(array, block):
    """The power of two at or above each block's largest magnitude, in the array's shape."""
    largest = np.abs(array.reshape(*array.shape[:-1], -1, block)).max(-1)
    return np.repeat(np.exp2(np.ceil(np.log2(largest))), block, axis=-1)


def numbers(code, shape=(16, 1024)):
    """Numbers of all magnitudes; each row has its own largest."""
    rows = np.exp2(np.linspace(-80, 80, shape[0]))[:, None]
    values = np.exp2(-RNG.uniform(0, 40, shape)) * rows
    return np.asarray(values * (RNG.choice([-1, 1], shape) if code != Code.POSITIVE else 1), np.float32)


@ALL
def test_errors_are_less_than_a_step_and_zero_in_the_mean(code):
    array = numbers(code)
    wide = array.astype(np.float64)
    if code == Code.EVEN:
        step = powers_of(wide * 128 / 127, 128) * 2.0**-7
    else:
        power = powers_of(wide, 128)
        step = 2.0**-3 * np.maximum(np.exp2(np.floor(np.log2(np.abs(wide)))), power * 2.0 ** -PRECISE[code])
    encode = jax.jit(lambda salt: rounded(jnp.asarray(array), salt, code))
    results = [np.asarray(encode(salt), np.float64) for salt in range(256)]
    assert all(np.all(np.abs(result - wide) < step) for result in results)
    if code != Code.POSITIVE:
        is_even = np.ones_like(wide, bool)
    else:  # what would be 0 is the least number
        assert all(np.all(result > 0) for result in results)
        is_even = wide >= 2.0 ** -(PRECISE[code] + 3) * power
    means = np.abs(np.mean(results, axis=0) - wide)[is_even] / step[is_even]
    assert means.max() < 6 * 0.5 / 16 and means.mean() < 0.5 / 16  # 16 is the root of the number of salts


@ALL
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_decoded_does_not_change(code, dtype):
    once = rounded(jnp.asarray(numbers(code), dtype), code=code).astype(dtype)
    for salt in range(1, 20):
        np.testing.assert_array_equal(rounded(once, salt, code), once.astype(jnp.float32))


@ALL
def test_blocks_are_apart(code):
    """Zeros are exact, and a huge number reaches only its own block, where the others are the least at most."""
    array = np.ones((2, 1024), np.float32)
    array[0, :128] = 0
    array[0, 130], array[1, 700] = 1e30, 0
    got = np.array(rounded(jnp.asarray(array), code=code))
    others = np.delete(got[0, 128:256], 2)
    if code != Code.POSITIVE:
        np.testing.assert_array_equal(others, 0)  # but with a chance of 1e-25
    else:
        assert 0 < others.min() == others.max() < 1e30 * 2.0**-31
    np.testing.assert_allclose(got[0, 130], 1e30, rtol=1 / 8)
    got[0, 128:256] = array[0, 128:256] = 0
    np.testing.assert_array_equal(got, array)


@ALL
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_block(code, bad):
    array = numbers(code)
    wanted = np.asarray(rounded(jnp.asarray(array), code=code))
    array[3, 200] = bad
    got = np.array(rounded(jnp.asarray(array), code=code))
    assert not np.isfinite(got[3, 128:256]).any()
    got[3, 128:256] = wanted[3, 128:256]
    np.testing.assert_array_equal(got, wanted)


def test_a_negative_number_is_not_lost():
    array = jnp.ones((1, 256)).at[0, 7].set(-1e-9)
    got = np.array(rounded(array, code=Code.POSITIVE))
    assert not np.isfinite(got[0, :32]).any()
    np.testing.assert_array_equal(got[0, 32:], 1)


def test_a_layer_alone_is_as_in_its_stack():
    array = jnp.asarray(numbers(Code.FLOAT, (6, 64 * 64)).reshape(2, 3, 64, 64))
    stack = small(array, 5)
    for index in np.ndindex(2, 3):
        layer = jax.tree.map(lambda a, index=index: a[index], stack)
        jax.tree.map(np.testing.assert_array_equal, small(array[index], 5), layer)
    mapped = jax.vmap(lambda a: small(a, 5))(array)
    jax.tree.map(np.testing.assert_array_equal, mapped, stack)
    first, second = (np.asarray(rounded(jnp.full((64, 64), 0.77), salt)) for salt in (0, 1))
    assert len({row.tobytes() for row in first}) == 64  # each row has its own noise, at each update
    assert 0.3 < np.mean(first != second) < 0.7


@pytest.mark.parametrize(
    ("size", "block"),
    [
        (2048, 128),
        (1024, 128),
        (768, 96),
        (1408, 88),
        (2880, 120),
        (16, 16),
        (8, 8),
        (50257, 29),
        (7, None),
        (257, None),
    ],
)
def test_blocks(size, block):
    assert block_of(size) == block


@ALL
@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_smallest_blocks(code, platform):
    largest = np.asarray([0, 2.0**-149, 2.0**-130, 2.0**-126, 2.0**-118, 2.0**-100], np.float32)[:, None]
    array = largest * np.linspace(0, 1, 256, dtype=np.float32)
    with jax.default_device(jax.devices(platform)[0]):
        result = np.asarray(jax.jit(lambda array: rounded(array, 1, code))(jnp.asarray(array)))
    assert np.isfinite(result).all() and not result[array == 0].any()
    assert np.all(np.abs(result - array)[-2:] <= largest[-2:] / 8)


@ALL
def test_codes_are_computed_in_integers(code):
    """XLA for a GPU divided by the product of two powers of two in place of one after the other: 0 / 0."""
    exponents = exponents_of(jnp.ones((8, 128)), code)
    jaxpr = jax.make_jaxpr(lambda array: encoded(array, exponents, jnp.uint32(0), code))(jnp.ones((8, 128)))
    floats = {str(own.primitive) for own in jaxpr.eqns if jnp.issubdtype(own.outvars[0].aval.dtype, jnp.floating)}
    assert floats <= {"reshape", "convert_element_type"}
