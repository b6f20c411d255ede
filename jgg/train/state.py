"""The state of a model in training: its variables, their placement, and which arrays a step may reuse."""

import functools
import gc
import sys
from collections.abc import Collection, Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

type State = nnx.State[Hashable, Any]
type Split[Model: nnx.Module] = tuple[nnx.GraphDef[Model], State, State]
Path = tuple[Hashable, ...]


def split[Model: nnx.Module](
    model: Model, wrt: type[nnx.Variable[jax.Array]], changed: Collection[Path] = ()
) -> Split[Model]:
    """Splits a model into its graph, the variables that a step replaces, and the variables that it only reads.

    Args:
      wrt: type of the trained variables.
      changed: paths of other variables that the loss changes.
    """
    parts: Any = nnx.split(model, (wrt, lambda path, _: path in changed), ...)
    return parts


def name_of(path: Path) -> str:
    """The unique name of a variable, such as layers.attention.w_q."""
    return ".".join(_escaped(str(key)) for key in path)


def _escaped(key: str) -> str:
    """A key with its dots escaped, since dots separate the keys of a name."""
    return key.replace("%", "%25").replace(".", "%2E")


def unescaped(name: str) -> str:
    """A name with unescaped dots in its keys, as jgg 0.3 wrote it."""
    return name.replace("%2E", ".").replace("%25", "%")


def named(tree: object, prefix: str) -> dict[str, jax.Array]:
    """The arrays of a tree by name, such as optimizer.0.count."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = name_of(tuple(jax.tree_util.keystr((key,), simple=True) for key in path))
        found[f"{prefix}{name}".rstrip(".")] = leaf
    return found


def named_in(state: State) -> dict[str, jax.Array]:
    """The arrays of a model's state by name, such as model.layers.attention.w_q."""
    values = ((path, _value_of(leaf)) for path, leaf in nnx.to_flat_state(state))
    return {name: leaf for path, value in values for name, leaf in named(value, f"model.{name_of(path)}.").items()}


def set_named(model: nnx.Module, arrays: Mapping[str, jax.Array]) -> None:
    """Sets a model's arrays to the given ones, by the names of `named_in`; other arrays stay unchanged."""
    state = nnx.state(model)
    for path, variable in nnx.to_flat_state(state):
        value = _value_of(variable)
        own = named(value, f"model.{name_of(path)}.")
        if own.keys() & arrays.keys():
            leaves = [arrays.get(name, leaf) for name, leaf in own.items()]
            _set(state, path, variable, jax.tree.unflatten(jax.tree.structure(value), leaves))
    nnx.update(model, state)  # for arrays that are no variables


def form_of(tree: object) -> tuple[object, ...]:
    """What a compiled program depends on: the structure of a tree, and each array's shape, dtype and sharding."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)


def everywhere(tree: object) -> jax.NamedSharding | None:
    """The replicated sharding on the mesh that splits a tree's arrays; None without a mesh."""
    shardings = (leaf.sharding for leaf in jax.tree.leaves(tree))
    mesh = next((own.mesh for own in shardings if isinstance(own, jax.NamedSharding)), None)
    return None if mesh is None else jax.NamedSharding(mesh, jax.P())


def is_key(array: jax.Array) -> bool:
    """Whether an array holds random keys, as `jax.random.key` makes them."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def put(array: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Puts an array that each process has onto the devices of a sharding."""
    if is_key(array):
        return jax.random.wrap_key_data(put(jax.random.key_data(array), sharding), impl=jax.random.key_impl(array))
    if isinstance(array, jax.Array) and array.sharding.device_set == sharding.device_set:
        return jax.device_put(array, sharding)
    return jax.make_array_from_process_local_data(sharding, np.asarray(array))


def place(
    state: State,
    places: Mapping[Path, object] = MappingProxyType({}),
    default: jax.sharding.Sharding | None = None,
) -> dict[Path, object]:
    """Moves variables' values back to where they were, for example if one was set to a NumPy array.

    Args:
      state: a model's state, whose variables are changed.
      places: shardings, as an earlier call returned them.
      default: the sharding for values on one device, where others are on several.

    Returns: the shardings of all values.
    """

    def settled(value: object, sharding: jax.sharding.Sharding | None) -> jax.Array:
        value = value if isinstance(value, jax.Array) else jnp.asarray(value)
        if sharding is None and not isinstance(value.sharding, jax.NamedSharding):
            sharding = default
        return value if sharding in (None, value.sharding) else put(value, sharding)

    found: dict[Path, object] = {}
    for path, variable in nnx.to_flat_state(state):
        value, own = _value_of(variable), places.get(path)
        structures: tuple[Any, Any] = jax.tree.structure(value), jax.tree.structure(own)
        if structures[0] != structures[1]:
            own = jax.tree.map(lambda _: None, value)
        new = jax.tree.map(settled, value, own)
        if any(a is not b for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(new), strict=True)):
            _set(state, path, variable, new)
        found[path] = jax.tree.map(lambda a: a.sharding, new)
    return found


def own_arrays(state: State) -> None:
    """Copies the arrays of variables that something else refers to, such as a clone of the model.

    A step can then reuse the memory of all arrays. If only the variables refer to their arrays, nothing is copied.
    """
    flat = list(nnx.to_flat_state(state))
    if any(is_shared(variable) for _, variable in flat):
        gc.collect()  # what refers to them may be gone, but for a cycle
    for path, variable in flat:
        is_owned = _has_array(variable) and not is_shared(variable)
        value = _value_of(variable)
        if not is_owned:
            value = jax.tree.map(_copied, value)
        if not all(leaf.committed for leaf in jax.tree.leaves(value)):  # as those of each step are
            value = jax.tree.map(lambda a: jax.device_put(a, a.sharding), value)
        if value is not _value_of(variable):
            _set(state, path, variable, value)


def owned(values: list[Any]) -> Iterator[jax.Array]:
    """Yields the values' arrays, copying each one that occurs twice or that something else refers to.

    Empties the list, so that no array stays in memory longer than copying it takes.
    """
    values.reverse()
    while values:
        value = values.pop()
        if not isinstance(value, jax.Array):
            yield jnp.asarray(value)
        elif sys.getrefcount(value) > _REFERENCES_OF_LOCAL or value.ndim == 0:  # JAX may keep a scalar for others
            yield _copied(value)
        else:
            yield value


def _value_of(leaf: object) -> object:
    """The value of a variable, or an array that a module holds without a variable."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _set(state: State, path: Path, leaf: object, value: object) -> None:
    if isinstance(leaf, nnx.Variable):
        leaf.set_raw_value(value)
    else:
        part: State = functools.reduce(lambda part, key: cast(State, part[key]), path[:-1], state)
        part[path[-1]] = value


def _copied(array: jax.Array) -> jax.Array:
    """A copy, which one of several processes can make alone."""
    if array.is_fully_addressable:
        return array.copy()
    shards = [shard.data.copy() for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _references_of_local() -> int:
    """What `sys.getrefcount` returns for a value that only one local variable refers to."""
    value = object()
    return sys.getrefcount(value)


_REFERENCES_OF_LOCAL = _references_of_local()


def is_shared(leaf: object) -> bool:
    """Whether something other than a variable refers to its array."""
    return isinstance(leaf, nnx.Variable) and _has_array(leaf) and _references(leaf) > _references_of_one()


def _has_array(leaf: object) -> bool:
    """Whether this is a variable whose value is one array."""
    return isinstance(leaf, nnx.Variable) and isinstance(leaf.get_raw_value(), jax.Array)


def _references(variable: nnx.Variable[object]) -> int:
    return sys.getrefcount(variable.get_raw_value())


@functools.cache
def _references_of_one() -> int:
    """What `_references` returns if only the variable refers to its value."""
    variable = nnx.Variable(object())
    return _references(variable)
