"""The measurements in benchmarks/, and tables that are made of them."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
Row = dict[str, str]


def measurements(name: str) -> list[Row]:
    """The rows of a file in benchmarks/, by heading."""
    with (ROOT / "benchmarks" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def table(headings: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows))
