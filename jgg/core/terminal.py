"""Consoles of rich, which is imported only where it is used, because --help does not need it."""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def rich_console(*, stderr: bool = False, **options: Any) -> "Console":
    """A console on stdout or stderr, and no terminal unless the stream is one.

    Rich alone takes any stream for a terminal where FORCE_COLOR is set, as notebooks set it.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    is_terminal = stream is not None and stream.isatty()  # None where the process has no such stream
    return Console(stderr=stderr, force_terminal=None if is_terminal else False, **options)
