"""Files that are whole at any time, and the folder for those that can be made anew."""

import os
from pathlib import Path

import platformdirs


def replace_text(path: Path, text: str) -> Path:
    """Writes a file all at once, so that whoever reads it or ends this process finds the old text or the new."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text)
    return temporary.replace(path)


def cache_folder() -> Path:
    """jgg's in the platform's folder for caches ($XDG_CACHE_HOME on Linux); it need not exist."""
    return platformdirs.user_cache_path("jgg", appauthor=False)
