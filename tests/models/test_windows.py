"""Generation with caches that keep windows as windows, by models whose prompts are longer than them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg.models
from jgg.models import continuous, decoding
from jgg.models.attention import Attention, Place
from jgg.models.operations.cache_layout import CacheLayout
from jgg.models.rotary import rotations
from tests.support.models import loaded

PROMPTS, LENGTHS = np.random.default_rng(1).integers(1, 60, (5, 97)), np.array([97, 3, 70, 65, 31])
MOST = [20, 5, 12, 20, 8]
# 97 tokens in pieces of 32 are three pieces, and one token of which four prompts have none
CASES = {
    "whole prompts": {},
    "pieces": {"prefill_chunk": 32},
    "rows": {"rows": 4, "num_samples": 2},
    "rows, pieces": {"rows": 4, "num_samples": 2, "prefill_chunk": 32},
}


def sampled(model, case):
    options = {"lengths": LENGTHS, "temperature": 1.0, "seeds": np.arange(5), "details": True} | CASES[case]
    return jgg.models.generate(model, PROMPTS, MOST, **options)


def forget_programs():
    for program in (decoding.start, decoding.advance, continuous.run):
        program._alone.clear_cache()


def check_bits(model, case, monkeypatch):
    """Results are those of caches that keep all positions."""
    got = sampled(model, case)
    with monkeypatch.context() as whole:
        whole.setattr(CacheLayout, "of", lambda *_: None)
        forget_programs()
        want = sampled(model, case)
    forget_programs()
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("gpt_oss", "rows, pieces"),
        *(pytest.param("gpt_oss", case, marks=pytest.mark.sweep) for case in ("whole prompts", "pieces", "rows")),
        *(pytest.param("mixtral", case, marks=pytest.mark.sweep) for case in CASES),
        *(pytest.param("gemma4_text", case, marks=pytest.mark.sweep) for case in CASES),
    ],
)
def test_bits_are_those_of_caches_of_all_positions(family, case, monkeypatch):
    check_bits(loaded(family), case, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_caches_of_all_positions_on_a_gpu(case, family, batch_invariant, monkeypatch):
    check_bits(loaded(family, dtype=jnp.bfloat16, batch_invariant=batch_invariant), case, monkeypatch)


def test_new_tokens_have_the_probabilities_of_the_whole_model():
    model = loaded("mixtral")
    generated = sampled(model, "pieces")
    rows = generated.training_rows(PROMPTS, LENGTHS)
    losses = jax.jit(lambda model, tokens, targets: model.losses(tokens, targets))(model, rows.tokens, rows.targets)
    np.testing.assert_allclose(jnp.where(rows.is_new, -losses, 0.0), rows.log_probabilities, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("family", "piece", "shapes"),
    [
        ("gpt_oss", 1, {(1, 5, 64 + 1000)}),
        ("gpt_oss", None, {(2, 5, 1000)}),
        ("mixtral", 32, {(2, 5, 64)}),
        ("mixtral", 60, {(2, 5, 128)}),
        ("qwen3_moe", 1, {(2, 5, 1000)}),
    ],
)
def test_room_in_caches(family, piece, shapes):
    model = loaded(family)
    caches = jax.eval_shape(lambda: model.empty_caches(5, 1000, piece))
    assert {array.shape[:3] for array in jax.tree.leaves(caches)} == shapes


def test_more_tokens_at_once_than_caches_are_for_are_refused():
    model, tokens = loaded("mixtral"), jnp.zeros((2, 62), jnp.int32)
    run = functools.partial(model.run_layers, tokens, jnp.arange(62, dtype=jnp.int32)[None] + 80, start=80)
    message = "piece of empty_caches must be at least the tokens that run at once with a start, 62, got caches for 59."
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, model.empty_caches(2, 1000, 1))
    jax.eval_shape(run, model.empty_caches(2, 1000, 62))


def test_one_token_attends_to_the_cache_whether_or_not_lengths_are_given():
    module = jax.tree.map(lambda stacked: stacked[0], loaded("mixtral").layers.attention)
    config, own = module.config, module.own
    rng, positions = np.random.default_rng(0), jnp.array([[79], [150]], jnp.int32)
    cache = Attention.empty_cache(own, 1, 2, 200, jnp.float32, CacheLayout(200, 64, None))
    cache = jax.tree.map(lambda array: jnp.asarray(rng.normal(size=array.shape), array.dtype), cache)
    x = jnp.asarray(rng.normal(size=(2, 1, config.features)), jnp.float32)
    place = Place(positions, rotations(own.rotary, positions), jnp.int32(0), own.window, None)
    want, after = module(x, place, cache)
    got = module(x, place._replace(lengths=positions[:, 0] + 1), cache)
    jax.tree.map(np.testing.assert_array_equal, got, (want, after))
