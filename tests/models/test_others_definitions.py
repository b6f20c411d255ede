"""What vLLM tests to call sampling batch invariant, and Megatron-LM to call routes replayed, by their own definitions.

Sources: vLLM's tests/v1/determinism and Megatron-LM's tests of RouterReplay. test_grpo_loss.py has the arithmetic of
TRL, verl and tunix.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
import jgg.models
from tests.models.test_model_invariance import adapted, of_family, of_real_width

TRIALS, NEW = 5, 12


def generated(model, prompts, **options):
    """Tokens and log-probabilities of prompts of different lengths; each has a seed of its own, its first token."""
    lengths = np.array([len(prompt) for prompt in prompts])
    padded = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    options = {"lengths": lengths, "seeds": [prompt[0] for prompt in prompts], "details": True} | options
    result = jgg.models.generate(model, padded, NEW, **options)
    return np.asarray(result.tokens), np.asarray(result.log_probabilities)


def random_prompts(rng, count, longest, vocabulary):
    return [rng.integers(0, vocabulary, rng.integers(1, longest + 1)).astype(np.int32) for _ in range(count)]


MODELS = {
    **{family: functools.partial(of_family, family) for family in ("qwen3_moe", "gpt_oss", "deepseek_v3")},
    "real width": functools.partial(of_real_width, lora_rank=16),
    "real width, FP8": functools.partial(of_real_width, quantization=jgg.Fp8()),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_needle_is_sampled_alike_in_every_batch(name):
    """vLLM's: a prompt at a random place of batches of random sizes, whose other prompts have random lengths."""
    model, rng = adapted(MODELS[name]()), np.random.default_rng(0)
    vocabulary = model.config.vocabulary
    needle = rng.integers(0, vocabulary, 17).astype(np.int32)
    tokens, log_probabilities = generated(model, [needle], temperature=0.8)
    for _ in range(TRIALS):
        count = int(rng.integers(2, 65))
        prompts, place = random_prompts(rng, count, 90, vocabulary), int(rng.integers(count))
        prompts[place] = needle
        options = {} if rng.random() < 0.5 else {"rows": int(rng.integers(1, count + 1))}
        got, of_batch = generated(model, prompts, temperature=0.8, **options)
        np.testing.assert_array_equal(got[place], tokens[0])
        np.testing.assert_array_equal(of_batch[place], log_probabilities[0])


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_each_step_of_a_batch_is_that_of_a_batch_of_one(name, temperature):
    """vLLM's: the log-probability of every step, one prompt at a time and all of them together."""
    model, rng = adapted(MODELS[name]()), np.random.default_rng(1)
    prompts = random_prompts(rng, 33, 40, model.config.vocabulary)
    together = generated(model, prompts, temperature=temperature)
    for row in (0, 7, 32):
        alone = generated(model, [prompts[row]], temperature=temperature)
        for got, want in zip(alone, together, strict=True):
            np.testing.assert_array_equal(got[0], want[row])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_recorded_routes_get_the_weights_of_new_logits(score):
    """Megatron's: replay keeps the experts that were recorded, and takes their weights from the logits that it has."""
    rng = np.random.default_rng(0)
    logits, later = (jnp.asarray(rng.normal(size=(64, 8)), jnp.float32) for _ in range(2))
    route = functools.partial(jgg.route, topk=2, score=score)
    recorded = route(logits).topk_indices
    assert (recorded != route(later).topk_indices).any()
    np.testing.assert_array_equal(route(logits, topk_indices=recorded).topk_indices, recorded)

    def weights(later, topk_indices):
        return route(later, topk_indices=topk_indices).topk_weights.reshape(64, 2)

    def expected(later):
        scores = jax.nn.softmax(later) if score == "softmax" else jax.nn.sigmoid(later)
        own = jnp.take_along_axis(scores, recorded, axis=1)
        return own / own.sum(axis=1, keepdims=True)

    np.testing.assert_allclose(weights(later, recorded), expected(later), rtol=1e-5)
    dy = jnp.asarray(rng.normal(size=(64, 2)), jnp.float32)
    (got,), (want,) = (
        jax.vjp(function, later)[1](dy) for function in (functools.partial(weights, topk_indices=recorded), expected)
    )
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
