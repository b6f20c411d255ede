"""Compiled kernels, kept in the platform's cache folder; if several threads need the same one, one of them compiles it.

A kept kernel is machine code, so it is loaded only from a file that no other user can have written and whose content
matches the digest at its beginning. Triton's own cache is not used: it reads whatever it finds, fails where it cannot
write, and assembles each kernel, which XLA does again (1.1 s of 9.6 for a warp-specialized one).
"""

import hashlib
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from jgg.core.files import cache_folder, read_own_text, replace_text, warn_once

_logger = logging.getLogger("jgg")

type Kernel = dict[str, Any]  # a compiled kernel, as jax_triton_fixes keeps it

_running: dict[str, Future[Kernel]] = {}  # what threads compile right now
_lock = threading.Lock()


def kept(name: str, compile_it: Callable[[], Kernel]) -> Kernel:
    """The compiled kernel of that name: the kept one or, if there is none, what `compile_it` returns, which is kept.

    Args:
      name: tells kernels apart that differ in anything that a compiled kernel depends on.
    """

    def load_or_compile() -> Kernel:
        folder = cache_folder()
        path = folder and folder / "kernels" / name
        kernel = _load(path)
        if kernel is None:
            kernel = compile_it()
            _keep(path, kernel)
        return kernel

    return _once_at_a_time(name, load_or_compile)


def _once_at_a_time(name: str, compute: Callable[[], Kernel]) -> Kernel:
    """The result of compute(); if another thread is computing it for that name, waits for that thread's result."""
    with _lock:
        is_first = name not in _running
        future = _running.setdefault(name, Future())
    if is_first:
        try:
            future.set_result(compute())
        except BaseException as error:
            future.set_exception(error)
        finally:
            with _lock:
                del _running[name]
    return future.result()


def _digest(path: Path, text: str) -> str:
    """The digest of the text and of the file's name, so that no kernel can be taken for another."""
    return hashlib.sha256(f"{path.name}\n{text}".encode()).hexdigest()


def _load(path: Path | None) -> Kernel | None:
    if path is None:
        return None
    try:
        digest, _, text = read_own_text(path).partition("\n")
        if digest != _digest(path, text):
            raise ValueError("it is not as it was written")
        return json.loads(text)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        warn_once(f"A compiled kernel is not taken from a file that others may have written or that is theirs: {error}")
    except (OSError, ValueError) as error:
        _logger.info("A compiled kernel cannot be read from %s: %s", path, error)
    return None


def _keep(path: Path | None, kernel: Kernel) -> None:
    if path is None:
        return
    text = json.dumps(kernel)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, f"{_digest(path, text)}\n{text}", mode=0o644)
    except OSError as error:
        reason = error.strerror or error
        warn_once(f"Compiled kernels cannot be kept in {path.parent}, so each process compiles them: {reason}")
