"""The weights of the experts that a router chose."""

import jax
import jax.numpy as jnp

from jgg.launching.choice import How
from jgg.products.plain.choices import of_choices
from jgg.products.score import SCORE, WEIGH, Score, Weigh


def weigh(
    logits: jax.Array,
    topk_indices: jax.Array,
    how: How,
    *,
    score: str,
    normalize: bool,
    scale: float,
    all_are_experts: bool,
) -> jax.Array:
    """The weights of the chosen experts, float32 [T, k]; 0 for a choice without an expert."""
    if score != "softmax" or normalize:
        return WEIGH(
            how,
            Weigh(logits, topk_indices),
            score=score,
            normalize=normalize,
            scale=scale,
            all_are_experts=all_are_experts,
        )
    scores = SCORE(how, Score(logits), score=score)
    if all_are_experts:
        return of_choices(scores, topk_indices) * scale
    num_experts = logits.shape[1]
    is_expert = (topk_indices >= 0) & (topk_indices < num_experts)
    chosen = of_choices(scores, jnp.where(is_expert, topk_indices, num_experts - 1))
    return jnp.where(is_expert, chosen * scale, 0.0)
