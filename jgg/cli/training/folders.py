"""The folders of a run: whether they can be written, and whether a checkpoint is of the same run."""

import datetime
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

import jgg
from jgg.cli.errors import UsageError, writes
from jgg.cli.files import Target, check_files, check_new, check_writable, is_same
from jgg.train import runs
from jgg.train.locks import LOCK
from jgg.train.logs import check_log

_NOTED, ADAPTERS = "run.toml", "adapters.sha256"  # next to the checkpoints: options, digests of what was written
_KEYS = "steps", "data"  # what each run notes besides its options
_DIGESTS = re.compile(rb"([0-9a-f]{64}\n)*[0-9a-f]{0,64}")  # the last may be cut off


def check(args, check_output: Callable[[str, Path], None] = check_new) -> None:
    """Raises UsageError if the run would lose a file or could not write one.

    Args:
      args: the options.
      check_output: what looks at --output; by default it must be new or empty.
    """
    output, checkpoints = args.output, args.checkpoints
    log, notes, events = (beside(output, ending) for ending in (".jsonl", ".toml", ".tensorboard"))
    own = functools.partial(Target, "--output", output)
    is_whole = check_output is check_new
    targets = [
        own("a folder", output, functools.partial(check_output, "--output", output), is_whole=is_whole),
        own("its log", log, functools.partial(check_log, log)),
        own("the file of its options", notes, functools.partial(runs.check_notes, notes, *_KEYS), goes_on=True),
    ]
    if "tensorboard" in (args.log_to or ()):
        check_events = functools.partial(check_writable, "--output", events)
        targets.append(own("its folder for TensorBoard", events, check_events, is_whole=False))
    if checkpoints is not None:
        check_own = functools.partial(_check_checkpoints, checkpoints)
        targets.append(Target("--checkpoints", checkpoints, "a folder", checkpoints, check_own))
    check_files(args.reads(), targets)


def _check_checkpoints(folder: Path) -> None:
    """Raises UsageError, ValueError or OSError unless a run's checkpoints can be in a folder."""
    check_writable("--checkpoints", folder)
    runs.check_notes(folder / _NOTED, *_KEYS)
    has_notes = (folder / _NOTED).exists()
    if has_steps(folder) and not has_notes:
        raise UsageError(f"--checkpoints must be new or have {_NOTED} next to its steps, got {folder}")
    others = sorted({each.name for each in folder.iterdir()} - {LOCK}) if folder.is_dir() and not has_notes else []
    if others:
        raise UsageError(f"--checkpoints must be new, empty or of a run, got {folder}, which has {others[0]}")
    if (folder / LOCK).is_symlink():
        raise UsageError(f"--checkpoints must be a folder whose {LOCK} is no link, got {folder}")
    digests = folder / ADAPTERS
    if digests.is_symlink() or (digests.exists() and not _DIGESTS.fullmatch(digests.read_bytes())):
        raise UsageError(f"--checkpoints must be a folder without {ADAPTERS} of another program, got {folder}")


def beside(output: Path, ending: str) -> Path:
    """The name of a file next to the output's folder."""
    output = output.absolute()
    return output.with_name(output.name + ending)


def first_day(args) -> datetime.date:
    """The day on which the run of the checkpoints began, if there are any, or else today."""
    noted = runs.noted_in(args.checkpoints / _NOTED) if _has_run(args.checkpoints) else {}
    try:
        return datetime.date.fromisoformat(str(noted.get("date")))
    except ValueError:
        return datetime.date.today()


def _has_run(checkpoints: Path | None) -> bool:
    """Whether a folder has checkpoints, and notes of their run."""
    return checkpoints is not None and (checkpoints / _NOTED).exists() and has_steps(checkpoints)


def has_steps(folder: Path) -> bool:
    """Whether a folder has checkpoints."""
    return folder.is_dir() and any(each.name.isdecimal() for each in folder.iterdir())


def noted_of(steps: int, digest: str, date: datetime.date) -> dict[str, object]:
    """What is noted about a run in addition to its options: its steps, the digest of its data, and `first_day`."""
    return {"steps": steps, "data": digest, "date": date.isoformat()}


def check_same(args, noted: Mapping[str, object]) -> None:
    """Raises UsageError if the checkpoints, or the file of --config, are of a run with other options; it names them."""
    settings = args.noted()
    # its steps and the content of its data are noted
    free = {name for name, each in args.declared().items() if each.may_change}
    if _has_run(args.checkpoints):
        path = args.checkpoints / _NOTED
        found = runs.changes(path, settings, noted, free)
        if found:
            raise UsageError(
                f"--checkpoints {args.checkpoints} has a run with other options: {'; '.join(found)}: take another "
                f"folder, or change {path} if the run is the same"
            )
    for read in _places(args):
        if _is_config(args, read):
            found = runs.changes(read, settings, runs.noted_in(read), free)
            if found:
                what = f"{read}, where a run with other options would note them: {'; '.join(found)}"
                raise UsageError(f"--config must be another file, got {what}: take a copy, or another --output")


def note(args, noted: Mapping[str, object]) -> None:
    """Notes a run next to its checkpoints and next to --output, once no other run can use its checkpoints.

    The file that --config reads stays unchanged, and so does a file with the same options.

    Raises: UsageError: see `check_same`. SystemExit: a file cannot be written.
    """
    check_same(args, noted)
    if jax.process_index() > 0:
        return
    if args.checkpoints is not None and not _has_run(args.checkpoints):
        (args.checkpoints / ADAPTERS).unlink(missing_ok=True)  # those of an earlier run
    settings = args.noted()
    for place in _places(args):
        if _is_config(args, place) or (place.exists() and not runs.changes(place, settings, noted)):
            continue  # comments in it stay
        with writes(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            runs.note_run(
                place, settings, noted, f"jgg {args.command} --config FILE reads this; by jgg {jgg.__version__}"
            )


def _places(args) -> list[Path]:
    """The files in which a run is noted."""
    places = [beside(args.output, ".toml")]
    return places if args.checkpoints is None else [*places, args.checkpoints / _NOTED]


def _is_config(args, place: Path) -> bool:
    return args.config is not None and is_same(place, Path(args.config))
