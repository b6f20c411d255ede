"""Orthogonalizes one parameter, a stack of matrices at a time, split over a mesh."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

P = jax.P
Iterate = Callable[[jax.Array], jax.Array]  # of matrices [G, N, K]
Axes = tuple[tuple[int, ...], tuple[int, ...]]  # of a parameter: a matrix's rows, and its columns


def map_stacks(iterate: Iterate, x: jax.Array, axes: Axes, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
    """Applies `iterate` to all matrices of a parameter x, in place, one stack at a time.

    Args:
      axes: the axes of x that index a matrix's rows and columns. The last remaining axis counts the matrices of a
        stack, such as the experts of a layer, and the axes before it count stacks.
      sharding: the NamedSharding of x, whose mesh axes may split any axis. Where one splits matrices, devices exchange
        parts of a stack, so that each has some whole matrices, and then exchange them back. Where one splits stacks or
        the matrices of a stack, nothing moves. Along mesh axes that do not split x, devices share out the matrices of
        a stack, if their number divides evenly, and gather the results; otherwise they all do the same work. None for
        one device, for Explicit axes, where the type of x has the sharding, or to let XLA decide for Auto axes.
    """
    if x.size == 0:
        return x
    own = jax.typeof(x).sharding
    if sharding is None and any(own.spec) and jax.sharding.AxisType.Manual not in own.mesh.axis_types:
        sharding = own
    if not isinstance(sharding, jax.NamedSharding) or sharding.mesh.size == 1:
        return _on_device(iterate, x, axes, {})
    names = _names(sharding.spec, x.ndim)
    shared, stack = _shared(x.shape, axes, names, sharding.mesh), _stack_axis(x.ndim, axes)
    spec = P(*(own if axis != stack else (*own, *shared) for axis, own in enumerate(names)))
    exchanged = {axis: own for axis, own in enumerate(names) if axis in sum(axes, ()) and own}
    on_device = functools.partial(_on_device, iterate, axes=axes, exchanged=exchanged)
    y = jax.shard_map(on_device, mesh=sharding.mesh, in_specs=(spec,), out_specs=spec)(placed(x, sharding))
    return placed(y, sharding)


def placed(array: jax.Array, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """The array, constrained to this sharding for XLA; on Explicit axes its type already says so."""
    if not isinstance(sharding, jax.NamedSharding) or set(sharding.mesh.axis_types) != {jax.sharding.AxisType.Auto}:
        return array
    return jax.lax.with_sharding_constraint(array, sharding)


def _on_device(iterate: Iterate, x: jax.Array, axes: Axes, exchanged: dict[int, tuple[str, ...]]) -> jax.Array:
    """`map_stacks` for a device's part; `exchanged` has the mesh axes that split each axis of the matrices."""
    first = [axis for axis in range(x.ndim) if axis not in sum(axes, ())]
    order = (*first, *axes[0], *axes[1])
    x = x.transpose(order)
    shape, features = x.shape, x.shape[len(first) :]
    count, group = math.prod(shape[: max(len(first) - 1, 0)]), shape[len(first) - 1] if first else 1
    stacks = x.reshape(count, group, *features)
    moves = [(order.index(axis) - len(first) + 1, names) for axis, names in exchanged.items()]
    rows = len(axes[0])

    def orthogonalized(stack: jax.Array) -> jax.Array:
        stack = _exchange(stack, moves)
        features = stack.shape[1:]
        matrices = stack.reshape(len(stack), math.prod(features[:rows]), math.prod(features[rows:]))
        return _exchange_back(iterate(matrices).reshape(stack.shape), moves)[:group]

    def replace(number: jax.Array, stacks: jax.Array) -> jax.Array:
        own = jax.lax.dynamic_index_in_dim(stacks, number, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(stacks, orthogonalized(own), number, 0)

    stacks = jax.lax.fori_loop(0, count, replace, stacks) if count > 1 else orthogonalized(stacks[0])[None]
    return stacks.reshape(shape).transpose([order.index(axis) for axis in range(len(order))])


def _exchange(stack: jax.Array, moves: list[tuple[int, tuple[str, ...]]]) -> jax.Array:
    """Exchanges a device's part of all matrices [G, ...] for some whole matrices."""
    devices = math.prod(jax.lax.axis_size(name) for _, names in moves for name in names)
    missing = -len(stack) % devices
    if missing:  # zeros stay zero
        stack = jnp.concatenate([stack, jnp.zeros_like(stack, shape=(missing, *stack.shape[1:]))])
    for axis, names in moves:
        stack = jax.lax.all_to_all(stack, names, 0, axis, tiled=True)
    return stack


def _exchange_back(stack: jax.Array, moves: list[tuple[int, tuple[str, ...]]]) -> jax.Array:
    for axis, names in reversed(moves):
        stack = jax.lax.all_to_all(stack, names, axis, 0, tiled=True)
    return stack


def _names(spec: P, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes that split each axis of an array."""
    parts = (*spec, *[None] * (ndim - len(spec)))
    return [() if part is None else part if isinstance(part, tuple) else (part,) for part in parts]


def _stack_axis(ndim: int, axes: Axes) -> int | None:
    """The axis that counts the matrices of a stack; None if there is one matrix."""
    return max((axis for axis in range(ndim) if axis not in sum(axes, ())), default=None)


def _shared(
    shape: tuple[int, ...],
    axes: Axes,
    names: list[tuple[str, ...]],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
) -> tuple[str, ...]:
    """The mesh axes that split nothing yet, along which devices can share out a stack's matrices."""
    stack = _stack_axis(len(shape), axes)
    if stack is None:
        return ()
    taken = {name for own in names for name in own}
    matrices = shape[stack] // math.prod(mesh.shape[name] for name in names[stack])
    shared: list[str] = []
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        size = mesh.shape[name]
        # an array on Explicit axes is split as its type says, and no other way
        if name not in taken and kind == jax.sharding.AxisType.Auto and size > 1 and matrices % size == 0:
            matrices //= size
            shared.append(name)
    return tuple(shared)
