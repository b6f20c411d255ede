"""Reserves a folder for one run, with a system lock that ends with the process that holds it."""

import contextlib
import os
import socket
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import jax
import numpy as np
from jax.experimental import multihost_utils

from jgg.core.files import own_opener, warn_once

LOCK = ".lock"  # the name of the file
_OWN = "process "  # that jgg's begins with


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[str | None]:
    """Locks a folder for this run; yields None, or why it cannot, such as "process 7 on a since noon uses it".

    The lock is on the open file .lock in the folder, so it ends with the process, however the process ends. If several
    processes are connected, the first one holds it. Where files cannot be locked, as on some network file systems, it
    warns once and continues without a lock. A .lock that is a link or has other content is left unchanged.
    """
    with contextlib.ExitStack() as stack:
        other = None
        if jax.process_index() == 0:
            other = _taken(folder / LOCK, stack)
        if jax.process_count() > 1:  # one that went on would wait for the others
            is_held = multihost_utils.broadcast_one_to_all(np.int32(other is not None))
            other = other or ("another run uses it" if is_held else None)
        yield other


def _taken(path: Path, stack: contextlib.ExitStack) -> str | None:
    """Locks a file until the stack exits; if it cannot, returns why, with what the holder wrote into the file."""
    try:
        import fcntl  # not everywhere

        file = stack.enter_context(open(path, "a+", encoding="utf-8", errors="replace", opener=own_opener))  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            return f"{file.readline().strip() or 'another run'} uses it"
        file.seek(0)
        if not _OWN.startswith(file.read(len(_OWN))):
            return "its .lock is another program's"
    except (ImportError, OSError) as error:
        if path.is_symlink():
            return "its .lock is a link"
        warn_once(f"{path.parent} is used without a lock, so let one run at a time use it: {error}")
        return None
    _close_in_children(file)
    file.truncate(0)
    file.write(f"{_OWN}{os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n")
    file.flush()
    return None


def _close_in_children(file: TextIO) -> None:
    """Closes a file in forked processes; otherwise a child that outlives this process would hold its lock."""
    own = weakref.ref(file)

    def close() -> None:
        file = own()
        if file is not None:
            file.close()

    os.register_at_fork(after_in_child=close)
