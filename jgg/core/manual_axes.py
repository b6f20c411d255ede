"""Makes arrays inside `jax.shard_map` vary over the same mesh axes, as a loop or a kernel needs them."""

from typing import overload

import jax


def varying_axes(*arrays: jax.Array | None) -> frozenset[str]:
    """The manual mesh axes over which any of the arrays (None counts as constant) varies."""
    return frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays if array is not None))


@overload
def vary_over(axes: frozenset[str], array: jax.Array) -> jax.Array: ...
@overload
def vary_over(axes: frozenset[str], array: None) -> None: ...
def vary_over(axes: frozenset[str], array: jax.Array | None) -> jax.Array | None:
    """The array, marked as varying over `axes` too; None stays None. Its transpose sums over the added axes."""
    if array is None:
        return None
    added = tuple(axes - jax.typeof(array).manual_axis_type.varying)
    return jax.lax.pcast(array, added, to="varying") if added else array


def alike[Arrays](arrays: Arrays) -> Arrays:
    """A pytree of arrays, each marked as varying over the axes over which any of them varies."""
    axes = varying_axes(*jax.tree.leaves(arrays))
    return jax.tree.map(lambda array: vary_over(axes, array), arrays)
