"""Compiles the kernels of a program side by side, if the installed versions are in `jgg.core.versions.FIXED`.

A kernel takes seconds to compile, and JAX lowers a program one operation after the other. So tracing notes operations,
and when the first of them is lowered, threads lower the others too. Only the compiled kernels of the threads are used:
jax-triton keeps them, and the program waits for any that are not ready. A process that ends meanwhile waits for the
threads too; the kernels that they compile are on disk for the next process.
"""

import functools
import os
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax.numpy as jnp

from jgg.core.arguments import Shaped
from jgg.core.versions import FIXED, unlike

MOST_NOTED = (
    1024  # a program has about ten for each kind of layer; one that is forgotten is compiled when it is lowered
)


class Noted(NamedTuple):
    """An operation, noted when it is traced.

    Attributes:
      is_local: whether each device computes it on its own arrays, as in `jax.shard_map`.
      shapes: shape and dtype of each operand.
      params: the parameters of the primitive.
    """

    is_local: bool
    shapes: tuple[tuple[tuple[int, ...], jnp.dtype], ...]
    params: frozenset[tuple[str, Hashable]]

    @classmethod
    def of(cls, is_local: bool, operands: Iterable[Shaped], params: dict[str, Hashable]) -> "Noted":
        """Notes an operation by its operands, which have a shape and a dtype."""
        return cls(is_local, tuple((a.shape, a.dtype) for a in operands), frozenset(params.items()))


class AheadCompiler:
    """Remembers traced operations, and compiles them in threads when the program that they are part of is lowered.

    Attributes:
      num_threads: how many threads compile in addition to the program's own; with 0 nothing is noted.
      noted: the last MOST_NOTED operations, each with whether it still has to be lowered.
    """

    def __init__(self, num_threads: int | None = None):
        self.num_threads = min((os.cpu_count() or 1) - 1, 8) if num_threads is None else num_threads
        self.noted: dict[Noted, bool] = {}
        self._lock = threading.Lock()

    def note(self, operation: Noted) -> None:
        """Remembers an operation that may be lowered later; if there are too many, forgets the oldest."""
        if self.num_threads == 0:
            return
        with self._lock:
            self.noted.setdefault(operation, True)
            if len(self.noted) > MOST_NOTED:
                del self.noted[next(iter(self.noted))]

    def compile_others(self, operation: Noted, lower: Callable[[Noted], object]) -> None:
        """Begins to lower all other noted operations, each once, while the program itself lowers `operation`.

        An error in a thread is ignored: it comes again when the program lowers that operation itself.
        """
        with self._lock:
            if operation in self.noted:
                self.noted[operation] = False
            is_local = operation.is_local
            others = [other for other, is_open in self.noted.items() if is_open and other.is_local == is_local]
            if not others or not self._can_compile():
                return
            self.noted.update(dict.fromkeys(others, False))
        for other in reversed(others):  # from the last on, as the program itself begins with the first
            self._threads.submit(lower, other)

    def _can_compile(self) -> bool:
        if self.num_threads == 0 or unlike(FIXED):
            return False
        from jgg.launching.jax_triton_fixes import dumps_kernels

        return not dumps_kernels()  # two threads would dump a kernel to the same folder

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.num_threads, thread_name_prefix="jgg-compile")
