"""Finds the folders that MODEL and ADAPTER name."""

from pathlib import Path

from jgg.cli.errors import UsageError
from jgg.hf.hub import folder_of


def model_folder(name: str) -> Path:
    """The folder of MODEL, or of the Hub's model of that name, which is fetched.

    Raises: UsageError: it is no folder. ValueError, OSError, ImportError: as `jgg.hf.hub.folder_of`.
    """
    folder = folder_of(name)
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "which is not there"
        raise UsageError(f"MODEL must be a model's folder, or its name on the Hub, got {folder}, {kind}")
    return folder


def check_adapter(name: str | None) -> None:
    """Raises UsageError unless ADAPTER, if there is one, is an adapter's folder: before a model is loaded for it."""
    if name is not None and not Path(name, "adapter_config.json").is_file():
        raise UsageError(f"ADAPTER must be a folder with adapter_config.json, got {name}")
