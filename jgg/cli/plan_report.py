"""Reports what `jgg plan` estimates: a table for the terminal and a plot."""

import dataclasses
from pathlib import Path

from matplotlib.figure import Figure

from jgg.cli.bench_report import number
from jgg.measuring.cost_model import Cluster, Strategy, best, strategies
from jgg.measuring.workloads import Layer

_HEADER = (
    "devices",
    "strategy",
    "link MB",
    "network MB",
    "exchange / minimum",
    "GFLOP",
    "memory GB",
    "ms",
    "efficiency",
)
# what is compared in the plot: which strategies belong to each
FAMILIES = {
    "data": lambda s: s.expert == s.tensor == 1 and not s.fsdp,
    "fsdp": lambda s: s.expert == s.tensor == 1 and s.fsdp,
    "expert by all_gather, with data or fsdp": lambda s: s.expert > 1 == s.tensor and s.exchange == "all_gather",
    "expert by ragged_all_to_all, with data or fsdp": lambda s: (
        s.expert > 1 == s.tensor and s.exchange == "ragged_all_to_all"
    ),
    "tensor, with anything": lambda s: s.tensor > 1,
}


def with_tokens(layer: Layer, tokens: int | None) -> Layer:
    """The layer with so many tokens for each device."""
    return layer if tokens is None else dataclasses.replace(layer, tokens=tokens)


def text(layer: Layer, cluster: Cluster, counts: tuple[int, ...], top: int) -> str:
    """Conditions and a line for each of the fastest strategies."""
    lines = [_HEADER]
    for count in counts:
        at = dataclasses.replace(cluster, devices=count)
        found = best(layer, at, strategies(layer, at))[:top]
        lines += [_cells(count, *pair) for pair in found] or [(str(count), "none fits", *["-"] * (len(_HEADER) - 2))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = "\n".join("  ".join(_aligned(line, widths)) for line in lines)
    return (
        f"A model, not a measurement. {layer.name}: {layer.tokens} tokens for each device, H {layer.hidden}, "
        f"I {layer.expert_intermediate}, E {layer.experts}, k {layer.topk}; forward and backward, bfloat16.\n"
        f"Nodes of {cluster.node_size}, {cluster.link / 1e9:g} GB/s inside, {cluster.network / 1e9:g} GB/s between "
        f"them, {cluster.flops / 1e12:g} TFLOP/s, {cluster.memory / 1e9:g} GB.\n{table}"
    )


def _aligned(cells, widths):
    """Numbers to the right, the strategy to the left."""
    return [
        cell.ljust(width) if column == 1 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]


def _cells(count, strategy: Strategy, cost):
    sent = cost.exchange / cost.minimum if cost.minimum else None
    return (
        str(count),
        str(strategy),
        number(cost.traffic.link / 1e6),
        number(cost.traffic.network / 1e6),
        number(sent),
        number(cost.flops / 1e9),
        number(cost.memory / 1e9),
        number(cost.seconds * 1e3),
        f"{cost.efficiency:.2f}",
    )


def write(layer: Layer, cluster: Cluster, counts: tuple[int, ...], prefix: str) -> Path:
    """Writes the plot, and returns its path."""
    path = Path(f"{prefix}.png")
    plot(layer, cluster, max(counts)).savefig(path, dpi=120)
    return path


def plot(layer: Layer, cluster: Cluster, most: int) -> Figure:
    """Draws efficiency and memory over the number of devices, for the fastest strategy of each family that fits."""
    figure = Figure(figsize=(9, 9), layout="constrained")
    figure.suptitle(f"jgg plan: {layer.name}, {layer.tokens} tokens for each device (a model, not a measurement)")
    efficiency, memory = figure.subplots(2, 1, sharex=True)
    counts = [2**i for i in range(most.bit_length()) if 2**i <= most]
    for name, belongs in FAMILIES.items():
        points = []
        for count in counts:
            at = dataclasses.replace(cluster, devices=count)
            found = best(layer, at, [s for s in strategies(layer, at) if belongs(s) and count > 1])
            points += [(count, found[0][1])] if found else []
        x = [count for count, _ in points]
        efficiency.plot(x, [cost.efficiency for _, cost in points], "o-", label=name)
        memory.plot(x, [cost.memory / 1e9 for _, cost in points], "o-", label=name)
    efficiency.set(ylabel="efficiency against one device", ylim=(0, 1), xscale="log")
    memory.set(xlabel="devices", ylabel="GB of a device", xscale="log")
    memory.set_xscale("log", base=2)
    efficiency.legend()
    for axes in (efficiency, memory):
        axes.grid(alpha=0.3)
    return figure
