"""Turns group sizes into row ranges and tiles: pure functions of one small array, computed on the device.

For up to `_MAX_COMPARED` groups, running sums, searches and sorts compare every group with every other and add up,
which XLA fuses into one kernel. Scans and binary searches take several kernels, of one or two microseconds each. They
serve for more groups, since their memory grows with the number of groups rather than with its square.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.typing import ArrayLike, DTypeLike

from jgg.core.arguments import as_array, as_array_or_none, as_int, check_integers, check_rank
from jgg.core.quantized import QuantizedArray

_MAX_COMPARED = 1024  # groups that are compared all with all
_FEW_ROWS = 256  # rows and positions that are compared all with all
_MOST = 2**30  # rows or tiles, more than there ever are
NO_ROW = 2**31 - 1  # an index past the end of any array


class GroupBounds(NamedTuple):
    """Where the rows of each group are, in expert order; each int32 [E], starts and ends ascending.

    Attributes:
      starts, ends: the first row and one past the last.
      sizes: ends - starts; where group_sizes sum to more than M, it may be the size asked for, at most M.
    """

    starts: jax.Array
    ends: jax.Array
    sizes: jax.Array


class Rows(NamedTuple):
    """M routed rows in an array [any, features]: the i-th is row `at[i]`, or row i where `at` is None.

    `at` is int32 [M] or None. An index past the end reads zero and writes nothing. A QuantizedArray, whose blocks must
    have one row, is read as dequantized float32 rows.
    """

    array: Any
    at: jax.Array | None = None

    @property
    def num_rows(self) -> int:
        """M, the number of routed rows."""
        return (self.array if self.at is None else self.at).shape[0]

    @property
    def dtype(self) -> DTypeLike:
        """The dtype of the rows that are read."""
        return jnp.float32 if isinstance(self.array, QuantizedArray) else self.array.dtype


def guarded(indices: jax.Array, num_rows: int) -> jax.Array:
    """The indices, with NO_ROW for each one outside [0, num_rows), which `.at` neither wraps around nor writes."""
    return jnp.where((indices >= 0) & (indices < num_rows), indices, NO_ROW)


class TileSchedule(NamedTuple):
    """The row tiles of a ragged-M kernel; no tile holds rows of two groups.

    Attributes:
      group: int32 [T], the group of each tile.
      start: int32 [T], the tile's first row.
      end: int32 [T], one past the last row of the tile's group.
      tiles_through: int32 [E], how many tiles each group and all groups before it have together. Its last entry is the
        number of tiles in use; later entries of [T] mean nothing. Tiles for rows past the end of a group are empty.
    """

    group: jax.Array
    start: jax.Array
    end: jax.Array
    tiles_through: jax.Array


def group_bounds(
    group_sizes: jax.Array, num_rows: int, group_offset: jax.Array | None = None, num_groups: int | None = None
) -> GroupBounds:
    """Row ranges of the groups, for any values of `group_sizes`.

    A negative size counts as 0 and no range passes `num_rows`: sizes (3, -1, 0, 9) of 8 rows give the starts
    (0, 3, 3, 3) and the ends (3, 3, 3, 8).

    Args:
      group_sizes: integer [G], rows of each group.
      num_rows: M, the number of routed rows.
      group_offset: integer scalar or [1], the first of the `num_groups` groups to return; the rest keep their rows.
      num_groups: number of groups to return where `group_offset` is given.

    Returns: GroupBounds of [G] or, with `group_offset`, [num_groups]; groups past G are empty.
    """
    sizes = jnp.clip(saturated_int32(group_sizes), 0, num_rows)
    starts, ends = _running_sums(num_rows, sizes)
    if group_offset is not None:
        past = jnp.full((num_groups,), jnp.max(ends, initial=0))
        first = jnp.clip(saturated_int32(group_offset.reshape(())), 0, len(group_sizes))
        starts, ends, sizes = (
            jax.lax.dynamic_slice(jnp.concatenate([array, padding]), (first,), (num_groups,))
            for array, padding in ((starts, past), (ends, past), (sizes, jnp.zeros_like(past)))
        )
    return GroupBounds(starts, ends, sizes)


def row_parts(bounds: GroupBounds, parts: int, step: int) -> GroupBounds:
    """The ranges of `parts` parts of each group's rows, [G * parts]; a part has a multiple of `step` rows or fewer.

    A group of rows 3 to 13 in three parts with a step of 2 gives the ranges 3 to 7, 7 to 11 and 11 to 13.
    """
    starts, ends = bounds.starts[:, None], bounds.ends[:, None]
    size = -(-(ends - starts) // (parts * step)) * step
    firsts = jnp.minimum(starts + size * jnp.arange(parts, dtype=jnp.int32)[None], ends)
    lasts = jnp.minimum(firsts + size, ends)
    return GroupBounds(firsts.reshape(-1), lasts.reshape(-1), (lasts - firsts).reshape(-1))


def _running_sums(limit: int, terms: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums before each term and through each term, int32, both cut off at `limit`; terms are from 0 to `limit`."""
    if len(terms) > _MAX_COMPARED:
        # sums stop at _MOST, which is above any limit, before they can pass int32
        through = jax.lax.associative_scan(lambda a, b: a + jnp.minimum(b, _MOST - a), terms)
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), through[:-1]])
    else:
        # both from one sum with one result, which XLA cuts off in one kernel more
        index = jnp.arange(len(terms))
        ends = jnp.concatenate([index, index + 1])
        terms_before = jnp.where(index[None, :] < ends[:, None], terms[None, :], 0)
        fits = isinstance(limit, int) and limit * len(terms) < 2**31  # it may be symbolic, in exported programs
        sums = jnp.sum(terms_before, axis=1, dtype=jnp.int32) if fits else _sum_up_to_most(terms_before)
        sums = jnp.minimum(sums, limit)
        return sums[: len(terms)], sums[len(terms) :]
    return jnp.minimum(before, limit), jnp.minimum(through, limit)


def _sum_up_to_most(terms: jax.Array) -> jax.Array:
    """The sum of each row of terms, cut off at _MOST, int32; a row has up to 2**15 terms from 0 to _MOST."""
    # plain sums of each half of the bits, which XLA can also split over devices
    high, low = (jnp.sum(half, axis=1, dtype=jnp.int32) for half in (terms >> 15, terms & 0x7FFF))
    high += low >> 15
    return jnp.where(high < _MOST >> 15, (high << 15) + (low & 0x7FFF), _MOST)


def tile_schedule(bounds: GroupBounds, num_rows: int, block_rows: int) -> TileSchedule:
    """Cuts each group's rows into tiles of `block_rows`, the last of a group possibly short.

    Groups may lie anywhere, with rows of no group between them, as long as no two groups share a row. Example: group 0
    has rows 0-4, group 1 has none, group 2 has rows 7-9, and tiles have 4 rows:

        group          0  0  2        rows 0-3, row 4, rows 7-9
        start          0  4  7
        end            5  5  10
        tiles_through  2  2  3
    """
    num_groups = len(bounds.ends)
    max_tiles = min(num_rows, num_rows // block_rows + num_groups)
    # computed from sizes, because XLA would have to wait for ends - starts
    tiles = jnp.minimum((bounds.sizes + (block_rows - 1)) // block_rows, max_tiles)
    first_tile, tiles_through = _running_sums(max_tiles, tiles)
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    # where a group's tile number 0 would begin
    origin = bounds.starts - first_tile * block_rows
    if num_groups > _MAX_COMPARED:
        group = jnp.minimum(jnp.searchsorted(tiles_through, tile, side="right"), num_groups - 1).astype(jnp.int32)
        return TileSchedule(group, origin[group] + tile * block_rows, bounds.ends[group], tiles_through)
    is_own = (first_tile[None, :] <= tile[:, None]) & (tile[:, None] < tiles_through[None, :])
    starts = origin[None, :] + tile[:, None] * block_rows
    group, start, end = (
        jnp.sum(jnp.where(is_own, values, 0), axis=1, dtype=jnp.int32)
        for values in (jnp.arange(num_groups, dtype=jnp.int32)[None, :], starts, bounds.ends[None, :])
    )
    return TileSchedule(group, start, end, tiles_through)


def schedule_of_one_group(num_rows: int, block_rows: int) -> TileSchedule:
    """The `tile_schedule` of one group that has all rows: constants, where XLA would compute them in each step.

    Two entries that no tile has are at the end: XLA launches kernels for constants that are all alike or evenly spaced.
    """
    start = np.arange(0, num_rows, block_rows, dtype=np.int32)
    entries = (np.zeros_like(start), start, np.full_like(start, num_rows))
    padded = (np.append(each, np.full(2, -1, np.int32)) for each in entries)
    return TileSchedule(*map(jnp.asarray, (*padded, np.array([len(start)], np.int32))))


def group_of_rows(bounds: GroupBounds, num_rows: int) -> jax.Array:
    """The group of each row, int32 [num_rows]; E for a row of no group."""
    num_groups, row = len(bounds.ends), jnp.arange(num_rows, dtype=jnp.int32)
    method = "scan" if num_groups > _MAX_COMPARED else "compare_all"
    group = jnp.searchsorted(bounds.ends, row, side="right", method=method).astype(jnp.int32)
    start = bounds.starts[jnp.minimum(group, num_groups - 1)]  # checkify reports indices past the end
    return jnp.where(start <= row, group, num_groups)


def between_groups(bounds: GroupBounds, num_rows: int) -> jax.Array:
    """Whether each row lies between the start of the first group and the end of the last group, bool [num_rows]."""
    if len(bounds.starts) == 0:
        return jnp.zeros(num_rows, bool)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    return (row >= bounds.starts[0]) & (row < bounds.ends[-1])


def largest_first(bounds: GroupBounds) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The groups sorted by their number of rows, largest first; among equal groups the lower index comes first.

    Sizes (3, 0, 5, 3) give (2, 0, 3, 1), (3, 0, 8, 3) and (8, 3, 11, 3).

    Returns: the groups, their first rows and one past their last rows: int32 [E] each.
    """
    sizes = bounds.ends - bounds.starts
    group = jnp.arange(len(sizes), dtype=jnp.int32)
    if len(sizes) > _MAX_COMPARED:
        order = jnp.argsort(-sizes, stable=True).astype(jnp.int32)
        return order, bounds.starts[order], bounds.ends[order]
    is_before = (sizes[None, :] > sizes[:, None]) | (
        (sizes[None, :] == sizes[:, None]) & (group[None, :] < group[:, None])
    )
    rank = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    takes = rank[None, :] == group[:, None]
    order, starts, ends = (
        jnp.sum(jnp.where(takes, values[None, :], 0), axis=1, dtype=jnp.int32)
        for values in (group, bounds.starts, bounds.ends)
    )
    return order, starts, ends


def saturated_int32(array: jax.Array) -> jax.Array:
    """An array of any integer dtype as int32; values outside the range of int32 are clipped to it."""
    info = jnp.iinfo(array.dtype)
    if info.bits < 32 or array.dtype == jnp.int32:
        return array.astype(jnp.int32)
    lowest, highest = max(info.min, -(2**31)), 2**31 - 1
    return jnp.clip(array, jnp.array(lowest, array.dtype), jnp.array(highest, array.dtype)).astype(jnp.int32)


def as_indices(gather_indices: jax.Array | None) -> jax.Array | None:
    """gather_indices as int32, or None where there are none."""
    return None if gather_indices is None else saturated_int32(gather_indices)


def inverse_permutation(gather_indices: jax.Array, num_positions: int | None = None) -> jax.Array:
    """The row in expert order that names each position in token order, or -1 for a position that no row names.

    Where several rows name a position, the last of them counts. Indices outside the positions name nothing.

    Args:
      gather_indices: integer [M].
      num_positions: how many positions there are; M by default.

    Returns: int32 [num_positions].
    """
    num_rows = gather_indices.shape[0]
    num_positions = num_rows if num_positions is None else num_positions
    gather_indices = saturated_int32(gather_indices)
    in_range = (gather_indices >= 0) & (gather_indices < num_positions)
    targets = jnp.where(in_range, gather_indices, num_positions)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    if isinstance(num_rows, int) and isinstance(num_positions, int) and max(num_rows, num_positions) <= _FEW_ROWS:
        names = targets[None, :] == jnp.arange(num_positions, dtype=jnp.int32)[:, None]
        return jax.lax.reduce(jnp.where(names, rows[None, :], -1), jnp.int32(-1), jax.lax.max, (1,))
    return jnp.full((num_positions,), -1, jnp.int32).at[targets].max(rows, mode="drop")


def check(group_sizes: ArrayLike, num_rows: int, gather_indices: ArrayLike | None = None) -> None:
    """Reports values that `grouped_gemm` would clamp or ignore, under `jax.experimental.checkify`.

    Checks that no group size is negative, that their sum is at most `num_rows`, and that `gather_indices` names each
    position of [0, num_rows) once.

    Args:
      group_sizes: integer [E].
      num_rows: M.
      gather_indices: integer [M].

    Raises: ValueError, TypeError: a shape or a dtype is wrong; the message names the argument.
    """
    num_rows = as_int("num_rows", num_rows, least=0)
    sizes, indices = as_array("group_sizes", group_sizes), as_array_or_none("gather_indices", gather_indices)
    check_integers("group_sizes", sizes)
    check_rank("group_sizes", sizes, "[E]")
    if indices is not None:
        check_integers("gather_indices", indices)
        check_rank("gather_indices", indices, "[M]")
        if indices.shape != (num_rows,):
            raise ValueError(f"gather_indices must be [M] = [{num_rows}], got {list(indices.shape)}.")
    sizes = saturated_int32(sizes)
    smallest = jnp.min(sizes, initial=0)
    checkify.check(smallest >= 0, "group_sizes must not be negative, got {size}", size=smallest)
    bounds = group_bounds(sizes, num_rows)
    fits = jnp.all(bounds.ends - bounds.starts >= sizes)
    checkify.check(
        fits,
        "group_sizes must sum to at most M, {num_rows}, got {total}",
        num_rows=jnp.int32(num_rows),
        total=jnp.sum(sizes.astype(jnp.float32)),
    )
    if indices is not None:
        missing = jnp.sum(inverse_permutation(indices) < 0)
        checkify.check(
            missing == 0,
            "gather_indices must name each of [0, M) once, {missing} positions are missing",
            missing=missing,
        )
