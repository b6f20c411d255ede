"""Lets all reads of a checkpoint finish if one of them fails.

Orbax closes its event loop then. TensorStore tells the loop of each later read, and for each a traceback is written.
"""

import asyncio
import contextlib
import sys
from collections.abc import Iterator

_LONGEST = 60.0  # seconds


@contextlib.contextmanager
def ended_reads() -> Iterator[None]:
    """Within it, event loops that Orbax makes wait for their tasks before they close after an error."""
    own = asyncio.new_event_loop
    asyncio.new_event_loop = _Loop
    try:
        yield
    finally:
        asyncio.new_event_loop = own


class _Loop(asyncio.SelectorEventLoop):
    def close(self) -> None:
        """Waits, unless the user interrupted what ran."""
        tasks = set() if self.is_closed() else asyncio.all_tasks(self)
        if tasks and isinstance(sys.exception(), Exception):
            with contextlib.suppress(RuntimeError):  # within another loop
                self.run_until_complete(asyncio.wait(tasks, timeout=_LONGEST))
        super().close()
