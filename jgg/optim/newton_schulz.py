"""`orthogonalize`: Newton-Schulz iterations on stacks of matrices, on the matrices or on their Gram matrices."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jgg.core.arguments import as_array, as_dtype, check, check_one_of
from jgg.core.problem import DTYPES
from jgg.extend import check_implementation
from jgg.linear.symmetric import apply, symmetric_product
from jgg.optim.coefficients import Coefficients, CoefficientsLike, coefficients_of

METHODS = "standard", "gram"
_SEGMENT = 3  # most iterations on one Gram matrix before the next is computed of x
_GROWTH = 150.0  # how much larger iterations may make the rounding errors of a Gram matrix until then


def orthogonalize(
    x: ArrayLike,
    *,
    ns_coeffs: CoefficientsLike = "standard",
    ns_steps: int = 5,
    eps: float = 1e-8,
    ns_dtype: DTypeLike = jnp.float16,
    ns_method: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Approximates, for each matrix of a stack, the nearest matrix with orthonormal rows or columns.

    If `x = U S V^T` is a matrix's singular value decomposition, the result is `U p(S / |S|) V^T`. |S| is the norm of
    all singular values, and p is the composition of `ns_steps` odd polynomials a s + b s^3 + c s^5, which maps singular
    values that are not too small to about 1. Zero stays zero. It has no gradients.

    **standard** computes `x = (a I + b x x^T + c (x x^T)^2) x` in each iteration. **gram** multiplies the polynomials
    of the small matrix `R = x x^T`, and x by their product. With N rows of K numbers, K > N, five iterations are
    `14 N^3 + 6 N^2 K` multiplications and additions instead of `5 N^3 + 15 N^2 K`, as all products except those with x
    are symmetric and only half of each is computed; with "polar_express", `11 N^3 + 9 N^2 K`. Rounding gives R negative
    eigenvalues the size of the dtype's precision, and each iteration makes them larger. So x is multiplied and R is
    recomputed after three iterations, or after two if they are as steep as the first of "polar_express". In float16,
    "gram" is then about as accurate as "standard". In bfloat16 its error can be as large as the result, so bfloat16 is
    refused. In float32 it is always accurate.

    float16 has eight times bfloat16's precision, at the same speed on tensor cores. Its smaller range does not matter
    here, because matrices are scaled first.

    Examples:
      >>> x = jnp.diag(jnp.asarray([3.0, 1.0, 0.5]))
      >>> y = orthogonalize(x, ns_coeffs="polar_express", ns_steps=8, ns_dtype="float32")
      >>> [round(float(s), 3) for s in jnp.diag(y)]
      [1.0, 1.0, 1.0]

    Args:
      x: float32, bfloat16 or float16 [..., N, K].
      ns_coeffs: three numbers; or three numbers per iteration, and then `ns_steps` is not used; or a name. "standard"
        is Muon's (3.4445, -4.7750, 2.0315). "dion" is Dion's five. "polar_express" is Polar Express's, for any
        ns_steps: the polynomials that bring singular values down to 1e-3 of the norm closest to 1.
      ns_steps: number of iterations.
      eps: added to the norm of each matrix.
      ns_dtype: dtype of the iterations. The norm is computed in float32.
      ns_method: "standard" or "gram"; by default "gram" where N and K differ and ns_dtype is not bfloat16.
      implementation: as in `jgg.grouped_gemm`, for the symmetric products and the products with x.

    Returns:
      [..., N, K] in the dtype of x.

    Raises:
      ValueError: x is not a matrix; coefficients, a method or an implementation is wrong; or "gram" with bfloat16.
      TypeError: a dtype is wrong.

    Source: Jordan et al., Muon, 2024, https://kellerjordan.github.io/posts/muon/; Amsel et al., The Polar Express,
    2025, https://arxiv.org/abs/2505.16932; Zhang et al., Gram Newton-Schulz, 2026,
    https://dao-lab.ai/blog/2026/gram-newton-schulz
    """
    x = as_array("x", x)
    as_dtype("x", x.dtype, DTYPES)
    check(x.ndim >= 2, f"x must be matrices, with at least two axes, got {list(x.shape)}.")
    check_implementation(implementation)
    dtype, method = checked_method(ns_dtype, ns_method)
    coefficients = coefficients_of(ns_coeffs, ns_steps)
    return iterate(scaled(x, eps, dtype), coefficients, method, implementation, x.dtype)


def checked_method(ns_dtype: DTypeLike, ns_method: str | None) -> tuple[jnp.dtype, str | None]:
    """The arguments, checked; raises if one is wrong."""
    dtype = as_dtype("ns_dtype", ns_dtype, DTYPES)
    if ns_method is not None:
        check_one_of("ns_method", ns_method, METHODS)
        is_precise = ns_method != "gram" or dtype != jnp.bfloat16
        check(is_precise, "ns_method must be 'standard' where ns_dtype is bfloat16, got 'gram'.")
    return dtype, ns_method


def scaled(x: jax.Array, eps: float, dtype: DTypeLike, axes: tuple[tuple[int, ...], ...] = ((-2,), (-1,))) -> jax.Array:
    """Scales each matrix to the norm `_scale`, as `iterate` takes it; `axes` are the axes of rows and of columns.

    This keeps the numbers of matrices of any size far from the ends of float16's range.
    """
    x = x.astype(jnp.float32)
    rows, columns = (math.prod(x.shape[axis] for axis in own) for own in axes)
    # squares of numbers above 1e19 are infinite, and the norm itself can be; both sums together read x once, while a
    # division by x's largest number would read it twice
    sizes = [jnp.sqrt(jnp.sum(jnp.square(x * f), axis=sum(axes, ()), keepdims=True)) for f in (1.0, 2.0**-96)]
    is_large = jnp.isinf(sizes[0])
    norm = jnp.where(is_large, sizes[1], sizes[0] + eps)
    factor = jnp.where(norm == 0, 0.0, _scale(rows, columns) / norm)
    return (x * jnp.where(is_large, 2.0**-96, 1.0) * factor).astype(dtype)


def _scale(rows: int, columns: int) -> float:
    """The power of two below the square root of the smaller axis, so that equal singular values are near 1."""
    return 2.0 ** (int(math.log2(max(min(rows, columns), 1))) // 2)


def iterate(
    x: jax.Array,
    coefficients: Coefficients,
    method: str | None,
    implementation: str | None,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """The iterations, on matrices [..., N, K] that `scaled` returned; the result has `dtype`, or the dtype of x."""
    rows, columns = x.shape[-2:]
    if x.size == 0:
        return x if dtype is None else x.astype(dtype)
    if rows > columns:
        return iterate(x.mT, coefficients, method, implementation, dtype).mT
    if method is None:
        method = "gram" if rows < columns and x.dtype != jnp.bfloat16 else "standard"
    scale = _scale(rows, columns)
    first, *others = _segments(coefficients, _SEGMENT if method == "gram" else 1)
    a, b, c = first[0]
    segments = ((a / scale, b / scale**3, c / scale**5), *first[1:]), *others
    # the default precision of float32 on a GPU has 11 bits
    symmetric = functools.partial(symmetric_product, precision="highest", implementation=implementation)
    for index, segment in enumerate(segments):
        own = dtype if index == len(segments) - 1 else None
        x = apply(
            _polynomial(symmetric(x), segment, symmetric),
            x,
            preferred_element_type=own,
            precision="highest",
            implementation=implementation,
        )
    return x


def _polynomial(gram: jax.Array, coefficients: Coefficients, symmetric: Callable[..., jax.Array]) -> jax.Array:
    """The matrix that a few iterations multiply x with; `gram` is the Gram matrix R of x.

    An iteration multiplies x with a I + z, where z = b R + c R^2, so that R becomes (a I + z) R (a I + z). z is rounded
    without a I, which is larger, wherever the errors grow in later iterations.
    """
    *before, (a, b, c) = coefficients
    factors = []
    for own_a, own_b, own_c in before:
        z = symmetric(gram, scale=own_c, add=gram, add_scale=own_b)
        for _ in range(2):
            gram = symmetric(gram, z, add=gram, add_scale=own_a)
        factors.append((own_a, z))
    q = symmetric(gram, scale=c, add=gram, add_scale=b, diagonal=a)
    # z on the left: the part that is computed and mirrored had half the error in z @ q that it had in q @ z
    for own_a, z in reversed(factors):
        q = symmetric(z, q, add=q, add_scale=own_a)
    return q


def _segments(coefficients: Coefficients, most: int) -> list[Coefficients]:
    """The iterations between restarts; each makes the Gram matrix's smallest eigenvalues a^2 times larger."""
    segments: list[Coefficients] = [coefficients[:1]]
    for each in coefficients[1:]:
        last = segments[-1]
        if len(last) < most and math.prod(a**2 for a, _, _ in last) <= _GROWTH:
            segments[-1] = (*last, each)
        else:
            segments.append((each,))
    return segments
