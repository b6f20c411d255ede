"""Files that are whole at any time and changed by one process at a time, and the folder for those made anew at need."""

import contextlib
import functools
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import platformdirs

_logger = logging.getLogger("jgg")


def replace_text(path: Path, text: str, mode: int = 0o666) -> Path:
    """Writes a file all at once, as `replacing` does.

    Args:
      mode: permissions of a new file, less the process's umask.
    """
    with (
        replacing(path) as temporary,
        open(temporary, "x", opener=functools.partial(os.open, mode=mode)) as file,
    ):
        file.write(text)
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives the name of a file to write, which then replaces `path`; after an error there is no such file.

    So whoever reads `path` or ends this process finds the old content or the new.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # process ids repeat between containers
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def read_own_text(path: Path) -> str:
    """The text of a file that no other user can have written.

    Raises:
      PermissionError: it belongs to another user but root, or its group or all may write to it.
      OSError: it cannot be read, or is a symbolic link.
    """
    with open(path, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())  # of what is open, whatever bears the name by now
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{path} belongs to another user, of id {status.st_uid}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{path} may be written by other users")
        return file.read()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps others out who lock the same path, in any process or thread; its folder must exist.

    Where there are no locks, on some network file systems, it says so once and goes on without.
    """
    with contextlib.ExitStack() as stack:
        try:
            import fcntl  # not everywhere

            opener = functools.partial(os.open, mode=0o666)
            lock = stack.enter_context(open(path.with_name(f".{path.name}.lock"), "a", opener=opener))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except (ImportError, OSError) as error:
            warn_once(f"{path} is written without a lock, so let one process at a time do it: {error}")
        yield


def cache_folder() -> Path | None:
    """jgg's in the platform's folder for caches ($XDG_CACHE_HOME on Linux), which need not exist.

    None where there is none, as for a user without a home; it says so once.
    """
    try:
        folder = platformdirs.user_cache_path("jgg", appauthor=False)
    except RuntimeError:
        folder = None
    if folder is None or not folder.is_absolute():  # "~/..." where no one knows what ~ is
        warn_once("Nothing is kept for later processes, since this user has no home: set HOME or XDG_CACHE_HOME.")
        return None
    return folder


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning, unless this process already did."""
    _logger.warning(message)
