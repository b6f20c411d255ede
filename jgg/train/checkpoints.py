"""Saves the training state with Orbax, in the background, and restores the last complete one."""

import contextlib
import errno
import os
import shutil
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.typing import DTypeLike

from jgg.core.arguments import as_path, check
from jgg.train.digests import digests_of
from jgg.train.locks import folder_lock
from jgg.train.reads import ended_reads
from jgg.train.state import is_key, unescaped

Arrays = Mapping[str, jax.Array]  # by their names

_AS_BYTES = "uint2", "uint4", "float8_e4m3"  # dtypes that TensorStore does not have
_OWN = 2**22  # bytes that Orbax needs for a checkpoint besides its arrays


class TrainingError(RuntimeError):
    """Training cannot continue; the message says why.

    Attributes:
      step: the last finished step if its checkpoint could not be written, else None.
    """

    step: int | None = None


class FrozenWeights:
    """The frozen weights that a model came with; checkpoints store only their digests.

    Weights that are set later are saved like everything else.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = {name: weakref.ref(array) for name, array in arrays.items()}
        self._digests: dict[str, int] = {}

    def digests_in(self, arrays: Arrays) -> dict[str, int]:
        """The digests of the arrays that are still the same."""
        same = [name for name, own in self._arrays.items() if name in arrays and own() is arrays[name]]
        self._digests |= digests_of({name: arrays[name] for name in same if name not in self._digests})
        return {name: self._digests[name] for name in same}


@contextlib.contextmanager
def opened(folder: str | os.PathLike[str] | None) -> Iterator[ocp.CheckpointManager | None]:
    """Yields Orbax's manager of a folder, which keeps the last two checkpoints; None without a folder.

    No other run can use the folder meanwhile. On exit it waits until everything is written.

    Raises:
      ValueError: the path is no folder.
      TrainingError: another run uses the folder, or a checkpoint cannot be written.
    """
    if folder is None:
        yield None
        return
    path = as_path("checkpoints", folder).absolute()
    check(path.is_dir() or not path.exists(), f"checkpoints must be a folder, got {path}, which is none.")
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
    with folder_lock(path) as other:
        if other is not None:
            raise TrainingError(f"checkpoints must be a folder that no other run uses, got {path}: {other}")
        with _writing(path):
            manager = ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(max_to_keep=2))
        try:
            yield manager
        finally:
            with _writing(path):
                manager.close()


def save(manager: ocp.CheckpointManager, step: int, arrays: Arrays, weights: FrozenWeights) -> None:
    """Starts writing a checkpoint of arrays, with only digests of frozen weights.

    Raises: TrainingError: this checkpoint or the previous one cannot be written.
    """
    frozen = weights.digests_in(arrays)
    saved = {name: _plain(array) for name, array in arrays.items() if name not in frozen}
    digests = {"saved": digests_of(saved), "frozen": frozen}
    about = {kind: {name: [_type_of(arrays[name]), own[name]] for name in own} for kind, own in digests.items()}
    # Orbax refers to what it gets until that is written, and a step takes arrays that nothing else refers to
    state = {name: _alias(array) for name, array in saved.items() if array.size}
    items = ocp.args.Composite(about=ocp.args.JsonSave(about), state=ocp.args.StandardSave(state))
    needed = _OWN + sum(array.nbytes for array in state.values())
    try:
        with _writing(manager.directory):
            free = shutil.disk_usage(manager.directory).free
            if needed > free:  # else each of Orbax's threads prints how it failed
                sizes = f"{needed / 2**20:,.1f} MiB are needed, {free / 2**20:,.1f} are free"
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {sizes}")
            manager.save(step, args=items)
    except TrainingError as error:
        error.step = step
        raise


@contextlib.contextmanager
def _writing(folder: os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of any type: TensorStore raises ValueError where a disk is full
        text = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise TrainingError(f"could not write checkpoints into {folder}: {text[:300]}") from error


def restored(manager: ocp.CheckpointManager, step: int, arrays: Arrays) -> dict[str, jax.Array]:
    """A checkpoint's arrays by name, split over devices like `arrays`.

    Args:
      manager: of a folder with a checkpoint of this step.
      arrays: all arrays of the model and the optimizer; `jax.ShapeDtypeStruct` descriptions are enough.

    Raises:
      TrainingError: the checkpoint is damaged or belongs to another model; the message says how to resume from the
        previous one, if there is one.
    """
    folder = manager.directory / str(step)
    try:
        check((folder / "about").exists(), "it has no digests: jgg 0.3 or another program wrote it")
        content: Any = manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))
        about = content.about
        saved, frozen = about["saved"], about["frozen"]
        types = {name: str(own) for name, (own, _) in (saved | frozen).items()}
        names = _names_in(types, arrays)
        arrays = {names[name]: array for name, array in arrays.items()}
        _check_same(types, {name: _type_of(array) for name, array in arrays.items()})
        found = _read(manager, step, {name: arrays[name] for name in saved})
        for name, digest in digests_of({name: _plain(array) for name, array in found.items()}).items():
            check(digest == saved[name][1], f"{name} has other values than were saved")
        for name, digest in digests_of({name: arrays[name] for name in frozen}).items():
            check(digest == frozen[name][1], f"{name}, which is not trained, has other values than in that run")
        return {name: found[own] for name, own in names.items() if own in found}
    except Exception as error:  # of any type, for files that are damaged
        text = " ".join(str(error).split())[:200]
        earlier = max((each for each in manager.all_steps() if each < step), default=None)
        advice = f"; if it is damaged, delete or move it and run again to go on from step {earlier}" if earlier else ""
        raise TrainingError(f"checkpoints must have steps of this model, got {folder}: {text}{advice}") from error


def _names_in(there: Collection[str], here: Collection[str]) -> dict[str, str]:
    """The name of each array in a checkpoint; earlier versions did not escape dots in keys."""
    before = {name: unescaped(name) for name in here}
    counts = Counter(before.values())
    return {
        name: old if name not in there and old in there and counts[old] == 1 else name for name, old in before.items()
    }


def _check_same(there: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raises ValueError unless arrays of a checkpoint have the names, shapes and dtypes of others."""
    for name in [*here, *there]:
        got, wanted = (types.get(name, "missing") for types in (there, here))
        check(got == wanted, f"{name} is {got}, and {wanted} here")


def _read(manager: ocp.CheckpointManager, step: int, arrays: Arrays) -> dict[str, jax.Array]:
    plain = {name: _plain(array) for name, array in arrays.items()}
    described = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for name, a in plain.items()}
    asked = {name: own for name, own in described.items() if own.size}
    found: dict[str, jax.Array] = {}
    if asked:
        with ended_reads():
            content: Any = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(asked)))
        found = content.state
    found |= {name: jnp.zeros(a.shape, a.dtype, device=a.sharding) for name, a in described.items() if not a.size}
    return {name: _like(array, found[name]) for name, array in arrays.items()}


def _plain(array: jax.Array) -> jax.Array:
    """An array or its description in a form that files can hold: random keys as their numbers, others as bytes."""
    if is_key(array):
        return jax.random.key_data(array)
    if array.dtype.name not in _AS_BYTES:
        return array
    if not isinstance(array, jax.Array):
        return jax.ShapeDtypeStruct(array.shape, jnp.uint8, sharding=array.sharding)
    return _converted(array, jnp.uint8)


def _like(array: jax.Array, plain: jax.Array) -> jax.Array:
    if is_key(array):
        return jax.random.wrap_key_data(plain, impl=jax.random.key_impl(array))
    return plain if plain.dtype == array.dtype else jax.device_put(_converted(plain, array.dtype), array.sharding)


def _converted(array: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Small integers by their values, floats by their bits."""
    is_float = any(jnp.issubdtype(each, jnp.floating) for each in (array.dtype, dtype))
    return jax.lax.bitcast_convert_type(array, dtype) if is_float else array.astype(dtype)


def _alias(array: jax.Array) -> jax.Array:
    """Another array in the same memory."""
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _type_of(array: jax.Array) -> str:
    return f"{array.dtype} {list(array.shape)}"
