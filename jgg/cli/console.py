"""Shows numbers, tables and progress, and holds back what libraries write.

rich is imported only where it is used, because --help does not need it.
"""

import contextlib
import io
import math
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import IO

from jgg.core.terminal import rich_console


def number(value: float | None) -> str:
    """Formats a number with three digits or more; None becomes "-"."""
    if value is None:
        return "-"
    decimals = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{min(decimals, 5)}f}"


def print_table(headings: Sequence[str], rows: Iterable[Sequence], texts: Collection[str] = ()) -> None:
    """Prints a table; columns named in `texts` are aligned left, others right, and rows are never wrapped."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in texts else "right")
    for row in rows:
        table.add_row(*map(str, row))
    rich_console(width=10_000, markup=False, emoji=False, highlight=False).print(table)


@contextlib.contextmanager
def progress(total: int, quiet: bool = False) -> Iterator[Callable]:
    """Shows a progress bar on stderr, if that is a terminal.

    Yields tell(text, steps=0), which shows text and advances the bar by steps.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    console = rich_console(stderr=True)
    # limited, because a longer text would take the space of the other columns
    column = Column(no_wrap=True, overflow="ellipsis", max_width=max(10, console.width - 30))
    text_column = TextColumn("{task.description}", markup=False, table_column=column)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text_column
    # no automatic refresh: its thread would disturb what is timed
    bar = Progress(
        *columns,
        console=console,
        auto_refresh=False,
        disable=quiet or not console.is_terminal,
        redirect_stdout=sys.stdout.isatty(),
    )
    with bar:
        task = bar.add_task("", total=total)
        yield lambda text, steps=0: bar.update(task, description=text, advance=steps, refresh=True)


@contextlib.contextmanager
def held_back() -> Iterator[IO[bytes]]:
    """Redirects stderr, C++'s too, to a temporary file and yields it; at the end its content goes to stderr.

    If no temporary file can be made, as on a full disk, stderr is not redirected.
    """
    with contextlib.ExitStack() as stack:
        try:
            notes = stack.enter_context(tempfile.TemporaryFile())
        except OSError:
            yield io.BytesIO()
            return
        stderr = os.dup(2)
        os.dup2(notes.fileno(), 2)
        try:
            yield notes
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            notes.seek(0)
            os.write(2, notes.read())
