"""Products of bfloat16 and float32 matrices in plain JAX, the float32 one as the sum of two bfloat16 matrices."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgg.products.launches.pieces import two_pieces


def pieces_of(matrix: jax.Array) -> list[jax.Array]:
    """The bfloat16 matrices whose sum is the matrix or, if that is float32, its upper 17 bits."""
    return [matrix] if matrix.dtype == jnp.bfloat16 else list(two_pieces(matrix, jnp.dtype("bfloat16")))


def sum_of_products(x: jax.Array, pieces: list[jax.Array], x_axis: int, like: jax.Array | None = None) -> jax.Array:
    """The sum of x's float32 products with each piece, side by side in one product, so that x is read once."""
    products = dot(x, jnp.concatenate(pieces, axis=1), x_axis, 0, jnp.float32, like)
    first, *others = jnp.split(products, len(pieces), axis=1)
    # where the first product is infinite, the low pieces, which may be zero, would make it NaN
    return jnp.where(jnp.isfinite(first), sum(others, first), first) if others else first


def dot(
    left: jax.Array, right: jax.Array, left_axis: int, right_axis: int, dtype: DTypeLike, like: jax.Array | None = None
) -> jax.Array:
    """The product of two matrices; if `like` is given, split over Explicit axes of a mesh as `like` is."""
    multiply = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(((left_axis,), (right_axis,)), ((), ())),
        precision=jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.dtype(dtype),
        out_sharding=None if like is None else jax.typeof(like).sharding,
    )
    if dtype != jnp.float32:
        return multiply(left, right)

    def multiply_float32(left: jax.Array, right: jax.Array) -> jax.Array:
        return multiply(left.astype(jnp.float32), right.astype(jnp.float32))

    # XLA for CPUs multiplies bfloat16 to float32 in some forms, but not for the gradient of w_router under vmap
    return jax.lax.platform_dependent(left, right, cpu=multiply_float32, default=multiply)
