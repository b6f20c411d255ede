"""The schedule against plain Python, on worked examples and on random and nasty values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.core.schedule import (
    GroupBounds,
    group_bounds,
    group_of_rows,
    inverse_permutation,
    largest_first,
    row_parts,
    schedule_of_one_group,
    tile_schedule,
)
from tests.support import oracle

MIN_INT, MAX_INT = -(2**31), 2**31 - 1

# (group sizes, rows)
SIZES = {
    "docstring": ((3, -1, 0, 9), 8),
    "exact": ((5, 0, 9, 1, 25), 40),
    "short": ((5, 0, 9), 40),
    "empty": ((0, 0, 0), 40),
    "no-rows": ((0, 0, 0), 0),
    "no-rows-but-sizes": ((4, MAX_INT, -4), 0),
    "single": ((7,), 7),
    "single-too-large": ((8,), 7),
    "negative": ((MIN_INT, -1, 4, MIN_INT, 3), 10),
    "huge": ((MAX_INT, MAX_INT, MAX_INT), 10),
    "sum-wraps-once": ((3, MAX_INT, MAX_INT, 5, 9), 1000),
    "sum-wraps-often": ((1, *[MAX_INT] * 300), 2**30 - 1),
    "many-rows": ((2**29, 2**29, 2**29), 2**30 - 1),
    "mixed": ((MAX_INT, MIN_INT, 3, MAX_INT), 5),
}


jitted_bounds = jax.jit(group_bounds, static_argnums=(1, 3))


def reference_bounds(group_sizes, num_rows):
    ranges = oracle.group_ranges(group_sizes, num_rows)
    return [rows.start for rows in ranges], [rows.stop for rows in ranges]


def random_sizes(seed):
    """Group sizes of all kinds, bad ones among them."""
    rng = np.random.default_rng(seed)
    num_groups = (1, 8, 11)[seed % 3]
    sizes = rng.integers(0, 40, num_groups)
    sizes[rng.random(num_groups) < 0.3] = 0
    bad = rng.random(num_groups) < 0.2 * (seed % 2)
    sizes[bad] = rng.choice([MIN_INT, MAX_INT, -1, 1000, MAX_INT - 1], bad.sum())
    return tuple(sizes.tolist()), (57, 200)[rng.integers(2)]


def assert_bounds(bounds, starts, ends, message=""):
    np.testing.assert_array_equal(bounds.starts, starts, message)
    np.testing.assert_array_equal(bounds.ends, ends, message)
    rows = np.subtract(ends, starts)
    has_rows_after = np.cumsum(rows[::-1])[::-1] > rows
    np.testing.assert_array_equal(bounds.sizes[has_rows_after], rows[has_rows_after], message)
    assert np.all(bounds.sizes >= rows), message
    assert all(array.dtype == jnp.int32 for array in bounds), message


@pytest.mark.parametrize(("group_sizes", "num_rows"), SIZES.values(), ids=SIZES.keys())
def test_group_bounds(group_sizes, num_rows):
    bounds = jitted_bounds(jnp.array(group_sizes, jnp.int32), num_rows)
    assert_bounds(bounds, *reference_bounds(group_sizes, num_rows))


def test_group_bounds_of_random_sizes():
    for seed in range(100):
        group_sizes, num_rows = random_sizes(seed)
        bounds = jitted_bounds(jnp.array(group_sizes, jnp.int32), num_rows)
        assert_bounds(bounds, *reference_bounds(group_sizes, num_rows), f"seed {seed}")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32"])
def test_group_bounds_of_other_integers(dtype):
    limits = np.iinfo(dtype)
    for sizes in ([3, 100, 0, 5], [limits.max, 1, limits.max, limits.min, 100]):
        for num_rows in (90, 300, 70_000):
            bounds = group_bounds(jnp.array(sizes, dtype), num_rows)
            assert_bounds(bounds, *reference_bounds(sizes, num_rows))


@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize("offset", range(6))
def test_group_bounds_from_an_offset(offset, num_groups):
    group_sizes, num_rows = (4, 0, 7, 2, 3), 18
    bounds = jitted_bounds(jnp.array(group_sizes), num_rows, jnp.int32(offset), num_groups)
    expected_starts, expected_ends = reference_bounds(group_sizes, num_rows)
    last = expected_ends[-1]
    # groups past the last one are empty
    expected_starts += [last] * num_groups
    expected_ends += [last] * num_groups
    chosen = slice(offset, offset + num_groups)
    assert_bounds(bounds, expected_starts[chosen], expected_ends[chosen])


def reference_tiles(starts, ends, block_rows):
    """(group, first row, end of the group) of each tile."""
    return [
        (group, row, end)
        for group, (start, end) in enumerate(zip(starts, ends, strict=True))
        for row in range(start, end, block_rows)
    ]


jitted_schedule = jax.jit(tile_schedule, static_argnums=(1, 2))


def assert_schedule(group_sizes, num_rows, block_rows, skipped=0, message=""):
    """Every tile of every group from number `skipped` on, in order; others, only where sizes do not fit, are empty."""
    starts, ends = (bound[skipped:] for bound in reference_bounds(group_sizes, num_rows))
    offset = (jnp.int32(skipped), len(starts)) if skipped else ()
    bounds = jitted_bounds(jnp.array(group_sizes, jnp.int32), num_rows, *offset)
    schedule = jitted_schedule(bounds, num_rows, block_rows)
    assert all(array.dtype == jnp.int32 for array in schedule), message
    groups, first_rows, row_ends = (array.tolist() for array in schedule[:3])
    count = schedule.tiles_through[-1].item()
    assert count <= len(groups) == len(first_rows) == len(row_ends), message
    tiles = list(zip(groups, first_rows, row_ends, strict=True))[:count]
    expected = reference_tiles(starts, ends, block_rows)
    assert [tile for tile in tiles if tile[1] < tile[2]] == expected, message
    fits = sum(max(size, 0) for size in group_sizes) <= num_rows
    assert count == len(expected) or not fits, message
    # each group's tiles, the empty ones too, are those between the numbers of tiles_through
    through = [sum(group <= last for group, _, _ in tiles) for last in range(len(starts))]
    assert schedule.tiles_through.tolist() == through, message
    # what a kernel reads past the last tile must be safe to follow too
    assert np.all((schedule.group >= 0) & (schedule.group < len(starts))), message


def test_tile_schedule_of_the_docstring():
    bounds = group_bounds(jnp.array([5, 0, 3]), 8)
    schedule = tile_schedule(bounds, 8, 4)
    assert schedule.group[:3].tolist() == [0, 0, 2]
    assert schedule.start[:3].tolist() == [0, 4, 5]
    assert schedule.end[:3].tolist() == [5, 5, 8]
    assert schedule.tiles_through.tolist() == [2, 2, 3]


@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize(
    ("group_sizes", "num_rows"),
    [case for case in SIZES.values() if case[1] < 10_000],
    ids=[name for name, case in SIZES.items() if case[1] < 10_000],
)
def test_tile_schedule(group_sizes, num_rows, block_rows):
    assert_schedule(group_sizes, num_rows, block_rows)


@pytest.mark.parametrize(("num_rows", "block_rows"), [(1, 16), (16, 16), (33, 16), (128, 128)])
def test_the_schedule_of_one_group_is_its_tile_schedule(num_rows, block_rows):
    schedule = schedule_of_one_group(num_rows, block_rows)
    count = schedule.tiles_through[0].item()
    expected = jitted_schedule(jitted_bounds(jnp.array([num_rows]), num_rows), num_rows, block_rows)
    np.testing.assert_array_equal(schedule.tiles_through, expected.tiles_through)
    for array, wanted in zip(schedule[:3], expected[:3], strict=True):
        assert array.dtype == jnp.int32
        np.testing.assert_array_equal(array[:count], wanted[:count])


def test_tile_schedule_of_random_sizes():
    for seed in range(100):
        group_sizes, num_rows = random_sizes(seed)
        skipped = seed % 2 if len(group_sizes) > 1 else 0
        assert_schedule(group_sizes, num_rows, 16, skipped, f"seed {seed}")


def test_tile_schedule_of_groups_with_rows_of_none_between_them():
    for seed in range(50):
        rng = np.random.default_rng(seed)
        cuts = np.sort(rng.integers(0, 300, 14))
        starts, ends = cuts[::2], cuts[1::2]
        bounds = GroupBounds(*(jnp.asarray(array, jnp.int32) for array in (starts, ends, ends - starts)))
        schedule = jitted_schedule(bounds, 300, 16)
        tiles = list(zip(*(array.tolist() for array in schedule[:3]), strict=True))
        assert tiles[: schedule.tiles_through[-1].item()] == reference_tiles(starts, ends, 16), f"seed {seed}"
        rows = [group for row in range(300) for group in [np.flatnonzero((starts <= row) & (row < ends))]]
        assert group_of_rows(bounds, 300).tolist() == [group[0] if len(group) else 7 for group in rows], f"seed {seed}"


def test_more_groups_than_are_compared_with_each_other():
    rng = np.random.default_rng(0)
    sizes = rng.integers(-3, 12, 3000)
    sizes[rng.integers(0, 3000, 20)] = MAX_INT
    num_rows = 2 * int(np.clip(sizes[:100], 0, 100).sum())
    assert_bounds(jitted_bounds(jnp.array(sizes, jnp.int32), num_rows), *reference_bounds(sizes, num_rows))
    sizes = rng.integers(0, 12, 3000)
    num_rows = int(sizes.sum())
    assert_schedule(tuple(sizes.tolist()), num_rows, 4)
    bounds = jitted_bounds(jnp.array(sizes, jnp.int32), num_rows)
    np.testing.assert_array_equal(group_of_rows(bounds, num_rows), np.repeat(np.arange(3000), sizes))
    groups, starts, ends = largest_first(bounds)
    np.testing.assert_array_equal(groups, np.argsort(-sizes, kind="stable"))
    np.testing.assert_array_equal(ends - starts, sizes[groups])


def test_memory_grows_with_the_number_of_groups():
    def schedule(sizes):
        bounds = group_bounds(sizes, 65_536)
        return bounds, tile_schedule(bounds, 65_536, 128), group_of_rows(bounds, 65_536), largest_first(bounds)

    sizes = jax.ShapeDtypeStruct((32_768,), "int32")
    assert jax.jit(schedule).lower(sizes).compile().memory_analysis().temp_size_in_bytes < 200 * 32_768


@pytest.mark.parametrize("block_rows", [16, 128])
def test_tile_schedule_has_room_for_the_most_tiles(block_rows):
    """Each group ends with a tile of one row: no schedule of as many rows has more tiles."""
    group_sizes = (block_rows + 1,) * 7
    assert_schedule(group_sizes, sum(group_sizes), block_rows)
    assert_schedule((1,) * 50, 50, block_rows)


def reference_inverse(gather_indices):
    inverse = [-1] * len(gather_indices)
    for row, position in enumerate(gather_indices):
        if 0 <= position < len(gather_indices):
            inverse[position] = row
    return inverse


@pytest.mark.parametrize(
    "gather_indices",
    [[], [0], [-1], [1], [3, 1, 0, 2], [0, 0, 0, 0], [3, -1, 4, 0], [2, 2, MAX_INT, MIN_INT, -5, 5, 1]],
)
def test_inverse_permutation(gather_indices):
    inverse = inverse_permutation(jnp.array(gather_indices, jnp.int32))
    np.testing.assert_array_equal(inverse, np.array(reference_inverse(gather_indices), np.int32))
    assert inverse.dtype == jnp.int32


def test_inverse_permutation_of_random_indices():
    jitted = jax.jit(inverse_permutation)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        permutation = rng.permutation(64)
        np.testing.assert_array_equal(jitted(permutation)[permutation], np.arange(64))
        indices = rng.integers(-20, 84, 64)
        np.testing.assert_array_equal(jitted(indices), reference_inverse(indices), f"seed {seed}")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_inverse_permutation_of_other_integers(dtype):
    rng = np.random.default_rng(0)
    limits = np.iinfo(dtype)
    indices = rng.integers(limits.min, limits.max, 300, dtype, endpoint=True)
    indices[:100] = rng.integers(0, min(limits.max, 300), 100)
    np.testing.assert_array_equal(inverse_permutation(jnp.asarray(indices)), reference_inverse(indices))


@pytest.mark.parametrize("sizes", [(3, 0, 5, 3), (7,), (0, 0, 0), (1, 2, 3, 4, 5)])
def test_largest_first(sizes):
    bounds = group_bounds(jnp.array(sizes, jnp.int32), sum(sizes))
    groups, starts, ends = jax.jit(largest_first)(bounds)
    assert groups.dtype == starts.dtype == ends.dtype == jnp.int32
    order = sorted(range(len(sizes)), key=lambda group: -sizes[group])
    assert groups.tolist() == order
    assert starts.tolist() == [int(bounds.starts[group]) for group in order]
    assert ends.tolist() == [int(bounds.ends[group]) for group in order]


def test_largest_first_counts_rows_that_are_there():
    bounds = group_bounds(jnp.array([2, 9, -1, 9, 4], jnp.int32), 16)
    groups, starts, ends = largest_first(bounds)
    assert groups.tolist() == [1, 3, 0, 2, 4]
    assert starts.tolist() == [2, 11, 0, 11, 16]
    assert ends.tolist() == [11, 16, 2, 11, 16]


def test_parts_of_the_rows_of_each_group():
    bounds = GroupBounds(*(jnp.asarray(each, jnp.int32) for each in ([3, 13, 13], [13, 13, 14], [10, 0, 1])))
    starts, ends, sizes = row_parts(bounds, 3, 2)
    np.testing.assert_array_equal(starts, [3, 7, 11, 13, 13, 13, 13, 14, 14])
    np.testing.assert_array_equal(ends, [7, 11, 13, 13, 13, 13, 14, 14, 14])
    np.testing.assert_array_equal(sizes, ends - starts)
