"""Continuous batching: rows that end make room for the next prompts, and every row is as if all ran at once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg.models
from jgg.models import continuous, requests
from tests.support.models import loaded

BATCH, SAMPLES, MOST = 7, 2, 13


def request(seed=0, batch=BATCH):
    """Prompts of 1 to 9 tokens, and options with which rows end at different times."""
    draw = np.random.default_rng(seed)
    prompts = draw.integers(1, 60, (batch, 9))
    options = {
        "lengths": draw.integers(1, 10, batch),
        "temperature": draw.uniform(0.5, 2, batch),
        "seeds": np.arange(batch),
        "num_samples": SAMPLES,
        "stop_tokens": [5, (7, 9)],
        "frequency_penalty": draw.uniform(0, 2, batch),
    }
    limits = draw.integers(1, MOST + 1, (batch, SAMPLES))
    limits[0, 0] = MOST
    return prompts, limits, options


def assert_same(got, want):
    for name in ("tokens", "lengths", "topk_indices"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    for name in ("log_probabilities", "sampled_log_probabilities"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    "family",
    ["gpt_oss", "qwen3_next", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("deepseek_v3", "llama4"))],
)
@pytest.mark.parametrize("rows", [2, pytest.param(5, marks=pytest.mark.sweep)])
def test_rows_are_as_if_all_ran_at_once(family, rows):
    model, (prompts, limits, options) = loaded(family), request()
    want = jgg.models.generate(model, prompts, limits, details=True, **options)
    assert len(set(want.lengths.tolist())) > 4  # rows end at different times
    assert (want.lengths <= limits.reshape(-1)).all()
    assert family == "llama4" or (want.lengths < limits.reshape(-1)).any()  # which draws none of the stop tokens
    assert_same(jgg.models.generate(model, prompts, limits, details=True, rows=rows, **options), want)


@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("deepseek_v3", marks=pytest.mark.sweep)])
def test_the_last_rows_run_alone(family, monkeypatch):
    monkeypatch.setattr(requests, "_LEAST_ROWS", 4)
    sizes, alone = [], continuous._alone
    monkeypatch.setattr(continuous, "_alone", lambda state, rows: sizes.append(len(rows)) or alone(state, rows))
    model, (prompts, limits, options) = loaded(family), request()
    want = jgg.models.generate(model, prompts, limits, details=True, **options)
    assert_same(jgg.models.generate(model, prompts, limits, details=True, rows=8, **options), want)
    assert sizes == [2]


def test_one_program_serves_other_prompts_and_numbers_of_them():
    model, compiled = loaded("qwen3_moe"), continuous.run.num_compiled()
    prompts, limits, options = request(11, 11)
    want = jgg.models.generate(model, prompts, limits, **options)
    for count in (5, 11):
        own = {name: each[:count] if isinstance(each, np.ndarray) else each for name, each in options.items()}
        got = jgg.models.generate(model, prompts[:count], limits[:count], rows=4, prefill_chunk=4, **own)
        np.testing.assert_array_equal(got, want[: count * SAMPLES])
    assert continuous.run.num_compiled() == compiled + 1


def test_a_row_that_ends_in_nan_makes_room():
    model, (prompts, limits, options) = loaded("qwen3_moe"), request()
    model.w_embedding.set_value(model.w_embedding.get_value().at[61].set(jnp.nan))
    prompts[3] = 61
    want = jgg.models.generate(model, prompts, limits, details=True, **options)
    assert (want.tokens[3 * SAMPLES] == -1).all() and want.lengths[3 * SAMPLES] == 0
    assert_same(jgg.models.generate(model, prompts, limits, details=True, rows=2, **options), want)


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.sweep)])
def test_what_a_row_left_in_its_cache_reaches_no_later_prompt(family):
    """A token makes the state NaN where no later prompt has a token yet."""
    model, draw = loaded(family), np.random.default_rng(0)
    prompts, options = draw.integers(1, 30, (8, 5)), {"temperature": 1.5, "seeds": np.arange(8), "details": True}
    usual = jgg.models.generate(model, prompts, 12, **options)
    bad = next(token for token in range(30, 64) if 0 < (np.asarray(usual.tokens) == token).any(axis=1)[:6].sum() < 4)
    model.w_embedding.set_value(model.w_embedding.get_value().at[bad].set(jnp.nan))
    want = jgg.models.generate(model, prompts, 12, **options)
    assert 0 < (want.lengths < 12).sum() < 6
    assert_same(jgg.models.generate(model, prompts, 12, rows=1, **options), want)


def test_enough_rows_for_all_run_the_usual_programs():
    model, (prompts, limits, options) = loaded("qwen3_moe"), request()
    compiled = continuous.run.num_compiled()
    jgg.models.generate(model, prompts, limits, rows=BATCH * SAMPLES, **options)
    assert continuous.run.num_compiled() == compiled


def test_one_number_of_new_tokens_for_all_inside_jit():
    """No row has a stop token here, so each ends with its last token."""
    model, prompts = loaded("qwen3_moe"), request()[0]
    run = jax.jit(lambda model, prompts: jgg.models.generate(model, prompts, 6, rows=4, details=True))
    got, want = run(model, prompts), jgg.models.generate(model, prompts, 6, details=True)
    assert_same(got, want)
    assert (got.lengths == 6).all()


def test_no_prompts_have_no_limits_either():
    model, none = loaded("qwen3_moe"), np.zeros((0, 3), np.int32)
    assert jgg.models.generate(model, none, [], rows=2, num_samples=2).shape == (0, 1)


@pytest.mark.parametrize(
    ("rows", "limits", "message"),
    [
        (1, 3, "rows must be at least num_samples, 2, got 1."),
        (0, 3, "rows must be a positive int, got 0."),
        (4, [1, 2], "max_new_tokens must be a number, [B] or [B, num_samples], [7, 2], got [2]."),
        (None, [[1] * 3] * 7, "max_new_tokens must be a number, [B] or [B, num_samples], [7, 2], got [7, 3]."),
        (None, [[1, 2], *[[1]] * 6], "max_new_tokens must be an array"),
        (None, [0] * 7, "max_new_tokens must have numbers of 1 or more, got [0, 0, 0, 0, 0, 0, 0]."),
    ],
)
def test_wrong_arguments(rows, limits, message):
    prompts, _, options = request()
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        jgg.models.generate(loaded("qwen3_moe"), prompts, limits, rows=rows, **options)


def test_limits_of_a_stream():
    model, (prompts, limits, options) = loaded("qwen3_moe"), request(1)
    want = jgg.models.generate(model, prompts, limits, **options)
    stream = jgg.models.stream(model, prompts, limits, chunk=4, **options)
    got = np.concatenate(list(stream), axis=1)
    np.testing.assert_array_equal(got, want[:, : got.shape[1]])
    with pytest.raises(TypeError, match="rows must be given to generate alone, got 2 in stream"):
        jgg.models.stream(model, prompts, limits, rows=2, **options)
    assert stream.is_done.all() and stream.lengths.max() == got.shape[1]
