"""Writes whole files, one process at a time; reads files that no other user wrote; finds the folder for caches."""

import contextlib
import errno
import functools
import itertools
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs

_logger = logging.getLogger("jgg")


def replace_text(path: Path, text: str, mode: int = 0o666) -> Path:
    """Writes a file in UTF-8 all at once, as `replacing` does.

    Args:
      mode: permissions of a new file, less the process's umask.
    """
    with (
        replacing(path) as temporary,
        open(temporary, "x", encoding="utf-8", opener=functools.partial(os.open, mode=mode)) as file,
    ):
        file.write(text)
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the name of a temporary file to write, which then replaces `path`; after an error it is removed.

    A reader of `path` finds the old content or the new, even if this process is killed while it writes.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # process ids repeat between containers
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def share_as_usual(path: Path) -> None:
    """Gives a file the permissions of a new file from `open`: safetensors writes files that only this user may read.

    These depend on the process's umask and, on some file systems, on the folder.
    """
    other = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with open(other, "x") as file:
        other.unlink()
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    path.chmod(mode)


def own_opener(name: str, flags: int) -> int:
    """An opener for `open` that follows no symbolic link and does not block on a pipe."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode=0o666)


def read_own_text(path: Path) -> str:
    """The text, in UTF-8, of a file that no other user can have written.

    Raises:
      PermissionError: the file belongs to a user other than this one and root, or others may write to it.
      OSError: the file cannot be read, or is a symbolic link.
    """
    with open(path, encoding="utf-8", opener=own_opener) as file:
        status = os.fstat(file.fileno())  # of the open file: the name may be another file's by now
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{path} belongs to another user, of id {status.st_uid}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{path} may be written by other users")
        return file.read()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock on a path; other processes and threads that lock the path wait. Its folder must exist.

    Where files cannot be locked, as on some network file systems, it warns once and goes on without a lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            import fcntl  # not everywhere

            lock = stack.enter_context(open(path.with_name(f".{path.name}.lock"), "a", opener=own_opener))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except (ImportError, OSError) as error:
            warn_once(f"{path} is written without a lock, so let one process at a time do it: {error}")
        yield


def cache_folder() -> Path | None:
    """jgg's folder in the platform's folder for caches ($XDG_CACHE_HOME on Linux); it need not exist.

    None if the platform has no folder for caches, as for a user without a home; a warning says so once.
    """
    try:
        folder = platformdirs.user_cache_path("jgg", appauthor=False)
    except RuntimeError:
        folder = None
    if folder is None or not folder.is_absolute():  # "~/..." if the home is unknown
        warn_once("Nothing is kept for later processes, since this user has no home: set HOME or XDG_CACHE_HOME.")
        return None
    return folder


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning, unless this process already did."""
    _logger.warning(message)


def fill(
    folder: Path, last: str, write: Callable[[Path], None], may_replace: Callable[[Path], bool] = lambda folder: False
) -> Path:
    """Has `write` fill a temporary folder, and moves its files to `folder`; after an error they are removed.

    A new folder appears whole. An existing one may be a mount point or the working folder, which cannot be replaced:
    it gets the files one after the other, and the file named `last` after all others. If it is not empty by then, all
    files go to a new folder next to it, such as folder-2, or into it if nothing next to it can be written.

    Args:
      write: function of the temporary folder.
      may_replace: whether the files may go into a folder that is not empty.

    Returns: `folder`, or the other folder that has the files.
    """
    asked, folder = folder, Path(os.path.realpath(folder))
    name = f".{folder.name}.{secrets.token_hex(8)}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = (folder if folder.is_dir() else folder.parent) / name
    temporary.mkdir()
    try:
        write(temporary)
        if _has_moved(temporary, folder):
            return asked
        if folder.is_dir() and ({path.name for path in folder.iterdir()} <= {name} or may_replace(folder)):
            for file in sorted(temporary.iterdir(), key=lambda file: file.name == last):
                file.replace(folder / file.name)
            return asked
        return _moved_next_to(folder, temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _has_moved(made: Path, folder: Path) -> bool:
    """Renames a folder if nothing, or an empty folder, is at its new path; returns whether it did."""
    if folder in made.parents:
        return False
    try:
        made.rename(folder)
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EBUSY):  # the last: a mount point
            raise
        return False


def _moved_next_to(folder: Path, made: Path) -> Path:
    for parent in (folder.parent, folder):
        try:
            places = (parent / f"{folder.name}-{number}" for number in itertools.count(2))
            return next(place for place in places if not os.path.lexists(place) and _has_moved(made, place))
        except OSError:  # another file system, or a folder that others own
            if parent == folder:
                raise
    raise AssertionError("the loop returns or raises")


def check_regular(path: Path) -> None:
    """Raises ValueError if a path is not a regular file: reading a pipe or a device might never end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} must be a regular file, got a {'folder' if path.is_dir() else 'pipe or a device'}.")


def is_new_or_empty(folder: Path) -> bool:
    """Whether there is nothing at a path, or an empty folder."""
    # a link leads to the place, which need not exist yet
    return not os.path.lexists(os.path.realpath(folder)) or (folder.is_dir() and not any(folder.iterdir()))
