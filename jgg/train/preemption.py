"""Notices SIGTERM, which schedulers and clouds send before they take a machine back, so that a run can stop."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import jax
import orbax.checkpoint as ocp


class Preempted(RuntimeError):
    """SIGTERM stopped a run before its last step, after the checkpoint of `step` was written.

    Attributes:
      step: number of the last finished step; 0 if there is none.
    """

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step

    def __str__(self) -> str:
        return f"stopped by SIGTERM after step {self.step}"


@contextlib.contextmanager
def stop_notices(is_resumable: bool) -> Iterator[Callable[[int], bool]]:
    """Yields a function to call with each finished step's number; it tells whether the run stops after that step.

    Where JAX has connected several processes, it notices SIGTERM in any of them, and they agree on the step. In a
    single process, this context replaces an earlier SIGTERM handler and restores it at the end. A signal that does not
    end in Preempted then goes to that handler. The default handler ends the process, except that after the last step
    the signal does not reach it. SIGTERM keeps its meaning where it is ignored, in threads other than the main one, and
    for runs that are not resumable.
    """
    if is_resumable and jax.distributed.is_initialized():
        yield ocp.utils.reached_preemption
        return
    notice = _Notice()
    if is_resumable and threading.current_thread() is threading.main_thread():
        notice.replace_handler()
    is_whole = False
    try:
        yield lambda step: notice.is_given
        is_whole = True
    except Preempted:
        notice.is_given = False  # the caller is told
        raise
    finally:
        notice.end()
        if notice.is_given and not (is_whole and notice.previous is signal.SIG_DFL):
            signal.raise_signal(signal.SIGTERM)


class _Notice:
    """A SIGTERM handler that remembers the signal, and at its end passes it to the previous handler."""

    def __init__(self) -> None:
        self.is_given = self._is_over = False
        self.previous: Any = None

    def replace_handler(self) -> None:
        previous = signal.getsignal(signal.SIGTERM)
        if previous not in (None, signal.SIG_IGN):  # None: it is not Python's, and could not be put back
            self.previous = signal.signal(signal.SIGTERM, self)

    def end(self) -> None:
        self._is_over = True
        handler: object = signal.getsignal(signal.SIGTERM)
        if handler is self and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.previous)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:  # it could not be put back from another thread, or under the handler of another run
            signal.signal(number, self.previous)
            signal.raise_signal(number)
        self.is_given = True
