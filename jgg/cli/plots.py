"""The plots of `jgg bench`; its only module that needs matplotlib."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from jgg.cli.bench_run import JGG, Result
from jgg.cli.info import devices
from jgg.core.files import replacing
from jgg.measuring.peers import DENSE

_MARKERS = {"forward": "o", "dx": "s", "dw": "^", "gather": "D"}
_TITLES = {"forward": "forward: y", "dx": "dX", "dw": "dW", "gather": "gather: y of x in token order"}


def write_bench(result: Result, path: Path) -> None:
    """Draws the speeds of each op and of whole layers as bars, and jgg's products under the roofs of this device."""
    panels: list[tuple[int, Callable]] = []  # heights, and what draws on axes
    for op in result.settings.gemm_ops:
        rows = [row for row in result.rows if row.op == op]
        speeds = {name: [row.tflops(name) for row in rows] for name in (JGG, *result.peers)}
        if rows:
            labels = [f"{row.layer}\n{row.gemm}" for row in rows]
            panels.append((3, functools.partial(_plot_bars, _TITLES[op], labels, speeds, not panels)))
    if result.layers:
        by_pass = list(zip(*(layer.passes for layer in result.layers), strict=True))
        speeds = {f"{who} {rows[0].op}": [row.tflops(who) for row in rows] for rows in by_pass for who in (JGG, DENSE)}
        labels = [layer.problem.layer.name for layer in result.layers]
        panels.append((3, functools.partial(_plot_bars, "whole layer, router included", labels, speeds, True)))
    if result.rows:
        panels.append((5, functools.partial(_plot_roofline, result)))
    heights = [height for height, _ in panels]
    figure = Figure(figsize=(12, sum(heights)), layout="constrained")
    figure.suptitle(f"jgg bench: {devices()[0].kind}, {result.settings.dtype}, {result.settings.groups} groups")
    all_axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (_, draw) in zip(all_axes, panels, strict=True):
        draw(axes)
    _save(figure, path)


def _save(figure, path):
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def _plot_bars(title, labels, speeds, has_legend, axes):
    """A group of bars for each label, one for each name in speeds."""
    positions, width = np.arange(len(labels)), min(0.8 / len(speeds), 0.2)
    for i, (name, values) in enumerate(speeds.items()):
        heights = [value or 0 for value in values]
        axes.bar(positions + (i - (len(speeds) - 1) / 2) * width, heights, width, label=name, color=f"C{i}")
    axes.set_xticks(positions, labels, fontsize="small", rotation=30 if len(labels) > 6 else 0)
    axes.set(ylabel="TF/s", title=title, xlim=(-0.5, len(labels) - 0.5))
    axes.grid(axis="y", alpha=0.3)
    if has_legend:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _plot_roofline(result, axes):
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
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte of x, w and y", ylabel="TF/s")
    axes.set_title("roofline: jgg, and what a copy of x, w and y and the fastest dense product would allow")
    axes.legend()
    axes.grid(alpha=0.3, which="both")
