"""Products of pairs of matrices: symmetric products, computed by half, and products with a symmetric matrix."""

import string
from collections.abc import Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgg.core.problem import GroupedGemmProblem
from jgg.core.schedule import GroupBounds
from jgg.launching.choice import Launcher
from jgg.launching.kernel_configs import KernelConfigForward
from jgg.primitives.barrier import barrier
from jgg.primitives.operation import Operation, array_type
from jgg.primitives.partitioning import WHOLE, Letters
from jgg.products.forward import FORWARD, Forward
from jgg.products.launches import symmetric


class Symmetric(NamedTuple):
    """The matrices of a symmetric product.

    Attributes:
      left: [..., N, K].
      terms: float32 [3], the factors of left @ right^T, of `add` and of the identity.
      right: like left; None for left.
      add: [..., N, N] or None, in any float dtype.
    """

    left: jax.Array
    terms: jax.Array
    right: jax.Array | None = None
    add: jax.Array | None = None


class Apply(NamedTuple):
    """p [..., N, N] and x [..., N, K], which it is multiplied with."""

    p: jax.Array
    x: jax.Array


def _plain(operands: Symmetric, dtype: DTypeLike, precision: jax.lax.Precision) -> jax.Array:
    left, terms, right, add = operands
    right, size = left if right is None else right, left.shape[-2]
    product = jnp.einsum("...nk,...mk->...nm", left, right, precision=precision, preferred_element_type=jnp.float32)
    y = terms[0] * product
    if add is not None:
        y += terms[1] * add.astype(jnp.float32)
    y += jnp.broadcast_to(terms[2] * jnp.eye(size, dtype=jnp.float32), y.shape)
    is_own = jnp.broadcast_to(jnp.tri(size, dtype=bool), y.shape)
    return jnp.where(is_own, y, y.mT).astype(dtype)  # with a right, rounding makes the product slightly asymmetric


def _launch(
    launcher: Launcher,
    operands: Symmetric,
    dtype: DTypeLike,
    precision: jax.lax.Precision,
    config: KernelConfigForward | None = None,
) -> jax.Array:
    left, right, add = (None if a is None else _one_axis(a) for a in (operands.left, operands.right, operands.add))
    assert left is not None
    product = symmetric.SymmetricProduct(
        _problem(left, left.shape[1], dtype, precision), left, left if right is None else right, add, operands.terms
    )
    return symmetric.multiply(launcher, product, config).reshape(*operands.left.shape[:-1], left.shape[1])


def _one_axis(matrices: jax.Array) -> jax.Array:
    """Matrices [..., N, K] as [G, N, K]."""
    return matrices.reshape(-1, *matrices.shape[-2:])


def _problem(
    rows: jax.Array, columns: int, dtype: DTypeLike, precision: jax.lax.Precision, w_layout: str = "enk"
) -> GroupedGemmProblem:
    """The product of each group's rows [G, N, K] and its own matrix, as a grouped GEMM of groups of N rows."""
    num_groups, size, reduced = rows.shape
    return GroupedGemmProblem(
        num_rows=num_groups * size,
        num_experts=num_groups,
        in_features=reduced,
        out_features=columns,
        topk=1,
        dtype=rows.dtype,
        out_dtype=jnp.dtype(dtype),
        w_layout=w_layout,
        precision=precision,
        is_dense=num_groups == 1,
    )


def _apply_plain(operands: Apply, dtype: DTypeLike, precision: jax.lax.Precision) -> jax.Array:
    product = jnp.matmul(operands.p, operands.x, precision=precision, preferred_element_type=dtype)
    # XLA for CPUs moves a transpose of the result into the product, and then has none of bfloat16 in float32
    return barrier(product) if dtype != operands.p.dtype else product


def _apply_launch(launcher: Launcher, operands: Apply, dtype: DTypeLike, precision: jax.lax.Precision) -> jax.Array:
    p, x = map(_one_axis, operands)
    num_groups, rows, size = p.shape
    starts = jnp.arange(num_groups, dtype=jnp.int32) * rows
    bounds = GroupBounds(starts, starts + rows, jnp.full(num_groups, rows, jnp.int32))
    problem = _problem(p, x.shape[2], dtype, precision, "ekn")
    y = FORWARD.launch(launcher, Forward(p.reshape(-1, size), x, bounds), problem=problem)
    return y.reshape(*operands.p.shape[:-1], x.shape[2])


def _leading(matrices: jax.Array) -> str:
    """Letters of the axes in front of the matrices, which may be split over devices, alike in all arrays."""
    return string.ascii_lowercase[: matrices.ndim - 2]


def _letters(operands: Symmetric, **_: Hashable) -> Letters:
    matrices = _leading(operands.left) + 2 * WHOLE
    return Letters(dict.fromkeys(("left", "right", "add"), matrices) | {"terms": WHOLE}, (matrices,), ("",))


def _letters_of_apply(operands: Apply, **_: Hashable) -> Letters:
    leading = _leading(operands.x)
    return Letters({"p": f"{leading}n{WHOLE}", "x": f"{leading}{WHOLE}k"}, (f"{leading}nk",), ("",))


SYMMETRIC: Operation[jax.Array] = Operation(
    "symmetric",
    Symmetric,
    result_types=lambda operands, dtype, precision: array_type(
        (*operands.left.shape[:-1], operands.left.shape[-2]), dtype
    ),
    plain=_plain,
    launch=_launch,
    vmap="axis",
    mesh=_letters,
    shared=("terms",),
)
"""terms[0] * left @ right^T + terms[1] * add + terms[2] * I, in `dtype`; `precision` applies to float32 products."""

APPLY: Operation[jax.Array] = Operation(
    "apply",
    Apply,
    result_types=lambda operands, dtype, precision: array_type((*operands.p.shape[:-1], operands.x.shape[-1]), dtype),
    plain=_apply_plain,
    launch=_apply_launch,
    vmap="axis",
    mesh=_letters_of_apply,
)
"""p @ x, in `dtype`; `precision` applies to float32 products."""
