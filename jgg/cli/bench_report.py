"""Reports a run of `jgg bench`: a table for the terminal, a JSON file and a plot."""

import dataclasses
import functools
import json
import math
import statistics
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from jgg.cli import bench_layer_report
from jgg.cli.bench_run import BOUNDS, JGG, Result, Row
from jgg.cli.common import number
from jgg.cli.machine import devices, origin
from jgg.files import replace_text
from jgg.measuring.measurement import DENSE, RIGHT, UNSUPPORTED

_MARKERS = {"forward": "o", "dx": "s", "dw": "^", "gather": "D"}


def text(result: Result) -> str:
    """Everything that is printed: conditions, table, what was not right, ratios."""
    parts = [header(result), table(result), *_not_right(result), ratios_text(result)]
    if result.layers:
        parts += [_aligned(bench_layer_report.lines(result.layers)), *bench_layer_report.notes(result.layers)]
    if result.interrupted:
        parts.append("Interrupted: not everything was measured")
    return "\n".join(filter(None, parts))


def header(result: Result) -> str:
    """Where and how it was measured, and which peers were not."""
    settings = result.settings
    lines = [
        f"{devices()[0].kind}, {settings.dtype}, {settings.groups} groups, w {settings.w_layout},"
        f" implementation {settings.implementation or 'by default'}"
    ]
    if settings.scaled_down:
        lines.append("scaled down: no GPU; layers have at most 256 tokens, 1/16 of their features and 16 experts")
    if result.copy_bandwidth is not None:
        lines.append(f"Plain copy on the device: {number(result.copy_bandwidth / 1e9)} GB/s, read and written")
    lines += [f"Skipped {name}: {reason}" for name, reason in result.skipped.items()]
    return "\n".join(lines)


def table(result: Result) -> str:
    """A line for each product of each GEMM; speeds without a unit are TF/s."""
    if not result.rows:
        return ""
    others = [*BOUNDS.values(), *result.peers]
    lines = [["GEMM", "M, K, N, E", "op", "ms", "TF/s", "GB/s", "% of dense", *others]]
    for row in result.rows:
        problem, measurement = row.problem, row.measurements.get(JGG)
        sizes = (problem.num_rows, problem.in_features, problem.out_features, problem.num_experts)
        lines.append([f"{row.layer} {row.gemm}", ", ".join(map(str, sizes)), row.op, *_own_cells(row, measurement)])
        lines[-1] += [_cell(row.measurements.get(name), row.tflops(name)) for name in others]
    return _aligned(lines)


def _aligned(lines):
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_line(cells, widths) for cells in lines)


def _line(cells, widths):
    """Text to the left, numbers to the right."""
    texts = [cell.ljust(width) for cell, width in zip(cells[:3], widths[:3], strict=True)]
    numbers = [cell.rjust(width) for cell, width in zip(cells[3:], widths[3:], strict=True)]
    return "  ".join(texts + numbers)


def _own_cells(row, measurement):
    values = _numbers(row, JGG)
    percent = values["percent_of_dense"]
    return [
        _cell(measurement, values["milliseconds"]),
        number(values["tflops"]),
        number(values["gbytes_per_second"]),
        "-" if percent is None else f"{percent:.1f}",
    ]


def _cell(measurement, value):
    if measurement is None or measurement.status == UNSUPPORTED:
        return "-"
    return number(value) if measurement.status == RIGHT else measurement.status


def _not_right(result):
    """A line for each product that is wrong, failed or unsupported; the same reason for many GEMMs once."""
    reasons = {}
    for row in result.rows:
        for name, measurement in row.measurements.items():
            if measurement.status != RIGHT:
                of = row.op if measurement.status == UNSUPPORTED else f"{row.layer} {row.gemm} {row.op}"
                reasons.setdefault((name, str(measurement)), {})[of] = None
    return [f"{name}, {'; '.join(where)}: {what}" for (name, what), where in reasons.items()]


def ratios(rows: list[Row], ops, names) -> dict[str, dict[str, dict]]:
    """By op and name, how many times as fast as `name` jgg is: geometric mean, smallest, and how many GEMMs."""
    found = {}
    for op in ops:
        for name in names:
            measured = [(row.ratio(name), row) for row in rows if row.op == op and row.ratio(name) is not None]
            if measured:
                smallest, row = min(measured, key=lambda pair: pair[0])
                found.setdefault(op, {})[name] = {
                    "geometric_mean": statistics.geometric_mean(ratio for ratio, _ in measured),
                    "smallest": smallest,
                    "smallest_of": f"{row.layer} {row.gemm}",
                    "gemms": len(measured),
                }
    return found


def ratios_text(result: Result) -> str:
    """A line for each op and peer."""
    lines = [
        f"  {op:8} / {name:10} {numbers['geometric_mean']:.3f}, smallest {numbers['smallest']:.3f}"
        f" ({numbers['smallest_of']}), {numbers['gemms']} GEMMs"
        for op, by_name in _ratios(result).items()
        for name, numbers in by_name.items()
    ]
    return "\n".join(["jgg's speed over each peer's, geometric mean over GEMMs:", *lines] if lines else [])


def _ratios(result):
    return ratios(result.rows, result.settings.ops, sorted(result.peers, key=lambda name: name != DENSE))


def write(result: Result) -> list[Path]:
    """Writes the JSON file and the plot, and returns their paths."""
    path = Path(f"{result.settings.out}.png")
    plot(result).savefig(path, dpi=120)
    return [path, write_json(result)]


def write_json(result: Result) -> Path:
    """Writes the JSON file and returns its path."""
    return replace_text(Path(f"{result.settings.out}.json"), json.dumps(as_json(result), indent=2) + "\n")


def as_json(result: Result) -> dict:
    """The result with the command, the versions and the device that it is from."""
    return origin() | {
        "settings": dataclasses.asdict(result.settings),
        "copy_bytes_per_second": result.copy_bandwidth,
        "peers": result.peers,
        "skipped": result.skipped,
        "interrupted": result.interrupted,
        "ratios": _ratios(result),
        "rows": [_row_as_json(row) for row in result.rows],
        "layers": [bench_layer_report.as_json(row) for row in result.layers],
    }


def _row_as_json(row):
    problem = row.problem
    return {
        "layer": row.layer,
        "gemm": row.gemm,
        "op": row.op,
        "num_rows": problem.num_rows,
        "in_features": problem.in_features,
        "out_features": problem.out_features,
        "num_experts": problem.num_experts,
        "topk": problem.topk,
        "dtype": problem.dtype.name,
        "flops": problem.flops,
        "bytes": problem.bytes_accessed,
        "flops_per_byte": problem.flops / problem.bytes_accessed,
        "measurements": {
            name: _finite(dataclasses.asdict(measurement)) | _numbers(row, name)
            for name, measurement in row.measurements.items()
        },
    }


def _numbers(row, name):
    """What follows from the seconds of a call; None where there is no right one."""
    seconds, dense = row.seconds(name), row.seconds(DENSE)
    return {
        "milliseconds": seconds and seconds * 1e3,
        "tflops": row.tflops(name),
        "gbytes_per_second": seconds and row.problem.bytes_accessed / seconds / 1e9,
        "percent_of_dense": 100 * dense / seconds if seconds and dense else None,
    }


def _finite(values):
    """NaN and infinity as text, which JSON can hold."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def plot(result: Result) -> Figure:
    """Draws the speeds of each op and of whole layers as bars, and jgg's products under the roofs of this device."""
    ops = [op for op in result.settings.gemm_ops if any(row.op == op for row in result.rows)]
    panels = [
        *((3, functools.partial(_plot_op, result, op)) for op in ops),
        *([(3, lambda axes: bench_layer_report.plot_bars(axes, result.layers))] if result.layers else []),
        *([(5, functools.partial(_plot_roofline, result=result))] if ops else []),
    ]
    heights = [height for height, _ in panels]
    figure = Figure(figsize=(12, sum(heights)), layout="constrained")
    figure.suptitle(f"jgg bench: {devices()[0].kind}, {result.settings.dtype}, {result.settings.groups} groups")
    all_axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (_, draw) in zip(all_axes, panels, strict=True):
        draw(axes)
    if ops:
        all_axes[0].legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _plot_op(result, op, axes):
    _plot_bars(axes, op, [row for row in result.rows if row.op == op], [JGG, *result.peers])


def _plot_bars(axes, op, rows, names):
    """A group of bars for each GEMM, one for each name."""
    positions, width = np.arange(len(rows)), 0.8 / len(names)
    for i, name in enumerate(names):
        speeds = [row.tflops(name) or 0 for row in rows]
        axes.bar(positions + (i - (len(names) - 1) / 2) * width, speeds, width, label=name, color=f"C{i}")
    labels = [f"{row.layer}\n{row.gemm}" for row in rows]
    axes.set_xticks(positions, labels, fontsize="small", rotation=30 if len(rows) > 6 else 0)
    axes.set(ylabel="TF/s", title=op)
    axes.grid(axis="y", alpha=0.3)


def _plot_roofline(axes, result):
    """Each product's FLOPs per byte and speed, below a copy's bandwidth and the fastest dense product."""
    intensities = [row.problem.flops / row.problem.bytes_accessed for row in result.rows]
    for op, marker in _MARKERS.items():
        points = [(i, row.tflops(JGG)) for i, row in zip(intensities, result.rows, strict=True) if row.op == op]
        points = [point for point in points if point[1]]
        if points:
            axes.plot(*zip(*points, strict=True), marker, label=f"jgg {op}")
    span = np.array([min(intensities) / 2, max(intensities) * 2])
    if result.copy_bandwidth:
        axes.plot(span, span * result.copy_bandwidth / 1e12, "k--", label="copy's bandwidth")
    dense = [row.tflops(DENSE) for row in result.rows if row.tflops(DENSE)]
    if dense:
        axes.axhline(max(dense), color="k", linestyle=":", label="fastest dense product")
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte of x, w and y", ylabel="TF/s", title="roofline")
    axes.legend()
    axes.grid(alpha=0.3, which="both")
