"""Attention of one token to a cache, against a loop over heads in NumPy float64: the kernels and plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.core.gpu_target import current_target
from jgg.launching.choice import How
from jgg.models.operations.attend_one import ATTEND_ONE, AttendOne
from tests.support.marks import EVERYWHERE, KERNELS

# heads, kv heads, features; window and whether it holds, which None leaves out; sinks
CASES = {
    "grouped": (8, 2, 16, None, None, False),
    "one key head": (6, 1, 48, None, None, False),
    "as many key heads": (2, 2, 32, None, None, False),
    "few features": (4, 2, 5, None, None, False),
    "window": (4, 2, 16, 5, None, False),
    "window of one": (4, 2, 16, 1, None, True),
    "window that holds, sinks": (8, 2, 16, 70, True, True),
    "window that does not hold, sinks": (8, 2, 16, 70, False, True),
}


def operands_of(case, positions, capacity, layers=2, dtype=jnp.float32):
    """Random operands, with NaN in the cache from each sequence's position on."""
    heads, kv_heads, features, _, is_local, has_sinks = CASES[case]
    batch, rng = len(positions), np.random.default_rng(3)

    def random(*shape):
        return jnp.asarray(rng.normal(size=shape) * 2, dtype)

    is_old = np.arange(capacity)[None] < np.asarray(positions)[:, None]
    # a result does not depend on the capacity, so the caches of a case are the same where they overlap
    caches = [random(layers, batch, 1100, kv_heads, features)[:, :, :capacity] for _ in "kv"]
    caches = [jnp.where(is_old[None, :, :, None, None], cache, jnp.nan).astype(dtype) for cache in caches]
    return AttendOne(
        random(batch, heads, features),
        random(batch, kv_heads, features),
        random(batch, kv_heads, features),
        *caches,
        jnp.int32(layers - 1),
        jnp.asarray(positions, jnp.int32),
        None if is_local is None else jnp.asarray(is_local),
        jnp.asarray(rng.normal(size=heads), jnp.float32) if has_sinks else None,
    )


def reference(operands, scale, window, chunk=None):
    q, k, v, k_cache, v_cache = (np.asarray(array, np.float64) for array in operands[:5])
    layer, group, result = int(operands.layer), q.shape[1] // k.shape[1], np.empty_like(q)
    for b, position in enumerate(np.asarray(operands.positions)):
        k_cache[layer, b, position], v_cache[layer, b, position] = k[b], v[b]
        has_window = window is not None and (operands.is_local is None or bool(operands.is_local))
        first = max(0, position + 1 - window) if has_window else 0
        seen = slice(first if chunk is None else position // chunk * chunk, position + 1)
        for head in range(q.shape[1]):
            logits = k_cache[layer, b, seen, head // group] @ q[b, head] * scale
            if operands.sinks is not None:
                logits = np.append(logits, np.float64(operands.sinks[head]))
            weights = np.exp(logits - logits.max())
            weights = (weights / weights.sum())[: k_cache[layer, b, seen].shape[0]]
            result[b, head] = weights @ v_cache[layer, b, seen, head // group]
    return result, k_cache, v_cache


def compute(operands, implementation, window, scale=0.2, chunk=None):
    how = How(implementation, current_target())
    return jax.jit(functools.partial(ATTEND_ONE, how, scale=scale, window=window, chunk=chunk))(operands)


def cleaned(operands):
    """The operands with zeros for NaN: plain JAX reads the whole cache."""
    caches = {name: jnp.nan_to_num(getattr(operands, name)) for name in ("k_cache", "v_cache")}
    return operands._replace(**caches)


@EVERYWHERE
@pytest.mark.parametrize("case", CASES)
def test_attends_as_float64_does(case, implementation):
    operands, window = operands_of(case, [0, 6, 63, 64, 70], 71), CASES[case][3]
    if implementation in (None, "xla"):
        operands = cleaned(operands)
    attended, *caches = compute(operands, implementation, window)
    expected, *expected_caches = reference(operands, 0.2, window)
    np.testing.assert_allclose(attended, expected, rtol=2e-5, atol=2e-5)
    for cache, wanted in zip(caches, expected_caches, strict=True):
        np.testing.assert_array_equal(cache, wanted.astype(np.float32))


@EVERYWHERE
@pytest.mark.parametrize("chunk", [1, 7, 64, 80])
def test_a_token_attends_to_its_own_chunk(chunk, implementation):
    operands = operands_of("grouped", [0, 6, 7, 63, 64, 70], 71)
    operands = cleaned(operands) if implementation in (None, "xla") else operands
    attended, *_ = compute(operands, implementation, None, chunk=chunk)
    np.testing.assert_allclose(attended, reference(operands, 0.2, None, chunk)[0], rtol=2e-5, atol=2e-5)


@KERNELS
@pytest.mark.parametrize("chunk", [512, pytest.param(700, marks=pytest.mark.sweep)])
def test_a_long_cache_has_several_chunks(chunk, implementation):
    operands = operands_of("grouped", [3, 511, 512, 699, 700, 1099], 1100, layers=1)
    attended, *_ = compute(operands, implementation, None, chunk=chunk)
    np.testing.assert_allclose(attended, reference(operands, 0.2, None, chunk)[0], rtol=2e-5, atol=2e-5)


@KERNELS
@pytest.mark.parametrize(
    "case",
    ["grouped", pytest.param("window that holds, sinks", marks=pytest.mark.sweep), "window that does not hold, sinks"],
)
def test_long_caches_are_attended_to_in_parts(case, implementation):
    operands, window = operands_of(case, [3, 512, 600, 1099], 1100, layers=1), CASES[case][3]
    attended, *caches = compute(operands, implementation, window)
    expected, *expected_caches = reference(operands, 0.2, window)
    np.testing.assert_allclose(attended, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(caches, np.asarray(expected_caches, np.float32))


@KERNELS
@pytest.mark.parametrize("case", ["grouped", "window that holds, sinks"])
def test_bits_depend_neither_on_the_capacity_nor_on_other_sequences(case, implementation):
    positions, window = [5, 64, 200], CASES[case][3]
    operands = operands_of(case, positions, 201)
    alone = AttendOne(
        *(array[1:2] for array in operands[:3]),
        *(array[:, 1:2, :65] for array in operands[3:5]),
        operands.layer,
        operands.positions[1:2],
        *operands[7:],
    )
    longer = operands_of(case, positions, 600)
    results = [compute(each, implementation, window).attended for each in (operands, alone, longer)]
    np.testing.assert_array_equal(results[1], results[0][1:2])
    np.testing.assert_array_equal(results[2], results[0])


@KERNELS
def test_float16_is_attended_in_float32(implementation):
    operands = operands_of("grouped", [0, 70, 13], 71, dtype=jnp.float16)
    attended = compute(operands, implementation, None).attended
    assert attended.dtype == jnp.float16
    np.testing.assert_allclose(attended, reference(operands, 0.2, None)[0], rtol=4e-3, atol=4e-3)


def test_layers_and_batches_map():
    operands = cleaned(operands_of("grouped", [0, 6, 64], 71))
    other = operands._replace(q=operands.q[::-1], layer=jnp.int32(0))
    both = jax.tree.map(lambda *arrays: jnp.stack(arrays), operands, other)
    got = jax.vmap(functools.partial(compute, implementation=None, window=None))(both)
    for each, index in ((operands, 0), (other, 1)):
        wanted = compute(each, None, None)
        jax.tree.map(
            lambda got, want, index=index: np.testing.assert_allclose(got[index], want, 1e-5, 1e-5), got, wanted
        )


@pytest.mark.thorough
@pytest.mark.parametrize(("heads", "calls"), [(64, 1), (128, 0)])
def test_many_heads_that_share_keys_fit_a_small_gpu(heads, calls):
    """64 float32 queries leave room for one step of keys; 128 leave none, so that plain JAX attends."""
    own, cache = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 1, 256), (1, 1, 500, 1, 256)))
    layer, positions = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (1,)))
    queries = jax.ShapeDtypeStruct((1, heads, 256), jnp.float32)
    operands = AttendOne(queries, own, own, cache, cache, layer, positions)
    with jgg.target(89):
        attend = jax.jit(functools.partial(ATTEND_ONE, How("triton", current_target()), scale=0.2, window=None))
        text = attend.trace(operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton_kernel_call") == calls
