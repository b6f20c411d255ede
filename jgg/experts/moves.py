"""Moves rows between devices that each hold some of the experts, inside `jax.shard_map`, following a plan of runs."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.core.manual_axes import vary_over, varying_axes
from jgg.core.schedule import group_bounds, group_of_rows
from jgg.launching.choice import How
from jgg.products.buffer import BUFFER, Buffer

_RUNS = 1024  # runs that a device sends within a machine, not counting those that start at an expert


class Placement(NamedTuple):
    """Where the experts are.

    Attributes:
      axis: mesh axis that splits the experts, in order.
      num_experts: experts per device.
      capacity: R, rows that a device has room for.
    """

    axis: str
    num_experts: int
    capacity: int


class Moves(NamedTuple):
    """Runs of rows to and from p devices, u runs each: int32 [p * u], the arguments of `jax.lax.ragged_all_to_all`.

    Attributes:
      input_offsets: first row, on this device, of each run that it sends.
      send_sizes: rows of each run that it sends.
      output_offsets: first row, on the other device, of each run that this device sends.
      recv_sizes: rows of each run that this device gets.
    """

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


class Plan(NamedTuple):
    """The moves of rows between devices.

    Attributes:
      there: moves to the experts.
      back: moves of the experts' results to the tokens' devices.
      positions: int32 [M], the position in token order of each sent row, ordered by expert; -1 for a row that finds no
        room or has no expert.
      group_sizes: int32 [num_experts], rows that find room, for each of this device's experts.
      overflow: int32, rows for this device that find no room.
    """

    there: Moves
    back: Moves
    positions: jax.Array
    group_sizes: jax.Array
    overflow: jax.Array


class _Runs(NamedTuple):
    """Runs of rows from one device to another, each of one expert; int32 [u].

    Attributes:
      starts: the first row of each run, counted from the first row for that device.
      sizes: the rows of each run that find room.
      arrivals: the row at which each run begins on the other device.
    """

    starts: jax.Array
    sizes: jax.Array
    arrivals: jax.Array


def plan_moves(group_sizes: jax.Array, gather_indices: jax.Array, counts: jax.Array, placement: Placement) -> Plan:
    """The plan for rows in expert order.

    Example: two devices have two experts each, and room for 4 rows. Device 0 has (2, 1, 0, 0) rows for the experts,
    device 1 has (1, 2, 0, 0). Device 0 gets the 2 + 1 rows for expert 0, then its own row for expert 1. Device 1's 2
    rows for expert 1 find no room.

    Args:
      group_sizes: [E], this device's rows for each expert of all devices.
      counts: the same for all devices, [from, to, expert].
    """
    axis, num_experts, capacity = placement
    here, num_devices = jax.lax.axis_index(axis), jax.lax.axis_size(axis)
    by_expert = counts.transpose(1, 2, 0).reshape(num_devices, -1)  # [to, (expert, from)], as rows arrive
    arrivals = jnp.minimum(jnp.cumsum(by_expert, axis=1, dtype=jnp.int32) - by_expert, capacity)
    fitting = jnp.minimum(by_expert, capacity - arrivals)
    arrivals, fitting = (
        array.reshape(num_devices, num_experts, num_devices).transpose(2, 0, 1) for array in (arrivals, fitting)
    )
    rows = jnp.sum(counts, axis=2, dtype=jnp.int32)
    firsts = jnp.cumsum(rows, axis=1, dtype=jnp.int32) - rows  # [from, to], where the sender has them
    # between machines a run is a message of NCCL; within one a block of 128 threads copies it, so long runs are slow
    parts = max(1, _RUNS // num_devices) if jax.process_count() == 1 else 1
    cut = jax.vmap(functools.partial(_cut, parts))
    sent = cut(counts[here], fitting[here], arrivals[here])
    received = cut(counts[:, here], fitting[:, here], arrivals[:, here])
    from_here = (firsts[here][:, None] + sent.starts).reshape(-1)
    from_there = (firsts[:, here][:, None] + received.starts).reshape(-1)
    send_sizes, recv_sizes = sent.sizes.reshape(-1), received.sizes.reshape(-1)
    return Plan(
        Moves(from_here, send_sizes, sent.arrivals.reshape(-1), recv_sizes),
        Moves(received.arrivals.reshape(-1), recv_sizes, from_there, send_sizes),
        _with_room(gather_indices, group_sizes, fitting[here].reshape(-1)),
        jnp.sum(fitting[:, here], axis=0, dtype=jnp.int32),
        jnp.sum((counts - fitting)[:, here], dtype=jnp.int32),
    )


def _cut(num_parts: int, counts: jax.Array, fitting: jax.Array, arrivals: jax.Array) -> _Runs:
    """The rows that one device sends to another, cut between experts and into `num_parts` even parts.

    Rows (3, 5) of two experts in 2 parts are the runs 0-2, 3-3 and 4-7.

    Args:
      counts, fitting, arrivals: for each expert its rows, how many find room, and at which row they arrive.
    """
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    firsts, num_rows = ends - counts, ends[-1]
    part = -(-num_rows // num_parts)
    even = jnp.minimum(part * jnp.arange(num_parts, dtype=jnp.int32), num_rows)
    starts = jnp.sort(jnp.concatenate([firsts, even[1:]]))
    stops = jnp.concatenate([starts[1:], num_rows[None]])
    # where several experts begin at the same row, it belongs to the last: the others have no rows
    expert = jnp.searchsorted(firsts, starts, side="right", method="compare_all").astype(jnp.int32) - 1
    offsets = starts - firsts[expert]
    sizes = jnp.clip(fitting[expert] - offsets, 0, stops - starts)
    return _Runs(starts, sizes, arrivals[expert] + jnp.minimum(offsets, fitting[expert]))


def _with_room(gather_indices: jax.Array, group_sizes: jax.Array, fitting: jax.Array) -> jax.Array:
    """gather_indices [M] with -1 for each expert's rows past the first `fitting`, and for rows of no expert."""
    num_rows = len(gather_indices)
    bounds = group_bounds(group_sizes, num_rows)
    expert = group_of_rows(bounds, num_rows)
    last = jnp.concatenate([bounds.starts + fitting, jnp.zeros(1, jnp.int32)])
    return jnp.where(jnp.arange(num_rows, dtype=jnp.int32) < last[expert], gather_indices, -1)


class Way(NamedTuple):
    """The two arrays that rows move between on each device of a mesh axis, with `num_rows` and `num_rows_there` rows.

    Attributes:
      how: how to allocate the array that rows are moved into.
    """

    axis: str
    num_rows: int
    num_rows_there: int
    how: How

    @property
    def back(self) -> "Way":
        """The way from there to here."""
        return self._replace(num_rows=self.num_rows_there, num_rows_there=self.num_rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def move(way: Way, rows: jax.Array, there: Moves, back: Moves) -> jax.Array:
    """Moves rows [M, H] as `there` says; rows that nobody sends are unspecified. The derivative moves them back."""
    out = BUFFER(way.how, Buffer(there.recv_sizes), shape=(way.num_rows_there, rows.shape[1]), dtype=rows.dtype)
    axes = varying_axes(rows, *there)
    return _ragged_all_to_all(way.axis, *[vary_over(axes, array) for array in (rows, out, *there)])


move.defvjp(
    lambda way, rows, there, back: (move(way, rows, there, back), (there, back)),
    lambda way, moves, dy: (move(way.back, dy, moves[1], moves[0]), None, None),
)


def _ragged_all_to_all(axis_name: str, *arrays: jax.Array) -> jax.Array:
    """Computes `jax.lax.ragged_all_to_all`, whose own `vmap` rule fails if elements share an array of runs."""

    @jax.custom_batching.custom_vmap
    def moved(*arrays: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(
            *arrays,
            cpu=functools.partial(_ragged_all_to_all_by_gather, axis_name=axis_name),  # XLA has none for CPUs
            default=functools.partial(jax.lax.ragged_all_to_all, axis_name=axis_name),
        )

    @moved.def_vmap
    def moved_together(size: int, are_batched: Sequence[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        """The rows of all elements as rows of one array, with as many runs to each device."""
        rows, out, *moves = (
            array if is_batched else jnp.broadcast_to(array, (size, *array.shape))
            for array, is_batched in zip(arrays, are_batched, strict=True)
        )
        there, element = Moves(*moves), jnp.arange(size, dtype=jnp.int32)[:, None]
        there = there._replace(
            input_offsets=there.input_offsets + element * rows.shape[1],
            output_offsets=there.output_offsets + element * out.shape[1],
        )
        merged = [array.reshape(-1, array.shape[2]) for array in (rows, out)]
        return moved(*merged, *(array.T.reshape(-1) for array in there)).reshape(out.shape), True

    return moved(*arrays)


def _ragged_all_to_all_by_gather(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str,
) -> jax.Array:
    """Computes `jax.lax.ragged_all_to_all` with operations that every platform has."""
    del recv_sizes
    here = jax.lax.axis_index(axis_name)
    sent, *plans = (
        jax.lax.all_gather(array, axis_name) for array in (operand, input_offsets, send_sizes, output_offsets)
    )
    num_devices = len(sent)
    # [p * u, 1], of the runs that come here
    sources, sizes, targets = (plan.reshape(num_devices, num_devices, -1)[:, here].reshape(-1, 1) for plan in plans)
    rows = jnp.arange(output.shape[0], dtype=jnp.int32)[None]
    comes = (rows >= targets) & (rows < targets + sizes)  # [p * u, rows]
    device = jnp.argmax(comes, axis=0) // (len(targets) // num_devices)
    row = jnp.sum(jnp.where(comes, sources + rows - targets, 0), axis=0)
    return jnp.where(jnp.any(comes, axis=0)[:, None], sent[device, row], output)
