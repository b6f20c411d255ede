"""What each token's scores have for the experts that it chose, in plain JAX whose gradient is no scatter."""

import functools

import jax
import jax.numpy as jnp


@jax.custom_jvp
def of_choices(scores: jax.Array, topk_indices: jax.Array) -> jax.Array:
    """The scores [T, E] of the chosen experts, [T, k]; each choice must lie in [0, E)."""
    tokens = jnp.arange(scores.shape[0], dtype=jnp.int32)[:, None]
    return scores.at[tokens, topk_indices].get(out_sharding=jax.typeof(topk_indices).sharding)


@of_choices.defjvp
def _of_choices_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # The transpose of the read would be a scatter, which XLA's partitioner gets wrong: where rows are split unevenly
    # over one axis of a mesh that has another axis, it adds the padding's values to element [0, 0].
    return of_choices(*primals), _compared_choices(tangents[0], primals[1])


@jax.jit
@functools.partial(jax.checkpoint, prevent_cse=False)  # keeps topk_indices for the transpose, and no mask [T, E]
def _compared_choices(scores: jax.Array, topk_indices: jax.Array) -> jax.Array:
    """Computes `of_choices` in a form whose transpose has no scatter."""
    # fused with the gradient of a softmax, XLA for CPUs would write a [T, E] for each choice; fused with the top k, it
    # would sort all scores of a token
    scores, topk_indices = jax.lax.optimization_barrier(scores), jax.lax.optimization_barrier(topk_indices)
    experts = jnp.arange(scores.shape[1], dtype=jnp.int32)[None, :]
    choices = jnp.split(topk_indices, topk_indices.shape[1], axis=1)  # [T, 1] each
    # a loop, as XLA fuses its transpose into one pass over [T, E]
    return jnp.stack([jnp.sum(jnp.where(each == experts, scores, 0.0), axis=1) for each in choices], axis=1)
