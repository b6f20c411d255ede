"""The weights of the experts that a router chose."""

import functools
import math

import jax
import jax.numpy as jnp


def weigh(
    logits: jax.Array, topk_indices: jax.Array, score: str, normalize: bool, scale: float, *, all_are_experts: bool
) -> jax.Array:
    """The weights of the chosen experts, float32 [T, k]; 0 for a choice that is no expert."""
    scores = jax.nn.softmax(logits) if score == "softmax" and not normalize else logits
    if all_are_experts:
        return _weigh_chosen(_of_choices(scores, topk_indices), score, normalize) * scale
    is_expert = (topk_indices >= 0) & (topk_indices < logits.shape[1])
    if normalize:
        # What is no expert takes a column of its own, which adds nothing to the sum of a token's scores. A mask would
        # do so too, but XLA would then compute the gradients of a replayed choice with other last bits.
        scores = jnp.pad(scores, ((0, 0), (0, 1)), constant_values=jnp.finfo(jnp.float32).min)
    chosen = _of_choices(scores, jnp.where(is_expert, topk_indices, scores.shape[1] - 1))
    return jnp.where(is_expert, _weigh_chosen(chosen, score, normalize) * scale, 0.0)


def _weigh_chosen(chosen: jax.Array, score: str, normalize: bool) -> jax.Array:
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


@jax.custom_jvp
def _of_choices(scores: jax.Array, topk_indices: jax.Array) -> jax.Array:
    """The scores [T, E] of the chosen experts, [T, k]; each choice must lie in [0, E).

    The transpose of this read would be a scatter, which XLA's partitioner gets wrong: where rows are split unevenly
    over one axis of a mesh that has another axis, it adds the padding's values to element [0, 0]. So the derivative
    compares indices instead.
    """
    tokens = jnp.arange(scores.shape[0], dtype=jnp.int32)[:, None]
    return scores.at[tokens, topk_indices].get(out_sharding=jax.typeof(topk_indices).sharding)


@_of_choices.defjvp
def _of_choices_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return _of_choices(*primals), _compared_choices(tangents[0], primals[1])


@jax.jit
@functools.partial(jax.checkpoint, prevent_cse=False)  # keeps topk_indices for the transpose, and no mask [T, E]
def _compared_choices(scores: jax.Array, topk_indices: jax.Array) -> jax.Array:
    """Computes `_of_choices` in a form whose transpose has no scatter.

    It loops over the k choices, since XLA fuses the loop's transpose into one pass over [T, E].

    The barriers keep this pass apart from what surrounds it. Fused with the gradient of a softmax, XLA for CPUs would
    write a [T, E] for each choice; fused with the top k, it would sort all scores of a token.
    """
    scores, topk_indices = jax.lax.optimization_barrier(scores), jax.lax.optimization_barrier(topk_indices)
    experts = jnp.arange(scores.shape[1], dtype=jnp.int32)[None, :]
    choices = jnp.split(topk_indices, topk_indices.shape[1], axis=1)  # [T, 1] each
    return jnp.stack([jnp.sum(jnp.where(each == experts, scores, 0.0), axis=1) for each in choices], axis=1)
