"""Products with matrices that are no experts'."""

import jax
import jax.numpy as jnp


def dense_product(x: jax.Array, w: jax.Array, precision: jax.lax.PrecisionLike = None) -> jax.Array:
    """`x @ w` of x [..., M, K] and w [K, N].

    One row is multiplied as two. Alone, XLA for GPUs would write its products with w to memory and then add them up.
    """
    if any(size != 1 for size in x.shape[:-1]):
        return jnp.dot(x, w, precision=precision)
    rows = jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, 1), (0, 0)])
    return jnp.dot(rows, w, precision=precision)[..., :1, :]
