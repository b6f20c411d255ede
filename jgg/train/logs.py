"""Writes what a run measures: JSON lines, and TensorBoard or Weights & Biases."""

import importlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Self

from jgg.core.arguments import as_path, check_instance
from jgg.core.choices import TRACKERS
from jgg.core.files import replace_text

type _Tracker = tuple[Callable[[int, dict[str, float]], object], Callable[[], object]]  # writes values; ends
_START, _LONGEST = b'{"step": ', 2**16  # of a line, in bytes


class Log:
    """The log of a run: a file with one JSON object per line, and optionally the same numbers in other tools.

        with jgg.train.Log("run.jsonl", trackers=["tensorboard"]) as log:
            for record in trainer.fit(batch_of, steps):
                log.write(record.step, {"loss": record.metrics["loss"].mean()})

    A run that resumes from a checkpoint continues the file, after removing the lines of its first step and all later
    steps, which an earlier run may have written. A new run therefore replaces the whole file. An existing file that is
    not a log, such as data, is left unchanged.

    Args:
      path: the file, in a folder that exists.
      trackers: "tensorboard" writes events into the folder `path` with the suffix .tensorboard, using tensorboardX.
        "wandb" starts a run of Weights & Biases, which reads its own environment variables: WANDB_PROJECT, and
        WANDB_RUN_ID with WANDB_RESUME=allow for a resumed run.
      settings: the options of the run, for trackers that show them.

    Raises:
      FileExistsError: the file exists and is not a log.
      ValueError: a tracker is none of these.
      ImportError: its package is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        trackers: Collection[str] = (),
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.path, self._settings = as_path("path", path), dict(settings or {})
        check_instance("trackers", trackers, Collection, f"a collection of {', '.join(TRACKERS)}")
        for name in trackers:
            if name not in TRACKERS:
                raise ValueError(f"trackers must be of {', '.join(TRACKERS)}, got {name!r}.")
        check_log(self.path)
        self._modules = {name: _imported(TRACKERS[name], name) for name in trackers}
        self._trackers: list[_Tracker] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Writes what was measured at a step; values of None are left out.

        Raises: OSError: the file cannot be written, or is no longer a log.
        """
        known = {name: float(value) for name, value in values.items() if value is not None}
        if self._trackers is None:
            self._begin(step)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | known) + "\n")
        for write, _ in self._trackers or ():
            write(step, known)

    def close(self) -> None:
        """Flushes the trackers."""
        for _, close in self._trackers or ():
            close()
        self._trackers = None

    def _begin(self, step: int) -> None:
        """Drops the lines of steps from this one on, and starts the trackers."""
        check_log(self.path)
        # a damaged line may have any bytes
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
        lines = text.splitlines(keepends=True)
        replace_text(self.path, "".join(line for line in lines if (_step_of(line) or step) < step))
        start = {"tensorboard": self._tensorboard, "wandb": self._wandb}
        self._trackers = [start[name](module, step) for name, module in self._modules.items()]

    def _tensorboard(self, module: ModuleType, step: int) -> _Tracker:
        writer = module.SummaryWriter(str(self.path.with_suffix(".tensorboard")), purge_step=step)

        def write(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return write, writer.close

    def _wandb(self, module: ModuleType, step: int) -> _Tracker:
        run = module.init(name=self.path.stem, config=self._settings)
        return lambda step, values: run.log(values, step=step), run.finish


def check_log(path: Path) -> None:
    """Raises FileExistsError, or another OSError, if a path exists and is not a log.

    Each line of a log has a step and numbers. Some lines may be cut off, for example where a process was killed while
    writing, but not all of them.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise FileExistsError(f"{path} must be a file, got a {'folder' if path.is_dir() else 'pipe or a device'}")
    wholes = 0
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), 1):
            if not _is_of_log(line):
                got = line[:80].decode(errors="replace").strip()
                raise FileExistsError(f"{path}:{number} must be a line of a log, got {got}: choose another name")
            wholes += _step_of(line.decode(errors="replace")) is not None
        if file.tell() and not wholes:
            raise FileExistsError(f"{path} must be a log, got no line that is whole: choose another name")


def _is_of_log(line: bytes) -> bool:
    if not line.startswith(_START):
        return False
    try:
        return all(isinstance(value, int | float) for value in json.loads(line).values())
    except ValueError:
        return b'": "' not in line  # cut off


def _imported(package: str, tracker: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"the tracker {tracker} needs a package: pip install {package}") from error


def _step_of(line: str) -> int | None:
    """The step of a line; None if the line is damaged, for example because a process was killed while writing it."""
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None
