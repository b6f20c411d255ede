"""The router's projection: float32 logits, computed by 16-bit tensor cores."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jgg.core.arguments import as_array, as_precision, check_floats, check_rank
from jgg.core.gpu_target import current_target
from jgg.core.manual_axes import vary_over, varying_axes
from jgg.launching.choice import How, check_implementation
from jgg.products.launches.pieces import two_pieces
from jgg.products.logits_few import are_few, logits_few


def router_logits(
    x: ArrayLike,
    w_router: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> jax.Array:
    """The router's logits `x @ w_router + bias`, float32.

    Tokens in bfloat16 are multiplied as they are, since converting them to float32 takes longer than the product. A
    float32 factor (w_router, or in the backward pass the gradient of the logits) becomes the sum of two bfloat16
    numbers, which keep 17 bits (TF32, JAX's default, keeps 11); sums are in float32. Tokens of another dtype are
    multiplied in float32.

    Args:
      x: float [T, H].
      w_router: float [H, E].
      bias: float [E] or None.
      precision: precision of float32 products, as in `grouped_gemm`; any but the default makes all products float32.
      implementation: as in `grouped_gemm`. "xla" multiplies in float32 too, and is differentiable in forward mode.

    Returns: float32 [T, E].
    Raises: ValueError: shapes disagree. TypeError: an argument is no float array.
    """
    x, w_router = as_array("x", x), as_array("w_router", w_router)
    for name, array, shape in (("x", x, "[T, H]"), ("w_router", w_router, "[H, E]")):
        check_rank(name, array, shape)
        check_floats(name, array)
    if w_router.shape[0] != x.shape[1]:
        raise ValueError(f"w_router must be [H, E] with H = {x.shape[1]}, got {list(w_router.shape)}.")
    precision = as_precision(precision)
    check_implementation(implementation)
    if bias is not None:
        bias = as_array("bias", bias)
        if bias.shape != (w_router.shape[1],):
            raise ValueError(f"bias must be [E] = [{w_router.shape[1]}], got {list(bias.shape)}.")
        check_floats("bias", bias)
    return compute_logits(x, w_router, bias, precision, implementation)


def compute_logits(
    x: jax.Array,
    w_router: jax.Array,
    bias: jax.Array | None,
    precision: jax.lax.Precision,
    implementation: str | None,
) -> jax.Array:
    """`router_logits` of checked arguments."""
    if x.dtype == jnp.bfloat16 and precision == jax.lax.Precision.DEFAULT and implementation != "xla":
        axes = varying_axes(x, w_router)
        in_pieces = w_router if w_router.dtype == x.dtype else w_router.astype(jnp.float32)
        how = How(implementation, current_target())
        logits = _multiply(how, vary_over(axes, x), vary_over(axes, in_pieces))
    else:
        logits = jnp.dot(x.astype(jnp.float32), w_router.astype(jnp.float32), precision=precision)
    return logits if bias is None else logits + bias.astype(jnp.float32)[None, :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(how: How, x: jax.Array, w_router: jax.Array) -> jax.Array:
    """Float32 logits of bfloat16 x and a w_router in bfloat16 or float32."""
    if are_few(x, w_router, how):
        return logits_few(how, x, w_router)
    return _sum_of_products(x, _pieces(w_router), x_axis=1)


def _forward(how: How, x: jax.Array, w_router: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _multiply(how, x, w_router), (x, w_router)


def _backward(how: How, residuals: tuple[jax.Array, jax.Array], d_logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w_router = residuals
    d_pieces, w_pieces = _pieces(d_logits), _pieces(w_router)
    dw_router = _sum_of_products(x, d_pieces, x_axis=0, like=w_router).astype(w_router.dtype)
    if len(w_pieces) == 1:
        w_pieces = w_pieces * 2
    else:  # all products of pieces except low times low
        d_pieces, w_pieces = [*d_pieces, d_pieces[0]], [w_pieces[0], *w_pieces]
    return _dot(jnp.concatenate(d_pieces, axis=1), jnp.concatenate(w_pieces, axis=1), 1, 1, x.dtype, x), dw_router


_multiply.defvjp(_forward, _backward)


def _pieces(matrix: jax.Array) -> list[jax.Array]:
    """The bfloat16 matrices whose sum is the matrix or, if that is float32, its upper 17 bits."""
    return [matrix] if matrix.dtype == jnp.bfloat16 else list(two_pieces(matrix, jnp.dtype("bfloat16")))


def _sum_of_products(x: jax.Array, pieces: list[jax.Array], x_axis: int, like: jax.Array | None = None) -> jax.Array:
    """The sum of x's float32 products with each piece, side by side in one product, so that x is read once."""
    products = _dot(x, jnp.concatenate(pieces, axis=1), x_axis, 0, jnp.float32, like)
    first, *others = jnp.split(products, len(pieces), axis=1)
    # where the first product is infinite, the low pieces, which may be zero, would make it NaN
    return jnp.where(jnp.isfinite(first), sum(others, first), first) if others else first


def _dot(
    left: jax.Array, right: jax.Array, left_axis: int, right_axis: int, dtype: DTypeLike, like: jax.Array | None = None
) -> jax.Array:
    """The product of two matrices; if `like` is given, split over Explicit axes of a mesh as `like` is."""
    dot = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(((left_axis,), (right_axis,)), ((), ())),
        precision=jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.dtype(dtype),
        out_sharding=None if like is None else jax.typeof(like).sharding,
    )
    if dtype != jnp.float32:
        return dot(left, right)

    def dot_of_float32(left: jax.Array, right: jax.Array) -> jax.Array:
        return dot(left.astype(jnp.float32), right.astype(jnp.float32))

    # XLA for CPUs multiplies bfloat16 to float32 in some forms, but not for the gradient of w_router under vmap
    return jax.lax.platform_dependent(left, right, cpu=dot_of_float32, default=dot)
