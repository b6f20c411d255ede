"""Computes a vmapped product as one product of more groups, more rows or more tokens, where that copies no weights.

B problems of E groups and M rows become one problem:

    each has its own rows and weights, or it is dW    B * E groups, whose rows stay where they are
    each has its own rows, and weights are shared     E groups of all problems' rows, read and written through indices
    no row depends on another, as in an activation    all problems' rows

Other cases, such as separate weights for shared rows, would repeat a large operand, so they run in a loop.
`operands` and `batched` are NamedTuples with the same fields; `batched` says of each array whether it has a leading
batch axis, [B, ...].
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import jax
import jax.export
import jax.numpy as jnp

from jgg.core.problem import MAX_ROWS, GroupedGemmProblem
from jgg.core.quantized import is_quantized
from jgg.core.schedule import GroupBounds, group_of_rows
from jgg.launching.choice import How

if TYPE_CHECKING:
    from jgg.primitives.operation import Operation

_OF_GROUPS = "bounds", "gather_indices", "topk_weights", "bias"  # operands that are small compared with the others


def batch_size(operands: NamedTuple, batched: NamedTuple) -> int:
    """B, the number of problems in a batch."""
    return next(a.shape[0] for a, b in zip(jax.tree.leaves(operands), jax.tree.leaves(batched), strict=True) if b)


@dataclasses.dataclass(frozen=True)
class Batch:
    """B problems of equal shapes, whose B * M rows lie one after the other.

    Attributes:
      problem: one of them.
      size: B.
      bounds: the bounds of the groups within each problem's own rows, [B, E].
      positions: int32 [B * M], the gather indices into all rows, -1 for one that is out of range; or None.
      topk_weights: [B * M] or None.
      group: int32 [B * M], the group of each row in its problem, E for a row of no group.
    """

    problem: GroupedGemmProblem
    size: int
    bounds: GroupBounds
    positions: jax.Array | None
    topk_weights: jax.Array | None
    group: jax.Array

    @classmethod
    def of(cls, problem: GroupedGemmProblem, operands: NamedTuple, batched: NamedTuple, *rows: str) -> "Batch | None":
        """The batch of a product's operands; None if one product for all would be too large or copy one of `rows`."""
        size = batch_size(operands, batched)
        if 0 in (size, problem.num_rows) or size * problem.num_rows > MAX_ROWS or problem.is_empty:
            return None
        if problem.num_tokens is not None or not all(getattr(batched, name) in (True, None) for name in rows):
            return None
        bounds, positions, topk_weights = (
            for_each(getattr(operands, name), getattr(batched, name), size)
            for name in ("bounds", "gather_indices", "topk_weights")
        )
        return cls(
            problem,
            size,
            bounds,
            None if positions is None else offset(positions, problem.num_rows),
            None if topk_weights is None else topk_weights.reshape(-1),
            jax.vmap(lambda bounds: group_of_rows(bounds, problem.num_rows))(bounds).reshape(-1),
        )

    @property
    def in_group(self) -> jax.Array:
        """Whether a row belongs to a group, bool [B * M]."""
        return self.group < self.problem.num_experts

    @property
    def rows(self) -> jax.Array:
        """The numbers of all rows, int32 [B * M]."""
        return jnp.arange(self.size * self.problem.num_rows, dtype=jnp.int32)

    def offset_bounds(self) -> GroupBounds:
        """The bounds of all B * E groups within all rows."""
        first_row = jnp.arange(self.size, dtype=jnp.int32)[:, None] * self.problem.num_rows
        starts, ends, _ = self.bounds
        return GroupBounds(*(a.reshape(-1) for a in (starts + first_row, ends + first_row, ends - starts)))

    def merged_order(self) -> tuple[GroupBounds, jax.Array, jax.Array]:
        """An order of all rows in which the rows of a group are contiguous, whatever problem they are from.

        Returns: (GroupBounds of the E groups, the place of each row in that order, the row at each place).
        """
        num_rows, num_groups = self.problem.num_rows, self.problem.num_experts
        sizes = self.bounds.ends - self.bounds.starts
        merged_sizes = jnp.sum(sizes, axis=0, dtype=jnp.int32)
        ends = jnp.cumsum(merged_sizes, dtype=jnp.int32)
        bounds = GroupBounds(ends - merged_sizes, ends, merged_sizes)
        first = bounds.starts[None, :] + jnp.cumsum(sizes, axis=0, dtype=jnp.int32) - sizes  # [B, E]
        problem = self.rows // num_rows
        at = problem, jnp.minimum(self.group, num_groups - 1)
        place = first[at] + self.rows - problem * num_rows - self.bounds.starts[at]
        outside = ends[-1] + jnp.cumsum(~self.in_group, dtype=jnp.int32) - 1
        place = jnp.where(self.in_group, place, outside)
        return bounds, place, jnp.zeros_like(place).at[place].set(self.rows, unique_indices=True)

    def positions_in_groups(self) -> jax.Array | None:
        """The `positions`, with -1 also for rows of no group; or None."""
        return None if self.positions is None else jnp.where(self.in_group, self.positions, -1)

    def row_weights(self) -> jax.Array | None:
        """topk_weights of each row, rather than of its position; [B * M] or None."""
        if self.topk_weights is None or self.positions is None:
            return self.topk_weights
        at = jnp.where(self.positions < 0, len(self.positions), self.positions)
        return self.topk_weights.at[at].get(mode="fill", fill_value=0)

    def read_in_order(
        self,
        reads_permuted: bool,
        writes_permuted: bool,
        row_at: jax.Array,
        rows: jax.Array,
        gather: Callable[[jax.Array, jax.Array], jax.Array],
    ) -> tuple[jax.Array, jax.Array, bool]:
        """Rows for one product that reads and writes them through the same indices.

        A product that is permuted on both sides or on neither takes the rows as they lie. For any other, the rows are
        gathered in merged order.

        Args:
          row_at: the row at each place of the merged order.
          gather: (rows, positions) -> rows.

        Returns: (rows, the indices, whether the rows are as they lie).
        """
        positions = self.rows if self.positions is None else self.positions
        read, write = (positions if permuted else self.rows for permuted in (reads_permuted, writes_permuted))
        in_place = reads_permuted == writes_permuted
        return rows if in_place else gather(rows, read[row_at]), write[row_at], in_place

    def split[Results](self, results: Results) -> Results:
        """The results of one product for all problems, split into the problems' own: [B, ...]."""
        return jax.tree.map(lambda result: result.reshape(self.size, -1, *result.shape[1:]), results)


def more_groups[Results](
    compute: Callable[..., Results], batch: Batch, operands: NamedTuple, batched: NamedTuple
) -> Results:
    """The results of one product of B * E groups and all rows; `compute` takes operands and a problem.

    Each problem must have its own of all large operands. Rows of no group may lie between the groups of two problems;
    kernels do not touch them.
    """
    problem = batch.problem.repeated(batch.size, groups=batch.size)
    merged = {name: flat(array) for name, array in operands._asdict().items() if name not in _OF_GROUPS}
    bias, has_own = (getattr(each, "bias", None) for each in (operands, batched))
    if bias is not None:
        merged["bias"] = flat(for_each(bias, has_own, batch.size))
    merged |= {"bounds": batch.offset_bounds(), "gather_indices": batch.positions_in_groups()}
    return compute(operands._replace(**merged, topk_weights=batch.topk_weights), problem=problem)


def by_rows[Results](
    operation: "Operation[Results]", how: How, operands: NamedTuple, batched: NamedTuple, **parameters: Hashable
) -> Results | None:
    """The results of one operation on all problems' rows; None where that would copy an operand, or it quantizes."""
    size, rows = batch_size(operands, batched), 0
    merged: dict[str, jax.Array | None] = {}
    for name, array, is_own in zip(operands._fields, operands, batched, strict=True):
        if is_quantized(array) or (name in operation.shared and is_own):
            return None
        if array is None or name in operation.shared:
            merged[name] = array
        elif is_own or math.prod(array.shape[1:]) == 1:  # one number a row is repeated
            of_rows = for_each(array, is_own, size)
            merged[name], rows = flat(of_rows), size * of_rows.shape[1]
        else:
            return None
    results = operation.result_types(operands._replace(**merged), **parameters)
    is_large = not jax.export.is_symbolic_dim(rows) and rows > MAX_ROWS
    if is_large or any(map(is_quantized, jax.tree.leaves(results, is_leaf=is_quantized))):
        return None
    results = operation(how, operands._replace(**merged), **parameters)
    return jax.tree.map(lambda result: result.reshape(size, rows // size, *result.shape[1:]), results)


def by_groups[Results](
    operation: "Operation[Results]",
    how: How,
    operands: Any,
    batched: Any,
    problem: GroupedGemmProblem,
    **parameters: Hashable,
) -> Results | None:
    """The results of one operation of more groups; None where that would copy an operand, or one is quantized."""
    large = [name for name in operands._fields if name not in _OF_GROUPS]
    if any(is_quantized(getattr(operands, name)) for name in large):
        return None
    batch = Batch.of(problem, operands, batched, *large)

    def compute(operands: NamedTuple, problem: GroupedGemmProblem) -> Results:
        return operation(how, operands, problem=problem, **parameters)

    return None if batch is None else batch.split(more_groups(compute, batch, operands, batched))


def by_axis[Results](
    operation: "Operation[Results]", how: How, operands: NamedTuple, batched: NamedTuple, **parameters: Hashable
) -> Results | None:
    """The results of one operation on arrays with one more leading axis; None unless all have it but the shared."""
    pairs = batched._asdict().items()
    has_all = all((name in operation.shared) != is_own for name, is_own in pairs if is_own is not None)
    return operation(how, operands, **parameters) if has_all else None


def by_parts[Results](
    operation: "Operation[Results]", how: How, operands: NamedTuple, batched: NamedTuple, **parameters: Hashable
) -> Results:
    """The results of vmap over the operations that `several` devices compute; where a loop would copy caches."""
    axes = jax.tree.map(lambda is_own: 0 if is_own else None, batched)
    return jax.vmap(functools.partial(operation.several, how, **parameters), in_axes=(axes,))(operands)


RULES: dict[str, Callable[..., Any]] = {"rows": by_rows, "groups": by_groups, "axis": by_axis, "several": by_parts}
"""The rules that operations name: (operation, how, operands, batched, **parameters) -> results, or None for a loop."""


def for_each[Arrays](arrays: Arrays, batched: object, size: int) -> Arrays:
    """Arrays as [B, ...]; arrays that the problems share are repeated, so this is only for small ones."""
    return jax.tree.map(lambda a, b: a if b else jnp.broadcast_to(a[None], (size, *a.shape)), arrays, batched)


def offset(indices: jax.Array, count: int) -> jax.Array:
    """Indices [B, any] into `count` elements each, as one array of indices into B * `count`; -1 if out of range."""
    first = jnp.arange(indices.shape[0], dtype=jnp.int32)[:, None] * count
    return jnp.where((indices >= 0) & (indices < count), indices + first, -1).reshape(-1)


@overload
def flat(array: jax.Array) -> jax.Array: ...
@overload
def flat(array: jax.Array | None) -> jax.Array | None: ...
def flat(array: jax.Array | None) -> jax.Array | None:
    """An array [B, M, ...] as [B * M, ...]; None stays None."""
    return None if array is None else array.reshape(-1, *array.shape[2:])


def where_rows(condition: jax.Array, array: jax.Array) -> jax.Array:
    """The array with zeros in the rows for which the condition does not hold."""
    return jnp.where(condition.reshape(-1, *[1] * (array.ndim - 1)), array, jnp.zeros((), array.dtype))
