"""Generated tokens: those that transformers generates, those that the whole model gives, and draws that are fair."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg.models
from tests.support.marks import thorough_but
from tests.support.models import FAMILIES, FEW_FAMILIES, loaded, logits_of, reference

LENGTHS = np.array([1, 5, 9])  # of the prompts in the reference data


@pytest.mark.parametrize("family", thorough_but(("qwen3_moe", "gpt_oss"), FAMILIES, pytest.mark.sweep))
def test_greedy_tokens_are_those_of_transformers(family):
    expected = reference(family)
    model = loaded(family)
    got = jgg.models.generate(model, expected["prompts"], expected["greedy"].shape[1], lengths=LENGTHS)
    np.testing.assert_array_equal(got, expected["greedy"])
    # padding is not read
    other = np.where(np.arange(9) < LENGTHS[:, None], expected["prompts"], 63)
    np.testing.assert_array_equal(jgg.models.generate(model, other, got.shape[1], lengths=LENGTHS), got)


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_decoding_with_a_cache_gives_the_logits_of_the_whole_model(family):
    model, tokens = loaded(family), jnp.asarray(reference(family)["tokens"])
    caches = model.empty_caches(2, 13)
    run = jax.jit(lambda model, tokens, positions, caches: model.run_layers(tokens, positions, caches))
    x, caches = run(model, tokens[:, :6], jnp.arange(6)[None], caches)
    parts = [x]
    for position in range(6, 13):
        x, caches = run(model, tokens[:, position : position + 1], jnp.full((2, 1), position), caches)
        parts.append(x)
    got = model.logits(jnp.concatenate(parts, axis=1))
    np.testing.assert_allclose(got, reference(family)["logits"], rtol=0, atol=1e-4)


def test_decoding_with_sinks_of_minus_infinity_is_as_without_sinks():
    expected, generated = reference("gpt_oss"), []
    for sink in (-1e4, -jnp.inf, jnp.finfo(jnp.float32).min):
        model = loaded("gpt_oss")
        sinks = model.layers.attention.sinks
        sinks.set_value(jnp.full_like(sinks.get_value(), sink))
        generated.append(jgg.models.generate(model, expected["prompts"], 6, lengths=LENGTHS))
    np.testing.assert_array_equal(generated[1], generated[0])
    np.testing.assert_array_equal(generated[2], generated[0])
    assert (generated[0] != expected["greedy"]).any()


def test_one_prompt_is_continued_with_x64():
    expected = reference("qwen3_moe")
    with jax.enable_x64(True):
        prompt = np.asarray(expected["prompts"][1:2, :5], np.int64)
        got = jgg.models.generate(loaded("qwen3_moe"), prompt, expected["greedy"].shape[1])
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, expected["greedy"][1:2])


def test_a_stop_token_ends_its_sequence_and_repeats():
    expected = reference("qwen3_moe")
    greedy = expected["greedy"]
    stop = int(greedy[1, 2])
    model = loaded("qwen3_moe")
    got = jgg.models.generate(model, expected["prompts"], 6, lengths=LENGTHS, stop_tokens=(stop, 64, 2**40, -1))
    wanted = greedy.copy()
    for row in wanted:
        ends = np.flatnonzero(row == stop)
        row[ends[0] if len(ends) else 6 :] = stop
    np.testing.assert_array_equal(got, wanted)


def test_draws_follow_the_temperature_and_top_p():
    model, prompt = loaded("mixtral"), jnp.asarray(reference("mixtral")["tokens"][:1, :3])
    logits = np.asarray(logits_of(model, prompt)[0, -1], np.float64) / 1.3
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = order[before < 0.6]
    assert 1 < len(kept) < 20
    draw = functools.partial(jgg.models.generate, model, jnp.tile(prompt, (2000, 1)), 1, temperature=1.3)
    drawn = np.asarray(draw(top_p=0.6, key=jax.random.key(1)))[:, 0]
    expected = np.zeros(64)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    np.testing.assert_allclose(np.bincount(drawn, minlength=64) / 2000, expected, atol=0.05)
    assert set(drawn) <= set(kept)
    np.testing.assert_array_equal(draw(top_p=0.6, key=jax.random.key(1))[:, 0], drawn)
    assert len(set(np.asarray(draw(top_p=0.999, key=jax.random.key(1)))[:, 0]) - set(kept)) > 3


# float32 has zero for the smallest of them, or nearly so; without top_p it is another program
@pytest.mark.parametrize(
    ("temperature", "top_p"),
    [(1e-38, 0.9), (1e-60, 0.9), (1.0, 1e-50), pytest.param(1e-38, 1.0, marks=pytest.mark.sweep)],
)
def test_the_coldest_and_the_narrowest_draws_are_greedy(temperature, top_p):
    expected, options = reference("qwen3_moe"), {"temperature": temperature, "top_p": top_p, "key": jax.random.key(0)}
    got = jgg.models.generate(loaded("qwen3_moe"), expected["prompts"], 6, lengths=LENGTHS, **options)
    np.testing.assert_array_equal(got, expected["greedy"])


@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe"])
def test_a_nan_in_padding_reaches_no_token(family):
    expected, model = reference(family), loaded(family)
    is_read = np.arange(9) < LENGTHS[:, None]
    unused = np.setdiff1d(np.arange(64), [*expected["prompts"][is_read], *np.ravel(expected["greedy"])])[0]
    model.w_embedding[...] = model.w_embedding[...].at[unused].set(jnp.nan)
    prompts = np.where(is_read, expected["prompts"], unused)
    got = jgg.models.generate(model, prompts, 6, lengths=LENGTHS)
    np.testing.assert_array_equal(got, expected["greedy"])


def test_ids_that_the_vocabulary_lacks_give_minus_one_in_a_traced_program():
    expected, model = reference("qwen3_moe"), loaded("qwen3_moe")
    prompts = jnp.asarray(expected["prompts"], jnp.int16).at[1, 3].set(64).at[0, 1:].set(-1)  # -1: padding, not read

    @jax.jit
    def run(prompts, lengths):
        return jgg.models.generate(model, prompts, 6, lengths=lengths)

    wanted = expected["greedy"].copy()
    wanted[1] = -1
    np.testing.assert_array_equal(run(prompts, jnp.asarray([-5, 5, 99])), wanted)  # clipped to 1, 5 and 9
    np.testing.assert_array_equal(run(prompts.at[1, 3].set(-1), jnp.asarray(LENGTHS)), wanted)


@pytest.mark.sweep
def test_vmap_draws_with_a_key_of_each_prompt():
    prompts, keys = jnp.asarray(reference("qwen3_moe")["prompts"])[:, None], jax.random.split(jax.random.key(3), 3)
    draw = functools.partial(jgg.models.generate, loaded("qwen3_moe"), max_new_tokens=6, temperature=1.5, top_p=0.9)
    got = jax.vmap(lambda prompt, length, key: draw(prompt, lengths=length, key=key))(prompts, LENGTHS[:, None], keys)
    each = [draw(prompt, lengths=[length], key=key) for prompt, length, key in zip(prompts, LENGTHS, keys, strict=True)]
    np.testing.assert_array_equal(got, each)


def test_no_prompts_give_no_tokens():
    assert jgg.models.generate(loaded("qwen3_moe"), np.zeros((0, 3), int), 6).shape == (0, 6)


IDS = "tokens must be ids from 0 to 63, the last of the model's vocabulary, got"
WRONG = {
    "max_new_tokens must be a positive int, got 0": (ValueError, {"max_new_tokens": 0}),
    "tokens must be [B, S], 2-dimensional, got [3]": (ValueError, {"tokens": [1, 2, 3]}),
    "tokens must be [B, S] with S at least 1, got [2, 0]": (ValueError, {"tokens": np.zeros((2, 0), int)}),
    "tokens must be an integer array": (TypeError, {"tokens": [[1.0, 2.0]]}),
    "tokens must be [B, S] with S at least 1, got [1, 0]": (ValueError, {"tokens": [[]]}),
    "tokens must be an array, got rows of unequal lengths in a list": (TypeError, {"tokens": [[1, 2], [3]]}),
    f"{IDS} 64 at [0, 1]": (ValueError, {"tokens": jnp.array([[1, 64, 2]])}),
    f"{IDS} -100 at [1, 0]": (ValueError, {"tokens": [[1, -100], [-100, 2]], "lengths": [1, 2]}),
    f"{IDS} 4294967301 at [0, 0]": (ValueError, {"tokens": np.array([[2**32 + 5]])}),
    "max_new_tokens must be at most 2**31 - 1 - S, 2147483644, got 2147483645": (
        ValueError,
        {"max_new_tokens": 2**31 - 3},
    ),
    "lengths must be [B], [1], got [2]": (ValueError, {"lengths": [1, 2]}),
    "lengths must be between 1 and the 3 columns of tokens, got [4]": (ValueError, {"lengths": [4]}),
    "lengths must be between 1 and the 3 columns of tokens, got [4294967297]": (ValueError, {"lengths": [2**32 + 1]}),
    "temperature must be 0 or more, got -1.0": (ValueError, {"temperature": -1}),
    "temperature must be a finite number, got 1000": (ValueError, {"temperature": 10**400}),
    "top_p must be more than 0 and at most 1, got 0.0": (ValueError, {"top_p": 0}),
    "key must be a random key with temperature 1.0, got None": (ValueError, {"temperature": 1.0}),
    "key must be a random key, as jax.random.key returns it, got int": (TypeError, {"key": 0}),
    "key must be a random key, as jax.random.key returns it, got float32 [2]": (TypeError, {"key": np.ones(2, "f4")}),
    "key must be one random key, for all prompts, got keys [3]": (
        ValueError,
        {"key": jax.random.split(jax.random.key(0), 3)},
    ),
    "stop_tokens must be a collection of ints, or of sequences of them, got 5": (TypeError, {"stop_tokens": 5}),
    "stop_tokens must be a collection of ints, or of sequences of them, got [5]": (TypeError, {"stop_tokens": [[[5]]]}),
    "model must be a jgg.models.Decoder, got": (TypeError, {"model": nnx.Module()}),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    error, changes = WRONG[message]
    arguments = {"model": loaded("qwen3_moe"), "tokens": [[1, 2, 3]], "max_new_tokens": 2} | changes
    with pytest.raises(error, match=re.escape(message)):
        jgg.models.generate(**arguments)
