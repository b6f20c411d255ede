"""Attention of whole sequences gives what the definition gives, in each combination of its options."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.models import attend as attend_module
from jgg.models import flash
from jgg.models.attend import Way, attend, choose
from jgg.models.operations import attend_plain
from tests.support.closeness import largest_error

B, S, HEADS, KV_HEADS, D, SCALE = 2, 48, 4, 2, 16, 0.25
WINDOW = 10
SEGMENTS = np.repeat([[0, 1, 2], [4, 4, 7]], S // 3, axis=1)
OPTIONS = {
    "causal": {},
    "window": {"window": WINDOW},
    "segments": {"segments": SEGMENTS},
    "sinks": {"sinks": True},
    "window with sinks": {"window": WINDOW, "sinks": True},
    "segments with sinks": {"segments": SEGMENTS, "sinks": True},
    "all": {"window": WINDOW, "segments": SEGMENTS, "sinks": True},
    "window past the end": {"window": S, "is_local": True},
    "local": {"window": WINDOW, "is_local": True, "sinks": True},
    "not local": {"window": WINDOW, "is_local": False, "sinks": True},
}


def by_definition(q, k, v, sinks, *, window=None, is_local=True, segments=None):
    """The attention of each head, by the whole matrix of probabilities."""
    k, v = (jnp.repeat(array, HEADS // KV_HEADS, axis=2) for array in (k, v))
    distance = np.arange(S)[:, None] - np.arange(S)[None]
    mask = np.broadcast_to((distance >= 0) & (distance < (window if window and is_local else S)), (B, S, S))
    if segments is not None:
        mask = mask & (segments[:, :, None] == segments[:, None])
    logits = jnp.where(mask[:, None], jnp.einsum("bqhd,bkhd->bhqk", q, k) * SCALE, -jnp.inf)
    if sinks is not None:
        of_sinks = jnp.broadcast_to(sinks[None, :, None, None], (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, of_sinks], axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, axis=-1)[..., :S], v)


def inputs(has_sinks):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (B, S, HEADS, D), (B, S, KV_HEADS, D), (B, S, KV_HEADS, D), (HEADS,), (B, S, HEADS, D)
    q, k, v, sinks, dy = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    # what bfloat16 holds, so that both dtypes attend to the same
    q, k, v = (array.astype(jnp.bfloat16).astype(jnp.float32) for array in (q, k, v))
    return (q, k, v, sinks if has_sinks else None), dy


def arguments(options):
    """Those of `attend` for options of `by_definition`."""
    window, is_local, segments = (options.get(name) for name in ("window", "is_local", "segments"))
    starts = None if segments is None else jnp.asarray([np.searchsorted(row, row) for row in segments], jnp.int32)
    return {"window": window, "is_local": None if is_local is None else jnp.asarray(is_local), "starts": starts}


def with_gradients(function, arrays, dy):
    y, pull_back = jax.vjp(function, *arrays)
    return y, *pull_back(dy.astype(y.dtype))


def check(name, dtype, tolerance):
    options = dict(OPTIONS[name])
    arrays, dy = inputs(options.pop("sinks", False))
    want = with_gradients(functools.partial(by_definition, **options), arrays, dy)

    def run(q, k, v, sinks):
        return attend(q, k, v, scale=SCALE, sinks=sinks, **arguments(options))

    q, k, v, sinks = arrays
    got = jax.jit(functools.partial(with_gradients, run))((*(a.astype(dtype) for a in (q, k, v)), sinks), dy)
    for got_one, want_one in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert largest_error(got_one, want_one) <= tolerance


@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_are_those_of_the_definition(name):
    check(name, jnp.float32, 1e-5)


@pytest.mark.parametrize(
    "name", [name if name in ("causal", "all") else pytest.param(name, marks=pytest.mark.sweep) for name in OPTIONS]
)
def test_long_sequences_attend_by_blocks_of_queries(name, monkeypatch):
    """The last block is not full; each block of queries has the keys before its end alone."""
    monkeypatch.setattr(attend_plain, "_MOST_LOGITS", 1000)
    monkeypatch.setattr(attend_plain, "_LEAST_QUERIES", 7)
    monkeypatch.setattr(attend_module, "_QUERIES", 18)
    monkeypatch.setattr(attend_module, "attend_by_mask", None)
    check(name, jnp.float32, 1e-5)


def test_a_long_sequence_has_no_matrix_of_all_pairs():
    """Nor where a head has more features than cuDNN takes."""
    shapes = [jax.ShapeDtypeStruct((1, 4096, heads, 512), jnp.bfloat16) for heads in (16, 2, 2)]
    run = jax.grad(lambda q, k, v: attend(q, k, v, scale=0.1).astype(jnp.float32).sum(), (0, 1, 2))
    memory = jax.jit(run).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.75 * 16 * 4096**2 * 4  # of the logits in float32


@pytest.mark.parametrize(
    ("gpu", "dtype", "features", "length", "window", "has_segments", "way"),
    [
        (None, "bfloat16", 64, 512, None, False, Way.WHOLE),
        (None, "float32", 64, 4096, 128, True, Way.BLOCKS),
        (90, "bfloat16", 64, 511, None, False, Way.FLASH),
        (90, "bfloat16", 64, 511, None, True, Way.WHOLE),
        (90, "bfloat16", 64, 511, 128, True, Way.FLASH),
        (90, "float16", 64, 8192, 127, False, Way.BLOCKS),
        (90, "float32", 64, 512, None, False, Way.WHOLE),
        (90, "bfloat16", 20, 512, None, False, Way.WHOLE),
        (90, "bfloat16", 256, 512, None, False, Way.FLASH),
        (90, "bfloat16", 264, 512, None, False, Way.WHOLE),
        (80, "bfloat16", 128, 512, None, False, Way.FLASH),
        (80, "bfloat16", 136, 512, None, False, Way.WHOLE),
        (0, "bfloat16", 136, 4096, None, False, Way.BLOCKS),
        (90, "bfloat16", 64, 0, None, False, Way.WHOLE),
    ],
)
def test_the_way_is_chosen_by_arrays_and_gpu(gpu, dtype, features, length, window, has_segments, way):
    q = jax.ShapeDtypeStruct((2, length, HEADS, features), dtype)
    assert choose(q, q, window, has_segments=has_segments, gpu=gpu) is way


def test_the_larger_of_queries_and_values_chooses_the_way():
    q, v = (jax.ShapeDtypeStruct((2, 512, HEADS, features), "bfloat16") for features in (64, 264))
    assert choose(q, v, None, has_segments=False, gpu=90) is choose(v, q, None, has_segments=False, gpu=90) is Way.WHOLE


def test_a_jax_without_the_primitives_attends_in_plain_jax(monkeypatch):
    monkeypatch.setattr(flash, "_jax", None)
    q = jax.ShapeDtypeStruct((2, 512, HEADS, 64), "bfloat16")
    assert choose(q, q, None, has_segments=False, gpu=90) is Way.WHOLE


@pytest.mark.parametrize("features", [6, 20])
def test_values_may_have_other_features_than_queries(features):
    (q, k, _, sinks), _ = inputs(has_sinks=True)
    keys = jax.random.split(jax.random.key(1), 2)
    v, dy = (jax.random.normal(key, (B, S, n, features)) for key, n in zip(keys, (KV_HEADS, HEADS), strict=True))
    run = functools.partial(attend, scale=SCALE, sinks=sinks)
    got = jax.jit(functools.partial(with_gradients, run))((q, k, v), dy)
    want = with_gradients(functools.partial(by_definition, sinks=sinks), (q, k, v), dy)
    for got_one, want_one in zip(got, want, strict=True):
        assert largest_error(got_one, want_one) <= 1e-5


def test_float16_on_a_cpu():
    check("all", jnp.float16, 0.005)


LEAST = float(jnp.finfo(jnp.float32).min)


@pytest.mark.parametrize("name", ["sinks", "window with sinks"])
@pytest.mark.parametrize(
    "dtype", [jnp.float32, *(pytest.param(t, marks=pytest.mark.gpu) for t in ("float16", "bfloat16"))]
)
def test_sinks_of_any_size_take_nothing_or_all(name, dtype):
    options = {key: value for key, value in OPTIONS[name].items() if key != "sinks"}
    (q, k, v, _), dy = inputs(has_sinks=True)
    run = jax.jit(
        functools.partial(with_gradients, lambda q, k, v, sinks: attend(q, k, v, scale=SCALE, sinks=sinks, **options))
    )
    q, k, v = (array.astype(dtype) for array in (q, k, v))
    wanted = run((q, k, v, jnp.asarray([-1e4, -1e4, -1e4, 1e4])), dy)
    assert not np.isnan(wanted[0]).any()
    for sinks in ([-jnp.inf, LEAST, -3.3895314e38, -LEAST], [LEAST, -1e30, -jnp.inf, jnp.inf]):
        for got_one, wanted_one in zip(run((q, k, v, jnp.asarray(sinks)), dy), wanted, strict=True):
            np.testing.assert_array_equal(got_one, wanted_one)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_bfloat16_on_a_gpu(name):
    check(name, jnp.bfloat16, 0.02)


def of_features(features, of_values):
    """q, k, v and dy in bfloat16 for heads of many features, with logits as those of few."""
    shapes = (B, S, HEADS, features), (B, S, KV_HEADS, features), (B, S, KV_HEADS, of_values), (B, S, HEADS, of_values)
    keys = jax.random.split(jax.random.key(2), 4)
    q, *others = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    return q * jnp.bfloat16((D / features) ** 0.5), *others


@pytest.mark.gpu
@pytest.mark.parametrize(("features", "of_values"), [(192, 128), (256, 256), (512, 512)])
def test_heads_of_many_features_on_a_gpu(features, of_values):
    *arrays, dy = of_features(features, of_values)
    got = jax.jit(functools.partial(with_gradients, functools.partial(attend, scale=SCALE)))(arrays, dy)
    of_definition = functools.partial(by_definition, sinks=None)
    want = with_gradients(of_definition, [array.astype(jnp.float32) for array in arrays], dy)
    for got_one, want_one in zip(got, want, strict=True):
        assert largest_error(got_one, want_one) <= 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_a_gpu_runs_flash_attention(name):
    options = dict(OPTIONS[name])
    (q, k, v, sinks), _ = inputs(options.pop("sinks", False))
    run = functools.partial(attend, scale=SCALE, sinks=sinks, **arguments(options))
    text = jax.jit(run).lower(*(array.astype(jnp.bfloat16) for array in (q, k, v))).as_text()
    assert "__cudnn$fmha" in text and "dot_general" not in text
