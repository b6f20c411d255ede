"""Measures whole MoE layers: forward and backward, router included, their memory and their routing.

    python -m benchmarks.layers --layer qwen3-30b-a3b
    python -m benchmarks.layers --m 65536 --k 2048 --n 1536 --experts 128 --topk 8 --dtype fp8
    python -m benchmarks.layers --layer qwen3-30b-a3b --peers all

Every result is checked, then timed. Prints tables, and writes PREFIX.json.
"""

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from benchmarks import layers_report
from benchmarks.layer import (
    PASSES,
    LayerProblem,
    LayerReference,
    choices_of,
    layer_function,
    logits_of,
    measure_memory,
)
from benchmarks.layer_peers import LAYER_PEERS, LayerPeer, measure_peer
from benchmarks.layer_roofline import dense_times, least_layer_seconds, parts_of
from jgg.cli import options
from jgg.cli import run as run_command
from jgg.cli.arguments import prefix
from jgg.cli.commands import Bench, Products
from jgg.cli.console import progress
from jgg.cli.declarations import add_options, changed
from jgg.cli.errors import INTERRUPTED, UsageError
from jgg.cli.output import Output
from jgg.core.choices import FP8
from jgg.core.files import replace_text
from jgg.core.program_memory import Memory
from jgg.experts.router.routing import route
from jgg.linear.fp8 import Fp8
from jgg.tuning.roofline import copy_bandwidth, percent_of_roofline
from jgg.tuning.timing import FAILED, WRONG, Measurement, first_line
from jgg.tuning.ways import JaxProduct, check_and_time
from jgg.tuning.workloads import Layer


@dataclasses.dataclass
class LayerRow:
    """The measurements of one layer.

    Attributes:
      passes: the measurement of each of PASSES.
      in_flax: the same of a `jgg.nnx.MoE` with float32 parameters.
      peers: the same of peers, by their names.
      dense_seconds: for each of PASSES, the time of dense products as large as the experts' products.
      product_seconds: the time of each of these products, in FP8 where the layer multiplies in FP8.
      copy_bandwidth: bytes a second, read and written, of a plain copy on the device.
      memory: memory that forward + backward takes.
      route_seconds: time of routing alone, from logits to sorted rows.
      group_sizes: fewest, median and most rows of an expert.
      used_experts: how many experts have rows, in the layer and as a `jgg.nnx.MoE`.
      failures: the error of each measurement that raised one, in one line.
    """

    problem: LayerProblem
    passes: dict[str, Measurement] = dataclasses.field(default_factory=dict)
    in_flax: dict[str, Measurement] = dataclasses.field(default_factory=dict)
    peers: dict[str, dict[str, Measurement]] = dataclasses.field(default_factory=dict)
    dense_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    product_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    copy_bandwidth: float | None = None
    memory: Memory | None = None
    route_seconds: float | None = None
    group_sizes: tuple[int, int, int] | None = None
    used_experts: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether no result is wrong and nothing failed, but for peers."""
        own = (*self.passes.values(), *self.in_flax.values())
        of_peers = [measurement for passes in self.peers.values() for measurement in passes.values()]
        is_wrong = any(each.status == WRONG for each in (*own, *of_peers))
        return not (self.failures or is_wrong or any(each.status == FAILED for each in own))

    def tflops(self, which: str) -> float | None:
        """TF/s of the experts' products in a pass; None if the pass was not measured or not right."""
        seconds = self.passes[which].seconds if which in self.passes else None
        return seconds and self.problem.flops(which) / seconds / 1e12

    def percent_of_dense(self, which: str) -> float | None:
        """The time of the dense products in percent of the time of a pass."""
        seconds = self.passes[which].seconds if which in self.passes else None
        dense = self.dense_seconds.get(which)
        return 100 * dense / seconds if dense and seconds else None

    def percent_of_roofline(self, which: str, kind: str = "passes") -> float | None:
        """The least time of a pass, as `layer_roofline` has it, in percent of its time; None if a time is missing.

        Args:
          kind: "passes" or "in_flax".
        """
        passes, problem = getattr(self, kind), self.problem if kind == "passes" else self.problem.in_flax()
        parts = parts_of(problem, which, self.used_experts.get(kind))
        least = least_layer_seconds(parts, self.copy_bandwidth, self.product_seconds)
        return percent_of_roofline(least, passes[which].seconds if which in passes else None)


@dataclasses.dataclass(kw_only=True)
class _Options(Bench):
    layer: list[str] | None = changed(Products, "layer")
    dtype: str | None = changed(Products, "dtype", what="dtype of x and the weights; fp8: bfloat16, multiplied in FP8")


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser; it has the options of `jgg bench` that make sense for whole layers."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.layers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, _Options, *(name for name in _Options.declared() if name not in ("op", "groups")))
    what = "how the names of the written files begin (default: %(default)s)"
    parser.add_argument("--out", type=prefix, default="jgg-layers", metavar="PREFIX", help=what)
    what = f"all, none or a comma list of {', '.join(LAYER_PEERS)}, not with fp8 (default: %(default)s)"
    parser.add_argument("--peers", default="none", metavar="LIST", help=what)
    parser.set_defaults(parser=parser)
    return parser


def problems_of(args) -> list[LayerProblem]:
    """Makes the problems that options name.

    Raises: UsageError: options that do not fit together or do not fit this machine.
    """
    sizes = options.sizes(args)
    options.check_implementation(args.implementation)
    if sizes and sizes["out_features"] % 2:
        raise UsageError(f"--n must be even: gate and up, got {sizes['out_features']}")
    layers = (own_layer(**sizes),) if sizes else options.layers(args)
    if are_scaled_down(args):
        layers = tuple(map(options.scaled_down, layers[:2]))
    dtype, recipe = args.dtype or options.default_dtype(), None
    if dtype == FP8:
        dtype, recipe = "bfloat16", Fp8()
    return [LayerProblem(layer, dtype, args.w_layout, args.implementation, recipe) for layer in layers]


def peers_of(args, dtype: str) -> tuple[dict[str, LayerPeer], dict[str, str]]:
    """The peers that options name and that can run, and why others cannot."""
    if args.peers == "none" or args.dtype == FP8:
        if args.peers not in ("none", "all"):
            raise UsageError(f"--peers must be none with --dtype {FP8}, got {args.peers}")
        return {}, {}
    names = tuple(LAYER_PEERS) if args.peers == "all" else options.names("--peers", args.peers, LAYER_PEERS)
    skipped, found = {}, {}
    for name in names:
        peer = LAYER_PEERS[name]
        if dtype not in peer.dtypes:
            skipped[name] = f"it is measured in {' and '.join(peer.dtypes)}"
        elif (reason := peer.unavailable()) is not None:
            skipped[name] = reason
        else:
            found[name] = peer
    return found, skipped


def are_scaled_down(args) -> bool:
    """Whether only two layers, made smaller, are measured: without a GPU, if options name neither layers nor sizes."""
    return options.sizes(args) is None and options.are_scaled_down(args)


def own_layer(*, num_rows, in_features, out_features, num_experts, topk) -> Layer:
    """Makes the layer whose up product has these sizes."""
    return Layer("own", num_rows // topk, in_features, out_features // 2, num_experts, topk)


def run(args) -> int:
    """Measures and reports; returns 0, 1 after a wrong or failed result or file, or 130 after an interrupt."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    problems, rows, interrupted = problems_of(args), [], False
    peers, skipped = peers_of(args, problems[0].dtype)
    output, path = Output(), Path(f"{args.out}.json")
    if are_scaled_down(args) and not args.json:
        print(options.SCALED_DOWN)
    try:
        with progress(len(problems) * (3 + (2 + len(peers)) * len(PASSES)), args.quiet) as tell:
            speed = copy_bandwidth()
            for problem in problems:
                rows.append(LayerRow(problem, copy_bandwidth=speed))
                measure_layer(rows[-1], args.seed, tell, peers)
    except KeyboardInterrupt:
        interrupted = True
        rows = [row for row in rows if row.passes]
        if not rows:
            raise
    text = layers_report.as_json(rows, args, skipped, interrupted)
    output.write(path, lambda path: replace_text(path, text))
    if args.json:
        print(text, end="")
    else:
        layers_report.show(rows, skipped, interrupted)
    failed = output.report(quiet=args.json)
    if interrupted:
        return INTERRUPTED
    return int(failed or not all(row.is_right for row in rows))


def measure_layer(row: LayerRow, seed: int, tell, peers: Mapping[str, LayerPeer]) -> None:
    """Fills in the row's measurements, and `failures`; reports 3 + (2 + len(peers)) * len(PASSES) steps to `tell`."""
    problem = row.problem
    arrays = problem.operands(seed)

    @contextlib.contextmanager
    def attempt(what):
        tell(f"{problem.layer.name} {what}", 1)
        try:
            yield
        except Exception as error:  # such as too little memory: report it and go on
            row.failures[what] = first_line(error)

    with attempt("memory"):  # first, while few other arrays take memory
        row.memory = measure_memory(problem, arrays)
    for which in PASSES:
        tell(f"{problem.layer.name} {which}", 1)
        row.passes[which] = _measure_pass(row, problem, which, arrays, "passes")
    with attempt("route + sort"):
        _measure_routing(row, arrays)
    for name, peer in peers.items():
        row.peers[name] = {}
        for which in PASSES:
            tell(f"{problem.layer.name} {name} {which}", 1)
            row.peers[name][which] = measure_peer(peer, problem, which, arrays)
    del arrays
    with attempt("dense"):
        _measure_dense(row, seed)
    problem = problem.in_flax()
    arrays = problem.operands(seed)
    for which in PASSES:
        tell(f"{problem.layer.name} nnx.MoE {which}", 1)
        row.in_flax[which] = _measure_pass(row, problem, which, arrays, "in_flax")


def _measure_pass(row, problem, which, arrays, kind):
    function = layer_function(problem, which)
    num_bytes = sum(part.num_bytes for part in parts_of(problem, which))
    way = JaxProduct(function, arrays, problem.flops(which), num_bytes)
    try:
        choices = choices_of(problem, arrays)
        row.used_experts[kind] = np.unique(choices).size
        reference = LayerReference.of(problem, which, arrays, choices)
    except Exception as error:  # such as too little memory
        return Measurement(FAILED, reason=first_line(error))
    return check_and_time(way, reference)


def _measure_routing(row, arrays):
    topk, implementation = row.problem.layer.topk, row.problem.implementation
    logits = jax.jit(logits_of)(arrays["x"], arrays["w_router"])
    arrays = {"logits": logits, "group_sizes": arrays["group_sizes"]}
    way = JaxProduct(lambda a: route(a["logits"], topk, implementation=implementation), arrays, 0, 2 * logits.nbytes)
    sizes = sorted(way.compute().group_sizes.tolist())
    row.group_sizes = sizes[0], int(statistics.median(sizes)), sizes[-1]
    row.route_seconds = way.measure().seconds


def _measure_dense(row, seed):
    """Fills in the time of dense products as large as the experts': up and down, and their gradients."""
    seconds = dense_times(row.problem, seed)
    row.dense_seconds = {
        which: sum(time for name, time in seconds.items() if name.split()[1] in ops) for which, ops in PASSES.items()
    }
    is_in_fp8 = row.problem.quantization is not None
    row.product_seconds = seconds | (dense_times(row.problem, seed, is_in_fp8=True) if is_in_fp8 else {})


def main(argv=None) -> int:
    """Runs the benchmark and returns the exit code."""
    return run_command(make_parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
