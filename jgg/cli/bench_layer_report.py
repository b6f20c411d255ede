"""Reports what `jgg bench --op layer` measured: lines for the terminal, JSON and bars."""

import dataclasses

import numpy as np

from jgg.cli.bench_layer import LayerRow
from jgg.cli.common import number
from jgg.measuring.layer import PASSES
from jgg.measuring.measurement import RIGHT


def lines(rows: list[LayerRow]) -> list[list[str]]:
    """The cells of a table: a heading, then a line for each pass of each layer; the first three cells are text."""
    cells = [["layer", "T, H, I, E, k", "pass", "ms", "TF/s", "% of dense", "dense"]]
    for row in rows:
        layer = row.problem.layer
        sizes = (layer.tokens, layer.hidden, layer.expert_intermediate, layer.experts, layer.topk)
        for which, measurement in row.passes.items():
            percent = row.percent_of_dense(which)
            milliseconds = measurement.seconds and measurement.seconds * 1e3
            cells.append([
                layer.name, ", ".join(map(str, sizes)), which,
                number(milliseconds) if measurement.status == RIGHT else measurement.status,
                number(row.tflops(which)),
                "-" if percent is None else f"{percent:.1f}",
                number(row.dense_tflops(which)),
            ])  # fmt: skip
    return cells


def notes(rows: list[LayerRow]) -> list[str]:
    """A line on each layer's routing, one on its memory, and one for whatever was not right."""
    found = []
    for row in rows:
        name = row.problem.layer.name
        if row.route_seconds is not None:
            fewest, median, most = row.group_sizes
            found.append(
                f"{name}: routing and sorting {number(row.route_seconds * 1e6)} us;"
                f" rows of an expert {fewest} to {most}, median {median}"
            )
        if row.memory is not None:
            found.append(f"{name}: {_memory(row)}")
        found += [f"{name} {what}: failed: {reason}" for what, reason in row.failures.items()]
        found += [
            f"{name} {which}: {measurement}" + (f" ({measurement.variant})" if measurement.variant else "")
            for which, measurement in row.passes.items()
            if measurement.status != RIGHT
        ]
    return found


def _memory(row):
    memory, limit = row.memory, row.problem.memory_limit
    peak = "" if memory.peak_in_use is None else f"; in use at most {_megabytes(memory.peak_in_use)}"
    return (
        f"forward + backward takes {_megabytes(memory.total)} (arguments {_megabytes(memory.arguments)},"
        f" results {_megabytes(memory.results)}, temporaries {_megabytes(memory.temporaries)}{peak}),"
        f" {100 * memory.total / limit:.0f}% of the {_megabytes(limit)} aimed at"
    )


def _megabytes(count):
    return f"{number(count / 1e6)} MB"


def as_json(row: LayerRow) -> dict:
    """The measurements of a layer, and what follows from them."""
    return {
        **dataclasses.asdict(row),
        "flops": {which: row.problem.flops(which) for which in PASSES},
        "tflops": {which: row.tflops(which) for which in PASSES},
        "dense_tflops": {which: row.dense_tflops(which) for which in PASSES},
        "percent_of_dense": {which: row.percent_of_dense(which) for which in PASSES},
        "memory_limit": row.problem.memory_limit,
    }


def plot_bars(axes, rows: list[LayerRow]) -> None:
    """Draws the speeds of each layer and of dense products as bars."""
    positions, width = np.arange(len(rows)), 0.2
    for i, which in enumerate(PASSES):
        for j, (label, speeds) in enumerate(
            (
                (f"jgg {which}", [row.tflops(which) or 0 for row in rows]),
                (f"dense {which}", [row.dense_tflops(which) or 0 for row in rows]),
            )
        ):
            offset = (2 * i + j - 1.5) * width
            axes.bar(positions + offset, speeds, width, label=label, color=f"C{i}", alpha=(1, 0.4)[j])
    labels = [row.problem.layer.name for row in rows]
    axes.set_xticks(positions, labels, fontsize="small", rotation=30 if len(rows) > 6 else 0)
    axes.set(ylabel="TF/s", title="whole layer, router included")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
