"""A vmapped product as one product of more groups, more rows or more tokens, where that copies no weights.

B problems of E groups and M rows become one:

    each has its own rows and weights, or it is dW    B * E groups, whose rows lie as they are
    each has its own rows, and weights are shared     E groups of all problems' rows, read and written through indices
    no row depends on another, as in an activation    all problems' rows

Anything else, such as own weights for shared rows, would repeat a large operand, and is left to a loop.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jgg.problem import MAX_ROWS, GroupedGemmProblem
from jgg.schedule import GroupBounds, group_of_rows

_ARGUMENTS = {
    "forward": ("x", "w", "bounds", "gather_indices", "topk_weights", "bias"),
    "backward_dx": ("dy", "w", "x", "bounds", "gather_indices", "topk_weights"),
    "backward_dw": ("x", "dy", "bounds", "gather_indices", "topk_weights"),
    "combine": ("rows", "positions", "scales"),
}
_ROW_BY_ROW = ("activate", "activate_backward", "top_k")


def merge_batch(run: Callable, product: str, problem: GroupedGemmProblem, arrays, batched, options):
    """The results of a batch of products, each [B, ...], by one product; or None where that would copy an operand.

    Args:
      run: (product, problem, *arrays, **options) -> results.
      arrays: the product's arguments, some None; those of a batch are [B, ...].
      batched: of each of them whether it is; of GroupBounds a GroupBounds.
    """
    size = next(a.shape[0] for a, b in zip(jax.tree.leaves(arrays), jax.tree.leaves(batched), strict=True) if b)
    if product in _ROW_BY_ROW:
        return _more_rows(run, product, problem, arrays, batched, options)
    if product not in _ARGUMENTS:
        return None
    arrays = dict(zip(_ARGUMENTS[product], arrays, strict=True))
    batched = dict(zip(arrays, batched, strict=True))
    if product == "combine":
        return _combine(run, problem, arrays, batched, size, **options)
    if 0 in (size, problem.num_rows) or size * problem.num_rows > MAX_ROWS or problem.is_empty:
        return None
    if problem.num_tokens is not None:
        return None
    if not all(batched[name] for name in ("x", "dy") if arrays.get(name) is not None):
        return None
    if product == "backward_dw" or batched["w"]:
        return _more_groups(run, product, _Batch.of(problem, arrays, batched, size), arrays, batched, options)
    if batched.get("bias"):
        return None
    rule = _forward_of_more_rows if product == "forward" else _dx_of_more_rows
    return rule(run, _Batch.of(problem, arrays, batched, size), arrays)


@dataclasses.dataclass(frozen=True)
class _Batch:
    """B problems of equal shapes, of all their B * M rows one after the other.

    Attributes:
      problem: one of them.
      size: B.
      bounds: of each problem's own rows, [B, E].
      positions: int32 [B * M], the gather indices into all rows, -1 for one that is out of range; or None.
      topk_weights: [B * M] or None.
      group: int32 [B * M], the group of each row in its problem, E for a row of none.
    """

    problem: GroupedGemmProblem
    size: int
    bounds: GroupBounds
    positions: jax.Array | None
    topk_weights: jax.Array | None
    group: jax.Array

    @classmethod
    def of(cls, problem, arrays, batched, size):
        small = {
            name: _for_each(arrays[name], batched[name], size) for name in ("bounds", "gather_indices", "topk_weights")
        }
        positions, topk_weights = small["gather_indices"], small["topk_weights"]
        return cls(
            problem,
            size,
            small["bounds"],
            None if positions is None else _offset(positions, problem.num_rows),
            None if topk_weights is None else topk_weights.reshape(-1),
            jax.vmap(lambda bounds: group_of_rows(bounds, problem.num_rows))(small["bounds"]).reshape(-1),
        )

    @property
    def in_group(self):
        """Whether a row belongs to a group, bool [B * M]."""
        return self.group < self.problem.num_experts

    def all_rows(self):
        """The problem of as many rows."""
        rows, expected = self.problem.num_rows, self.problem.expected_rows
        return dataclasses.replace(
            self.problem, num_rows=self.size * rows, expected_rows=None if expected is None else self.size * expected
        )

    @property
    def rows(self):
        return jnp.arange(self.size * self.problem.num_rows, dtype=jnp.int32)

    def offset_bounds(self):
        """The bounds of B * E groups."""
        first_row = jnp.arange(self.size, dtype=jnp.int32)[:, None] * self.problem.num_rows
        starts, ends, _ = self.bounds
        return GroupBounds(*(a.reshape(-1) for a in (starts + first_row, ends + first_row, ends - starts)))

    def merged_order(self):
        """An order of all rows in which each group's are contiguous, whatever problem they are from.

        Returns: (GroupBounds of the E groups, the place of each row, the row at each place).
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

    def row_weights(self):
        """topk_weights of each row, rather than of its position; [B * M] or None."""
        if self.topk_weights is None or self.positions is None:
            return self.topk_weights
        at = jnp.where(self.positions < 0, len(self.positions), self.positions)
        return self.topk_weights.at[at].get(mode="fill", fill_value=0)

    def split(self, results):
        """Results of all problems as [B, ...]."""
        return [result.reshape(self.size, -1, *result.shape[1:]) for result in results]


def _more_groups(run, product, batch, arrays, batched, options):
    """One product of B * E groups. Between those of two problems lie rows of no group, which kernels leave alone."""
    problem = dataclasses.replace(batch.all_rows(), num_experts=batch.size * batch.problem.num_experts)
    positions = batch.positions
    if positions is not None:
        positions = jnp.where(batch.in_group, positions, -1)
    merged = {name: _flat(arrays.get(name)) for name in ("x", "dy", "w")}
    if arrays.get("bias") is not None:
        merged["bias"] = _flat(_for_each(arrays["bias"], batched["bias"], batch.size))
    merged |= {"bounds": batch.offset_bounds(), "gather_indices": positions, "topk_weights": batch.topk_weights}
    results = run(product, problem, *(merged.get(name) for name in arrays), **options)
    if product == "forward" and not problem.combine_y:
        written = batch.in_group
        if problem.permute_y:
            at = jnp.where(positions < 0, problem.num_rows, positions)
            written = jnp.zeros_like(written).at[at].set(True, mode="drop")
        results = [_where(written, results[0])]
    elif product == "backward_dx":
        # with permute_x each token adds up its rows, among which indices of -1 leave those of no group out
        dx, *row_sums = results
        results = [
            dx if problem.permute_x else _where(batch.in_group, dx),
            *(_where(batch.in_group, s) for s in row_sums),
        ]
    return batch.split(results)


def _forward_of_more_rows(run, batch, arrays):
    problem = batch.problem
    bounds, _, row_at = batch.merged_order()
    writes_permuted = problem.permute_y or problem.combine_y
    topk = problem.topk if problem.permute_x else 1
    x, write, in_place = _readable(run, batch, arrays["x"], problem.permute_x, writes_permuted, row_at, topk)
    problem = dataclasses.replace(
        batch.all_rows(),
        topk=problem.topk if problem.permute_x or problem.combine_y else 1,
        permute_x=in_place,
        permute_y=not problem.combine_y,
    )
    weights = batch.topk_weights if writes_permuted else batch.row_weights()
    return batch.split(run("forward", problem, x, arrays["w"], bounds, write, weights, arrays["bias"]))


def _dx_of_more_rows(run, batch, arrays):
    problem = batch.problem
    bounds, place, row_at = batch.merged_order()
    topk = problem.topk if problem.permute_x else 1
    dy, write, in_place = _readable(run, batch, arrays["dy"], problem.permute_y, problem.permute_x, row_at)
    problem = dataclasses.replace(batch.all_rows(), topk=topk, permute_x=True, permute_y=in_place)
    weights = batch.topk_weights if batch.problem.permute_x else batch.row_weights()
    x = _flat(arrays["x"])
    dx, *row_sums = run("backward_dx", problem, dy, arrays["w"], x, bounds, write, weights)
    return batch.split([dx, *(sums[place] for sums in row_sums)])


def _readable(run, batch, rows, reads_permuted, writes_permuted, row_at, topk=1):
    """Rows that one product reads and writes by the same indices: as they lie, or a copy in merged order.

    Returns: (rows, the indices, whether they are as they lie).
    """
    read, write = (batch.positions if permuted else batch.rows for permuted in (reads_permuted, writes_permuted))
    rows = _flat(rows)
    in_place = reads_permuted == writes_permuted
    if not in_place:
        (rows,) = run("combine", batch.problem, rows, read[row_at] // topk, None, topk=1)
    return rows, write[row_at], in_place


def _more_rows(run, product, problem, arrays, batched, options):
    """One product of all problems' rows, none of which depends on another."""
    size, num_rows = arrays[0].shape[:2]
    if not all(batched) or any(a.size == 0 for a in arrays) or size * num_rows > MAX_ROWS:
        return None
    results = run(product, problem, *map(_flat, arrays), **options)
    return [result.reshape(size, num_rows, *result.shape[1:]) for result in results]


def _combine(run, problem, arrays, batched, size, topk):
    rows, positions = arrays["rows"], _for_each(arrays["positions"], batched["positions"], size)
    if size * max(positions.shape[1], rows.shape[-2]) > MAX_ROWS:
        return None
    if batched["rows"]:
        positions, rows = _offset(positions, rows.shape[1]), _flat(rows)
    scales = _for_each(arrays["scales"], batched["scales"], size)
    scales = None if scales is None else scales.reshape(-1)
    (y,) = run("combine", problem, rows, positions.reshape(-1), scales, topk=topk)
    return [y.reshape(size, -1, y.shape[1])]


def _for_each(arrays, batched, size):
    """Arrays as [B, ...]; only for small ones, which are repeated where they are shared."""
    return jax.tree.map(lambda a, b: a if b else jnp.broadcast_to(a[None], (size, *a.shape)), arrays, batched)


def _offset(indices, count):
    """Indices [B, any] into B times `count` elements, as one array into all; -1 for those out of range."""
    first = jnp.arange(indices.shape[0], dtype=jnp.int32)[:, None] * count
    return jnp.where((indices >= 0) & (indices < count), indices + first, -1).reshape(-1)


def _flat(array):
    """[B, M, ...] as [B * M, ...]."""
    return None if array is None else array.reshape(-1, *array.shape[2:])


def _where(condition, array):
    """Zero where the condition of a row does not hold."""
    return jnp.where(condition.reshape(-1, *[1] * (array.ndim - 1)), array, jnp.zeros((), array.dtype))
