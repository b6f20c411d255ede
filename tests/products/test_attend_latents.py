"""Attention to latents, of one token to a cache and of several, against NumPy float64: the kernels and plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.core.gpu_target import current_target
from jgg.launching.choice import How
from jgg.models.operations import attend_latents
from jgg.models.operations.attend_latents import ATTEND_LATENTS, AttendLatents
from jgg.models.operations.attend_latents_one import ATTEND_LATENTS_ONE, AttendLatentsOne
from tests.support.lowering import lower
from tests.support.marks import EVERYWHERE

# heads, rank, rest, capacity, positions
CASES = {
    "one part": (4, 16, 8, 40, (0, 17, 39)),
    "several parts, heads of several tiles": (70, 24, 4, 600, (599, 255, 256)),
}
# heads, rank, rest, length, capacity, offset, starts of sequences in each row
TOKENS = {
    "a cache": (4, 16, 8, 7, 40, 30, None),
    "packed, tokens of several tiles": (20, 24, 4, 41, 41, None, ((0, 1, 17), (0, 33))),
    "more heads than a tile has rows": (70, 16, 8, 3, 600, 510, None),
}
SCALE = 0.2


def random(rng, *shape, dtype):
    return jnp.asarray(rng.normal(size=shape), dtype)


def operands_of(case, dtype):
    """Random operands, with NaN in the cache after each position."""
    heads, rank, rest, capacity, positions = CASES[case]
    rng = np.random.default_rng(0)
    q = random(rng, len(positions), heads, rank + rest, dtype=dtype)
    latents = rng.normal(size=(2, len(positions), capacity, 1, rank + rest))
    latents[:, np.arange(capacity)[None] > np.asarray(positions)[:, None]] = np.nan
    return AttendLatentsOne(q, jnp.asarray(latents, dtype), jnp.int32(1), jnp.asarray(positions, jnp.int32))


def several_of(case, dtype):
    """Random operands of several tokens; what is in the cache after the last of them is NaN."""
    heads, rank, rest, length, capacity, offset, starts = TOKENS[case]
    rng = np.random.default_rng(0)
    q = random(rng, 2, length, heads, rank + rest, dtype=dtype)
    latents = rng.normal(size=(2, 2, capacity, 1, rank + rest))
    if starts is None:
        latents[:, :, offset + length :] = np.nan
        return AttendLatents(q, jnp.asarray(latents, dtype), jnp.int32(1), jnp.int32(offset))
    places = np.arange(length)
    own = [np.asarray(row)[np.searchsorted(row, places, side="right") - 1] for row in starts]
    return AttendLatents(q, jnp.asarray(latents[:1], dtype), starts=jnp.asarray(own, jnp.int32))


def sum_of(q, latents, rank):
    """Of one token, q [heads, features], and its own sequence's latents [keys, features], in float64."""
    q, latents = (np.asarray(array, np.float64) for array in (q, latents))
    logits = q @ latents.T * SCALE
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    totals = weights.sum(axis=1, keepdims=True)
    return weights / totals @ latents[:, :rank], logits.max(axis=1) + np.log(totals[:, 0])


def reference(operands, rank):
    latents, positions = operands.latents[1, :, :, 0], np.asarray(operands.positions)
    return np.stack(
        [
            sum_of(q, latents[row, : position + 1], rank)[0]
            for row, (q, position) in enumerate(zip(operands.q, positions, strict=True))
        ]
    )


def several_references(operands, rank):
    batch, length = operands.q.shape[:2]
    latents = operands.latents[0 if operands.layer is None else operands.layer, :, :, 0]
    offset = 0 if operands.offset is None else int(operands.offset)
    starts = np.zeros((batch, length), int) if operands.starts is None else np.asarray(operands.starts)
    rows = [
        sum_of(operands.q[row, token], latents[row, starts[row, token] : offset + token + 1], rank)
        for row in range(batch)
        for token in range(length)
    ]
    return [np.stack(each).reshape(batch, length, *each[0].shape) for each in zip(*rows, strict=True)]


def without_nan(operands, implementation):
    """Plain JAX reads the whole cache."""
    if implementation not in (None, "xla"):
        return operands
    return operands._replace(latents=jnp.nan_to_num(operands.latents))


def compiled(operation, implementation, rank):
    return jax.jit(functools.partial(operation, How(implementation, current_target()), scale=SCALE, rank=rank))


@EVERYWHERE
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_float64(case, implementation):
    operands, rank = operands_of(case, jnp.float32), CASES[case][1]
    got = compiled(ATTEND_LATENTS_ONE, implementation, rank)(without_nan(operands, implementation))
    np.testing.assert_allclose(got, reference(operands, rank), rtol=1e-4, atol=1e-5)


@EVERYWHERE
@pytest.mark.parametrize("case", TOKENS)
def test_values_of_several_tokens_are_those_of_float64(case, implementation):
    operands, rank = several_of(case, jnp.float32), TOKENS[case][1]
    got = compiled(ATTEND_LATENTS, implementation, rank)(without_nan(operands, implementation))
    for got_one, want_one in zip(got, several_references(operands, rank), strict=True):
        np.testing.assert_allclose(got_one, want_one, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_on_a_gpu(case):
    operands, rank = operands_of(case, jnp.bfloat16), CASES[case][1]
    got = compiled(ATTEND_LATENTS_ONE, "triton", rank)(operands)
    np.testing.assert_allclose(got.astype(jnp.float32), reference(operands, rank), rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("case", TOKENS)
def test_bfloat16_of_several_tokens_on_a_gpu(case):
    operands, rank = several_of(case, jnp.bfloat16), TOKENS[case][1]
    got = compiled(ATTEND_LATENTS, "triton", rank)(operands)
    for got_one, want_one in zip(got, several_references(operands, rank), strict=True):
        np.testing.assert_allclose(got_one.astype(jnp.float32), want_one, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("implementation", "sizes"),
    [
        pytest.param("interpret", (20, 24, 8), id="interpret"),
        pytest.param("triton", (20, 24, 8), marks=pytest.mark.gpu, id="triton"),
        pytest.param("triton", (20, 512, 64), marks=pytest.mark.gpu, id="triton, as published"),
    ],
)
def test_a_token_has_the_same_bits_alone_and_among_others(implementation, sizes, monkeypatch):
    """In a cache, in a row of several sequences, and in another batch."""
    heads, rank, rest = sizes
    is_interpreted = implementation == "interpret"
    if is_interpreted:
        monkeypatch.setattr(attend_latents, "PART", 32)  # several parts of few tokens
        monkeypatch.setattr("jgg.models.operations.attend_latents_one.PART", 32)
    dtype, length, first = (jnp.float32, 75, 9) if is_interpreted else (jnp.bfloat16, 700, 300)
    rng = np.random.default_rng(0)
    q = random(rng, 2, length, heads, rank + rest, dtype=dtype)
    latents = random(rng, 1, 2, length, 1, rank + rest, dtype=dtype)
    attend, attend_one = (compiled(each, implementation, rank) for each in (ATTEND_LATENTS, ATTEND_LATENTS_ONE))
    whole = attend(AttendLatents(q, latents)).summed
    for position in (0, first, length - 1):
        alone = attend_one(AttendLatentsOne(q[:, position], latents, jnp.int32(0), jnp.full(2, position, jnp.int32)))
        np.testing.assert_array_equal(alone, whole[:, position])
    piece = attend(AttendLatents(q[:, first:], latents, jnp.int32(0), jnp.int32(first))).summed
    np.testing.assert_array_equal(piece, whole[:, first:])
    np.testing.assert_array_equal(attend(AttendLatents(q[1:], latents[:, 1:])).summed, whole[1:])
    q, latents = (
        jnp.concatenate([array[..., :1, :first, :, :], array[..., 1:, :, :, :]], axis=-3) for array in (q, latents)
    )
    starts = jnp.where(jnp.arange(length + first) < first, 0, first).astype(jnp.int32)[None]
    packed = attend(AttendLatents(q, latents, starts=starts)).summed
    np.testing.assert_array_equal(packed[0, :first], whole[0, :first])
    np.testing.assert_array_equal(packed[0, first:], whole[1])


def test_latents_without_a_tile_are_refused():
    """Not left to plain JAX, where a token's bits depend on its batch."""
    q, latents = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 9, 4, 320), (1, 1, 9, 1, 320)))
    with (
        jgg.target(89),
        pytest.raises(ValueError, match=r"batch_invariant must be False for latents of 320 .* float32"),
    ):
        attend = functools.partial(ATTEND_LATENTS, How("triton", current_target()), scale=SCALE, rank=256)
        lower(attend, AttendLatents(q, latents))
