"""Estimate how an MoE layer scales to many GPUs: bytes on links, FLOPs, memory, and the best way to split it.

A model and no measurement (docs/scaling.md). Prints a table of the fastest strategies for each number of devices and
writes PREFIX.png, efficiency over devices.
"""

import argparse

from jgg.cli.common import UsageError, check_out, import_with_extra, positive_float, positive_int
from jgg.measuring.cost_model import Cluster
from jgg.measuring.workloads import load_layers


def add_arguments(parser):
    """Declares the options of `jgg plan`."""
    cluster = Cluster(1)
    parser.add_argument("--layer", default="qwen3-30b-a3b", metavar="NAME", help="a known MoE layer (%(default)s)")
    parser.add_argument("--tokens", type=positive_int, help="of each device (the layer's own)")
    parser.add_argument(
        "--devices", type=_counts, default="8,64,512,4096", metavar="LIST", help="comma list (%(default)s)"
    )
    parser.add_argument("--node-size", type=positive_int, default=cluster.node_size, help="devices (%(default)s)")
    for name, value, meaning in (
        ("link-gbps", cluster.link / 1e9, "gigabytes a second that a device sends inside its node"),
        ("network-gbps", cluster.network / 1e9, "gigabytes a second that a device sends to other nodes"),
        ("tflops", cluster.flops / 1e12, "TFLOP/s of a device on this layer alone, as jgg bench measures them"),
        ("memory-gb", cluster.memory / 1e9, "gigabytes of a device"),
    ):
        parser.add_argument(f"--{name}", type=positive_float, default=value, help=f"{meaning} (%(default)s)")
    parser.add_argument("--top", type=positive_int, default=4, help="strategies for each number (%(default)s)")
    parser.add_argument("--out", default="jgg-plan", metavar="PREFIX", help="of the file written (%(default)s)")


def _counts(text):
    """Argument type: a comma list of powers of two."""
    counts = tuple(dict.fromkeys(positive_int(part) for part in text.split(",")))
    for count in counts:
        if count & (count - 1):
            raise argparse.ArgumentTypeError(f"must be powers of two, got {count}")
    return counts


def run(args) -> int:
    """Prints the table and writes the plot; returns 0."""
    layers = load_layers()
    if args.layer not in layers:
        raise UsageError(f"--layer must be one of {', '.join(layers)}; got {args.layer!r}")
    check_out(args.out)
    report = import_with_extra("jgg.cli.plan_report", "bench")
    layer = report.with_tokens(layers[args.layer], args.tokens)
    cluster = Cluster(
        1, args.node_size, args.link_gbps * 1e9, args.network_gbps * 1e9, args.tflops * 1e12, args.memory_gb * 1e9
    )
    print(report.text(layer, cluster, args.devices, args.top))
    print(f"Wrote {report.write(layer, cluster, args.devices, args.out)}")
    return 0
