"""Writes what a run learned where nothing is lost: next to --output, if something else is there by then."""

import hashlib
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

import jgg.models
from jgg.cli.errors import UsageError, writes
from jgg.cli.files import check_writable
from jgg.cli.training.data import note_ends
from jgg.cli.training.folders import ADAPTERS, has_steps
from jgg.core.files import fill
from jgg.hf.adapters import SETTINGS, TENSORS

_CONFIG = "config.json"
_OF_ADAPTER = SETTINGS, TENSORS, "generation_config.json"


def write_model(model: jgg.models.Decoder, folder: Path, end_tokens: Sequence[int]) -> Path:
    """Writes a whole model, and the tokens that end a text; returns the folder, see `_written`."""

    def write(place: Path) -> None:
        jgg.models.save(model, place)
        _note_ends(place, end_tokens)

    return _written(folder, _CONFIG, write)


class AdapterOutput:
    """The folder of an adapter, in which an adapter of the same run alone is replaced.

    Args:
      folder: the folder.
      checkpoints: the run's --checkpoints, where digests of its adapters are noted; None for a run that cannot resume.
    """

    def __init__(self, folder: Path, checkpoints: Path | None = None) -> None:
        self.folder = folder
        self._noted = None if checkpoints is None else checkpoints / ADAPTERS
        self._own: set[str] = set()
        if self._noted is not None and has_steps(self._noted.parent) and self._noted.exists():
            self._own.update(self._noted.read_text(encoding="utf-8", errors="replace").split())

    def check(self, option: str, folder: Path) -> None:
        """Raises UsageError unless an adapter can be written into the folder, which the option names."""
        check_writable(option, folder)
        if (folder / _CONFIG).exists():
            raise UsageError(f"{option} must be a folder without a model, got {folder}, which has {_CONFIG}")
        if not self._may_replace(folder):
            found = "an adapter" if (folder / SETTINGS).exists() else _files_of(folder)[0]
            got = f"{folder}, which has {found}"
            raise UsageError(f"{option} must be a folder without an adapter, unless a run goes on, got {got}")

    def write(self, model: jgg.models.Decoder, end_tokens: Sequence[int] = ()) -> Path:
        """Writes the adapter of a model, and the tokens that end a text; returns the folder, see `_written`."""

        def write(place: Path) -> None:
            jgg.models.save_adapter(model, place)
            _note_ends(place, end_tokens)
            if jax.process_index() == 0:
                self._note(_digest_of(place))

        self.folder = _written(self.folder, SETTINGS, write, self._may_replace)
        return self.folder

    def _may_replace(self, folder: Path) -> bool:
        found = _files_of(folder)
        return not found or (_CONFIG not in found and _digest_of(folder) in self._own)

    def _note(self, digest: str) -> None:
        self._own.add(digest)
        if self._noted is not None:
            with self._noted.open("a", encoding="utf-8") as file:
                file.write(f"{digest}\n")


def _files_of(folder: Path) -> list[str]:
    """The files in a folder that an adapter would replace, or that make it the folder of a model."""
    return [name for name in (*_OF_ADAPTER, _CONFIG) if (folder / name).exists()]


def _digest_of(folder: Path) -> str:
    """The SHA-256 of the files of an adapter's folder, in hexadecimal digits."""
    digest = hashlib.sha256()
    for name in _files_of(folder):
        digest.update(name.encode())
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _note_ends(folder: Path, end_tokens: Sequence[int]) -> None:
    if jax.process_index() == 0:
        note_ends(folder, list(end_tokens))


def _written(
    folder: Path,
    last: str,
    write: Callable[[Path], None],
    may_replace: Callable[[Path], bool] = lambda folder: False,
) -> Path:
    """Has `write` write into a new folder, which becomes `folder`, or one next to it if that is taken: see `fill`.

    All processes of a run must call this; the first one writes.

    Returns: the folder that was written. A line on stderr says so if it is not the one that was asked for.
    """
    if jax.process_index():
        write(folder.with_name(f".{folder.name}.{secrets.token_hex(8)}"))  # only takes part in the gathering
        return folder
    with writes(folder):
        place = fill(folder, last, write, may_replace)
    if place != folder:
        print(f"jgg: {folder} was taken while this run went on, so its result is in {place}", file=sys.stderr)
    return place
