"""The interface of `jax.lax.ragged_dot`, and what `ragged_dot_general` has in common with it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jgg.arguments import as_arrays, check, check_integers, check_rank, dtype_names
from jgg.backends.choice import check_implementation, is_plain_jax
from jgg.backends.xla.multilinear import outer_dot
from jgg.backends.xla.row_blocks import Rows
from jgg.gpu_target import current_target
from jgg.grouped_gemm import checked_grouped_gemm
from jgg.manual_axes import vary_over, varying_axes
from jgg.operation import Operation
from jgg.problem import DTYPES, check_problem
from jgg.products.dw import DW, Dw
from jgg.products.dx import DX, Dx
from jgg.products.forward import FORWARD, Forward
from jgg.schedule import GroupBounds, group_bounds


def ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: jax.NamedSharding | jax.P | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies each group of rows of `lhs` by that group's matrix, as `jax.lax.ragged_dot` does.

    Computes `out[i] = lhs[i] @ rhs[g]` for every row i of group g, accumulating in float32.
    Shapes: m rows, k contracted, n columns, g groups.

    Args:
      lhs: float32, float16 or bfloat16 [m, k], the rows of each group contiguous and in order.
      rhs: [g, k, n]. Where its dtype is another than that of lhs, both are converted to float32 for the product.
      group_sizes: integer [g], rows of each group; their sum may be less than m. With `group_offset`, [G] for G >= g.
      precision: as in `grouped_gemm`.
      preferred_element_type: dtype of the result; by default that of lhs or rhs that has the larger range or, of
        equal ranges, the more digits.
      group_offset: integer scalar or [1]: rhs holds the matrices of the g groups from this one on. Rows of other
        groups are zero in the result.
      out_sharding: how the result is split over the Explicit axes of a mesh, a jax.NamedSharding or a jax.P; the
        operands are whole on every device, which each computes all.
      implementation: as in `grouped_gemm`.

    Returns: [m, n]; rows of no group are zero.
    Raises: ValueError: shapes disagree. TypeError: a dtype is unsupported.
    """
    lhs, rhs, group_sizes, group_offset = checked_arrays(lhs, rhs, group_sizes, group_offset)
    check_rank("lhs", lhs, "[m, k]")
    check_rank("rhs", rhs, "[g, k, n]")
    check(
        rhs.shape[1] == lhs.shape[1],
        f"rhs must be [g, k, n] with k equal to lhs's {lhs.shape[1]}, got rhs {list(rhs.shape)}.",
    )
    check_group_sizes(group_sizes, (), None if group_offset is not None else rhs.shape[0])
    out = multiply_rows(
        lhs, rhs, group_sizes, group_offset,
        w_layout="ekn", precision=precision, out_dtype=preferred_element_type, implementation=implementation,
    )  # fmt: skip
    return split(out, out_sharding)


def multiply_rows(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, group_offset: jax.Array | None, *, w_layout: str,
    precision: jax.lax.PrecisionLike, out_dtype: DTypeLike | None, implementation: str | None,
) -> jax.Array:  # fmt: skip
    """[m, n] of lhs [m, k] and of rhs [g, k, n] or, with w_layout "enk", [g, n, k]."""
    out_dtype = result_dtype(lhs, rhs) if out_dtype is None else out_dtype
    dtype = _common_dtype(lhs.dtype, rhs.dtype)
    return checked_grouped_gemm(
        (None, None, None), implementation, lhs.astype(dtype), rhs.astype(dtype), group_sizes,
        w_layout=w_layout, precision=precision, out_dtype=out_dtype, group_offset=group_offset,
    )  # fmt: skip


def sum_over_rows(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, precision: jax.lax.PrecisionLike, out_dtype: DTypeLike,
    dtype: DTypeLike | None, implementation: str | None,
) -> jax.Array:  # fmt: skip
    """[g, m, n] of lhs [k, m] and rhs [k, n], in a dtype that holds those of the operands and of the result."""
    check_implementation(implementation)
    dtype = _common_dtype(lhs.dtype, rhs.dtype, out_dtype) if dtype is None else dtype
    lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    checked = check_problem(
        x=lhs, dy=rhs, group_sizes=group_sizes, topk=1, gather_indices=None, permute_x=False, permute_y=False,
        topk_weights=None, w_layout="ekn", precision=precision, out_dtype=out_dtype,
    )  # fmt: skip
    problem = dataclasses.replace(checked, out_dtype=checked.dtype)  # of the gradient in rhs
    return _outer_products(Operation(problem, implementation, current_target()), lhs, rhs, group_sizes)


@functools.partial(jax.jit, static_argnums=0)
def _outer_products(operation: Operation, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    problem = operation.problem
    axes = varying_axes(lhs, rhs, group_sizes)
    lhs, rhs, group_sizes = (vary_over(axes, array) for array in (lhs, rhs, group_sizes))
    bounds = group_bounds(group_sizes, problem.num_rows)
    if problem.is_empty or is_plain_jax(operation.implementation):
        return outer_dot(Rows(lhs), Rows(rhs), bounds, precision=problem.precision, out_dtype=problem.dtype)
    return _differentiable(operation, lhs, rhs, bounds)


_Residuals = tuple[jax.Array, jax.Array, GroupBounds]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(operation: Operation, lhs: jax.Array, rhs: jax.Array, bounds: GroupBounds) -> jax.Array:
    (out,) = operation.run(DW, Dw(lhs, rhs, bounds))
    return out


def _forward(
    operation: Operation, lhs: jax.Array, rhs: jax.Array, bounds: GroupBounds
) -> tuple[jax.Array, _Residuals]:  # fmt: skip
    return _differentiable(operation, lhs, rhs, bounds), (lhs, rhs, bounds)


def _backward(
    operation: Operation, residuals: _Residuals, ct: jax.Array
) -> tuple[jax.Array, jax.Array, None]:  # fmt: skip
    """With ct as the matrices, d lhs is what dX is of rhs, and d rhs the forward product of lhs."""
    lhs, rhs, bounds = residuals
    (d_lhs,) = operation.run(DX, Dx(rhs, ct, bounds))
    (d_rhs,) = operation.run(FORWARD, Forward(lhs, ct, bounds))
    return d_lhs, d_rhs, None


_differentiable.defvjp(_forward, _backward)


def _common_dtype(*dtypes: DTypeLike) -> DTypeLike:
    """Their dtype if they have one, else the one that holds the values of all."""
    return dtypes[0] if all(dtype == dtypes[0] for dtype in dtypes) else jnp.dtype(jnp.float32)


def result_dtype(*arrays: jax.Array) -> jnp.dtype:
    """As jax.lax chooses it: bfloat16 for bfloat16 and float16."""
    infos = {array.dtype: jnp.finfo(array.dtype) for array in arrays}
    return max(infos, key=lambda dtype: (infos[dtype].maxexp, infos[dtype].nmant))


def split(out: jax.Array, out_sharding: jax.NamedSharding | jax.P | None) -> jax.Array:
    """The result as it is to be split over devices."""
    if out_sharding is None:
        return out
    if not isinstance(out_sharding, jax.P | jax.NamedSharding):
        raise TypeError(
            f"out_sharding must be a jax.NamedSharding, a jax.P or None, got {type(out_sharding).__name__}."
        )
    # whole first, so that XLA does not ask for the product to be split, whose rows cannot be
    whole = jax.P() if isinstance(out_sharding, jax.P) else jax.NamedSharding(out_sharding.mesh, jax.P())
    return jax.sharding.reshard(jax.sharding.reshard(out, whole), out_sharding)


def checked_arrays(
    lhs: ArrayLike, rhs: ArrayLike, group_sizes: ArrayLike, group_offset: ArrayLike | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:  # fmt: skip
    """The arguments as arrays of the right dtypes."""
    arrays = as_arrays(
        {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes, "group_offset": group_offset},
        may_be_none=("group_offset",),
    )
    for name in ("lhs", "rhs"):
        if arrays[name].dtype not in DTYPES:
            names, got = dtype_names(DTYPES), arrays[name].dtype
            raise TypeError(f"{name} must be one of {names}, got {got}; jax.lax.ragged_dot takes others.")
    if group_offset is not None:
        check_integers("group_offset", arrays["group_offset"])
        shape = arrays["group_offset"].shape
        check(shape in ((), (1,)), f"group_offset must be a scalar or [1], got {list(shape)}.")
    check_integers("group_sizes", arrays["group_sizes"])
    return arrays["lhs"], arrays["rhs"], arrays["group_sizes"], arrays["group_offset"]


def check_group_sizes(group_sizes: jax.Array, prefix: tuple[int, ...], num_groups: int | None) -> None:
    """Raises unless they are [g] or [*prefix, g] with g equal to `num_groups`, where that is given."""
    shape = group_sizes.shape
    expected = f"[g] or [{', '.join(map(str, prefix))}, g]" if prefix else "[g]"
    check(shape[:-1] in ((), prefix) and shape != (), f"group_sizes must be {expected}, got {list(shape)}.")
    check(
        num_groups is None or shape[-1] == num_groups,
        f"group_sizes must be [g] with g equal to rhs's {num_groups}, got {list(shape)}.",
    )
