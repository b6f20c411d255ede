"""Group sizes to row ranges and tiles: pure functions of one small array, computed on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class GroupBounds(NamedTuple):
    """First row and one past the last row of each group, in expert order; each int32 [E]."""

    starts: jax.Array
    ends: jax.Array


class TileSchedule(NamedTuple):
    """The row tiles of a ragged-M kernel; no tile holds rows of two groups.

    Attributes:
      group: int32 [T], the group of each tile.
      start: int32 [T], the tile's first row.
      end: int32 [T], one past the last row of the tile's group.
      extent: int32 [3], the number of tiles in use (entries past it mean nothing), the first row of the first group,
        and one past the last row of the last group.
    """

    group: jax.Array
    start: jax.Array
    end: jax.Array
    extent: jax.Array


def group_bounds(group_sizes: jax.Array, num_rows: int, group_offset=None, num_groups: int | None = None):
    """Row ranges of the groups, for any values of `group_sizes`.

    A negative size counts as 0 and no range passes `num_rows`: sizes (3, -1, 0, 9) of 8 rows give the starts
    (0, 3, 3, 3) and the ends (3, 3, 3, 8).

    Args:
      group_sizes: integer [G], rows of each group.
      num_rows: rows there are.
      group_offset: integer scalar, the first of the `num_groups` groups to return; the rest keep their rows.
      num_groups: number of groups to return where `group_offset` is given.

    Returns: GroupBounds of [G] or, with `group_offset`, [num_groups]; groups past G are empty.
    """
    sizes = jnp.clip(saturated_int32(group_sizes), 0, num_rows).astype(jnp.uint32)
    # The sum is exact up to the first end past num_rows (both terms are below 2**31), and later ones may wrap around;
    # the running maximum keeps them at num_rows.
    ends = jax.lax.cummax(jnp.minimum(jnp.cumsum(sizes, dtype=jnp.uint32), jnp.uint32(num_rows)))
    ends = ends.astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    if group_offset is not None:
        past = jnp.broadcast_to(ends[-1:], (num_groups,))
        first = jnp.clip(saturated_int32(group_offset), 0, len(group_sizes))
        starts, ends = (
            jax.lax.dynamic_slice(jnp.concatenate([bound, past]), (first,), (num_groups,)) for bound in (starts, ends)
        )
    return GroupBounds(starts, ends)


def tile_schedule(bounds: GroupBounds, num_rows: int, block_rows: int) -> TileSchedule:
    """Cuts each group's rows into tiles of `block_rows`, the last of a group possibly short.

    Groups of 5, 0 and 3 rows with tiles of 4 rows:

        group  0  0  2        rows 0-3, row 4, rows 5-7
        start  0  4  5
        end    5  5  8
        extent 3  0  8
    """
    num_groups = len(bounds.ends)
    max_tiles = min(num_rows, num_rows // block_rows + num_groups)
    tiles = (bounds.ends - bounds.starts + (block_rows - 1)) // block_rows
    tile_ends = jnp.cumsum(tiles, dtype=jnp.int32)
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    # compare_all is one fused comparison and sum; the default method would be a loop of kernels
    group = jnp.searchsorted(tile_ends, tile, side="right", method="compare_all").astype(jnp.int32)
    group = jnp.minimum(group, num_groups - 1)
    start = bounds.starts[group] + (tile - (tile_ends - tiles)[group]) * block_rows
    extent = jnp.stack([tile_ends[-1], bounds.starts[0], bounds.ends[-1]])
    return TileSchedule(group, start, bounds.ends[group], extent)


def saturated_int32(array: jax.Array) -> jax.Array:
    """`array` of any integer dtype as int32, values past int32's range at its ends."""
    info = jnp.iinfo(array.dtype)
    if info.bits < 32 or array.dtype == jnp.int32:
        return array.astype(jnp.int32)
    lowest, highest = max(info.min, -(2**31)), 2**31 - 1
    return jnp.clip(array, jnp.array(lowest, array.dtype), jnp.array(highest, array.dtype)).astype(jnp.int32)


def inverse_permutation(gather_indices: jax.Array, num_positions: int | None = None) -> jax.Array:
    """For each position in token order the row in expert order that names it, or M where none does.

    Of several such rows it is the last; indices outside the positions name nothing.

    Args:
      gather_indices: integer [M].
      num_positions: how many positions there are; M by default.

    Returns: int32 [num_positions].
    """
    num_rows = len(gather_indices)
    num_positions = num_rows if num_positions is None else num_positions
    gather_indices = saturated_int32(gather_indices)
    in_range = (gather_indices >= 0) & (gather_indices < num_positions)
    targets = jnp.where(in_range, gather_indices, num_positions)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    inverse = jnp.full((num_positions,), -1, jnp.int32).at[targets].max(rows, mode="drop")
    return jnp.where(inverse < 0, num_rows, inverse)
