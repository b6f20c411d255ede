"""Saves the state of training by Orbax, in the background, and restores the last one."""

import contextlib
import os
from typing import Any

import jax
import orbax.checkpoint as ocp

from jgg.core.arguments import as_path, check


class TrainingError(RuntimeError):
    """Training cannot go on, for the reason that the message names."""


def opened(folder: str | os.PathLike[str] | None) -> contextlib.AbstractContextManager[Any]:
    """Orbax's manager of a folder, which keeps the last two checkpoints; None without a folder.

    On leaving it waits until everything is written.

    Raises: ValueError: the path is no folder.
    """
    if folder is None:
        return contextlib.nullcontext()
    path = as_path("checkpoints", folder).absolute()
    check(path.is_dir() or not path.exists(), f"checkpoints must be a folder, got {path}, which is none.")
    return ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(max_to_keep=2))


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
    """Begins to write a checkpoint."""
    manager.save(step, args=ocp.args.StandardSave(state))
