"""The embeddings of tokens, whose gradient is right however XLA splits them over devices."""

import functools

import jax
import jax.numpy as jnp

from jgg.core.manual_axes import alike, vary_over, varying_axes


def embedded(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """The rows [B, S, H] of a table [V, H] for tokens, integer [B, S]; NaN for an id that it lacks."""
    return table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Computes `embedded`, with a correct gradient however devices split tokens.

    The table's gradient is a scatter. Where devices split sequences unevenly over one axis of a mesh that has another,
    XLA's partitioner adds the values of its own padding to row 0 of a scatter. So this computes row 0 separately.
    """
    return _embed(jax.ShapeDtypeStruct(table.shape, table.dtype), *alike((table, tokens)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embed(like: jax.ShapeDtypeStruct, table: jax.Array, tokens: jax.Array) -> jax.Array:
    return embedded(table, tokens)


def _embed_fwd(like: jax.ShapeDtypeStruct, table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    return embedded(table, tokens), tokens


def _embed_bwd(like: jax.ShapeDtypeStruct, tokens: jax.Array, dy: jax.Array) -> tuple[jax.Array, None]:
    d_table = vary_over(varying_axes(dy), jnp.zeros(like.shape, like.dtype))
    d_table = d_table.at[tokens].add(dy, mode="drop", wrap_negative_indices=False)
    first = jnp.sum(jnp.where((tokens == 0)[..., None], dy.astype(jnp.float32), 0.0), axis=(0, 1))
    return jax.lax.dynamic_update_slice(d_table, first.astype(like.dtype)[None], (0, 0)), None


_embed.defvjp(_embed_fwd, _embed_bwd)
