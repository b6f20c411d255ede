"""How a mesh splits a whole model: where parameters are, how layers gather them, and how sequences are split."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jgg.core.arguments import check, check_instance
from jgg.experts.sharding import MoESharding

P = jax.P


def checked_sharding(sharding: MoESharding | None) -> MoESharding | None:
    """The argument `sharding` of a model; raises unless it is None or has a mesh that a model can be split over."""
    if sharding is not None:
        check_instance("sharding", sharding, MoESharding, "a jgg.sharding.MoESharding or None")
        kinds = sharding.mesh.axis_types
        check(
            set(kinds) == {jax.sharding.AxisType.Auto},
            f"sharding.mesh must have Auto axes, axis_types=(jax.sharding.AxisType.Auto,) * {len(kinds)} of "
            f"jax.make_mesh, for a model, got {kinds}.",
        )
    return sharding


def spec_of(path: tuple[str, ...], shape: tuple[int, ...], sharding: MoESharding) -> P:
    """The PartitionSpec of a parameter of one layer, or of a parameter outside the layers.

    Experts are split as in `jgg.nnx.MoE`. With an fsdp axis, everything else is split over the devices along that axis
    and along the expert axis, whose sequences differ. If these devices divide no axis of a matrix, it is split over
    those along fsdp alone. The first axis that the devices divide is split, so that what they gather is in order.
    Vectors, and matrices without such an axis, are whole on each device.
    """
    experts = sharding.weight_specs("ekn")
    if "moe" in path and path[-1] in experts:
        return experts[path[-1]]
    for axes in _dense_axes(sharding) if len(shape) > 1 else ():
        devices = sharding.size(*axes)
        axis = next((number for number, size in enumerate(shape) if size % devices == 0), None)
        if axis is not None:
            return P(*[None] * axis, axes)
    return P()


def gathers(sharding: MoESharding | None) -> bool:
    """Whether devices store parts of the matrices outside the experts, and gather them."""
    return sharding is not None and sharding.fsdp is not None and sharding.size(sharding.fsdp, sharding.expert) > 1


def place(
    path: tuple[str, ...], shape: tuple[int, ...], sharding: MoESharding, *, is_stacked: bool = False
) -> jax.NamedSharding:
    """Where a parameter of this shape is, which has the layers as its first axis if it is stacked."""
    spec = spec_of(path, shape[1:], sharding) if is_stacked else spec_of(path, shape, sharding)
    return sharding.named(P(None, *spec) if is_stacked else spec)


def put(array: np.typing.ArrayLike, place: jax.NamedSharding) -> jax.Array:
    """An array that each process has whole in its places on the devices of all processes."""
    own = np.asarray(array)
    return jax.make_array_from_callback(own.shape, place, own.__getitem__)


def on_host(array: jax.Array) -> np.ndarray:
    """A whole array; other processes may hold parts of it, so all processes must call this together."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def split[State](state: State, sharding: MoESharding | None) -> State:
    """Constrains stacked parameters to their places, in a traced function."""
    if sharding is None:
        return state

    def constrained(path: tuple[str, ...], array: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, place(path, array.shape, sharding, is_stacked=True))

    return _map_arrays(constrained, state)


def split_init(
    init: Initializer,
    path: tuple[str, ...],
    shape: tuple[int, ...],
    sharding: MoESharding | None,
    *,
    is_stacked: bool = False,
) -> Initializer:
    """An initializer that creates a parameter in its place."""
    if sharding is None:
        return init
    return jax.jit(init, static_argnums=(1, 2), out_shardings=place(path, shape, sharding, is_stacked=is_stacked))


def gathered[State](state: State, sharding: MoESharding | None, dtype: DTypeLike) -> State:
    """The parameters of one layer, with all split ones gathered except for the experts'.

    Before that, matrices are rounded to `dtype`, the dtype of all products but the router's.
    """
    if sharding is None or not gathers(sharding):
        return state
    experts = sharding.weight_specs("ekn")

    def whole(path: tuple[str, ...], array: jax.Array) -> jax.Array:
        spec = spec_of(path, array.shape, sharding)
        if spec == P() or ("moe" in path and path[-1] in experts):
            return array
        return _gather(array if path[-1].startswith("w_router") else array.astype(dtype), sharding.named(spec))

    return _map_arrays(whole, state)


def split_batch(array: jax.Array, sharding: MoESharding | None, axis: int = 0) -> jax.Array:
    """Constrains an array to be split over devices along the axis of its sequences."""
    if sharding is None:
        return array
    return jax.lax.with_sharding_constraint(array, sharding.named(P(*[None] * axis, *sharding.token_spec)))


def check_batch(tokens: jax.Array, sharding: MoESharding | None) -> None:
    """Raises unless the mesh can split tokens [B, S] along B."""
    if sharding is not None:
        sharding.check_divides("tokens", tokens.shape, sharding.token_spec)


def _dense_axes(sharding: MoESharding) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that matrices outside the experts may be split over, the first choice first."""
    if sharding.fsdp is None:
        return ()
    alone = (sharding.fsdp,)
    return (alone,) if sharding.expert is None else ((sharding.fsdp, sharding.expert), alone)


def _gather(array: jax.Array, stored: jax.NamedSharding) -> jax.Array:
    """The array, whole on each device; its gradient is summed there, and then split like `stored`."""
    array = jax.lax.with_sharding_constraint(array, stored)
    return jax.lax.with_sharding_constraint(array, jax.NamedSharding(stored.mesh, P()))


def _map_arrays[State](function: Callable[[tuple[str, ...], jax.Array], jax.Array], state: State) -> State:
    """Applies a function to the names that lead to each array, and to the array."""

    def apply(path: tuple[Any, ...], array: jax.Array) -> jax.Array:
        return function(tuple(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)), array)

    mapped: State = jax.tree_util.tree_map_with_path(apply, state)
    return mapped
