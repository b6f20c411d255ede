"""Time grouped GEMMs on this machine against a dense product and `jax.lax.ragged_dot`, and check every result."""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jgg.cli import options
from jgg.cli.console import number, print_table, progress
from jgg.cli.errors import INTERRUPTED, UsageError
from jgg.cli.info import devices, origin
from jgg.core.choices import FP8
from jgg.core.problem import GroupedGemmProblem
from jgg.tuning import ways, workloads
from jgg.tuning.roofline import copy_bandwidth, least_seconds, percent_of_roofline
from jgg.tuning.timing import FAILED, RIGHT, WRONG, Measurement, Reference, first_line
from jgg.tuning.workloads import computed_as, group_sizes, operands

OPS = ("forward", "dx", "dw", "gather")  # "gather" is forward with x in token order
JGG, DENSE = "jgg", "dense"
TIME_LIMIT = 75.0  # seconds; what is being measured as they end takes less than as many more
_HEADINGS = ("GEMM", "M, K, N, E", "op", "ms", "TF/s", "% of\ndense", "% of\nroofline")
_SIZES = ("num_rows", "in_features", "out_features", "num_experts", "topk")

Measure = Callable[[str, GroupedGemmProblem, dict[str, object], Reference], Measurement]
"""Checks and times one way to compute a product: function of the op, the problem, its arrays and the right result."""
Plan = Mapping[str, Mapping[str, Measure]]
"""The measurements to make, by their names, for each kind of group sizes. JGG has the kind that was asked for."""


@dataclasses.dataclass
class Row:
    """One op of one GEMM, its measurements, and the bytes that each of them must read and write, by their names."""

    layer: str
    gemm: str
    op: str
    problem: GroupedGemmProblem
    measurements: dict[str, Measurement] = dataclasses.field(default_factory=dict)
    num_bytes: dict[str, int] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """The names of the layer, of its GEMM and of the op."""
        return f"{self.layer} {self.gemm} {self.op}"

    def seconds(self, name: str) -> float | None:
        """Seconds of a call; None if `name` was not measured or not right."""
        measurement = self.measurements.get(name)
        return None if measurement is None else measurement.seconds

    def ratio(self, name: str, who: str = JGG) -> float | None:
        """The speed of `who` divided by the speed of `name`; None if one of them has no speed."""
        own, other = self.seconds(who), self.seconds(name)
        return other / own if own and other else None

    def numbers(self, name: str, copy_speed: float | None) -> dict[str, float | None]:
        """The numbers that follow from the seconds of a call; each is None if a time that it needs is missing."""
        seconds, num_bytes, ratio = self.seconds(name), self.num_bytes[name], self.ratio(DENSE, name)
        least = least_seconds(num_bytes, copy_speed, self.seconds(DENSE))
        return {
            "milliseconds": seconds and seconds * 1e3,
            "tflops": seconds and self.problem.flops / seconds / 1e12,
            "gbytes_per_second": seconds and num_bytes / seconds / 1e9,
            "percent_of_dense": ratio and 100 * ratio,
            "percent_of_roofline": percent_of_roofline(least, seconds),
        }

    def as_json(self, copy_speed: float | None) -> dict[str, object]:
        """The row as the JSON output has it."""
        problem, num_bytes = self.problem, self.num_bytes[JGG]
        return {
            **{name: getattr(self, name) for name in ("layer", "gemm", "op")},
            **{name: getattr(problem, name) for name in _SIZES},
            "dtype": problem.dtype.name,
            "flops": problem.flops,
            "bytes": num_bytes,
            "flops_per_byte": problem.flops / num_bytes,
            "measurements": {
                name: each.as_json() | self.numbers(name, copy_speed) for name, each in self.measurements.items()
            },
        }


@dataclasses.dataclass
class Result:
    """The outcome of a run.

    Attributes:
      settings: the options of the run.
      rows: all rows that were asked for.
      copy_speed: bytes a second, read and written, of a plain copy on the device.
      left_out: the rows that lack measurements, because there was no time for them.
      interrupted: whether something is left to measure because of an interrupt.
    """

    settings: dict[str, Any]
    rows: list[Row]
    copy_speed: float | None = None
    left_out: list[str] = dataclasses.field(default_factory=list)
    interrupted: bool = True

    @property
    def measured(self) -> list[Row]:
        """The rows in which jgg was measured; after an interrupt, the last may be incomplete."""
        return [row for row in self.rows if JGG in row.measurements]

    def as_json(self) -> dict[str, object]:
        """The result as the JSON output has it."""
        return origin() | {
            "settings": self.settings,
            "copy_bytes_per_second": self.copy_speed,
            "left_out": self.left_out,
            "interrupted": self.interrupted,
            "rows": [row.as_json(self.copy_speed) for row in self.measured],
        }

    def exit_code(self, peers: Mapping[str, object]) -> int:
        """130 after an interrupt, 1 if a result is wrong or a product of jgg's own failed, else 0."""
        if self.interrupted:
            return INTERRUPTED
        measured = [item for row in self.rows for item in row.measurements.items()]
        return int(any(m.status == WRONG or (m.status == FAILED and name not in peers) for name, m in measured))


def run(args) -> int:
    """Measures and prints; returns the exit code."""
    rows, peers = rows_of(args), peers_of(args)
    own = in_one_way(functools.partial(ways.own, implementation=args.implementation))
    result = measure(rows, plan_of(args.groups, own, peers), args)
    if args.json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        show(result)
    return result.exit_code(peers)


def in_one_way(prepare: Callable[[str, GroupedGemmProblem, dict[str, Any]], ways.Way]) -> Measure:
    """Makes the function that measures the one way that `prepare(op, problem, arrays)` returns."""
    return lambda op, problem, arrays, reference: ways.check_and_time(prepare(op, problem, arrays), reference)


def peers_of(args) -> dict[str, Measure]:
    """The products to compare jgg's with: a dense one, and XLA's grouped product or, for FP8, jgg's own in bfloat16."""
    grouped = {"bfloat16": ways.in_bfloat16} if args.dtype == FP8 else {"ragged_dot": ways.ragged_dot}
    return {name: in_one_way(prepare) for name, prepare in {DENSE: ways.dense, **grouped}.items()}


def plan_of(groups: str, own: Measure, peers: Mapping[str, Measure]) -> Plan:
    """The plan for these group sizes; the dense product is right, and measured first, with all rows in one group."""
    plan: dict[str, dict[str, Measure]] = {"one": {DENSE: peers[DENSE]}} if DENSE in peers else {}
    others = {name: peer for name, peer in peers.items() if name != DENSE}
    return plan | {groups: plan.get(groups, {}) | {JGG: own} | others}


def rows_of(args) -> list[Row]:
    """The rows that the options ask for, not yet measured. Fills in the default of --dtype.

    Raises: UsageError: options that do not fit together or do not fit this machine.
    """
    sizes = options.sizes(args)
    layers = () if sizes else options.layers(args)
    if is_first_look(args):
        layers = layers[:1]
    if is_scaled_down(args):
        layers = tuple(map(options.scaled_down, layers))
    options.check_implementation(args.implementation)
    options.check_layout(args)
    args.dtype = args.dtype or options.default_dtype()
    ops = options.names("--op", args.op.replace("fwd", "forward"), OPS)
    how = {"dtype": args.dtype, "w_layout": args.w_layout}

    def problems(op):
        gathers = how | {"permute_x": op == "gather"}
        if sizes:
            return {("own", "gemm"): workloads.gemm(**sizes, **gathers)}
        return {(layer.name, name): each for layer in layers for name, each in layer.gemms(**gathers).items()}

    if args.dtype == FP8:
        ops = tuple(op for op in ops if op != "dw")
    if not ops:
        raise UsageError(f"--op must name more than dw with --dtype {FP8}: the operands of dw are not quantized")
    by_op = {op: problems(op) for op in ops}
    return [Row(layer, gemm, op, by_op[op][layer, gemm]) for layer, gemm in problems("forward") for op in ops]


def is_first_look(args) -> bool:
    """Whether no option names layers or sizes: then one layer is measured, for a limited time."""
    return not (args.layer or args.shapes or options.sizes(args))


def is_scaled_down(args) -> bool:
    """Whether the one layer of a first look is made smaller, because there is no GPU."""
    return is_first_look(args) and options.are_scaled_down(args)


def measure(rows: list[Row], plan: Plan, args, keep: Callable[[Result], object] = lambda result: None) -> Result:
    """Measures the rows; after an interrupt from the keyboard it returns what was measured until then.

    It calls keep(result) after each row, for a library that might end the process.
    """
    settings = {name: value for name, value in vars(args).items() if name not in ("command", "parser")}
    result = Result(settings | {"scaled_down": is_scaled_down(args)}, rows)
    end = time.monotonic() + (TIME_LIMIT if is_first_look(args) else math.inf)
    try:
        result.copy_speed = copy_bandwidth()
        with progress(len(rows) * sum(map(len, plan.values())), args.quiet) as tell:
            for row in rows:
                if not _measure_row(row, plan, args, tell, end):
                    result.left_out.append(str(row))
                keep(result)
        result.interrupted = False
    except KeyboardInterrupt:
        if not result.measured:
            raise
    return result


def _measure_row(row, plan, args, tell, end):
    """Fills in the measurements of a row; returns whether none was left out because it would have begun after `end`.

    Operands and references are freed before it returns.
    """
    if time.monotonic() > end:
        return False
    op, problem = computed_as("forward" if row.op == "gather" else row.op, row.problem)
    arrays = operands(problem, args.groups, args.seed)
    for groups, measures in plan.items():
        sizes = group_sizes(groups, problem.num_rows, problem.num_experts, args.seed)
        arrays["group_sizes"] = jnp.asarray(sizes)
        reference = None
        for name, check_and_time in measures.items():
            if time.monotonic() > end and JGG in row.measurements:
                return False
            tell(f"{row} {name}")
            row.num_bytes[name] = problem.bytes_accessed(op, int(np.count_nonzero(sizes)))
            try:
                reference = reference or Reference.of(op, problem, arrays)
                row.measurements[name] = check_and_time(op, problem, arrays, reference)
            except Exception as error:  # such as too little memory: report it and go on
                row.measurements[name] = Measurement(FAILED, reason=first_line(error))
            tell(f"{row} {name}", 1)
    return True


def show(result: Result) -> None:
    """Prints the conditions, a table, and what was wrong, failed or was left out."""
    settings, rows = result.settings, result.measured
    implementation = settings["implementation"] or "chosen by jgg"
    print(f"{devices()[0].kind}, {settings['dtype']}, w {settings['w_layout']}, implementation {implementation}")
    print(f"Sizes of groups: {settings['groups']}. Plain copy: {number((result.copy_speed or 0) / 1e9)} GB/s")
    if settings["scaled_down"]:
        print(options.SCALED_DOWN)
    others = list(dict.fromkeys(name for row in rows for name in row.measurements if name not in (JGG, DENSE)))
    headings = (*_HEADINGS, *(f"{name},\nTF/s" for name in others))
    print_table(headings, [_cells(row, others, result.copy_speed) for row in rows], _HEADINGS[:3])
    for (name, what), where in _not_right(rows).items():
        print(f"{name}, {'; '.join(where)}: {what}")
    if result.left_out:
        print(f"Not all was measured, for lack of time, of {', '.join(result.left_out)}: name the layer with --layer")
    if result.interrupted:
        print("Interrupted: not everything was measured")


def _cells(row, others, copy_speed):
    def cell(name, key):
        measurement = row.measurements.get(name)
        if measurement is None:
            return "-"
        return number(row.numbers(name, copy_speed)[key]) if measurement.status == RIGHT else measurement.status

    own = ("milliseconds", "tflops", "percent_of_dense", "percent_of_roofline")
    sizes = ", ".join(str(getattr(row.problem, name)) for name in _SIZES[:-1])
    texts = f"{row.layer} {row.gemm}", sizes, row.op
    return *texts, *(cell(JGG, key) for key in own), *(cell(name, "tflops") for name in others)


def _not_right(rows):
    """Which rows are wrong or failed, by the name of the measurement and the reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, measurement in row.measurements.items():
            if measurement.status != RIGHT:
                reasons.setdefault((name, str(measurement)), []).append(str(row))
    return reasons
