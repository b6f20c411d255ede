"""Files that are whole at any time."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> Path:
    """Writes a file all at once, so that whoever reads it or ends this process finds the old text or the new."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text)
    return temporary.replace(path)
