"""Draws and penalties: those of transformers' logits processors and of vLLM's formulas, with settings of each row."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg.models
from jgg.models import penalties, sampling
from jgg.models.head import Head
from tests.support.models import loaded, logits_of, reference

LENGTHS = np.array([1, 5, 9])  # of the prompts in the reference data
SEEDS = np.array([3, 7, 2**31 - 1])
generate = jgg.models.generate
ROWS = {
    "temperature": [1.5, 0.0, 0.8],
    "top_k": [20, 64, 2**31 - 1],
    "top_p": [0.9, 0.5, 1.0],
    "min_p": [0.0, 0.3, 0.05],
    "repetition_penalty": [1.0, 1.7, 0.9],
    "presence_penalty": [0.5, 0.0, -1.0],
    "frequency_penalty": [0.0, 0.0, 2.0],
}


@functools.cache
def draws():
    """What transformers computed; see tests/programs/make_draws_data.py."""
    with np.load(Path(__file__).parents[1] / "data" / "draws.npz") as file:
        return dict(file)


def prompts():
    return reference("qwen3_moe")["prompts"]


def test_penalties_and_bounds_are_those_of_transformers():
    known = draws()
    none = jnp.zeros(3, jnp.float32)
    given = penalties.Penalties(jnp.asarray(known["repetition"], jnp.float32), none, none)
    # half of the tokens are those of a prompt, whose padding does not count
    padded = np.concatenate([known["tokens"][:, :6], np.arange(6).repeat(3).reshape(3, 6)], axis=1)
    there = penalties.of_prompts(jnp.asarray(padded, jnp.int32), jnp.full(3, 6, jnp.int32), 64, 1)
    for column in range(6, 12):
        there = penalties.counted(there, jnp.asarray(known["tokens"][:, column], jnp.int32))
    got = penalties.penalized(jnp.asarray(known["logits"]), given, there)
    np.testing.assert_array_equal(got, known["penalized"])
    temperatures = known["temperature"].astype(np.float32)[:, None]
    scaled = got / temperatures
    bounds = (jnp.asarray(known[name], jnp.float32) for name in ("top_p", "min_p"))
    own = sampling.Sampling(none, none, jnp.asarray(known["top_k"], jnp.int32), *bounds)
    is_kept = sampling._is_kept(scaled - scaled.max(axis=1, keepdims=True), own, Head())
    np.testing.assert_array_equal(is_kept, np.isfinite(known["scores"]))
    np.testing.assert_allclose(jnp.where(is_kept, scaled, -jnp.inf), known["scores"], rtol=1e-6)


def test_greedy_tokens_with_a_repetition_penalty_are_those_of_transformers():
    known, number = draws(), draws()["greedy"].shape[1]
    got = generate(loaded("qwen3_moe"), prompts(), number, lengths=LENGTHS, repetition_penalty=float(known["penalty"]))
    np.testing.assert_array_equal(got, known["greedy"])


@functools.cache
def of_rows():
    """Two samples of each prompt by settings of its own, and the model."""
    model = loaded("qwen3_moe")
    options = {"lengths": LENGTHS, "seeds": SEEDS, "num_samples": 2, "details": True, "prefill_chunk": 4}
    return model, generate(model, prompts(), 6, **options, **ROWS)


def penalized_in_float64(logits, row, prompt, new):
    """The logits [V] of a row by the definitions of transformers and of vLLM."""
    counts = np.bincount(new, minlength=64)
    seen = (counts > 0) | np.isin(np.arange(64), prompt)
    penalty = ROWS["repetition_penalty"][row]
    logits = np.where(seen, np.where(logits < 0, logits * penalty, logits / penalty), logits)
    return logits - ROWS["frequency_penalty"][row] * counts - ROWS["presence_penalty"][row] * (counts > 0)


def left_of(logits, row):
    """The tokens that top_k, top_p and min_p of a row leave of logits [V] that the temperature divided."""
    order = np.argsort(-logits)[: ROWS["top_k"][row]]
    weights = np.exp(logits[order] - logits.max())
    before = (np.cumsum(weights) - weights) / weights.sum()
    return order[(before < ROWS["top_p"][row]) & (weights >= ROWS["min_p"][row])]


@pytest.mark.sweep
def test_each_row_is_drawn_by_its_settings_from_what_is_left():
    model, got = of_rows()
    rows = got.training_rows(prompts(), LENGTHS)
    logits = np.asarray(logits_of(model, rows.tokens), np.float64)
    log_sums = np.log(np.exp(logits).sum(axis=-1))
    for sample, column in np.argwhere(rows.is_new):
        row, target = sample // 2, int(rows.targets[sample, column])
        prompt, new = np.split(np.asarray(rows.tokens[sample, : column + 1]), [LENGTHS[row]])
        own = penalized_in_float64(logits[sample, column], row, prompt, new)
        if ROWS["temperature"][row] == 0:
            assert target == own.argmax() and rows.sampled_log_probabilities[sample, column] == 0
        else:
            own /= ROWS["temperature"][row]
            kept = left_of(own, row)
            assert target in kept
            wanted = own[target] - np.log(np.exp(own[kept]).sum())
            np.testing.assert_allclose(rows.sampled_log_probabilities[sample, column], wanted, atol=1e-4)
        wanted = logits[sample, column, target] - log_sums[sample, column]
        np.testing.assert_allclose(rows.log_probabilities[sample, column], wanted, atol=1e-4)


@pytest.mark.sweep
def test_a_row_s_settings_are_those_of_all_rows():
    model, got = of_rows()
    options = {"num_samples": 2, "details": True, "prefill_chunk": 4}
    for row in (0, 1, 2):
        own = {name: numbers[row] for name, numbers in ROWS.items()}
        arrays = {name: np.full(3, number) for name, number in own.items()}
        all_alike = generate(model, prompts(), 6, lengths=LENGTHS, seeds=SEEDS, **options, **arrays)
        np.testing.assert_array_equal(all_alike.tokens[2 * row : 2 * row + 2], got.tokens[2 * row : 2 * row + 2])
    # one number for all rows; top_p = 1 and min_p = 0 are left out of the program
    alone = generate(model, prompts(), 6, lengths=LENGTHS, seeds=SEEDS, **options, **own)
    np.testing.assert_array_equal(alone.tokens[4:], got.tokens[4:])


def test_min_p_draws_among_tokens_that_are_likely_enough():
    model, prompt = loaded("mixtral"), jnp.asarray(reference("mixtral")["tokens"][:1, :3])
    logits = np.asarray(logits_of(model, prompt)[0, -1])
    draw = functools.partial(generate, model, prompt, 1, temperature=3.0, num_samples=500, seeds=[0])
    likely = np.flatnonzero(np.exp((logits - logits.max()) / 3) >= 0.6)
    assert 1 < len(likely) < 32
    assert set(np.asarray(draw(min_p=0.6))[:, 0]) == set(likely)
    assert set(np.asarray(draw(min_p=1))[:, 0]) == {logits.argmax()}


@pytest.mark.sweep
def test_traced_settings_are_of_each_row():
    model, got = of_rows()

    @jax.jit
    def run(rows):
        options = {"seeds": SEEDS, "num_samples": 2, "prefill_chunk": 4}
        return generate(model, prompts(), 6, lengths=LENGTHS, **options, **rows)

    np.testing.assert_array_equal(run({name: jnp.asarray(numbers) for name, numbers in ROWS.items()}), got.tokens)


WRONG = {
    "top_p must be a number or [B], [1], got [2]": (ValueError, {"top_p": [0.5, 0.5]}),
    "top_p must have finite numbers of more than 0 and at most 1, got [1.5]": (ValueError, {"top_p": [1.5]}),
    "top_k must be a number or [B], [1], got [2]": (ValueError, {"top_k": [1, 2]}),
    "top_k must have numbers of 1 or more, got [0]": (ValueError, {"top_k": [0]}),
    "top_k must be an integer array": (TypeError, {"top_k": [0.5]}),
    "min_p must be at least 0 and at most 1, got 1.5": (ValueError, {"min_p": 1.5}),
    "min_p must have finite numbers of at least 0 and at most 1, got [-1.0]": (ValueError, {"min_p": [-1.0]}),
    "repetition_penalty must be more than 0, got 0.0": (ValueError, {"repetition_penalty": 0}),
    "presence_penalty must be a finite number, got inf": (ValueError, {"presence_penalty": np.inf}),
    "frequency_penalty must be a number, got 'a'": (TypeError, {"frequency_penalty": "a"}),
    "frequency_penalty must have finite numbers, got [nan]": (ValueError, {"frequency_penalty": [np.nan]}),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    error, changes = WRONG[message]
    with pytest.raises(error, match=re.escape(message)):
        generate(loaded("qwen3_moe"), [[1, 2, 3]], 2, **changes)
