"""Saves the state of training by Orbax, in the background, and restores the last one."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from jgg.core.arguments import as_path, check


_OWN = 2**22  # bytes that Orbax needs for a checkpoint besides its arrays


class TrainingError(RuntimeError):
    """Training cannot go on, for the reason that the message names.

    Attributes:
      step: the last step that was made, where its checkpoint could not be written; else None.
    """

    step: int | None = None


@contextlib.contextmanager
def opened(folder: str | os.PathLike[str] | None) -> Iterator[Any]:
    """Orbax's manager of a folder, which keeps the last two checkpoints; None without a folder.

    On leaving it waits until everything is written.

    Raises: ValueError: the path is no folder. TrainingError: a checkpoint cannot be written.
    """
    if folder is None:
        yield None
        return
    path = as_path("checkpoints", folder).absolute()
    check(path.is_dir() or not path.exists(), f"checkpoints must be a folder, got {path}, which is none.")
    with _writing(path):
        manager = ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(max_to_keep=2))
    try:
        yield manager
    finally:
        with _writing(path):
            manager.close()


def restored(manager: Any, state: Any) -> tuple[int, Any]:
    """The step of the last checkpoint and its state, split over devices as `state` is; 0 and `state` if there is none.

    Raises: TrainingError: the checkpoint is damaged or of another model; the message says how to go on from the one
      before it, if there is one.
    """
    if manager is None or (step := manager.latest_step()) is None:
        return 0, state
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
    try:
        return step, manager.restore(step, args=ocp.args.StandardRestore(abstract))
    except Exception as error:  # of any type, for files that are damaged or of another model
        folder, text = manager.directory / str(step), " ".join(str(error).split())[:200]
        earlier = max((each for each in manager.all_steps() if each < step), default=None)
        advice = f"; if it is damaged, delete or move it and run again to go on from step {earlier}" if earlier else ""
        raise TrainingError(f"checkpoints must have steps of this model, got {folder}: {text}{advice}") from error


def save(manager: Any, step: int, state: Any) -> None:
    """Begins to write a checkpoint.

    Raises: TrainingError: it, or the one before it, cannot be written.
    """
    needed = _OWN + sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    try:
        with _writing(manager.directory):
            free = shutil.disk_usage(manager.directory).free
            if needed > free:  # else each of Orbax's threads prints how it failed
                sizes = f"{needed / 2**20:,.1f} MiB are needed, {free / 2**20:,.1f} are free"
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {sizes}")
            manager.save(step, args=ocp.args.StandardSave(state))
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
