"""Draws what benchmarks wrote: FILE.json of benchmarks.gemms or benchmarks.layers, into FILE.png.

    python -m benchmarks.plots jgg-gemms.json

Needs matplotlib.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

_MARKERS = {"forward": "o", "dx": "s", "dw": "^", "gather": "D"}
_BOUNDS = ("even", "one group")  # jgg's own product with other group sizes
_TITLES = {"forward": "forward: y", "dx": "dX", "dw": "dW", "gather": "gather: y of x in token order"}


def main(argv=None) -> None:
    """Draws each file named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what a benchmark wrote, JSON")
    for path in parser.parse_args(argv).files:
        draw(json.loads(path.read_text()), path.with_suffix(".png"))


def draw(result: dict, path: Path) -> None:
    """Draws the speeds of each op or of whole layers as bars; for GEMMs, also a roofline with jgg's products."""
    panels = _panels_of_layers(result) if "layers" in result else _panels_of_gemms(result)
    heights = [height for height, _, _ in panels]
    figure = Figure(figsize=(12, sum(heights)), layout="constrained")
    figure.suptitle(f"{result['device']['kind']}, {result['settings']['dtype'] or 'default dtype'}")
    all_axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (_, plot, arguments) in zip(all_axes, panels, strict=True):
        plot(axes, *arguments)
    figure.savefig(path, dpi=120)


def _panels_of_gemms(result):
    """Returns each panel's height, the function that draws it, and the arguments for that function."""
    panels = []
    names = dict.fromkeys(name for row in result["rows"] for name in row["measurements"])
    for op, title in _TITLES.items():
        rows = [row for row in result["rows"] if row["op"] == op]
        speeds = {name: [_tflops(row, name) for row in rows] for name in names if name not in _BOUNDS}
        if rows:
            panels.append((3, _plot_bars, (title, [f"{row['layer']}\n{row['gemm']}" for row in rows], speeds)))
    return [*panels, (5, _plot_roofline, (result,))]


def _panels_of_layers(result):
    layers = result["layers"]
    speeds = {
        f"{who} {which}": [layer[key].get(which) for layer in layers]
        for which in layers[0]["flops"]
        for who, key in (("jgg", "tflops"), ("dense", "dense_tflops"))
    }
    for who in dict.fromkeys(name for layer in layers for name in layer["peers"]):
        for which in layers[0]["flops"]:
            speeds[f"{who} {which}"] = [_tflops_of_peer(layer, who, which) for layer in layers]
    names = [layer["problem"]["layer"]["name"] for layer in layers]
    return [(3, _plot_bars, ("whole layer, router included", names, speeds))]


def _tflops_of_peer(layer, who, which):
    """TF/s of a peer's layer; None if it was not measured or not right."""
    seconds = layer["peers"].get(who, {}).get(which, {}).get("seconds")
    return seconds and layer["flops"][which] / seconds / 1e12


def _tflops(row, name):
    return row["measurements"].get(name, {}).get("tflops")


def _plot_bars(axes, title, labels, speeds):
    """A group of bars for each label, one for each name in speeds."""
    positions, width = np.arange(len(labels)), min(0.8 / len(speeds), 0.2)
    for i, (name, values) in enumerate(speeds.items()):
        heights = [value or 0 for value in values]
        axes.bar(positions + (i - (len(speeds) - 1) / 2) * width, heights, width, label=name, color=f"C{i}")
    axes.set_xticks(positions, labels, fontsize="small", rotation=30 if len(labels) > 6 else 0)
    axes.set(ylabel="TF/s", title=title, xlim=(-0.5, len(labels) - 0.5))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _plot_roofline(axes, result):
    """Plots each product's speed over its FLOPs per byte, and two bounds: a copy and the fastest dense product."""
    rows, bandwidth = result["rows"], result["copy_bytes_per_second"]
    for op, marker in _MARKERS.items():
        points = [(row["flops_per_byte"], _tflops(row, "jgg")) for row in rows if row["op"] == op]
        points = [point for point in points if point[1]]
        if points:
            axes.plot(*zip(*points, strict=True), marker, label=f"jgg {op}")
    intensities = [row["flops_per_byte"] for row in rows]
    span = np.array([min(intensities) / 2, max(intensities) * 2])
    if bandwidth:
        axes.plot(span, span * bandwidth / 1e12, "k--", label="copy's bandwidth")
    dense = [speed for row in rows if (speed := _tflops(row, "dense"))]
    if dense:
        axes.axhline(max(dense), color="k", linestyle=":", label="fastest dense product")
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte of x, w and y", ylabel="TF/s")
    axes.set_title("roofline: jgg, and what a copy of x, w and y and the fastest dense product would allow")
    axes.legend()
    axes.grid(alpha=0.3, which="both")


if __name__ == "__main__":
    main()
