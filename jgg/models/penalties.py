"""Penalties of tokens that are there already, which change logits before a token is drawn."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Penalties(NamedTuple):
    """What each of R rows charges for tokens that it has; the neutral numbers are 1, 0 and 0.

    Attributes:
      repetition: float32 [R], divides logits above 0 and multiplies those below, of tokens of the prompt and new ones.
      presence: float32 [R], is subtracted from the logits of tokens that occur in the new tokens.
      frequency: float32 [R], is subtracted from a token's logit once per occurrence in the new tokens.

    Source: `RepetitionPenaltyLogitsProcessor` of transformers; `presence_penalty` and `frequency_penalty` of OpenAI's
    API. vLLM has all three, in the same order.
    """

    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array


class Occurrences(NamedTuple):
    """Which tokens of the vocabulary a row's prompt has, bool [R, V], and how often its new tokens are each, int32."""

    in_prompt: jax.Array
    new: jax.Array


def of_prompts(prompts: jax.Array, lengths: jax.Array, vocabulary: int, num_samples: int) -> Occurrences:
    """The occurrences in `num_samples` rows of each prompt [B, S] of these lengths [B], before the first new token."""

    def of_prompt(prompt: jax.Array, length: jax.Array) -> jax.Array:
        is_token = jnp.arange(len(prompt), dtype=jnp.int32) < length
        return jnp.zeros(vocabulary, bool).at[prompt].max(is_token, mode="drop")

    in_prompt = jnp.repeat(jax.vmap(of_prompt)(prompts, lengths), num_samples, axis=0)
    return Occurrences(in_prompt, jnp.zeros(in_prompt.shape, jnp.int32))


def counted(occurrences: Occurrences, tokens: jax.Array) -> Occurrences:
    """The occurrences with one more new token of each row, int32 [R]; -1 is none."""
    ids = jnp.arange(occurrences.new.shape[1], dtype=jnp.int32)[None]
    return occurrences._replace(new=occurrences.new + (tokens[:, None] == ids).astype(jnp.int32))


def penalized(logits: jax.Array, penalties: Penalties, occurrences: Occurrences) -> jax.Array:
    """The logits [R, V] after the penalties."""
    repetition, presence, frequency = (each[:, None] for each in penalties)
    is_new = occurrences.new > 0
    repeated = jnp.where(logits < 0, logits * repetition, logits / repetition)
    logits = jnp.where(is_new | occurrences.in_prompt, repeated, logits)
    return logits - frequency * occurrences.new.astype(jnp.float32) - presence * is_new.astype(jnp.float32)
