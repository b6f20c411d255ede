"""Samples of prompts with their log-probabilities and experts: each depends on its own prompt and seed alone."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg.models
from jgg.models import decoding
from tests.support.models import FEW_FAMILIES, loaded, logits_of, reference

LENGTHS = np.array([1, 5, 9])  # of the prompts in the reference data
SEEDS = np.array([3, 7, 2**31 - 1])
generate = jgg.models.generate


def prompts_of(family="qwen3_moe"):
    return reference(family)["prompts"]


def programs():
    """How many programs have been compiled."""
    return decoding.start.num_compiled(), decoding.advance.num_compiled()


@functools.cache
def samples():
    """Two samples of each prompt, and the model."""
    model = loaded("qwen3_moe")
    options = {"temperature": 1.5, "top_k": 20, "top_p": 0.9}
    return (
        model,
        options,
        generate(model, prompts_of(), 6, lengths=LENGTHS, seeds=SEEDS, num_samples=2, details=True, **options),
    )


@jax.jit
def losses_and_choices(model, rows):
    """The model's losses of rows, and the experts that it chooses."""
    run = nnx.capture(lambda model: model.losses(rows.tokens, rows.targets, mask=rows.mask), nnx.Intermediate)
    losses, sown = run(model)
    return losses, nnx.to_pure_dict(sown)["topk_indices"][0]


def check_rows(model, generated, prompts, lengths):
    """What was noted while generating is what the model says of the whole rows."""
    rows = generated.training_rows(prompts, lengths)
    losses, choices = losses_and_choices(model, rows)
    np.testing.assert_allclose(jnp.where(rows.is_new, -losses, 0), rows.log_probabilities, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(jnp.where(rows.mask[None, ..., None], choices, -1), generated.topk_indices)
    assert rows.is_new.sum() == generated.lengths.sum() > 0
    times = len(generated.tokens) // len(prompts)
    for row, (tokens, targets) in enumerate(zip(np.asarray(rows.tokens), np.asarray(rows.targets), strict=True)):
        length, new = lengths[row // times], generated.tokens[row, : generated.lengths[row]]
        whole = np.concatenate([prompts[row // times, :length], new])
        np.testing.assert_array_equal(tokens, np.pad(whole, (0, len(tokens) - len(whole))))
        np.testing.assert_array_equal(targets, np.pad(whole[1:], (0, len(tokens) + 1 - len(whole))))
        np.testing.assert_array_equal(np.flatnonzero(rows.is_new[row]), np.arange(length, len(whole)) - 1)
        np.testing.assert_array_equal(np.flatnonzero(rows.mask[row]), np.arange(len(whole) - 1))


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_log_probabilities_and_experts_are_those_of_the_whole_model(family):
    expected, model = reference(family), loaded(family)
    stop = int(expected["greedy"][1, 2])
    options = {"lengths": LENGTHS, "stop_tokens": [stop], "details": True}
    got = generate(model, expected["prompts"], 6, **options)
    check_rows(model, got, expected["prompts"], LENGTHS)
    ends = [np.flatnonzero(np.append(row, stop) == stop)[0] + 1 for row in expected["greedy"]]
    np.testing.assert_array_equal(got.lengths, np.minimum(ends, 6))
    assert not np.any(got.sampled_log_probabilities)  # the likeliest token is certain
    # in chunks of 4, 4 and 1 tokens of the prompts, that see what is before them, in a layer within a window
    again = generate(model, expected["prompts"], 6, **options, prefill_chunk=4)
    for name in ("tokens", "lengths", "topk_indices"):
        np.testing.assert_array_equal(getattr(again, name), getattr(got, name))
    np.testing.assert_allclose(again.log_probabilities, got.log_probabilities, rtol=0, atol=1e-5)


def test_samples_are_of_the_whole_model_and_differ():
    model, _, got = samples()
    assert got.tokens.shape == (6, 6)
    check_rows(model, got, prompts_of(), LENGTHS)
    assert len({tuple(row) for row in np.asarray(got.tokens)}) == 6


def test_a_sample_depends_on_its_prompt_and_seed_alone():
    model, options, got = samples()
    alone = generate(model, prompts_of()[1:2, :5], 6, seeds=SEEDS[1:2], num_samples=3, details=True, **options)
    np.testing.assert_array_equal(alone.tokens[:2], got.tokens[2:4])
    np.testing.assert_array_equal(alone.lengths[:2], got.lengths[2:4])
    for name in ("log_probabilities", "sampled_log_probabilities"):
        np.testing.assert_allclose(getattr(alone, name)[:2], getattr(got, name)[2:4], rtol=0, atol=1e-5)
    options |= {"num_samples": 2, "details": True}
    turned = generate(model, prompts_of()[::-1], 6, lengths=LENGTHS[::-1], seeds=SEEDS[::-1], **options)
    np.testing.assert_array_equal(turned.tokens.reshape(3, 2, 6)[::-1].reshape(6, 6), got.tokens)
    other = generate(model, prompts_of(), 6, lengths=LENGTHS, seeds=[3, 8, 9], **options)
    assert [np.array_equal(*rows) for rows in zip(other.tokens, got.tokens, strict=True)] == [True, True, *[False] * 4]


def test_sampled_log_probabilities_are_of_what_is_left_of_the_distribution():
    model, _, got = samples()
    rows = got.training_rows(prompts_of(), LENGTHS)
    logits = np.asarray(logits_of(model, rows.tokens), np.float64) / 1.5
    for row, column in np.argwhere(rows.is_new):
        order = np.argsort(-logits[row, column])[:20]
        weights = np.exp(logits[row, column][order] - logits[row, column].max())
        before = (np.cumsum(weights) - weights) / weights.sum()
        kept = order[before < 0.9]
        target = int(rows.targets[row, column])
        assert target in kept
        wanted = logits[row, column][target] - np.log(np.exp(logits[row, column][kept]).sum())
        np.testing.assert_allclose(rows.sampled_log_probabilities[row, column], wanted, atol=1e-4)


@pytest.mark.sweep
def test_each_row_has_its_temperature():
    model, prompts = loaded("qwen3_moe"), prompts_of()
    draw = functools.partial(generate, model, prompts, 6, lengths=LENGTHS, key=jax.random.key(1))
    run = jax.jit(lambda temperatures: draw(temperature=temperatures, details=True))
    each = run(jnp.array([0.0, 1.0, 2.0]))
    np.testing.assert_array_equal(each.tokens[0], reference("qwen3_moe")["greedy"][0])
    for row in (1, 2):
        np.testing.assert_array_equal(each.tokens[row], run(jnp.full(3, float(row))).tokens[row])
    assert not np.any(each.sampled_log_probabilities[0])
    np.testing.assert_allclose(each.sampled_log_probabilities[1], each.log_probabilities[1], atol=1e-5)


def test_top_k_draws_among_as_many():
    model, prompt = loaded("mixtral"), jnp.asarray(reference("mixtral")["tokens"][:1, :3])
    order = np.argsort(-np.asarray(logits_of(model, prompt)[0, -1]))
    draw = functools.partial(generate, model, prompt, 1, temperature=3.0, num_samples=500, seeds=[0])
    for top_k in (1, 5):
        assert set(np.asarray(draw(top_k=top_k))[:, 0]) == set(order[:top_k])
    np.testing.assert_array_equal(draw(top_k=2**40), draw())


def test_a_sequence_of_stop_tokens_ends_a_row():
    expected, model = reference("qwen3_moe"), loaded("qwen3_moe")
    greedy = expected["greedy"]
    stop = greedy[1, 1:4].tolist()
    across = [int(expected["prompts"][2, 8]), int(greedy[2, 0])]  # begins in a prompt
    stops = [stop, [*stop, 64], np.array([63, 62]), jnp.array([62, 63]), across]
    got = generate(model, expected["prompts"], 6, lengths=LENGTHS, stop_tokens=stops, details=True)
    wanted = greedy.copy()
    wanted[1, 4:] = stop[-1]
    np.testing.assert_array_equal(got.tokens, wanted)
    np.testing.assert_array_equal(got.lengths, [6, 4, 6])
    assert not np.any(got.log_probabilities[1, 4:])
    assert np.all(got.log_probabilities[1, :4] < 0)


def test_other_numbers_of_new_tokens_and_other_draws_take_the_same_program():
    model, prompts = loaded("qwen3_moe"), prompts_of()
    draw = functools.partial(generate, model, prompts, lengths=LENGTHS, stop_tokens=[1])
    first = draw(7, temperature=1.0, top_p=0.9, seeds=SEEDS)
    number = programs()
    again = draw(16, temperature=[1.0] * 3, top_p=0.9, seeds=SEEDS)
    np.testing.assert_array_equal(again[:, :7], first)
    draw(1, temperature=0.5, top_p=0.5, key=jax.random.key(5))
    assert programs() == number


def test_logits_that_are_nan_end_a_row_before_them():
    model, prompts = loaded("qwen3_moe"), prompts_of()
    prompts = jnp.asarray(prompts).at[1, 3].set(64)
    got = jax.jit(lambda prompts: generate(model, prompts, 6, lengths=LENGTHS, details=True))(prompts)
    np.testing.assert_array_equal(got.lengths, [6, 0, 6])
    np.testing.assert_array_equal(got.tokens[1], -1)
    assert np.isfinite(got.log_probabilities).all()
    rows = got.training_rows(np.where(prompts > 63, 0, prompts), LENGTHS)
    np.testing.assert_array_equal(rows.is_new.sum(axis=1), [6, 0, 6])
    assert np.min(rows.tokens) == np.min(rows.targets) == 0


def test_no_prompts_have_no_details():
    got = generate(loaded("qwen3_moe"), np.zeros((0, 3), int), 6, num_samples=2, details=True)
    assert got.tokens.shape == (0, 6)
    assert got.training_rows(np.zeros((0, 3), int)).tokens.shape == (0, 9)


WRONG = {
    "top_k must be a positive int, got 0": (ValueError, {"top_k": 0}),
    "num_samples must be a positive int, got 0": (ValueError, {"num_samples": 0}),
    "prefill_chunk must be a positive int, got 0": (ValueError, {"prefill_chunk": 0}),
    "details must be True or False, got 1": (TypeError, {"details": 1}),
    "seeds must be [B], [1], got [2]": (ValueError, {"seeds": [1, 2]}),
    "seeds must be within int32, got [4294967296]": (ValueError, {"seeds": [2**32]}),
    "seeds must be an integer array": (TypeError, {"seeds": [0.5]}),
    "temperature must be a number or [B], [1], got [2]": (ValueError, {"temperature": [1.0, 2.0]}),
    "temperature must have finite numbers of 0 or more, got [-1.0]": (
        ValueError,
        {"temperature": [-1.0], "seeds": [0]},
    ),
    "temperature must have finite numbers of 0 or more, got [inf]": (ValueError, {"temperature": [np.inf]}),
    "stop_tokens must be a collection of ints, or of sequences of them, at least one in each, got []": (
        ValueError,
        {"stop_tokens": [[]]},
    ),
    "stop_tokens must be a collection of ints, or of sequences of them, got 'a'": (TypeError, {"stop_tokens": ["a"]}),
    "stop_tokens must be a collection of ints, or of sequences of them, got [2]": (
        TypeError,
        {"stop_tokens": [[1, [2]]]},
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    error, changes = WRONG[message]
    arguments = {"model": loaded("qwen3_moe"), "tokens": [[1, 2, 3]], "max_new_tokens": 2} | changes
    with pytest.raises(error, match=re.escape(message)):
        generate(**arguments)


def test_prompts_that_cannot_have_been_generated_from_are_named():
    _, _, got = samples()
    with pytest.raises(ValueError, match=re.escape("prompts must be those of generate, [B, 9] with B a divisor of 6")):
        got.training_rows(prompts_of()[:, :8], LENGTHS)
    with pytest.raises(ValueError, match=re.escape("lengths must be [B], [3], got [2]")):
        got.training_rows(prompts_of(), LENGTHS[:2])
    for lengths, told in ((None, "[9, 9, 9]"), ([2, 5, 9], "[2, 5, 9]"), ([1, 0, 9], "[1, 0, 9]")):
        with pytest.raises(ValueError, match=re.escape(f"lengths must be those of generate, got {told}")):
            got.training_rows(prompts_of(), lengths)


def test_temperatures_that_are_all_zero_need_no_key():
    model, prompts = loaded("qwen3_moe"), prompts_of()
    got = generate(model, prompts, 6, lengths=LENGTHS, temperature=np.zeros(3))
    np.testing.assert_array_equal(got, generate(model, prompts, 6, lengths=LENGTHS))
