"""Caches that keep windows as windows: every bit of attention is as with a cache that keeps all positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.core.gpu_target import current_target
from jgg.launching.choice import How
from jgg.models.operations import attend
from jgg.models.operations.attend import ATTEND, Attend
from jgg.models.operations.attend_one import ATTEND_ONE, AttendOne
from jgg.models.operations.cache_layout import CacheLayout, place_of
from tests.support.marks import EVERYWHERE

POSITIONS, WINDOW, PIECE = 300, 40, 20
# which layers have the window, and whether the one that attends, layer 2, has it
STACKS = {"all": (None, None), "its own": ((True, False, True), True), "others'": ((True, False, False), False)}


@pytest.fixture
def parts(monkeypatch):
    """Sequences of these tests have several parts."""
    monkeypatch.setattr(attend, "PART", 64)


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 2, jnp.float32)


def filled(layout, keys, ends, is_local):
    """The cache of three layers in which the last has keys [B, POSITIONS, ...] up to each end, and others' are 7."""
    layers, slots = (3, POSITIONS) if layout is None else layout.cache_shape(3)
    cache = np.full((layers, len(keys), slots, *keys.shape[2:]), 7, keys.dtype)
    for row, end in enumerate(ends):
        layer, slots = place_of(layout, jnp.int32(2), np.arange(end, dtype=np.int32), WINDOW, is_local)
        cache[int(layer), row, np.asarray(slots)] = keys[row, :end]  # the last where several have a slot
    return jnp.asarray(cache)


def both(case, ends, run):
    """What `run` makes of keys and values in a cache of windows, and in a whole one."""
    has_window, is_local = STACKS[case]
    is_local = None if is_local is None else jnp.asarray(is_local)
    results = []
    for layout in (CacheLayout.of(WINDOW, has_window, POSITIONS, PIECE), None):
        caches = (filled(layout, np.asarray(random(2, POSITIONS, 2, 16, seed=seed)), ends, is_local) for seed in (1, 2))
        results.append(run(layout, is_local, *caches))
    assert results[0][1].size < results[1][1].size
    return results


@EVERYWHERE
@pytest.mark.parametrize("positions", [[0, 63], [299, 130]])
@pytest.mark.parametrize("case", STACKS)
def test_one_token(case, positions, implementation, parts):
    how, own = How(implementation, current_target()), (random(2, heads, 16, seed=heads) for heads in (4, 2, 2))
    own, of_tokens = tuple(own), jnp.asarray(positions, jnp.int32)

    def run(layout, is_local, k, v):
        operands = AttendOne(*own, k, v, jnp.int32(2), of_tokens, is_local, random(4))
        attended, k, _ = jax.jit(functools.partial(ATTEND_ONE, how, scale=0.2, window=WINDOW, layout=layout))(operands)
        layer, slots = place_of(layout, jnp.int32(2), of_tokens, WINDOW, is_local)
        np.testing.assert_array_equal(k[layer, np.arange(2), slots], own[1])
        return attended, k

    got, want = both(case, positions, run)
    np.testing.assert_array_equal(got[0], want[0])


@EVERYWHERE
@pytest.mark.parametrize(("start", "count"), [(50, 20), (129, 1)])
@pytest.mark.parametrize("case", STACKS)
def test_some_tokens(case, start, count, implementation, parts):
    how, q = How(implementation, current_target()), random(2, count, 4, 16)

    def run(layout, is_local, k, v):
        operands = Attend(q, k, v, jnp.int32(2), jnp.int32(start), is_local=is_local, sinks=random(4))
        return jax.jit(functools.partial(ATTEND, how, scale=0.2, window=WINDOW, layout=layout))(operands).attended, k

    got, want = both(case, [start + count] * 2, run)
    np.testing.assert_array_equal(got[0], want[0])


def test_no_room_is_kept_where_it_would_not_be_less():
    assert CacheLayout.of(None, None, 1000, 1) is None
    assert CacheLayout.of(128, None, 128, 1) is None
    assert CacheLayout.of(128, None, 129, 1) == CacheLayout(129, 128, None)
    assert CacheLayout.of(128, None, 129, 2) is None
    assert CacheLayout.of(128, None, 1000, 65) == CacheLayout(1000, 192, None)
    assert CacheLayout(1000, 192, None).cache_shape(3) == (3, 192)
    assert CacheLayout(1000, 192, (True, False, True)).cache_shape(3) == (1, 1384)
