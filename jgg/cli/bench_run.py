"""The measurements of `jgg bench`: products, their bounds and their peers, each checked and then timed."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from jgg.cli.bench_settings import Settings
from jgg.cli.console import progress
from jgg.core.problem import GroupedGemmProblem
from jgg.measuring.peers import DENSE, PEERS, Peer
from jgg.measuring.roofline import copy_bandwidth
from jgg.measuring.timing import FAILED, WRONG, Measurement, Reference, first_line, product
from jgg.measuring.ways import JaxProduct, measure_best
from jgg.measuring.workloads import computed_as, group_sizes, operands

JGG = "jgg"
BOUNDS = {"even": "even", "one": "one group"}  # kind of group sizes: what a row calls jgg's own product with them


@dataclasses.dataclass(frozen=True)
class Row:
    """The measurements of one op of one GEMM, under the names JGG, the values of BOUNDS and the names of peers."""

    layer: str
    gemm: str
    op: str
    problem: GroupedGemmProblem
    measurements: dict[str, Measurement] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The names of the layer and of its GEMM."""
        return f"{self.layer} {self.gemm}"

    @property
    def computed(self) -> tuple[str, GroupedGemmProblem]:
        """The op and the problem that compute this one."""
        return computed_as("forward" if self.op == "gather" else self.op, self.problem)

    def seconds(self, name: str) -> float | None:
        """Seconds of a call; None if `name` was not measured or not right."""
        measurement = self.measurements.get(name)
        return None if measurement is None else measurement.seconds

    def tflops(self, name: str) -> float | None:
        """TF/s, from the FLOPs of the actual rows, without padding; None where `seconds` is None."""
        seconds = self.seconds(name)
        return seconds and self.problem.flops / seconds / 1e12

    def ratio(self, name: str, who: str = JGG) -> float | None:
        """The speed of `who`, by default jgg, divided by the speed of `name`; None if one of them has no speed."""
        own, other = self.seconds(who), self.seconds(name)
        return other / own if own and other else None


@dataclasses.dataclass
class Result:
    """What a run measured.

    Attributes:
      settings: the options of the run.
      peers: names of the peers that could run.
      skipped: why each of the other peers could not run.
      copy_bandwidth: bytes a second, read and written, of a plain copy on the device.
      rows: in the order measured; the last may be incomplete after an interrupt.
      left_out: GEMMs and ops for whose measurements there was no time; the last row may be one of them.
      interrupted: True while anything is left to measure, so also if the keyboard or a peer ended the run.
    """

    settings: Settings
    peers: list[str] = dataclasses.field(default_factory=list)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    copy_bandwidth: float | None = None
    rows: list[Row] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)
    interrupted: bool = True

    @property
    def is_right(self) -> bool:
        """Whether no product is wrong and none of jgg's own measurements failed."""
        measured = [item for row in self.rows for item in row.measurements.items()]
        return not any(
            m.status == WRONG or (m.status == FAILED and name in (JGG, *BOUNDS.values())) for name, m in measured
        )


def run(settings: Settings, keep: Callable[[Result], Any], peers: Mapping[str, Peer] = PEERS) -> Result:
    """Measures everything; after an interrupt from the keyboard it returns what was measured until then.

    It calls keep(result) after each row, because a library that is measured might end the process.
    """
    result, start = Result(settings), time.monotonic()
    try:
        for name in settings.peers:
            if (reason := peers[name].unavailable()) is None:
                result.peers.append(name)
            else:
                result.skipped[name] = reason
        result.copy_bandwidth = copy_bandwidth()
        end = start + (settings.time_limit or math.inf)
        _measure_all(result, keep, {**peers, JGG: _own(settings.implementation)}, end)
        result.interrupted = False
    except KeyboardInterrupt:
        result.rows = [row for row in result.rows if row.measurements]
    return result


def _own(implementation):
    """Wraps jgg as a Peer, so that it is measured like the others."""

    def prepare(op, problem, arrays):
        return [JaxProduct(product(op, problem, implementation), arrays, problem.flops, problem.bytes_accessed(op))]

    return Peer(prepare)


def groups_of(name: str, asked: str) -> str:
    """The kind of group sizes with which a measurement of a row was made, if `asked` was asked for."""
    kinds = {label: kind for kind, label in BOUNDS.items()} | {DENSE: "one"}
    return kinds.get(name, asked)


def _measure_all(result, keep, peers, end):
    settings = result.settings
    problems = {op: settings.problems(op) for op in settings.ops}
    plan = _plan(settings.groups, result.peers)
    rows = [
        Row(layer, gemm, op, problems[op][layer, gemm])
        for layer, gemm in settings.problems("forward")
        for op in settings.ops
    ]
    with progress(len(rows) * sum(map(len, plan.values())), settings.quiet) as tell:
        for row in rows:
            if time.monotonic() < end:
                result.rows.append(row)
                is_complete = _measure_row(row, settings, plan, peers, tell, end)
                keep(result)
                if is_complete:
                    continue
            result.left_out.append(f"{row.name} {row.op}")


def _plan(groups, peers) -> dict[str, list[str]]:
    """Returns what is measured with each kind of group sizes: jgg and peers with `groups`, jgg with BOUNDS too."""
    plan = {kind: [JGG] for kind in (groups, *BOUNDS)}
    plan[groups] += [name for name in peers if name != DENSE]
    plan["one"] += [name for name in peers if name == DENSE]  # the dense product is right if all rows are in one group
    return plan


def _measure_row(row, settings, plan, peers, tell, end):
    """Fills in the measurements of a row; returns whether none was left out because it would have begun after `end`.

    Operands and references are freed before it returns.
    """
    op, problem = row.computed
    arrays = operands(problem, settings.groups, settings.seed)
    for groups, names in plan.items():
        sizes = group_sizes(groups, problem.num_rows, problem.num_experts, settings.seed)
        arrays["group_sizes"] = jnp.asarray(sizes)
        reference = None
        for name in names:
            if time.monotonic() > end and row.measurements:
                return False
            what = f"{row.name} {row.op} {name}"
            tell(what)
            try:
                reference = reference or Reference.of(op, problem, arrays)
                measurement = measure_best(functools.partial(peers[name].prepare, op, problem, arrays), reference)
            except Exception as error:  # such as too little memory: report it and go on
                measurement = Measurement(FAILED, reason=f"no reference: {first_line(error)}")
            row.measurements.update(dict.fromkeys(_labels(name, groups, settings.groups), measurement))
            tell(what, 1)
    return True


def _labels(name, groups, asked):
    """Returns the names of a measurement in a row; with some group sizes, jgg's own is a bound too, or only a bound."""
    if name != JGG:
        return [name]
    labels = {asked: [JGG]}
    for kind, label in BOUNDS.items():
        labels[kind] = [*labels.get(kind, []), label]
    return labels[groups]
