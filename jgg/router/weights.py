"""The weights of the experts that a router chose."""

import math

import jax
import jax.numpy as jnp

from jgg.products.plain.choices import of_choices


def weigh(
    logits: jax.Array, topk_indices: jax.Array, score: str, normalize: bool, scale: float, *, all_are_experts: bool
) -> jax.Array:
    """The weights of the chosen experts, float32 [T, k]; 0 for a choice that is no expert."""
    scores = jax.nn.softmax(logits) if score == "softmax" and not normalize else logits
    if all_are_experts:
        return weigh_chosen(of_choices(scores, topk_indices), score, normalize) * scale
    is_expert = (topk_indices >= 0) & (topk_indices < logits.shape[1])
    if normalize:
        # What is no expert takes a column of its own, which adds nothing to the sum of a token's scores. A mask would
        # do so too, but XLA would then compute the gradients of a replayed choice with other last bits.
        scores = jnp.pad(scores, ((0, 0), (0, 1)), constant_values=jnp.finfo(jnp.float32).min)
    chosen = of_choices(scores, jnp.where(is_expert, topk_indices, scores.shape[1] - 1))
    return jnp.where(is_expert, weigh_chosen(chosen, score, normalize) * scale, 0.0)


def weigh_chosen(chosen: jax.Array, score: str, normalize: bool) -> jax.Array:
    """The weights before scaling; `chosen` are logits [T, k], or scores where a softmax over all experts is kept."""
    if score == "softmax" and not normalize:
        return chosen
    if score != "sigmoid":
        return jax.nn.softmax(chosen)  # equals the softmax over all experts divided by the sum of the chosen
    if not normalize:
        return jax.nn.sigmoid(chosen)
    # s / (sum of s + 1e-20) as a softmax over log(s) and log(1e-20): the gradient of the quotient overflows where all
    # of s are tiny
    terms = jnp.pad(jax.nn.log_sigmoid(chosen), ((0, 0), (0, 1)), constant_values=math.log(1e-20))
    return jax.nn.softmax(terms)[:, :-1]
