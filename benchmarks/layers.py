"""Measures whole MoE layers: forward and backward, router included, their memory and their routing.

    python -m benchmarks.layers --layer qwen3-30b-a3b
    python -m benchmarks.layers --m 65536 --k 2048 --n 1536 --experts 128 --topk 8 --dtype fp8

Every result is checked, then timed. Prints a table, and writes PREFIX.json.
"""

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
from pathlib import Path

import jax

from _jgg_command.parser import DTYPES, SIZES, add_shared
from benchmarks import layers_report
from benchmarks.layer import (
    PASSES,
    LayerProblem,
    LayerReference,
    Memory,
    choices_of,
    layer_function,
    logits_of,
    measure_memory,
)
from jgg.cli import options
from jgg.cli import run as run_command
from jgg.cli.console import progress
from jgg.cli.options import INTERRUPTED, UsageError
from jgg.cli.output import Output
from jgg.core.files import replace_text
from jgg.fp8 import Fp8
from jgg.measuring.peers import PEERS
from jgg.measuring.timing import FAILED, WRONG, Measurement, first_line
from jgg.measuring.ways import JaxProduct, measure_best
from jgg.measuring.workloads import FP8, OPS, Layer, operands
from jgg.router.routing import route


@dataclasses.dataclass
class LayerRow:
    """The measurements of one layer.

    Attributes:
      passes: the measurement of each of PASSES.
      in_flax: the same of a `jgg.nnx.MoE` with float32 parameters.
      dense_seconds: for each of PASSES, the time of dense products as large as the experts' products.
      memory: memory that forward + backward takes.
      route_seconds: time of routing alone, from logits to sorted rows.
      group_sizes: fewest, median and most rows of an expert.
      failures: the error of each measurement that raised one, in one line.
    """

    problem: LayerProblem
    passes: dict[str, Measurement] = dataclasses.field(default_factory=dict)
    in_flax: dict[str, Measurement] = dataclasses.field(default_factory=dict)
    dense_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    memory: Memory | None = None
    route_seconds: float | None = None
    group_sizes: tuple[int, int, int] | None = None
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether nothing failed and no result is wrong."""
        return not self.failures and not any(
            each.status in (FAILED, WRONG) for each in (*self.passes.values(), *self.in_flax.values())
        )

    def tflops(self, which: str) -> float | None:
        """TF/s of the experts' products in a pass; None if the pass was not measured or not right."""
        seconds = self.passes[which].seconds if which in self.passes else None
        return seconds and self.problem.flops(which) / seconds / 1e12

    def percent_of_dense(self, which: str) -> float | None:
        """The time of the dense products in percent of the time of a pass."""
        seconds = self.passes[which].seconds if which in self.passes else None
        dense = self.dense_seconds.get(which)
        return 100 * dense / seconds if dense and seconds else None


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser; it has the options of `jgg bench` that make sense for whole layers."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.layers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = "of x and the weights (bfloat16 on a GPU, float32 elsewhere); fp8: bfloat16, multiplied in FP8"
    plain = "layer", "shapes", *SIZES, "implementation", "seed", "json", "quiet"
    dtype = {"choices": (*DTYPES, FP8), "help": what}
    add_shared(parser, *plain, dtype=dtype, w_layout={"default": "enk"}, out={"default": "jgg-layers"})
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
    output, path = Output(), Path(f"{args.out}.json")
    if are_scaled_down(args) and not args.json:
        print(options.SCALED_DOWN)
    try:
        with progress(len(problems) * (3 + 2 * len(PASSES)), args.quiet) as tell:
            for problem in problems:
                rows.append(LayerRow(problem))
                measure_layer(rows[-1], args.seed, tell)
    except KeyboardInterrupt:
        interrupted = True
        rows = [row for row in rows if row.passes]
        if not rows:
            raise
    text = layers_report.as_json(rows, args, interrupted)
    output.write(path, lambda path: replace_text(path, text))
    if args.json:
        print(text, end="")
    else:
        layers_report.show(rows, interrupted)
    failed = output.report(quiet=args.json)
    if interrupted:
        return INTERRUPTED
    return int(failed or not all(row.is_right for row in rows))


def measure_layer(row: LayerRow, seed: int, tell) -> None:
    """Fills in the row's measurements, and `failures`; reports 3 + 2 * len(PASSES) steps to `tell`."""
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
        row.passes[which] = _measure_pass(problem, which, arrays)
    with attempt("route + sort"):
        _measure_routing(row, arrays)
    with attempt("dense"):
        _measure_dense(row, seed)
    del arrays
    problem = problem.in_flax()
    arrays = problem.operands(seed)
    for which in PASSES:
        tell(f"{problem.layer.name} nnx.MoE {which}", 1)
        row.in_flax[which] = _measure_pass(problem, which, arrays)


def _measure_pass(problem, which, arrays):
    function = layer_function(problem, which)
    way = JaxProduct(function, arrays, problem.flops(which), problem.bytes_accessed)
    try:
        reference = LayerReference.of(problem, which, arrays, choices_of(problem, arrays))
    except Exception as error:  # such as too little memory
        return Measurement(FAILED, reason=first_line(error))
    return measure_best(lambda: [way], reference)


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
    problem = row.problem
    one_expert = dataclasses.replace(problem.layer, experts=1, topk=1, tokens=problem.num_rows)
    gemms = dataclasses.replace(problem, layer=one_expert).gemms
    seconds = {op: sum(_time_dense(gemm, op, seed) for gemm in gemms) for op in OPS}
    row.dense_seconds = {which: sum(seconds[op] for op in ops) for which, ops in PASSES.items()}


def _time_dense(gemm, op, seed):
    (way,) = PEERS["dense"].prepare(op, gemm, operands(gemm, "one", seed))
    return way.measure().seconds


def main(argv=None) -> int:
    """Runs the benchmark and returns the exit code."""
    return run_command(make_parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
