"""From router logits to rows sorted by expert."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.schedule import saturated_int32


class Routing(NamedTuple):
    """Which experts each token goes to, and the order of the rows that follows.

    Attributes:
      topk_weights: float32 [T, k], the weight of each choice.
      topk_indices: int32 [T, k], the expert of each choice.
      group_sizes: int32 [E], rows of each expert.
      gather_indices: int32 [M], for each row in expert order its position t * k + j in token order.
    """

    topk_weights: jax.Array
    topk_indices: jax.Array
    group_sizes: jax.Array
    gather_indices: jax.Array


def route(
    logits: jax.Array, topk: int, *, score: str = "softmax", normalize: bool = True, scale: float = 1.0
) -> Routing:
    """Chooses each token's experts and sorts the rows by expert.

    Args:
      logits: float [T, E], the router's output.
      topk: k, experts per token.
      score: "softmax" over all experts, in float32.
      normalize: divide a token's k scores by their sum (Mixtral, Qwen3) rather than keep them (OLMoE).
      scale: factor of the weights.

    Returns: a Routing, differentiable in logits through topk_weights. Equal scores go to the lower expert.
    Raises: ValueError: logits is not [T, E], topk is not in [1, E] or score is unknown. TypeError: logits is not float.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits must be [T, E], 2-dimensional, got {list(logits.shape)}.")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"logits must be a float array, got {logits.dtype}.")
    num_experts = logits.shape[1]
    if not 1 <= topk <= num_experts:
        raise ValueError(f"topk must be between 1 and the number of experts, {num_experts}, got {topk}.")
    if score != "softmax":
        raise ValueError(f"score must be 'softmax', got {score!r}.")
    scores = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    topk_weights, topk_indices = jax.lax.top_k(scores, topk)
    if normalize:
        topk_weights = topk_weights / jnp.sum(topk_weights, axis=-1, keepdims=True)
    return Routing(topk_weights * scale, topk_indices, *sort_by_expert(topk_indices, num_experts))


def sort_by_expert(topk_indices: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Sorts the routed rows by expert; rows of one expert keep their token order.

    Args:
      topk_indices: integer [T, k] or [M], the expert of each row in token order. A row whose expert lies outside
        [0, num_experts) goes past every group.
      num_experts: E.

    Returns:
      group_sizes int32 [E] and gather_indices int32 [M], the position in token order of each row in expert order.

    Raises: TypeError: topk_indices is not an integer array.
    """
    if not jnp.issubdtype(topk_indices.dtype, jnp.integer):
        raise TypeError(f"topk_indices must be an integer array, got {topk_indices.dtype}.")
    experts = saturated_int32(topk_indices.reshape(-1))
    experts = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts)
    gather_indices = jnp.argsort(experts, stable=True).astype(jnp.int32)
    ends = jnp.searchsorted(experts[gather_indices], jnp.arange(num_experts, dtype=jnp.int32), side="right")
    return jnp.diff(ends, prepend=0).astype(jnp.int32), gather_indices
