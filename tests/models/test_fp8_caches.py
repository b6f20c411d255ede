"""Keys and values in FP8: attention to them, by kernels and in plain JAX, and generation with such caches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
import jgg.models
from jgg.core.gpu_target import current_target
from jgg.core.quantized import QuantizedArray
from jgg.launching.choice import How
from jgg.models import generate
from jgg.models.attention import Cache
from jgg.models.operations.attend import ATTEND, Attend
from jgg.models.operations.attend_one import ATTEND_ONE, AttendOne
from jgg.models.operations.cache_layout import CacheLayout, place_of
from jgg.models.operations.cached_heads import dense, empty_heads, put, stored_as
from tests.support.lowering import lower
from tests.support.models import loaded

FP8 = "float8_e4m3fn"
B, C, HEADS, KV_HEADS, D, SCALE = 3, 600, 6, 2, 16, 0.25  # C takes two parts
WINDOW, LAYER = 70, 1
POSITIONS = np.array([599, 3, 520])
# parameters of both operations, and whether layers with the window keep it as a ring
CASES = {
    "all positions": {},
    "window": {"window": WINDOW},
    "ring and sinks": {"window": WINDOW, "layout": CacheLayout(C, 128, (False, True, True)), "sinks": True},
    "ring, another layer": {"window": WINDOW, "layout": CacheLayout(C, 128, (True, False, True)), "is_local": False},
    "chunks": {"chunk": 64},
}


def heads_of(shape, outlier=False, seed=0):
    """Random heads; with an outlier, one feature is 50 times the others."""
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    x[..., 3] *= 50 if outlier else 1
    return jnp.asarray(x)


def by_definition(q, k, v, positions, *, window=None, chunk=None, sinks=None, is_local=True, layout=None):
    """Attention in float64 of q [B, S, heads, D] at positions [B, S] to k and v [B, C, kv heads, D]."""
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    q = q.reshape(*q.shape[:2], KV_HEADS, -1, D)
    logits = np.einsum("bsghd,bcgd->bsghc", q, k) * SCALE
    keys, places = np.arange(k.shape[1]), positions[:, :, None]
    seen = keys <= places
    if window is not None and is_local:
        seen &= places - keys < window
    if chunk is not None:
        seen &= keys >= places // chunk * chunk
    weights = np.exp(logits - logits.max()) * seen[:, :, None, None]
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total += np.exp(np.asarray(sinks, np.float64) - logits.max()).reshape(KV_HEADS, -1, 1)
    return np.einsum("bsghc,bcgd->bsghd", weights / total, v).reshape(*q.shape[:2], -1, D)


def cached(heads, positions, dtype, options):
    """A cache of three layers with a layer's heads [B, C, kv heads, D] at the positions before these."""
    layout, is_local = options.get("layout"), options.get("is_local", True)
    layers, slots = (3, C) if layout is None else layout.cache_shape(3)
    cache = empty_heads((layers, B, slots, KV_HEADS, D), jnp.dtype(dtype))
    places = jnp.broadcast_to(jnp.arange(C, dtype=jnp.int32), (B, C))
    layer, at = place_of(layout, LAYER, places, options.get("window"), jnp.asarray(is_local))
    oldest = 0 if layout is None or not is_local else positions[:, None] - layout.ring
    at = jnp.where((places < positions[:, None]) & (places >= oldest), at, slots)
    index = layer, np.arange(B)[:, None], at
    return jax.tree.map(lambda array, own: put(array, index, own), cache, stored_as(cache, heads))


def operands_of(options):
    """The parameters of both operations for options of a case, and their operands sinks and is_local."""
    sinks = jnp.linspace(-1, 2, HEADS) if options.get("sinks") else None
    local = jnp.asarray(options["is_local"]) if "is_local" in options else None
    parameters = {name: options[name] for name in ("chunk",) if name in options}
    return {"scale": SCALE, "window": options.get("window"), **parameters}, sinks, local


def attend_one(implementation, k, v, options, dtype=FP8, compute=jnp.float32):
    """The result of one token of each sequence and the caches after it; the tokens' own keys are among k."""
    parameters, sinks, local = operands_of(options)
    k, v = k.astype(compute), v.astype(compute)
    caches = [cached(heads, jnp.asarray(POSITIONS), dtype or compute, options) for heads in (k, v)]
    own = [stored_as(caches[0], heads[np.arange(B), POSITIONS]) for heads in (k, v)]
    q = heads_of((B, HEADS, D), seed=2).astype(compute)
    operands = AttendOne(q, *own, *caches, jnp.int32(LAYER), jnp.asarray(POSITIONS, jnp.int32), local, sinks)
    how = None if implementation == "xla" else How(implementation, current_target())
    results = ATTEND_ONE(how, operands, **parameters, layout=options.get("layout"))
    want = {name: options[name] for name in ("window", "chunk", "is_local") if name in options}
    return results, functools.partial(by_definition, q[:, None], positions=POSITIONS[:, None], sinks=sinks, **want)


def rounded(heads):
    """Heads as FP8 caches have them, as numbers."""
    return dense(stored_as(empty_heads((1, D), jnp.dtype(FP8)), heads), jnp.float32)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("interpret", marks=pytest.mark.interpret)])
@pytest.mark.parametrize("case", CASES)
def test_a_token_attends_to_what_the_cache_has(case, implementation):
    k, v = (heads_of((B, C, KV_HEADS, D), seed=seed) for seed in (0, 1))
    results, want = attend_one(implementation, k, v, CASES[case])
    np.testing.assert_allclose(results.attended[:, None], want(rounded(k), rounded(v)), rtol=0, atol=1e-5)
    for got, heads in ((results.k_cache, k), (results.v_cache, v)):  # all before the token, and itself
        want_cache = cached(heads, jnp.asarray(POSITIONS + 1), FP8, CASES[case])
        oldest = cached(heads, jnp.asarray(POSITIONS), FP8, CASES[case])
        kept = np.asarray(want_cache.scales != 0) | np.asarray(oldest.scales == 0)
        np.testing.assert_array_equal(np.where(kept, got.scales, 0), np.where(kept, want_cache.scales, 0))
        values = (np.asarray(each.values, np.float32) for each in (got, want_cache))
        np.testing.assert_array_equal(*(np.where(kept, each, 0) for each in values))


def close_in_bfloat16(got, want):
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_token_attends_to_what_the_cache_has_on_a_gpu(case):
    k, v = (heads_of((B, C, KV_HEADS, D), seed=seed).astype(jnp.bfloat16) for seed in (0, 1))
    results, want = attend_one("triton", k, v, CASES[case], compute=jnp.bfloat16)
    close_in_bfloat16(results.attended[:, None], want(rounded(k), rounded(v)))


@pytest.mark.interpret
@pytest.mark.parametrize("case", [name for name in CASES if name != "chunks"])
def test_a_piece_of_a_prompt_attends_to_what_the_cache_has(case):
    options, length, start = CASES[case], 20, 500
    parameters, sinks, local = operands_of(options)
    k, v = (heads_of((B, C, KV_HEADS, D), seed=seed) for seed in (0, 1))
    caches = [cached(heads, jnp.full(B, start + length), FP8, options) for heads in (k, v)]
    q = heads_of((B, length, HEADS, D), seed=2)
    operands = Attend(q, *caches, jnp.int32(LAYER), jnp.int32(start), is_local=local, sinks=sinks)
    layout = options.get("layout")
    got = ATTEND(How("interpret", current_target()), operands, **parameters, layout=layout)
    plain = ATTEND(None, operands, **parameters, layout=layout)
    positions = np.broadcast_to(start + np.arange(length), (B, length))
    want = {name: options[name] for name in ("window", "is_local") if name in options}
    want = by_definition(q, rounded(k), rounded(v), positions, sinks=sinks, **want)
    for attended, log_sums in (got, plain):
        np.testing.assert_allclose(attended, want, rtol=0, atol=1e-5)
        np.testing.assert_allclose(log_sums, plain.log_sums, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [name for name in CASES if name != "chunks"])
def test_a_piece_of_a_prompt_on_a_gpu(case):
    options, (length, start) = CASES[case], (20, 500)
    parameters, sinks, local = operands_of(options)
    k, v = (heads_of((B, C, KV_HEADS, D), seed=seed).astype(jnp.bfloat16) for seed in (0, 1))
    caches = [cached(heads, jnp.full(B, start + length), FP8, options) for heads in (k, v)]
    q = heads_of((B, length, HEADS, D), seed=2).astype(jnp.bfloat16)
    operands = Attend(q, *caches, jnp.int32(LAYER), jnp.int32(start), is_local=local, sinks=sinks)
    got = ATTEND(How("triton", current_target()), operands, **parameters, layout=options.get("layout"))
    positions = np.broadcast_to(start + np.arange(length), (B, length))
    want = {name: options[name] for name in ("window", "is_local") if name in options}
    close_in_bfloat16(got.attended, by_definition(q, rounded(k), rounded(v), positions, sinks=sinks, **want))


def error_of(outlier, dtype):
    """The error of a token's result in bfloat16, relative to the norm of the result in float64."""
    k, v = (heads_of((B, C, KV_HEADS, D), outlier, seed) for seed in (0, 1))
    k, v = (array.astype(jnp.bfloat16).astype(jnp.float32) for array in (k, v))
    results, want = attend_one("xla", k, v, {}, dtype, jnp.bfloat16)
    want = want(k, v)[:, 0]
    return np.linalg.norm(np.asarray(results.attended, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("outlier", [False, True], ids=["random", "outlier"])
def test_the_error_is_that_of_three_bits(outlier):
    """e4m3 has 3 bits behind the first and rounds by at most 1/16; an outlier, which decides most, is not rounded."""
    assert error_of(outlier, None) < 0.005
    assert 0.005 < error_of(outlier, FP8) < 0.05


@pytest.mark.parametrize("features", [8, 64, 256])
def test_each_head_of_a_token_has_a_scale(features):
    """Its largest feature is kept, and NaN stays NaN in its own head."""
    heads = heads_of((2, 5, 3, features)).at[1, 2, 0, 1].set(jnp.nan).at[0, 0].set(0.0) * 1e4
    got = stored_as(empty_heads((1, features), jnp.dtype(FP8)), heads)
    assert got.scales.shape == (2, 5, 3, 1) and got.shape == heads.shape
    is_nan = np.zeros((2, 5, 3), bool)
    is_nan[1, 2, 0] = True
    np.testing.assert_array_equal(np.isnan(dense(got, jnp.float32)).all(-1), is_nan)
    numbers, wanted = (np.asarray(each)[~is_nan] for each in (dense(got, jnp.float32), heads))
    largest = np.abs(wanted).max(-1, keepdims=True)
    smallest = largest / 448 / 2**9  # half of which rounding may add
    assert (np.abs(numbers - wanted) <= np.maximum(np.abs(wanted) / 16, smallest)).all()
    np.testing.assert_allclose(np.abs(numbers).max(-1, keepdims=True), largest, rtol=1e-6)


PROMPTS, LENGTHS = np.random.default_rng(1).integers(1, 60, (5, 70)), np.array([70, 3, 70, 65, 31])


def sampled(model, **options):
    options = {"lengths": LENGTHS, "temperature": 1.0, "seeds": np.arange(5), "details": True, **options}
    return generate(model, PROMPTS, [20, 5, 12, 20, 8], cache_dtype=FP8, **options)


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("llama4", marks=pytest.mark.sweep)])
def test_results_do_not_depend_on_pieces_and_rows(family):
    """As all tokens attend to rounded keys and values, whether or not these have been in a cache.

    What differs by rounding may be kept as neighbouring numbers of FP8, so that not all is the same.
    """
    model = loaded(family)
    want, got = sampled(model), sampled(model, rows=2, prefill_chunk=32)
    exact = generate(model, PROMPTS, 1, lengths=LENGTHS, details=True)
    assert np.mean(got.tokens == want.tokens) >= 0.9
    assert np.median(np.abs(got.log_probabilities - want.log_probabilities)) < 1e-3
    rounding = sampled(model, temperature=0.0).log_probabilities[:, 0] - exact.log_probabilities[:, 0]
    assert np.median(np.abs(rounding)) > 0.005


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"implementation": "interpret"}, marks=pytest.mark.interpret, id="interpreted"),
        pytest.param({"dtype": jnp.bfloat16}, marks=pytest.mark.gpu, id="on a GPU"),
    ],
)
def test_a_token_has_the_same_bits_in_any_batch(options):
    """By the kernels, alone and among others, and in pieces of a prompt and as a whole."""
    model = loaded("gpt_oss", batch_invariant=True, **options)
    prompts, lengths = PROMPTS[:3, :40], np.array([40, 3, 37])
    run = functools.partial(generate, model, cache_dtype=FP8, details=True)
    want = run(prompts, 4, lengths=lengths)
    pieces = run(prompts, 4, lengths=lengths, prefill_chunk=16)
    alone = run(prompts[2:, :37], 4)
    for got, rows in ((pieces, slice(None)), (alone, slice(2, 3))):
        np.testing.assert_array_equal(got.tokens, want.tokens[rows])
        np.testing.assert_array_equal(got.log_probabilities, want.log_probabilities[rows])


def test_caches_of_other_mixers():
    model = loaded("qwen3_next")
    caches, usual = (jax.eval_shape(lambda dtype=dtype: model.empty_caches(2, 9, None, dtype)) for dtype in (FP8, None))
    of_attention = [number for number, cache in enumerate(usual) if isinstance(cache, Cache)]
    assert 0 < len(of_attention) < len(usual)
    for number, (cache, other) in enumerate(zip(caches, usual, strict=True)):
        if number in of_attention:
            assert isinstance(cache.k, QuantizedArray) and isinstance(cache.v, QuantizedArray)
        else:
            assert cache == other  # states
    with pytest.raises(ValueError, match=r"cache_dtype must be None with latent attention.*as in deepseek_v3, got"):
        generate(loaded("deepseek_v3"), PROMPTS, 3, cache_dtype=FP8)


def test_wrong_dtypes_and_gpus():
    model = loaded("qwen3_moe")
    with pytest.raises(TypeError, match=r"cache_dtype must be one of float8_e4m3fn, got float8_e5m2."):
        generate(model, PROMPTS, 3, cache_dtype="float8_e5m2")
    with pytest.raises(ValueError, match=r"cache_dtype must be None with a computation in float16, got float8_e4m3fn."):
        generate(loaded("qwen3_moe", dtype=jnp.float16), PROMPTS, 3, cache_dtype=FP8)
    with jgg.target(80), pytest.raises(ValueError, match=r"cache_dtype must be None on GPUs below .* 8.9.* got .* 8.0"):
        model.empty_caches(1, 9, cache_dtype=FP8)
    cache = jax.eval_shape(lambda: empty_heads((1, 1, 9, 2, 16), jnp.dtype(FP8)))
    operands = Attend(jax.ShapeDtypeStruct((1, 9, 4, 16), jnp.bfloat16), cache, cache)
    with jgg.target(80), pytest.raises(ValueError, match="cache_dtype must be None on GPUs below"):
        lower(functools.partial(ATTEND, How("triton", current_target()), scale=1.0, window=None), operands)
