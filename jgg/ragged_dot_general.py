"""The interface of `jax.lax.ragged_dot_general`: dimensions in any order and number, by two products of matrices."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jgg.arguments import check
from jgg.ragged_dot import check_group_sizes, checked_arrays, multiply_rows, result_dtype, split, sum_over_rows
from jgg.schedule import saturated_int32

_Axes = Sequence[int]
_Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


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

    Groups are ranges of the one ragged dimension of lhs, which is

        a free one:        [b.., m.., k..], [g, b.., k.., n..], group_sizes [b.., x.., g] -> [b.., m.., n..]
        a contracted one:  [b.., m.., k..], [b.., k.., n..],    group_sizes [b.., x.., g] -> [g, b.., m.., n..]

    with x the other free or contracted dimensions before it. The first is `ragged_dot`, the second the gradient of that
    in rhs. Both are differentiable in lhs and rhs. No lhs [m, k] and rhs [g, k, n] or [g, n, k] is copied, nor lhs
    [k, m] and rhs [k, n] of the second; other orders are transposed first. Batches run as under `jax.vmap`.

    Args:
      lhs, rhs: float32, float16 or bfloat16; of two dtypes, both are converted to float32 for the product.
      group_sizes: integer [b.., x.., g], or [g] for all b and x alike. Their sum may be less than the ragged
        dimension; what lies past it counts as zero.
      ragged_dot_dimension_numbers: a jax.lax.RaggedDotDimensionNumbers. A ragged batch dimension is refused: there,
        groups make no difference to `jax.lax.dot_general`.
      precision, preferred_element_type, out_sharding, implementation: as in `ragged_dot`.
      group_offset: as in `ragged_dot`, for a free ragged dimension.

    Returns: the array of `jax.lax.ragged_dot_general`.
    Raises: ValueError: shapes or dimension numbers disagree. TypeError: a dtype is unsupported.
    """
    lhs, rhs, group_sizes, group_offset = checked_arrays(lhs, rhs, group_sizes, group_offset)
    numbers = ragged_dot_dimension_numbers
    _check_dimension_numbers(lhs, rhs, numbers)
    (contracted, _), (lhs_batch, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    options: dict[str, Any] = {
        "precision": precision,
        "out_dtype": preferred_element_type,
        "implementation": implementation,
    }
    if ragged in contracted:
        if group_offset is not None:
            raise ValueError("group_offset must be None where the ragged dimension is contracted, got an array.")
        outer = contracted[: contracted.index(ragged)]
        compute, num_groups = _contract_ragged, None
    else:
        outer = tuple(axis for axis in _others(lhs, contracted, lhs_batch) if axis < ragged)
        compute = functools.partial(_contract_dense, group_offset=group_offset)
        num_groups = rhs.shape[numbers.rhs_group_dimensions[0]] if group_offset is None else None
    check_group_sizes(group_sizes, tuple(lhs.shape[axis] for axis in (*lhs_batch, *outer)), num_groups)
    return split(compute(lhs, rhs, group_sizes, numbers, outer, **options), out_sharding)


def _contract_dense(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, numbers: jax.lax.RaggedDotDimensionNumbers, outer: _Axes,
    group_offset: jax.Array | None, **options: Any,
) -> jax.Array:  # fmt: skip
    """The product where the ragged dimension is free, by rows of that dimension and those after it."""
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    free = _others(lhs, lhs_contracted, lhs_batch)
    columns = _others(rhs, rhs_contracted, rhs_batch, numbers.rhs_group_dimensions)
    # in the order of rhs, so that it is lhs that is transposed where they differ
    order = sorted(range(len(rhs_contracted)), key=rhs_contracted.__getitem__)
    lhs_contracted, rhs_contracted = (tuple(axes[i] for i in order) for axes in (lhs_contracted, rhs_contracted))
    contracted_is_minor = tuple(rhs_contracted[-1:]) > columns[-1:]
    minor = (columns, rhs_contracted) if contracted_is_minor else (rhs_contracted, columns)
    rows = free[len(outer) :]
    operands = (
        _merge_axes(lhs, [lhs_batch, outer], [rows, lhs_contracted]),
        _merge_axes(rhs, [rhs_batch], [numbers.rhs_group_dimensions, *minor]),
        _sizes_of_rows(group_sizes, [lhs.shape[axis] for axis in rows], [lhs_batch, outer]),
    )
    function = functools.partial(
        multiply_rows, group_offset=group_offset, w_layout="enk" if contracted_is_minor else "ekn", **options
    )
    out = _over_batches(function, group_sizes, lhs_batch, outer, None)(*operands)
    return out.reshape([lhs.shape[axis] for axis in (*lhs_batch, *free)] + [rhs.shape[axis] for axis in columns])


def _contract_ragged(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, numbers: jax.lax.RaggedDotDimensionNumbers, outer: _Axes,
    out_dtype: DTypeLike | None, **options: Any,
) -> jax.Array:  # fmt: skip
    """The product where the ragged dimension is contracted: for each group the sum over its rows."""
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    free, columns = _others(lhs, lhs_contracted, lhs_batch), _others(rhs, rhs_contracted, rhs_batch)
    lhs_rows, rhs_rows = (axes[len(outer) :] for axes in (lhs_contracted, rhs_contracted))
    operands = (
        _merge_axes(lhs, [lhs_batch, outer], [lhs_rows, free]),
        _merge_axes(rhs, [rhs_batch, rhs_contracted[: len(outer)]], [rhs_rows, columns]),
        _sizes_of_rows(group_sizes, [lhs.shape[axis] for axis in lhs_rows], [lhs_batch, outer]),
    )
    out_dtype = result_dtype(lhs, rhs) if out_dtype is None else out_dtype
    # what is summed below is summed in float32 too
    dtype = jnp.float32 if outer else None
    function = functools.partial(sum_over_rows, out_dtype=out_dtype, dtype=dtype, **options)
    out = _over_batches(function, group_sizes, lhs_batch, outer, 0)(*operands)
    if outer:
        out = jnp.sum(out, axis=1 if lhs_batch else 0)
    if lhs_batch:
        out = jnp.moveaxis(out, 0, 1)
    shape = [lhs.shape[axis] for axis in (*lhs_batch, *free)] + [rhs.shape[axis] for axis in columns]
    return out.astype(out_dtype).reshape([out.shape[0], *shape])


def _others(array: jax.Array, *used: _Axes) -> tuple[int, ...]:
    """The axes of an array that are not used, in order."""
    return tuple(axis for axis in range(array.ndim) if not any(axis in axes for axes in used))


def _merge_axes(array: jax.Array, optional: Sequence[_Axes], parts: Sequence[_Axes]) -> jax.Array:
    """The array with the axes of each part merged into one, in this order; of optional parts only where there are."""
    parts = [*filter(None, optional), *parts]
    merged = [math.prod(array.shape[axis] for axis in axes) for axes in parts]
    return jnp.transpose(array, [*itertools.chain(*parts)]).reshape(merged)


def _sizes_of_rows(group_sizes: jax.Array, shape: Sequence[int], leading: Sequence[_Axes]) -> jax.Array:
    """Sizes in rows of all dimensions of `shape`, of which group_sizes are of the first; axes merged as lhs's are."""
    num_ragged, *others = shape
    if others:
        group_sizes = jnp.clip(saturated_int32(group_sizes), 0, num_ragged) * math.prod(others)
    if group_sizes.ndim == 1:
        return group_sizes
    lengths = iter(group_sizes.shape)
    merged = [math.prod(next(lengths) for _ in axes) for axes in leading if axes]
    return group_sizes.reshape([*merged, group_sizes.shape[-1]])


def _over_batches(
    function: _Product, group_sizes: jax.Array, batch: _Axes, outer: _Axes, rhs_of_outer: int | None
) -> _Product:  # fmt: skip
    """function(lhs, rhs, group_sizes) over batch axes of all of them and outer ones, of which rhs may have none."""
    of_sizes = None if group_sizes.ndim == 1 else 0
    if outer:
        function = jax.vmap(function, (0, rhs_of_outer, of_sizes))
    return jax.vmap(function, (0, 0, of_sizes)) if batch else function


def _check_dimension_numbers(lhs: jax.Array, rhs: jax.Array, numbers: jax.lax.RaggedDotDimensionNumbers) -> None:
    name = "ragged_dot_dimension_numbers"
    if not isinstance(numbers, jax.lax.RaggedDotDimensionNumbers):
        raise TypeError(f"{name} must be a jax.lax.RaggedDotDimensionNumbers, got {type(numbers).__name__}.")
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
