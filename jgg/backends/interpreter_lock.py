"""Who may use Triton's language: several threads that compile, or one that interprets."""

import contextlib
import threading


class InterpreterLock:
    """Triton's language, parts of which its interpreter replaces while it runs, for every thread.

    So several threads may compile, or one may interpret and nothing may be compiled meanwhile.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._compiling = 0

    @contextlib.contextmanager
    def compiles(self):
        """Held while kernels are compiled."""
        with self._changed:
            self._compiling += 1
        try:
            yield
        finally:
            with self._changed:
                self._compiling -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def interprets(self):
        """Held while a kernel is interpreted."""
        with self._changed:
            self._changed.wait_for(lambda: self._compiling == 0)
            yield


INTERPRETER_LOCK = InterpreterLock()
