"""Measures for `jgg bench`: each product is checked against a reference, then timed, beside its bounds and peers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jgg.cli.bench import Settings
from jgg.cli.bench_layer import STEPS, LayerRow, measure_layer
from jgg.cli.console import progress
from jgg.measuring.measurement import (
    DENSE,
    FAILED,
    JGG,
    RIGHT,
    UNSUPPORTED,
    WRONG,
    Measurement,
    check_and_time,
    first_line,
)
from jgg.measuring.peers import PEERS, JaxProduct, Unsupported
from jgg.measuring.timing import Reference, measure, product
from jgg.measuring.workloads import group_sizes, operands
from jgg.problem import GroupedGemmProblem

BOUNDS = {"even": "even", "one": "one group"}  # jgg's own product with other group sizes, and what a row calls it


@dataclasses.dataclass(frozen=True)
class Row:
    """The measurements of one product of one GEMM, by JGG, the values of BOUNDS and the names of peers."""

    layer: str
    gemm: str
    op: str
    problem: GroupedGemmProblem
    measurements: dict[str, Measurement] = dataclasses.field(default_factory=dict)

    def seconds(self, name: str) -> float | None:
        """Seconds of a call; None where there is no right one."""
        measurement = self.measurements.get(name)
        return None if measurement is None else measurement.seconds

    def tflops(self, name: str) -> float | None:
        """TF/s, counting the rows that there are."""
        seconds = self.seconds(name)
        return seconds and self.problem.flops / seconds / 1e12

    def ratio(self, name: str) -> float | None:
        """How many times as fast as `name` jgg is."""
        own, other = self.seconds(JGG), self.seconds(name)
        return other / own if own and other else None


@dataclasses.dataclass
class Result:
    """What a run measured.

    Attributes:
      settings: its options.
      peers: names of the peers that could run.
      skipped: the reason for each peer that could not.
      copy_bandwidth: bytes a second, read and written, of a plain copy on the device.
      rows: in the order measured; the last may be incomplete after an interrupt.
      layers: the same of whole layers.
      interrupted: there is more to measure, for good where the keyboard or a peer ended the run.
    """

    settings: Settings
    peers: list[str] = dataclasses.field(default_factory=list)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    copy_bandwidth: float | None = None
    rows: list[Row] = dataclasses.field(default_factory=list)
    layers: list[LayerRow] = dataclasses.field(default_factory=list)
    interrupted: bool = True

    @property
    def is_right(self) -> bool:
        """Whether no product is wrong and none of jgg's failed."""
        measured = [item for row in self.rows for item in row.measurements.items()]
        return all(layer.is_right for layer in self.layers) and not any(
            m.status == WRONG or (m.status == FAILED and name in (JGG, *BOUNDS.values())) for name, m in measured
        )


def run(settings: Settings, keep: Callable[[Result], Any] = lambda result: None) -> Result:
    """Measures all products; an interrupt from the keyboard ends it with what there is.

    keep(result) is called with what there is after each row, for a library that is measured may end the process.
    """
    result = Result(settings)
    try:
        for name in settings.peers:
            if (reason := PEERS[name].unavailable()) is None:
                result.peers.append(name)
            else:
                result.skipped[name] = reason
        result.copy_bandwidth = copy_bandwidth()
        _measure_rows(result, keep)
        _measure_layers(result, keep)
        result.interrupted = False
    except KeyboardInterrupt:
        result.rows = [row for row in result.rows if row.measurements]
        result.layers = [row for row in result.layers if row.passes]
    return result


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a plain copy on the device."""
    array = jnp.zeros(2**28 if jax.default_backend() == "gpu" else 2**23, jnp.int32)
    arrays = {"array": array, "group_sizes": jnp.zeros(1, jnp.int32)}
    num_bytes = 2 * array.nbytes
    timed = measure(lambda arrays: arrays["array"] ^ arrays["group_sizes"][0], arrays, 0, num_bytes)
    return num_bytes / timed.seconds


def _measure_rows(result, keep):
    settings = result.settings
    problems = {op: settings.problems(op) for op in settings.gemm_ops}
    plan = _plan(settings.groups, result.peers)
    rows = [
        Row(layer, gemm, op, problems[op][layer, gemm])
        for layer, gemm in settings.problems("forward")
        for op in settings.gemm_ops
    ]
    with progress(len(rows) * sum(map(len, plan.values())), settings.quiet or not rows) as tell:
        for row in rows:
            result.rows.append(row)
            _measure_row(row, settings, plan, tell)
            keep(result)


def _measure_layers(result, keep):
    settings, with_dense = result.settings, DENSE in result.peers
    problems = settings.layer_problems
    with progress(len(problems) * (STEPS + with_dense), settings.quiet or not problems) as tell:
        for problem in problems:
            row = LayerRow(problem)
            result.layers.append(row)
            measure_layer(row, settings.seed, with_dense, tell)
            keep(result)


def _plan(groups, peers) -> dict[str, list[str]]:
    """What is measured with each kind of group sizes: jgg and the peers with the one asked for, jgg with BOUNDS."""
    plan = {kind: [JGG] for kind in (groups, *BOUNDS)}
    plan[groups] += [name for name in peers if name != DENSE]
    plan["one"] += [name for name in peers if name == DENSE]  # a dense product is that of one group
    return plan


def _measure_row(row, settings, plan, tell):
    """Fills in the measurements; operands and references are freed before it returns."""
    op = "forward" if row.op == "gather" else row.op
    arrays = operands(row.problem, settings.groups, settings.seed)
    for groups, names in plan.items():
        sizes = group_sizes(groups, row.problem.num_rows, row.problem.num_experts, settings.seed)
        arrays["group_sizes"] = jnp.asarray(sizes)
        measured = _measure_all(op, row, names, arrays, settings.implementation, tell)
        for name, measurement in measured:
            labels = [name]
            if name == JGG:
                labels = [JGG] if groups == settings.groups else []
                labels += [BOUNDS[groups]] if groups in BOUNDS else []
            row.measurements.update(dict.fromkeys(labels, measurement))


def _measure_all(op, row, names, arrays, implementation, tell):
    """Yields each name with its measurement, all against one reference."""
    reference, reason = None, ""
    try:
        reference = Reference.of(op, row.problem, arrays)
    except Exception as error:  # such as too little memory: report it and go on
        reason = f"no reference: {first_line(error)}"
    for name in names:
        what = f"{row.layer} {row.gemm} {row.op} {name}"
        tell(what)
        if reference is None:
            yield name, Measurement(FAILED, reason=reason)
        elif name == JGG:
            own = JaxProduct(product(op, row.problem, implementation), arrays, row.problem)
            yield name, measure_best(lambda own=own: [own], reference)
        else:
            yield name, measure_best(lambda name=name: PEERS[name].prepare(op, row.problem, arrays), reference)
        tell(what, 1)


def measure_best(prepare: Callable, reference: Reference) -> Measurement:
    """Checks and times each way that `prepare()` gives: the fastest right one, else the first wrong one."""
    try:
        ways = prepare()
    except Unsupported as error:
        return Measurement(UNSUPPORTED, reason=str(error))
    except Exception as error:  # whatever another library raises
        return Measurement(FAILED, reason=first_line(error))
    measured = [_measure(way, reference) for way in ways]
    order = (RIGHT, WRONG, FAILED)
    best = min(measured, key=lambda m: (order.index(m.status), m.seconds or 0))
    others = tuple(f"{m.variant}: {m}" for m in measured if m is not best and m.status != RIGHT)
    return dataclasses.replace(best, others=others)


def _measure(way, reference):
    def check(result):
        error = reference.error(result)
        return Measurement(RIGHT if error <= reference.bound else WRONG, error=error, allowed_error=reference.bound)

    return dataclasses.replace(check_and_time(lambda: (way.compute(), check), way.measure), variant=way.variant)
