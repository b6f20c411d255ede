"""Estimate how an MoE layer scales to many GPUs: bytes on links, FLOPs, memory, and the best way to split it.

A model and no measurement (docs/scaling.md). Prints a table of the fastest strategies for each number of devices and
writes PREFIX.png, efficiency over devices; with --json it prints the same numbers and writes nothing.
"""

import dataclasses
import json
from pathlib import Path

from jgg.cli import options
from jgg.cli.console import number, print_table
from jgg.cli.output import Output
from jgg.measuring.cost_model import Cluster, best, powers_of_two, strategies

_HEADINGS = (
    "devices", "strategy", "link MB", "network MB", "exchange / minimum", "GFLOP", "memory GB", "ms", "efficiency",
)  # fmt: skip


def run(args) -> int:
    """Prints the table and writes the plot, or prints JSON; returns 0, or 1 where the plot could not be written."""
    layer = options.one_layer(args)
    cluster = Cluster(
        1, args.node_size, args.link_gbps * 1e9, args.network_gbps * 1e9, args.tflops * 1e12, args.memory_gb * 1e9
    )
    found = {}
    for count in args.devices:
        nodes = dataclasses.replace(cluster, devices=count)
        found[count] = best(layer, nodes, strategies(layer, nodes))[: args.top]
    if args.json:
        print(json.dumps(_as_json(layer, cluster, found), indent=2))
        return 0
    return _show(layer, cluster, found, Path(f"{args.out}.png"))


def _as_json(layer, cluster, found):
    """Bytes, operations and seconds of a device; a number of devices that no strategy fits has none."""
    return {
        "layer": dataclasses.asdict(layer),
        "cluster": {name: value for name, value in dataclasses.asdict(cluster).items() if name != "devices"},
        "strategies": [
            {
                "devices": count,
                "name": str(strategy),
                "strategy": dataclasses.asdict(strategy),
                "cost": dataclasses.asdict(cost) | {"traffic": cost.traffic._asdict()},
            }
            for count, pairs in found.items()
            for strategy, cost in pairs
        ],
    }


def _show(layer, cluster, found, path):
    plots = options.import_with_extra("jgg.cli.plots", "bench")
    print(f"A model, not a measurement. {layer}; forward and backward, bfloat16.")
    print(
        f"Nodes of {cluster.node_size}, {cluster.link / 1e9:g} GB/s inside, {cluster.network / 1e9:g} GB/s between"
        f" them, {cluster.flops / 1e12:g} TFLOP/s, {cluster.memory / 1e9:g} GB."
    )
    rows = []
    for count, pairs in found.items():
        rows += [_cells(*pair) for pair in pairs] or [(count, "none fits", *["-"] * (len(_HEADINGS) - 2))]
    print_table(_HEADINGS, rows, texts=("strategy",))
    clusters = [dataclasses.replace(cluster, devices=count) for count in powers_of_two(max(found))[1:]]
    output = Output()
    output.write(path, lambda path: plots.write_plan(layer, clusters, path))
    return output.report()


def _cells(strategy, cost):
    sent = cost.exchange / cost.minimum if cost.minimum else None
    numbers = (*(each / 1e6 for each in cost.traffic), sent, cost.flops / 1e9, cost.memory / 1e9, cost.seconds * 1e3)
    return (strategy.devices, strategy, *map(number, numbers), f"{cost.efficiency:.2f}")
