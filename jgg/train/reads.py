"""Lets all reads of a checkpoint finish if one of them fails.

Otherwise Orbax closes its event loop at once, TensorStore reports each later read to the closed loop, and every report
prints a traceback.
"""

import asyncio
import contextlib
import sys
from collections.abc import Iterator

_LONGEST = 60.0  # seconds


@contextlib.contextmanager
def ended_reads() -> Iterator[None]:
    """Makes Orbax's event loops wait for their tasks before they close after an error."""
    own = asyncio.new_event_loop
    asyncio.new_event_loop = _Loop
    try:
        yield
    finally:
        asyncio.new_event_loop = own


class _Loop(asyncio.SelectorEventLoop):
    def close(self) -> None:
        """Waits for the tasks, unless the user interrupted the program."""
        tasks = set() if self.is_closed() else asyncio.all_tasks(self)
        if tasks and isinstance(sys.exception(), Exception):
            with contextlib.suppress(RuntimeError):  # within another loop
                self.run_until_complete(asyncio.wait(tasks, timeout=_LONGEST))
        super().close()
