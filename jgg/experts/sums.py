"""Sums over a mesh axis's devices in a fixed order: a token's bits depend neither on its place nor on other tokens.

NCCL's order of additions depends on where a number is in the buffer, since each device begins a different part of a
ring; NCCL chooses rings or trees by the buffer's size; and in 16 bits it rounds after each step. So here each device
receives what all devices have for its part, and adds it up in float32 in the order of the devices. Each sends and
receives as many bytes as in a ring. Two numbers have only one sum, so between two devices JAX's own collectives are
used.

The derivatives are JAX's own sums, whose transposes are an all-gather and a copy.
"""

import functools

import jax
import jax.numpy as jnp

from jgg.primitives.barrier import barrier

_FEW_ROWS = 64  # so few go to every device whole, in one collective rather than in two


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def sum_scatter(rows: jax.Array, axis: str) -> jax.Array:
    """Each device's part [T, H] of the sum over the devices of rows [p T, H]: `psum_scatter` in a fixed order."""
    devices = jax.lax.axis_size(axis)
    if devices <= 2:
        return jax.lax.psum_scatter(rows, axis, scatter_dimension=0, tiled=True)
    parts = rows.reshape(devices, -1, rows.shape[1])
    return _added(jax.lax.all_to_all(parts, axis, split_axis=0, concat_axis=0))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def sum_all(rows: jax.Array, axis: str) -> jax.Array:
    """The sum over the devices of rows [T, H], on every device: `psum` in a fixed order."""
    devices, num_rows = jax.lax.axis_size(axis), rows.shape[0]
    if devices <= 2 or not rows.size:
        return jax.lax.psum(rows, axis)
    if num_rows <= _FEW_ROWS:
        return _added(jax.lax.all_gather(rows, axis, to="invarying"))
    rows = jnp.pad(rows, ((0, -num_rows % devices), (0, 0)))
    return jax.lax.all_gather(sum_scatter(rows, axis), axis, tiled=True, to="invarying")[:num_rows]


@sum_scatter.defjvp
def _differentiate_sum_scatter(
    axis: str, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return sum_scatter(primals[0], axis), jax.lax.psum_scatter(tangents[0], axis, scatter_dimension=0, tiled=True)


@sum_all.defjvp
def _differentiate_sum_all(
    axis: str, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return sum_all(primals[0], axis), jax.lax.psum(tangents[0], axis)


def _added(parts: jax.Array) -> jax.Array:
    """The sum along the first axis, from the first to the last, rounded once."""
    total = functools.reduce(jnp.add, parts.astype(jnp.float32))
    return barrier(total.astype(parts.dtype))  # else XLA may go on with float32
