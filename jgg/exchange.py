"""Tokens to the devices that hold their experts and back, inside `jax.shard_map`: two ways with one result.

Both are a function of the device's own tokens and of `mlp`, which maps tokens and their Routing among this device's
experts to the sums of their rows, of which there are R. R, the buffer, is `capacity` rows on every device; rows that
find no room in it are counted and add nothing to y.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jgg.manual_axes import vary_over, varying_axes
from jgg.products.combine import COMBINE, Combine
from jgg.routing import Routing, sort_by_expert
from jgg.schedule import inverse_permutation

Mlp = Callable[[jax.Array, Routing], jax.Array]


class Placement(NamedTuple):
    """Where the experts are.

    Attributes:
      axis: mesh axis over which they are split, in order.
      num_experts: experts of each device.
      capacity: R, rows that a device has room for.
    """

    axis: str
    num_experts: int
    capacity: int


def by_all_gather(
    x: jax.Array, topk_weights: jax.Array, topk_indices: jax.Array, mlp: Mlp, placement: Placement
) -> tuple[jax.Array, jax.Array]:
    """Every device gets all tokens, computes the rows of its experts, and a reduce-scatter adds up the results.

    Moves (p - 1) * T rows to each device and as many back, whatever the routing.

    Args:
      x: [T, H], this device's tokens.
      topk_weights, topk_indices: [T, k].

    Returns: y [T, H], and how many rows of all tokens found no room on this device, int32: those of its last experts.
    """
    axis = placement.axis
    tokens, weights, experts = (
        jax.lax.all_gather(array, axis, tiled=True) for array in (x, topk_weights, topk_indices)
    )
    experts -= jax.lax.axis_index(axis) * placement.num_experts  # those of other devices go past every group
    group_sizes, gather_indices = sort_by_expert(experts, placement.num_experts)
    partial = mlp(tokens, Routing(weights, experts, group_sizes, gather_indices[: placement.capacity]))
    y = jax.lax.psum_scatter(partial, axis, scatter_dimension=0, tiled=True)
    return y, jnp.maximum(jnp.sum(group_sizes, dtype=jnp.int32) - placement.capacity, 0)


def by_ragged_all_to_all(
    x: jax.Array, topk_weights: jax.Array, topk_indices: jax.Array, mlp: Mlp, placement: Placement
) -> tuple[jax.Array, jax.Array]:
    """Every row goes to the device of its expert and its result comes back; arguments as `by_all_gather`.

    Moves only rows, on average k * T * (p - 1) / p from each device and as many back.

    Returns: y [T, H], and how many rows found no room on this device, int32: of the devices last along the axis.
    """
    topk = topk_indices.shape[1]
    num_devices = jax.lax.axis_size(placement.axis)
    group_sizes, gather_indices = sort_by_expert(topk_indices, num_devices * placement.num_experts)
    there, back, experts, overflow = _plan(group_sizes, placement)
    there, back, gather_indices = checkpoint_name((there, back, gather_indices), "jgg_routing")
    move_there = functools.partial(move, (placement.axis, placement.capacity), there=there, back=back)
    move_back = functools.partial(move, (placement.axis, len(gather_indices)), there=back, back=there)

    rows = move_there(take_tokens(topk, x, gather_indices))
    weights = move_there(topk_weights.reshape(-1)[gather_indices][:, None])
    routing = Routing(weights, experts[:, None], *sort_by_expert(experts, placement.num_experts))
    y = move_back(mlp(rows, routing))
    return sum_choices((x.shape[0], topk), y, gather_indices), overflow


EXCHANGES = {"all_gather": by_all_gather, "ragged_all_to_all": by_ragged_all_to_all}


class Moves(NamedTuple):
    """Blocks of rows to and from every device, each int32 [p], as `jax.lax.ragged_all_to_all` takes them.

    Attributes:
      input_offsets: first row here of the block for each device.
      send_sizes: its rows.
      output_offsets: where it begins there.
      recv_sizes: rows of the block from each device.
    """

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


def _plan(group_sizes: jax.Array, placement: Placement) -> tuple[Moves, Moves, jax.Array, jax.Array]:
    """Moves to the experts and back, the expert of each row that comes, and how many rows find no room here.

    Two devices of one expert each, with room for 4 rows, where device 0 has (2, 1) rows of the experts and device 1
    has (3, 0): device 0 keeps its 2 rows and gets 2 of the 3 rows of device 1, of which 1 finds no room.
    """
    axis, num_experts, capacity = placement
    here, num_devices = jax.lax.axis_index(axis), jax.lax.axis_size(axis)
    counts = jax.lax.all_gather(group_sizes, axis).reshape(num_devices, num_devices, num_experts)  # [from, to, expert]
    rows = jnp.sum(counts, axis=2, dtype=jnp.int32)  # [from, to]
    starts = jnp.cumsum(rows, axis=1, dtype=jnp.int32) - rows  # where the sender has them
    offsets = jnp.minimum(jnp.cumsum(rows, axis=0, dtype=jnp.int32) - rows, capacity)  # where the receiver has them
    fitting = jnp.minimum(rows, capacity - offsets)
    there = Moves(starts[here], fitting[here], offsets[here], fitting[:, here])
    back = Moves(offsets[:, here], fitting[:, here], starts[:, here], fitting[here])

    ends = jnp.cumsum(counts[:, here].reshape(-1), dtype=jnp.int32)  # of (from, expert), as rows come
    block = jnp.searchsorted(ends, jnp.arange(capacity, dtype=jnp.int32), side="right", method="compare_all")
    experts = jnp.where(block < len(ends), block % num_experts, num_experts).astype(jnp.int32)
    return there, back, experts, jnp.sum((rows - fitting)[:, here], dtype=jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def move(static: tuple[str, int], rows: jax.Array, there: Moves, back: Moves) -> jax.Array:
    """Rows [any, H] moved as `there` says; rows that nobody sends are zero. Its derivative moves them back.

    XLA has no ragged all-to-all for CPUs, where an all-gather of everything does the same by the same plan.

    Args:
      static: axis and number of rows of the result.
    """
    axis, num_rows = static
    out = jnp.zeros((num_rows, rows.shape[1]), rows.dtype)
    axes = varying_axes(rows, *there)
    arrays = [vary_over(axes, array) for array in (rows, out, *there)]
    return jax.lax.platform_dependent(
        *arrays,
        cpu=functools.partial(_ragged_all_to_all_by_gather, axis_name=axis),
        default=functools.partial(jax.lax.ragged_all_to_all, axis_name=axis),
    )


move.defvjp(
    lambda static, rows, there, back: (move(static, rows, there, back), (rows.shape[0], there, back)),
    lambda static, residuals, dy: (move((static[0], residuals[0]), dy, residuals[2], residuals[1]), None, None),
)


def _ragged_all_to_all_by_gather(
    operand: jax.Array, output: jax.Array, input_offsets: jax.Array, send_sizes: jax.Array, output_offsets: jax.Array,
    recv_sizes: jax.Array, *, axis_name: str,
) -> jax.Array:  # fmt: skip
    """`jax.lax.ragged_all_to_all` from what every platform has."""
    del recv_sizes
    here = jax.lax.axis_index(axis_name)
    sent, *plans = (
        jax.lax.all_gather(array, axis_name) for array in (operand, input_offsets, send_sizes, output_offsets)
    )
    sources, sizes, targets = (plan[:, here, None] for plan in plans)  # [p, 1], of the blocks that come here
    rows = jnp.arange(output.shape[0], dtype=jnp.int32)[None]
    comes = (rows >= targets) & (rows < targets + sizes)  # [p, rows]
    device = jnp.argmax(comes, axis=0)
    row = jnp.sum(jnp.where(comes, sources + rows - targets, 0), axis=0)
    return jnp.where(jnp.any(comes, axis=0)[:, None], sent[device, row], output)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def take_tokens(topk: int, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """rows[i] = tokens[positions[i] // topk]: [R, H] of [T, H], for R different positions t * k + j."""
    return tokens.at[positions // topk].get(mode="promise_in_bounds")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_choices(shape: tuple[int, int], rows: jax.Array, positions: jax.Array) -> jax.Array:
    """tokens[t] = the sum of rows[i] over the i with positions[i] // k = t, in float32: [T, H] for shape (T, k)."""
    num_tokens, topk = shape
    (sums,) = COMBINE.plain(Combine(rows, inverse_permutation(positions, num_tokens * topk)), topk=topk)
    return sums


# Each is the other's transpose. Derived by JAX they would scatter and add rows, which is slow on a GPU.
take_tokens.defvjp(
    lambda topk, tokens, positions: (take_tokens(topk, tokens, positions), (tokens.shape[0], positions)),
    lambda topk, residuals, dy: (sum_choices((residuals[0], topk), dy, residuals[1]), None),
)
sum_choices.defvjp(
    lambda shape, rows, positions: (sum_choices(shape, rows, positions), positions),
    lambda shape, positions, dy: (take_tokens(shape[1], dy, positions), None),
)
