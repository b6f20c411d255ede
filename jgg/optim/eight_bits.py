"""Arrays in 8-bit floats with an exponent per block, rounded stochastically: what optimizers' moments are kept in.

An array [..., N] has codes, uint8 [..., N], and exponents, uint8 [..., N / block], of a power of two per block, as
float32 has them. What a code is, relative to its block's power of two:

- FLOAT: a float8_e4m3fn, precise to 4 bits from 1 down to 2**-14, and a multiple of 2**-17 below.
- POSITIVE: a float without a sign and with 5 bits of exponent, precise to 4 bits down to 2**-29, a multiple of 2**-32
  below, and not 0 unless the number is 0.
- EVEN: a multiple of 2**-7, from -127 to 127.
"""

import enum
import math

import jax
import jax.numpy as jnp

from jgg.core.rounding import magnitudes, mixed

_BLOCK = 128  # the most elements with one exponent
_LEAST_BLOCK = 8
_PARTS = 8  # a mesh that splits the last axis into 2, 4 or 8 parts splits no block, if the axis allows
_DIGITS = 3  # of a code, after its leading 1
_FLOAT, _POSITIVE, _EVEN = 8, 15, 7  # powers of two of the code of 1, as float8_e4m3fn, float16 and an integer


class Code(enum.Enum):
    """What a code is."""

    FLOAT = enum.auto()
    POSITIVE = enum.auto()
    EVEN = enum.auto()


def block_of(size: int) -> int | None:
    """Elements per block of an axis; None if the axis has no even blocks of at least 8 and at most 128 elements."""
    blocks = [block for block in range(_LEAST_BLOCK, _BLOCK + 1) if size % block == 0]
    even = [block for block in blocks if (size // block) % _PARTS == 0]
    return max(even or blocks, default=None)


def decoded(codes: jax.Array, exponents: jax.Array, code: Code) -> jax.Array:
    """The float32 array that was encoded, rounded."""
    blocks = _in_blocks(codes, exponents.shape[-1])
    if code == Code.EVEN:
        values = jax.lax.bitcast_convert_type(blocks, jnp.int8).astype(jnp.float32) * 2.0**-_EVEN
    elif code == Code.FLOAT:
        values = jax.lax.bitcast_convert_type(blocks, jnp.float8_e4m3fn).astype(jnp.float32) * 2.0**-_FLOAT
    else:  # the upper bits of a float16, without its sign
        halves = jax.lax.bitcast_convert_type(blocks.astype(jnp.uint16) << 10 - _DIGITS, jnp.float16)
        values = halves.astype(jnp.float32) * 2.0**-_POSITIVE
    return _whole(values * _powers(exponents), codes)


def exponents_of(array: jax.Array, code: Code) -> jax.Array:
    """The exponents of an array [..., N] with `block_of(N)`; 255 where a block is not finite.

    A negative number counts as infinite if it must be positive.
    """
    block = block_of(array.shape[-1])
    assert block is not None
    values = _in_blocks(array.astype(jnp.float32), array.shape[-1] // block)
    sizes = jnp.where(values >= 0, values, jnp.inf) if code == Code.POSITIVE else magnitudes(values)
    largest = _bits(jnp.max(sizes, axis=-1))
    # up to a power of two, or to the next one where 127 / 128 of it would be less
    exponents = jnp.minimum((largest + 0x1FFFF >> 23) + 1, 255) if code == Code.EVEN else largest + 0x7FFFFF >> 23
    return jnp.maximum(exponents, 1).astype(jnp.uint8)


def encoded(array: jax.Array, exponents: jax.Array, salt: jax.Array, code: Code) -> jax.Array:
    """The codes of an array, rounded stochastically: the mean over many salts is the array itself.

    All numbers of a block whose exponent is 255 become NaN or infinite. An array that was decoded does not change.

    Args:
      array: float [..., N].
      exponents: its `exponents_of`.
      salt: uint32 [], which selects how elements are rounded.
      code: what codes are.
    """
    bits = _bits(_in_blocks(array.astype(jnp.float32), exponents.shape[-1]))
    is_negative, sizes = bits >> 31 != 0, bits & 0x7FFFFFFF
    # In integers: XLA would merge divisions by powers of two into one by their product, which may be 0. A code has 20
    # further bits until it is rounded. `down` is how many powers of two a number is below its block's.
    own = sizes >> 23
    down = exponents[..., None].astype(jnp.int32) - own.astype(jnp.int32)
    digits = sizes & 0x7FFFFF | 0x800000
    if code == Code.EVEN:
        exact = digits << _EVEN - 3 >> jnp.clip(down, 0, 31).astype(jnp.uint32)
    else:  # one less than the number's exponent, as these floats have it; of a negative one, digits are shifted out
        power = (_FLOAT + 7 if code == Code.FLOAT else _POSITIVE + 15) - 1 - down
        exact = digits >> jnp.clip(-power, 0, 31).astype(jnp.uint32)
        exact += jnp.maximum(power, 0).astype(jnp.uint32) << 23
    exact = jnp.where(own > 0, exact, 0)
    codes = exact + (_noise(bits.shape, salt) >> 12) >> 20
    if code == Code.EVEN:
        codes = jnp.minimum(codes, 127)
        codes = jnp.where(is_negative, -codes, codes)
    elif code == Code.FLOAT:
        codes |= jnp.where(is_negative, jnp.uint32(0x80), 0)
    else:
        codes = jnp.where(sizes > 0, jnp.maximum(codes, 1), 0)
    return _whole(codes.astype(jnp.uint8), array)


def sharding_of_blocks(own: jax.NamedSharding, ndim: int, blocks: int) -> jax.NamedSharding:
    """Of exponents [..., blocks] of codes of `ndim` axes with a sharding: theirs, if it splits no block."""
    spec = (*own.spec, *[None] * (ndim - len(own.spec)))
    names = spec[-1] if isinstance(spec[-1], tuple) else () if spec[-1] is None else (spec[-1],)
    splits = blocks % math.prod(own.mesh.shape[name] for name in names) != 0
    last = None if splits else spec[-1]
    return own.update(spec=jax.P(*spec[:-1], last))


def _in_blocks(array: jax.Array, count: int) -> jax.Array:
    own = jax.typeof(array).sharding
    of_blocks = sharding_of_blocks(own, array.ndim, count).spec
    shape = *array.shape[:-1], count, array.shape[-1] // count
    return jnp.reshape(array, shape, out_sharding=own.update(spec=jax.P(*of_blocks, None)) if any(own.spec) else None)


def _whole(blocks: jax.Array, like: jax.Array) -> jax.Array:
    """Blocks in the shape and place of an array."""
    own = jax.typeof(like).sharding
    return jnp.reshape(blocks, like.shape, out_sharding=own if any(own.spec) else None)


def _bits(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.uint32)


def _floats(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _powers(exponents: jax.Array) -> jax.Array:
    """float32 [..., blocks, 1]."""
    return _floats(exponents.astype(jnp.uint32) << 23)[..., None]


def _noise(shape: tuple[int, ...], salt: jax.Array) -> jax.Array:
    """Random 32 bits for each element of blocks [..., rows, blocks, elements], the same in every matrix of a stack.

    So a layer alone is rounded as in its stack, and rounding errors elsewhere change no element's noise.
    """
    place = jnp.zeros((), jnp.uint32)
    for axis in range(max(len(shape) - 3, 0), len(shape)):
        place = place * shape[axis] + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return mixed(place * jnp.uint32(0x9E3779B9) ^ salt)
