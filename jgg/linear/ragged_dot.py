"""The interfaces of `jax.lax.ragged_dot` and `jax.lax.ragged_dot_general`."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jgg.core.arguments import as_array, as_dtype, check, check_instance, check_integers, check_rank, dtype_names
from jgg.core.problem import DTYPES
from jgg.linear.ragged import contract_dense, contract_ragged, other_axes


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
      rhs: float32, float16 or bfloat16 [g, k, n]. If lhs and rhs have different dtypes, both are converted to float32.
      group_sizes: integer [g], rows of each group; their sum may be less than m. With `group_offset`, [G] for G >= g.
      precision: as in `grouped_gemm`.
      preferred_element_type: dtype of the result; by default the operand dtype with the larger range; for equal ranges,
        the one with more mantissa bits.
      group_offset: integer scalar or [1], index of the first group whose matrix is in rhs; rhs has the matrices of
        groups group_offset to group_offset + g - 1. Rows of other groups are zero in the result.
      out_sharding: how to split the result over the Explicit axes of a mesh, a jax.NamedSharding or a jax.P. Operands
        are replicated, and every device computes the whole result before it is split.
      implementation: as in `grouped_gemm`.

    Returns: [m, n]; rows of no group are zero.
    Raises: ValueError: shapes disagree. TypeError: a dtype is unsupported.
    """
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    check_rank("lhs", lhs, "[m, k]")
    check_rank("rhs", rhs, "[g, k, n]")
    check(
        rhs.shape[1] == lhs.shape[1],
        f"rhs must be [g, k, n] with k equal to lhs's {lhs.shape[1]}, got rhs {list(rhs.shape)}.",
    )
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    return ragged_dot_general(
        lhs,
        rhs,
        group_sizes,
        numbers,
        precision,
        preferred_element_type,
        group_offset,
        out_sharding,
        implementation=implementation,
    )


def ragged_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: jax.NamedSharding | jax.P | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """`ragged_dot` with dimensions in any order and number, as `jax.lax.ragged_dot_general`.

    The ragged dimension of lhs is split into groups. It can be a free dimension (this is `ragged_dot`) or a contracted
    one (this is `ragged_dot`'s gradient in rhs):

        free:        [b.., m.., k..], [g, b.., k.., n..], group_sizes [b.., x.., g] -> [b.., m.., n..]
        contracted:  [b.., m.., k..], [b.., k.., n..],    group_sizes [b.., x.., g] -> [g, b.., m.., n..]

    Here b are batch dimensions, and x are the free or contracted dimensions before the ragged one. Both cases are
    differentiable in lhs and rhs. These layouts are used without a copy: lhs [m, k] with rhs [g, k, n] or [g, n, k],
    and in the second case lhs [k, m] with rhs [k, n]. Other orders are transposed first. Batches run as with
    `jax.vmap`.

    Args:
      lhs, rhs: float32, float16 or bfloat16. If they have different dtypes, both are converted to float32.
      group_sizes: integer [b.., x.., g], or [g], shared by all b and x. Their sum may be less than the ragged
        dimension; rows past their sum count as zero.
      ragged_dot_dimension_numbers: a jax.lax.RaggedDotDimensionNumbers. It must not have a ragged batch dimension,
        because groups would not change the result; use `jax.lax.dot_general` for that.
      precision, preferred_element_type, out_sharding, implementation: as in `ragged_dot`.
      group_offset: as in `ragged_dot`, for a free ragged dimension.

    Returns: the array of `jax.lax.ragged_dot_general`.
    Raises: ValueError: shapes or dimension numbers disagree. TypeError: a dtype is unsupported.
    """
    lhs, rhs, group_sizes = as_array("lhs", lhs), as_array("rhs", rhs), as_array("group_sizes", group_sizes)
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        if array.dtype not in DTYPES:
            expected = f"one of {dtype_names(DTYPES)}"
            raise TypeError(f"{name} must be {expected}, got {array.dtype}; jax.lax.ragged_dot takes others.")
    check_integers("group_sizes", group_sizes)
    if group_offset is not None:
        group_offset = as_array("group_offset", group_offset)
        check_integers("group_offset", group_offset)
        shape = group_offset.shape
        check(shape in ((), (1,)), f"group_offset must be a scalar or [1], got {list(shape)}.")
    numbers = ragged_dot_dimension_numbers
    _check_dimension_numbers(lhs, rhs, numbers)
    (contracted, _), (lhs_batch, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    out_dtype = _result_dtype(lhs, rhs)
    if preferred_element_type is not None:
        out_dtype = as_dtype("preferred_element_type", preferred_element_type, DTYPES)
    num_groups = None
    if ragged in contracted:
        if group_offset is not None:
            raise ValueError("group_offset must be None where the ragged dimension is contracted, got an array.")
        outer, compute = contracted[: contracted.index(ragged)], contract_ragged
    else:
        outer = tuple(axis for axis in other_axes(lhs, contracted, lhs_batch) if axis < ragged)
        compute = functools.partial(contract_dense, group_offset=group_offset)
        num_groups = rhs.shape[numbers.rhs_group_dimensions[0]] if group_offset is None else None
    _check_group_sizes(group_sizes, tuple(lhs.shape[axis] for axis in (*lhs_batch, *outer)), num_groups)
    out = compute(
        lhs, rhs, group_sizes, numbers, outer, precision=precision, out_dtype=out_dtype, implementation=implementation
    )
    return _split(out, out_sharding)


def _result_dtype(*arrays: jax.Array) -> jnp.dtype:
    """The dtype of the result as jax.lax chooses it: bfloat16 for bfloat16 and float16."""
    infos = [jnp.finfo(array.dtype) for array in arrays]
    return max(infos, key=lambda info: (info.maxexp, info.nmant)).dtype


def _split(out: jax.Array, out_sharding: jax.NamedSharding | jax.P | None) -> jax.Array:
    """The result, split over devices as `out_sharding` says."""
    if out_sharding is None:
        return out
    check_instance("out_sharding", out_sharding, jax.P | jax.NamedSharding, "a jax.NamedSharding, a jax.P or None")
    # whole first: XLA would otherwise ask for a split product, and its rows cannot be split
    whole = jax.P() if isinstance(out_sharding, jax.P) else jax.NamedSharding(out_sharding.mesh, jax.P())
    return jax.sharding.reshard(jax.sharding.reshard(out, whole), out_sharding)


def _check_group_sizes(group_sizes: jax.Array, prefix: tuple[int, ...], num_groups: int | None) -> None:
    """Raises unless group_sizes are [g] or [*prefix, g], with g equal to `num_groups` if that is given."""
    shape = group_sizes.shape
    expected = f"[g] or [{', '.join(map(str, prefix))}, g]" if prefix else "[g]"
    check(shape[:-1] in ((), prefix) and shape != (), f"group_sizes must be {expected}, got {list(shape)}.")
    check(
        num_groups is None or shape[-1] == num_groups,
        f"group_sizes must be [g] with g equal to rhs's {num_groups}, got {list(shape)}.",
    )


def _check_dimension_numbers(lhs: jax.Array, rhs: jax.Array, numbers: jax.lax.RaggedDotDimensionNumbers) -> None:
    name = "ragged_dot_dimension_numbers"
    check_instance(name, numbers, jax.lax.RaggedDotDimensionNumbers, "a jax.lax.RaggedDotDimensionNumbers")
    ragged, group = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    for of, array, axes in (
        ("lhs", lhs, (*lhs_contracted, *lhs_batch)),
        ("lhs", lhs, ragged),
        ("rhs", rhs, (*rhs_contracted, *rhs_batch, *group)),
    ):
        check(
            len({axis for axis in axes if 0 <= axis < array.ndim}) == len(axes),
            f"{name} must have different dimensions of {of} {list(array.shape)}, got {list(axes)}.",
        )
    check(len(ragged) == 1, f"{name} must have one lhs_ragged_dimensions, got {list(ragged)}.")
    check(
        ragged[0] not in lhs_batch,
        f"{name} must have a ragged dimension of lhs that is free or contracted, got {ragged[0]} of the batch "
        f"dimensions {list(lhs_batch)}, where groups make no difference to jax.lax.dot_general.",
    )
    expected = 0 if ragged[0] in lhs_contracted else 1
    check(
        len(group) == expected,
        f"{name} must have {expected} rhs_group_dimensions where the ragged dimension of lhs is "
        f"{'free' if expected else 'contracted'}, got {list(group)}.",
    )
    for kind, of_lhs, of_rhs in (("contracted", lhs_contracted, rhs_contracted), ("batch", lhs_batch, rhs_batch)):
        wanted, got = [lhs.shape[axis] for axis in of_lhs], [rhs.shape[axis] for axis in of_rhs]
        check(got == wanted, f"rhs must have {kind} dimensions equal to lhs's {wanted}, got {got}.")
