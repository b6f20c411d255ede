"""Matrix products whose result is known to be symmetric, and products with a symmetric matrix.

Newton-Schulz iterations are made of these: x @ x^T and its polynomials are symmetric, so one half of each can be copied
from the other.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jgg.core.arguments import as_array, as_dtype, as_precision, check, check_instance, check_reals
from jgg.core.gpu_target import current_target
from jgg.core.problem import DTYPES
from jgg.launching.choice import How, check_implementation, is_plain_jax
from jgg.launching.kernel_configs import KernelConfigForward
from jgg.products.symmetric import APPLY, SYMMETRIC, Apply, Symmetric


def symmetric_product(
    left: ArrayLike,
    right: ArrayLike | None = None,
    *,
    scale: ArrayLike = 1.0,
    add: ArrayLike | None = None,
    add_scale: ArrayLike = 1.0,
    diagonal: ArrayLike = 0.0,
    preferred_element_type: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    kernel_config: KernelConfigForward | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Computes `scale * left @ right^T + add_scale * add + diagonal * I`, where `left @ right^T` is symmetric.

    The caller promises the symmetry: right is left, or both are polynomials of one symmetric matrix. `add` must be
    symmetric too. Kernels compute the tiles on and below the diagonal and write the others as their mirror images, so
    the result is symmetric to the last bit. Otherwise two rounded polynomials would not quite commute, and iterations
    would make the difference larger. Products are summed in float32, and the result is rounded once. Kernels have no
    gradient rules of their own: JAX differentiates the plain product.

    Args:
      left: float32, float16 or bfloat16 [..., N, K]; leading axes are batch axes.
      right: like left; None for left itself.
      scale, add_scale, diagonal: numbers or float scalars, which may be traced: kernels do not depend on their values.
      add: float [..., N, N], or None for nothing.
      preferred_element_type: dtype of the result; by default the dtype of left.
      precision: for float32, as in `jgg.grouped_gemm`.
      kernel_config: tiles [block_m, block_n] of the result in steps of block_k features, and whether TMA loads left and
        right, as x and w of a forward product; None to choose. The kernel "hopper" is used where it can be: with 16-bit
        dtypes and rows that are multiples of 16 bytes. Another kernel computes everything else.
      implementation: as in `jgg.grouped_gemm`.

    Returns: [..., N, N].

    Raises:
      ValueError: a shape is wrong, a factor is not a scalar, or an implementation cannot run here.
      TypeError: a dtype is wrong.
    """
    check_implementation(implementation)
    left = _matrices("left", left)
    if right is not None:
        right = _matrices("right", right)
        _check_like("right", right, left.shape, "left's", left.dtype)
    if add is not None:
        add = _matrices("add", add)
        _check_like("add", add, (*left.shape[:-1], left.shape[-2]), "left's [..., N, N]")
    if kernel_config is not None:
        check_instance("kernel_config", kernel_config, KernelConfigForward, "a jgg.KernelConfigForward or None")
    terms = _scalars(scale=scale, add_scale=add_scale, diagonal=diagonal)
    return SYMMETRIC(
        _how(implementation),
        Symmetric(left, terms, right, add),
        config=kernel_config,
        dtype=_result_dtype(preferred_element_type, left.dtype),
        precision=as_precision(precision),
    )


def apply(
    p: ArrayLike,
    x: ArrayLike,
    *,
    preferred_element_type: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> jax.Array:
    """Computes `p @ x`, an ordinary product of each pair of matrices, accumulating in float32.

    Args:
      p: [..., N, N], in the dtype of x.
      x: float32, float16 or bfloat16 [..., N, K].
      preferred_element_type: dtype of the result; by default the dtype of x.
      precision, implementation: as in `symmetric_product`.

    Returns: [..., N, K].

    Raises: as `symmetric_product`.
    """
    check_implementation(implementation)
    x = _matrices("x", x)
    p = _matrices("p", p)
    _check_like("p", p, (*x.shape[:-1], x.shape[-2]), "x's [..., N, N]", x.dtype)
    return APPLY(
        _how(implementation),
        Apply(p, x),
        dtype=_result_dtype(preferred_element_type, x.dtype),
        precision=as_precision(precision),
    )


def _how(implementation: str | None) -> How | None:
    return None if is_plain_jax(implementation) else How(implementation, current_target())


def _result_dtype(asked: DTypeLike | None, default: jnp.dtype) -> jnp.dtype:
    return default if asked is None else as_dtype("preferred_element_type", asked, DTYPES)


def _matrices(name: str, value: ArrayLike) -> jax.Array:
    array = as_array(name, value)
    as_dtype(name, array.dtype, DTYPES)
    check(array.ndim >= 2, f"{name} must be matrices, with at least two axes, got {list(array.shape)}.")
    return array


def _check_like(name: str, array: jax.Array, shape: tuple[int, ...], like: str, dtype: DTypeLike | None = None) -> None:
    check(array.shape == shape, f"{name} must have {like} shape {list(shape)}, got {list(array.shape)}.")
    if dtype is not None and array.dtype != dtype:
        raise TypeError(f"{name} must have the dtype of the other operand, {dtype}, got {array.dtype}.")


def _scalars(**values: ArrayLike) -> jax.Array:
    """The values as one float32 array; raises if one is not a real scalar."""
    scalars = {name: as_array(name, value) for name, value in values.items()}
    for name, scalar in scalars.items():
        check_reals(name, scalar)
        check(scalar.ndim == 0, f"{name} must be a scalar, got {list(scalar.shape)}.")
    return jnp.stack([scalar.astype(jnp.float32) for scalar in scalars.values()])
