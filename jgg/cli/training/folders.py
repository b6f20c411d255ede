"""The folders of a run: whether they can be written, and whether a checkpoint is of the same run."""

import datetime
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

import jgg
from jgg.cli.options import UsageError
from jgg.core.files import is_new_or_empty
from jgg.train import runs

# what a run that goes on from a checkpoint may change; its steps and the content of its data are noted
FREE = frozenset(("data", "eval_data", "skip_unmarked", "eval_every", "log_every", "log_to"))
FREE |= frozenset(("steps", "epochs", "output", "checkpoints", "save_every", "remat"))
FREE |= frozenset(("fsdp", "fsdp_splits", "expert", "exchange"))
_NOTED = "run.toml"  # beside the checkpoints
_NO_OPTIONS = {"command", "parser", "config", "quiet", "coordinator", "processes", "process"}


def check_writable(option: str, folder: Path, others: Iterable[Path]) -> None:
    """Raises UsageError unless files can be written into a folder, which may be missing, apart from other folders."""
    nearest = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(each))
    reason = None if nearest.is_dir() else f"{nearest} is no folder"
    if reason is None:
        try:  # what the system lets a program write, it says only when it is tried
            with tempfile.TemporaryDirectory(dir=nearest) as trial:
                (Path(trial) / folder.absolute().relative_to(nearest)).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{nearest} does not take it: {error.strerror}"
    if reason is not None:
        raise UsageError(f"{option} must be a folder to write into, got {folder}: {reason}")
    if folder.resolve() in [other.resolve() for other in others]:
        raise UsageError(f"{option} must be a folder of its own, got {folder}")


def check_new(option: str, folder: Path) -> None:
    """Raises UsageError unless a folder is new or empty, as a whole model's must be."""
    if not is_new_or_empty(folder):
        raise UsageError(f"{option} must be new or an empty folder, got {folder}")


def check_adapter_output(args) -> None:
    """Raises UsageError where --output has a model, or the adapter of another run than that of --checkpoints."""
    if (args.output / "config.json").exists():
        raise UsageError(f"--output must be a folder without a model, got {args.output}, which has config.json")
    if (args.output / "adapter_config.json").exists() and not _has_run(args.checkpoints):
        got = f"{args.output}, which has an adapter"
        raise UsageError(f"--output must be a folder without an adapter, unless a run goes on, got {got}")


def beside(output: Path, ending: str) -> Path:
    """The name of a file beside the output's folder."""
    output = output.absolute()
    return output.with_name(output.name + ending)


def settings_of(args) -> dict[str, Any]:
    """The options of a run, with full paths."""
    values = {name: value for name, value in vars(args).items() if name not in _NO_OPTIONS}
    if os.path.exists(values["model"]):  # else it is a name on the Hub
        values["model"] = Path(values["model"]).resolve()
    for name in ("data", "eval_data", "output", "checkpoints", "tokenizer", "adapter", "include_path"):
        value = values.get(name)
        if value is not None:
            values[name] = [path.resolve() for path in value] if isinstance(value, list) else Path(value).resolve()
    return values


def first_day(args) -> datetime.date:
    """The day on which the run of the checkpoints began, if there are any, or else today."""
    noted = runs.noted_in(args.checkpoints / _NOTED) if _has_run(args.checkpoints) else {}
    try:
        return datetime.date.fromisoformat(str(noted.get("date")))
    except ValueError:
        return datetime.date.today()


def _has_run(checkpoints: Path | None) -> bool:
    """Whether a folder has checkpoints, and notes of their run."""
    if checkpoints is None or not (checkpoints / _NOTED).exists():
        return False
    return any(each.name.isdecimal() for each in checkpoints.iterdir())


def note(args, steps: int, digest: str, date: datetime.date) -> None:
    """Checks that it is the run of the checkpoints, if there are any; then notes it there and beside --output.

    Args:
      args: the options.
      steps: number of the run's steps.
      digest: of the data.
      date: what `first_day` was when the data were read.

    Raises: UsageError: the checkpoints are of a run with other options, which are named.
    """
    settings = settings_of(args)
    noted = {"steps": steps, "data": digest, "date": date.isoformat()}
    places = [beside(args.output, ".toml")]
    if args.checkpoints is not None:
        path = args.checkpoints / _NOTED
        if _has_run(args.checkpoints):
            found = runs.changes(path, settings, noted, FREE)
            if found:
                raise UsageError(
                    f"--checkpoints {args.checkpoints} has a run with other options: {'; '.join(found)}: take another "
                    f"folder, or change {path} if the run is the same"
                )
        places.append(path)
    for place in places if jax.process_index() == 0 else ():
        place.parent.mkdir(parents=True, exist_ok=True)
        runs.note_run(place, settings, noted, f"jgg {args.command} --config FILE reads this; by jgg {jgg.__version__}")
