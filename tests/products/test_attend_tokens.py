"""Attention in a fixed order of keys, against a loop over queries in NumPy float64: the kernels and plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.core.gpu_target import Target, current_target
from jgg.launching.choice import How, Launcher
from jgg.models.operations import attend
from jgg.models.operations.attend import ATTEND, Attend
from jgg.models.operations.attend_one import ATTEND_ONE, AttendOne
from tests.support.marks import EVERYWHERE, KERNELS

SCALE = 0.2
STARTS = [[0] * 5 + [5] * 30 + [35] * 40, [0] * 70 + [70] * 5]
# heads, kv heads, features; window and whether it holds, which None leaves out; sinks
CASES = {
    "grouped": (4, 2, 16, None, None, False),
    "one key head, features padded": (3, 1, 48, None, None, False),
    "few features": (2, 1, 5, None, None, False),
    "heads that begin between 16 bytes": (4, 2, 12, None, None, False),
    "window": (2, 1, 16, 5, None, False),
    "window that holds, sinks": (4, 2, 16, 40, True, True),
    "window that does not hold, sinks": (4, 2, 16, 40, False, True),
}
FEW = ["one key head, features padded", "window that holds, sinks"]


@pytest.fixture
def parts(monkeypatch):
    """Sequences of these tests have two parts."""
    monkeypatch.setattr(attend, "PART", 64)


def operands_of(case, length=75, dtype=jnp.float32, starts=None, batch=2):
    heads, kv_heads, features, _, is_local, has_sinks = CASES[case]
    rng = np.random.default_rng(5)

    def random(*shape):
        return jnp.asarray(rng.normal(size=shape) * 2, dtype)

    return Attend(
        random(batch, length, heads, features),
        *(random(1, batch, length, kv_heads, features) for _ in "kv"),
        starts=None if starts is None else jnp.asarray(starts, jnp.int32),
        is_local=None if is_local is None else jnp.asarray(is_local),
        sinks=jnp.asarray(rng.normal(size=heads), jnp.float32) if has_sinks else None,
    )


def of_cache(operands, queries, capacity=None):
    """The same keys and values as the second layer of a cache, whose other elements are no zeros, and some queries."""
    length = operands.k.shape[2]
    room = [(1, 0), (0, 0), (0, (capacity or length + 5) - length), (0, 0), (0, 0)]
    k, v = (jnp.pad(array, room, constant_values=3) for array in operands[1:3])
    layer, offset = jnp.int32(1), jnp.int32(queries.start)
    return operands._replace(q=operands.q[:, queries], k=k, v=v, layer=layer, offset=offset)


def reference(operands, window):
    layer, offset = (0 if index is None else int(index) for index in (operands.layer, operands.offset))
    q, k, v = np.asarray(operands.q, np.float64), *(np.asarray(a[layer], np.float64) for a in operands[1:3])
    has_window = window is not None and (operands.is_local is None or bool(operands.is_local))
    attended, log_sums = np.empty_like(q), np.empty(np.take(q.shape, (0, 2, 1)))
    for b, s, head in np.ndindex(*q.shape[:3]):
        first = 0 if operands.starts is None else int(operands.starts[b, s])
        first = max(first, offset + s + 1 - window) if has_window else first
        seen = slice(first, offset + s + 1)
        kv_head = head // (q.shape[2] // k.shape[2])
        weights = np.exp(k[b, seen, kv_head] @ q[b, s, head] * SCALE)
        total = weights.sum() + (0 if operands.sinks is None else np.exp(np.float64(operands.sinks[head])))
        attended[b, s, head], log_sums[b, head, s] = weights @ v[b, seen, kv_head] / total, np.log(total)
    return attended, log_sums


def compute(operands, implementation, window):
    how = How(implementation, current_target())
    return jax.jit(functools.partial(ATTEND, how, scale=SCALE, window=window))(operands)


def check(operands, implementation, window, tolerance=3e-5):
    for got, wanted in zip(compute(operands, implementation, window), reference(operands, window), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


@EVERYWHERE
@pytest.mark.parametrize("case", CASES)
def test_attends_as_float64_does(case, implementation):
    check(operands_of(case), implementation, CASES[case][3])


@EVERYWHERE
@pytest.mark.parametrize("case", FEW)
def test_sequences_in_a_row_attend_to_themselves(case, implementation, parts):
    check(operands_of(case, starts=STARTS), implementation, CASES[case][3])


@EVERYWHERE
@pytest.mark.parametrize("case", FEW)
def test_some_tokens_attend_to_a_cache(case, implementation, parts):
    check(of_cache(operands_of(case), slice(50, 75)), implementation, CASES[case][3])


@KERNELS
def test_float16_is_attended_in_float32(implementation):
    check(operands_of("grouped", dtype=jnp.float16), implementation, None, 4e-3)


def decoded(operands, position, implementation, window, chunk=None):
    """The result of one token, whose key and value the cache does not have yet, nor any that come later."""
    q, k, v = operands.q[:, position], *(array[0, :, position] for array in operands[1:3])
    cached = of_cache(operands, slice(0, 1))
    k_cache, v_cache = (array.at[:, :, position:].set(-4) for array in (cached.k, cached.v))
    positions = jnp.full(q.shape[:1], position, jnp.int32)
    one = AttendOne(q, k, v, k_cache, v_cache, cached.layer, positions, operands.is_local, operands.sinks)
    how = How(implementation, current_target())
    return jax.jit(functools.partial(ATTEND_ONE, how, scale=SCALE, window=window, chunk=chunk))(one).attended


def check_bits(case, dtype, implementation, length, positions, chunk, starts):
    """One token, some tokens, and sequences packed into a row have the bits that they have among all and alone."""
    operands, window = operands_of(case, length, dtype), CASES[case][3]
    whole, log_sums = compute(operands, implementation, window)
    for position in positions:
        got = decoded(operands, position, implementation, window)
        np.testing.assert_array_equal(got, whole[:, position])
    got = compute(of_cache(operands, chunk), implementation, window)
    np.testing.assert_array_equal(got.attended, whole[:, chunk])
    np.testing.assert_array_equal(got.log_sums, log_sums[:, :, chunk])
    ends = [*starts[1:], length]
    of_tokens = np.repeat(starts, np.subtract(ends, starts))
    packed = operands._replace(starts=jnp.asarray(np.broadcast_to(of_tokens, (2, length)), jnp.int32))
    packed = compute(packed, implementation, window).attended
    for start, end in zip(starts, ends, strict=True):
        tokens = operands.q[:1, start:end], operands.k[:, :1, start:end], operands.v[:, :1, start:end]
        alone = Attend(*tokens, is_local=operands.is_local, sinks=operands.sinks)
        np.testing.assert_array_equal(packed[:1, start:end], compute(alone, implementation, window).attended)


@pytest.mark.interpret
@pytest.mark.parametrize("case", FEW)
def test_bits_are_those_of_the_sequence(case, parts):
    check_bits(case, jnp.float32, "interpret", 75, (31, 64), slice(37, 60), (0, 30, 70))


def check_bits_of_chunks(dtype, implementation, chunk, length):
    """A token, and some tokens, that attend to a cache have the bits that they have where each chunk is a sequence."""
    places = np.broadcast_to(np.arange(length), (2, length))
    operands = operands_of("grouped", length, dtype, starts=places // chunk * chunk)
    whole, _ = compute(operands, implementation, None)
    for position in (0, chunk - 1, chunk, length - 1):
        got = decoded(operands, position, implementation, None, chunk)
        np.testing.assert_array_equal(got, whole[:, position])
    some = slice(chunk - 5, length - 2)
    cached = of_cache(operands, some)._replace(starts=operands.starts[:, some])
    np.testing.assert_array_equal(compute(cached, implementation, None).attended, whole[:, some])


@pytest.mark.interpret
def test_bits_of_chunks_are_those_of_sequences(parts):
    check_bits_of_chunks(jnp.float32, "interpret", 64, 75)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_of_chunks_are_those_of_sequences_on_a_gpu(dtype):
    check_bits_of_chunks(dtype, "triton", 512, 1300)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_sequence_on_a_gpu(case, dtype):
    positions = 0, 31, 32, 63, 64, 511, 512, 700, 1099
    check_bits(case, dtype, "triton", 1100, positions, slice(600, 900), (0, 70, 640, 1090))


@pytest.mark.parametrize("features", [8, 12, 16, 100, 128])
def test_a_copy_by_tma_begins_at_a_multiple_of_16_bytes(features):
    """A GPU gives CUDA_ERROR_ILLEGAL_INSTRUCTION elsewhere, so for the second of two heads of 24 bytes."""
    launches = []

    def record(_, launch):
        launches.append(launch)
        return {"attended": None, "log_sums": None}

    operands = Attend(
        jnp.zeros((1, 3, 4, features), jnp.bfloat16), *(jnp.zeros((1, 1, 3, 2, features), jnp.bfloat16),) * 2
    )
    attend._launch(Launcher(record, Target(90, num_sms=132)), operands, SCALE, None)
    (launch,) = launches
    assert launch.constants["BY_TMA"] == bool(launch.descriptors) == (features % 8 == 0)


def test_batches_of_sequences_map():
    operands = operands_of("window that holds, sinks", starts=STARTS)
    other = operands._replace(q=operands.q[::-1], k=operands.v)
    arrays = {name: jnp.stack([getattr(operands, name), getattr(other, name)]) for name in "qkv"}

    def run(arrays):
        return ATTEND(How(None, current_target()), operands._replace(**arrays), scale=SCALE, window=40)

    got = jax.jit(jax.vmap(run))(arrays)
    for index, each in enumerate((operands, other)):
        wanted = compute(each, None, 40)
        jax.tree.map(
            lambda got, want, index=index: np.testing.assert_allclose(got[index], want, 1e-5, 1e-5), got, wanted
        )
