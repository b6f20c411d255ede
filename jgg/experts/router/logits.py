"""The router's projection: float32 logits, computed on 16-bit tensor cores."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jgg.core.arguments import as_array, as_precision, check_floats, check_rank
from jgg.core.gpu_target import current_target
from jgg.core.manual_axes import alike
from jgg.core.matrix import Matrix
from jgg.launching.choice import How, check_implementation
from jgg.products.logits import LOGITS, Logits, computes_in_float32
from jgg.products.plain.pieces import dot, pieces_of, sum_of_products


def router_logits(
    x: ArrayLike,
    w_router: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> jax.Array:
    """The router's logits `x @ w_router + bias`, float32.

    Tokens in bfloat16 stay in bfloat16, since converting them to float32 takes longer than the product. A float32
    factor (w_router or, in the backward pass, the gradient of the logits) becomes the sum of two bfloat16 numbers,
    which keep 17 bits (TF32, JAX's default, keeps 11); sums are in float32. Kernels multiply float16 the same way and
    keep 23 bits; plain JAX multiplies tokens that are not bfloat16 in float32. On a GPU the bits of a token's logits do
    not depend on the other tokens or on their number.

    Args:
      x: float [T, H].
      w_router: float [H, E].
      bias: float [E] or None.
      precision: precision of float32 products, as in `grouped_gemm`; any but the default makes all products float32.
      implementation: as in `grouped_gemm`. "xla" multiplies in float32 too, and is differentiable in forward mode.

    Returns: float32 [T, E].
    Raises: ValueError: shapes disagree. TypeError: an argument is not a float array.
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
    """`router_logits` for checked arguments."""
    if implementation == "xla":
        logits = jnp.dot(x.astype(jnp.float32), w_router.astype(jnp.float32), precision=precision)
    else:
        in_pieces = w_router if w_router.dtype == x.dtype else w_router.astype(jnp.float32)
        operands = alike(Logits(x, in_pieces))
        # over Explicit axes of a mesh XLA splits the product, which a primitive would refuse
        is_split = any(names is not None for array in operands for names in jax.typeof(array).sharding.spec)
        how = None if is_split else How(implementation, current_target())
        if x.dtype == jnp.bfloat16 and not computes_in_float32(x.dtype, precision):
            logits = _of_bfloat16(how, *operands)
        else:
            logits = LOGITS(how, operands, precision=precision)
    return logits if bias is None else logits + bias.astype(jnp.float32)[None, :]


def compute_matrix_logits(
    x: jax.Array,
    matrix: Matrix,
    bias: jax.Array | None,
    precision: jax.lax.Precision,
    implementation: str | None,
) -> jax.Array:
    """`compute_logits` for a dense matrix with its LoRA term, if any: multiplies x by `w + a b` in float32."""
    w = matrix.dense
    if matrix.factors is not None:
        a, b = (factor.astype(jnp.float32) for factor in matrix.factors)
        w = w.astype(jnp.float32) + compute_logits(a, b, None, jax.lax.Precision.HIGHEST, implementation)
    return compute_logits(x, w, bias, precision, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_bfloat16(how: How | None, x: jax.Array, w_router: jax.Array) -> jax.Array:
    """Float32 logits of bfloat16 x and a w_router in bfloat16 or float32."""
    return LOGITS(how, Logits(x, w_router), precision=jax.lax.Precision.DEFAULT)


def _forward(how: How | None, x: jax.Array, w_router: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _of_bfloat16(how, x, w_router), (x, w_router)


def _backward(
    how: How | None, residuals: tuple[jax.Array, jax.Array], d_logits: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w_router = residuals
    d_pieces, w_pieces = pieces_of(d_logits), pieces_of(w_router)
    dw_router = sum_of_products(x, d_pieces, x_axis=0, like=w_router).astype(w_router.dtype)
    if len(w_pieces) == 1:
        w_pieces = w_pieces * 2
    else:  # all products of pieces except low times low
        d_pieces, w_pieces = [*d_pieces, d_pieces[0]], [w_pieces[0], *w_pieces]
    return dot(jnp.concatenate(d_pieces, axis=1), jnp.concatenate(w_pieces, axis=1), 1, 1, x.dtype, x), dw_router


_of_bfloat16.defvjp(_forward, _backward)
