"""Sends rows to the devices that hold their experts, and results back, inside `jax.shard_map`, in two ways.

Both functions take the device's own tokens and their choices, and return an Arrival: an Exchange, which sends rows
there and adds up what comes back, and the rows that arrive, with their Routing among this device's experts. Both ways
give the same result. Every device's buffer has room for R rows, `Placement.capacity`. Rows that find no room are
counted and add nothing; they belong to the device's last experts.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jgg.core.choices import EXCHANGES
from jgg.core.quantized import as_bits, from_bits
from jgg.core.schedule import group_bounds, group_of_rows, guarded, inverse_permutation
from jgg.experts.moves import Moves, Placement, Plan, Way, move, plan_moves
from jgg.experts.router.routing import Routing, compute_order
from jgg.experts.sums import sum_scatter
from jgg.launching.choice import How
from jgg.products.combine import COMBINE, Combine


class Exchange(Protocol):
    """Sends rows between a device's own tokens [T, H] and the MLPs of the experts; a pytree.

    The two functions are linear, and each is the other's transpose.
    """

    @property
    def num_devices(self) -> int:
        """The number of devices between which rows are sent."""
        ...

    def there(self, rows: jax.Array) -> jax.Array:
        """Sends this device's rows [T, N], of any dtype; returns the rows of all devices that arrive here."""
        ...

    def back(self, rows: jax.Array) -> jax.Array:
        """Sends back rows in the order of `there`'s result; returns the sums [T, N] for this device's tokens."""
        ...


class Arrival(NamedTuple):
    """What arrives at a device.

    Attributes:
      exchange: how the rows were sent.
      rows: `exchange.there(x)`.
      routing: the Routing of the rows that arrive, among this device's experts.
      overflow: int32, how many rows of all tokens found no room on this device.
    """

    exchange: Exchange
    rows: jax.Array
    routing: Routing
    overflow: jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["axis"])
@dataclasses.dataclass(frozen=True)
class AllGather:
    """Every device gets all tokens, computes the rows of its experts, and a reduce-scatter adds up the results.

    Whatever the routing, (p - 1) * T rows move to each device and as many back.
    """

    axis: str

    @property
    def num_devices(self) -> int:
        """p, the number of devices along the axis."""
        return jax.lax.axis_size(self.axis)

    def there(self, rows: jax.Array) -> jax.Array:
        """The tokens [p * T, N] of all devices."""
        return from_bits(jax.lax.all_gather(as_bits(rows), self.axis, tiled=True), rows.dtype)

    def back(self, rows: jax.Array) -> jax.Array:
        """The sums of the devices' results [p * T, N] for this device's tokens."""
        return sum_scatter(rows, self.axis)


def by_all_gather(
    x: jax.Array, topk_weights: jax.Array, topk_indices: jax.Array, placement: Placement, how: How
) -> Arrival:
    """The Arrival of all tokens.

    Args:
      x: [T, H], this device's tokens.
      topk_weights, topk_indices: [T, k].
      how: how rows are sorted and copied.
    """
    exchange = AllGather(placement.axis)
    # No barrier makes choices follow the tokens, though that would overlap the router with the tokens' gather: with
    # one, XLA of jaxlib 0.11.2 fails to compile a scan of layers on four devices.
    tokens = exchange.there(x)
    weights, experts = exchange.there(topk_weights), exchange.there(topk_indices)
    return Arrival(exchange, tokens, *_own_routing(weights, experts, placement, how))


def _own_routing(weights: jax.Array, experts: jax.Array, placement: Placement, how: How) -> tuple[Routing, jax.Array]:
    """The Routing of tokens [T', H] among this device's experts, and how many rows found no room.

    Args:
      weights, experts: [T', k], choices among the experts of all devices.
    """
    experts -= jax.lax.axis_index(placement.axis) * placement.num_experts  # others' experts lie outside the groups
    group_sizes, gather_indices = compute_order(experts, placement.num_experts, how)
    overflow = jnp.maximum(jnp.sum(group_sizes, dtype=jnp.int32) - placement.capacity, 0)
    return Routing(weights, experts, group_sizes, gather_indices[: placement.capacity]), overflow


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["moves_there", "moves_back", "positions"],
    meta_fields=["way", "num_tokens", "topk"],
)
@dataclasses.dataclass(frozen=True)
class RaggedAllToAll:
    """Copies of tokens go to other devices, and their results come back.

    Attributes:
      moves_there, moves_back, positions: as in the Plan.
      num_tokens, topk: T, and the number of copies that a token may have.
    """

    moves_there: Moves
    moves_back: Moves
    positions: jax.Array
    way: Way
    num_tokens: int
    topk: int

    @classmethod
    def of(cls, plan: Plan, way: Way, num_tokens: int, topk: int) -> "RaggedAllToAll":
        """The exchange that follows a plan."""
        return cls(plan.there, plan.back, plan.positions, way, num_tokens, topk)

    @property
    def num_devices(self) -> int:
        """p, the number of devices along the axis."""
        return jax.lax.axis_size(self.way.axis)

    def there(self, rows: jax.Array) -> jax.Array:
        """Sends this device's tokens [T, N]; returns the copies of all devices' tokens that arrive here."""
        taken = take_tokens(self.way.how, (self.num_tokens, self.topk), as_bits(rows), self.positions)
        return from_bits(self.moved(taken), rows.dtype)

    def moved(self, rows: jax.Array) -> jax.Array:
        """Sends this device's rows [M, N], in sending order; returns the rows of all devices that arrive here."""
        return move(self.way, rows, self.moves_there, self.moves_back)

    def back(self, rows: jax.Array) -> jax.Array:
        """The sums of the results by token, [T, N]."""
        rows = move(self.way.back, rows, self.moves_back, self.moves_there)
        return sum_choices(self.way.how, (self.num_tokens, self.topk), rows, self.positions)


def by_ragged_all_to_all(
    x: jax.Array, topk_weights: jax.Array, topk_indices: jax.Array, placement: Placement, how: How
) -> Arrival:
    """The Arrival of what this device's experts need; takes the arguments of `by_all_gather`.

    If devices have room for all tokens, which they do if there are fewer than k devices, a token goes once to each
    device that has experts of its choice; otherwise it goes once per choice.
    """
    has_room = jax.lax.axis_size(placement.axis) * len(x) <= placement.capacity
    return (_once_to_each_device if has_room else _once_for_each_choice)(x, topk_weights, topk_indices, placement, how)


def _once_to_each_device(
    x: jax.Array, topk_weights: jax.Array, topk_indices: jax.Array, placement: Placement, how: How
) -> Arrival:
    """Tokens arrive in the order of the devices that sent them. All devices get all choices.

    At most (p - 1) * T rows go from each device, and as many come back.
    """
    axis, num_tokens, num_devices = placement.axis, len(x), jax.lax.axis_size(placement.axis)
    weights, experts = (jax.lax.all_gather(array, axis, tiled=True) for array in (topk_weights, topk_indices))
    devices, here = devices_of(experts, placement.num_experts, num_devices), jax.lax.axis_index(axis)
    goes = (devices < num_devices).reshape(num_devices, num_tokens, num_devices)
    counts = jnp.sum(goes, axis=1, dtype=jnp.int32)
    own = jax.lax.dynamic_slice_in_dim(devices, here * num_tokens, num_tokens)
    plan = plan_moves(*compute_order(own, num_devices, how), counts[:, :, None], Placement(axis, 1, len(devices)))
    # 0 for a token that comes here
    num_arrived, order = compute_order(jax.lax.dynamic_slice_in_dim(devices, here, 1, axis=1) - here, 1, how)
    arrived = jnp.where(jnp.arange(len(order), dtype=jnp.int32) < num_arrived, order, -1)
    plan, arrived = checkpoint_name((plan, arrived), "jgg_routing")

    exchange = RaggedAllToAll.of(plan, Way(axis, len(plan.positions), len(devices), how), num_tokens, num_devices)
    weights = take_tokens(how, (len(arrived), 1), weights, arrived)
    experts = experts.at[guarded(arrived, len(arrived))].get(mode="fill", fill_value=-1)
    return Arrival(exchange, exchange.there(x), *_own_routing(weights, experts, placement, how))


def devices_of(experts: jax.Array, num_experts: int, num_devices: int) -> jax.Array:
    """The devices that have a token's experts, int32 [T, p] for experts [T, k]: d at place d, or p if d has none.

    Two devices with two experts each: the choices (1, 0) and (3, 1) give (0, 2) and (0, 1).
    """
    devices = jnp.arange(num_devices, dtype=jnp.int32)
    has = jnp.any(experts[:, :, None] // num_experts == devices[None, None], axis=1)
    return jnp.where(has, devices[None], num_devices)


def _once_for_each_choice(
    x: jax.Array, topk_weights: jax.Array, topk_indices: jax.Array, placement: Placement, how: How
) -> Arrival:
    """Rows arrive in expert order. On average k * T * (p - 1) / p go from each device, and as many come back."""
    num_tokens, topk = topk_indices.shape
    num_devices = jax.lax.axis_size(placement.axis)
    group_sizes, gather_indices = compute_order(topk_indices, num_devices * placement.num_experts, how)
    counts = jax.lax.all_gather(group_sizes, placement.axis).reshape(num_devices, num_devices, placement.num_experts)
    plan = checkpoint_name(plan_moves(group_sizes, gather_indices, counts, placement), "jgg_routing")
    way = Way(placement.axis, len(plan.positions), placement.capacity, how)
    exchange = RaggedAllToAll.of(plan, way, num_tokens, topk)

    weights = topk_weights.reshape(-1).at[guarded(plan.positions, topk_indices.size)].get(mode="fill", fill_value=0)
    weights = exchange.moved(weights[:, None])
    experts = group_of_rows(group_bounds(plan.group_sizes, placement.capacity), placement.capacity)
    routing = Routing(weights, experts[:, None], plan.group_sizes, None)
    return Arrival(exchange, exchange.there(x), routing, plan.overflow)


BY_NAME: dict[str, Callable[..., Arrival]] = dict(zip(EXCHANGES, (by_all_gather, by_ragged_all_to_all), strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def take_tokens(how: How, shape: tuple[int, int], tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """rows[i] = tokens[positions[i] // k], zero for -1: [M, H] of [T, H], for shape (T, k) and different positions."""
    return COMBINE(how, Combine(tokens, positions // shape[1]), topk=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sum_choices(how: How, shape: tuple[int, int], rows: jax.Array, positions: jax.Array) -> jax.Array:
    """tokens[t] = the sum of rows[i] over the i with positions[i] // k = t, in float32: [T, H] for shape (T, k)."""
    num_tokens, topk = shape
    return COMBINE(how, Combine(rows, inverse_permutation(positions, num_tokens * topk)), topk=topk)


# Each is the other's transpose. Derived by JAX they would scatter and add rows, which is slow on a GPU.
take_tokens.defvjp(
    lambda how, shape, tokens, positions: (take_tokens(how, shape, tokens, positions), positions),
    lambda how, shape, positions, dy: (sum_choices(how, shape, dy, positions), None),
)
sum_choices.defvjp(
    lambda how, shape, rows, positions: (sum_choices(how, shape, rows, positions), positions),
    lambda how, shape, positions, dy: (take_tokens(how, shape, dy, positions), None),
)
