"""Measures for `jgg bench`: products and whole layers are checked, then timed, beside their bounds and peers."""

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jgg.cli.bench import Settings
from jgg.cli.console import progress
from jgg.core.problem import GroupedGemmProblem
from jgg.measuring import fp8
from jgg.measuring.layer import PASSES, LayerProblem, LayerReference, Memory, layer_function, logits_of, measure_memory
from jgg.measuring.peers import DENSE, PEERS, JaxProduct, Unsupported
from jgg.measuring.timing import FAILED, RIGHT, UNSUPPORTED, WRONG, Measurement, Reference, first_line, measure, product
from jgg.measuring.workloads import OPS, group_sizes, operands
from jgg.router.routing import route

JGG = "jgg"
BOUNDS = {"even": "even", "one": "one group"}  # jgg's own product with other group sizes, and what a row calls it


@dataclasses.dataclass(frozen=True)
class Row:
    """The measurements of an op of a GEMM or a pass of a layer, by JGG, the values of BOUNDS and the names of peers."""

    layer: str
    gemm: str
    op: str
    problem: GroupedGemmProblem | LayerProblem
    measurements: dict[str, Measurement] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the layer and its GEMM, which a whole layer has none of."""
        return f"{self.layer} {self.gemm}".strip()

    @property
    def flops(self) -> int:
        """Floating-point operations of a call."""
        return self.problem.flops(self.op) if isinstance(self.problem, LayerProblem) else self.problem.flops

    def seconds(self, name: str) -> float | None:
        """Seconds of a call; None where there is no right one."""
        measurement = self.measurements.get(name)
        return None if measurement is None else measurement.seconds

    def tflops(self, name: str) -> float | None:
        """TF/s, counting the rows that there are."""
        seconds = self.seconds(name)
        return seconds and self.flops / seconds / 1e12

    def ratio(self, name: str, who: str = JGG) -> float | None:
        """How many times as fast as `name` jgg is, or who else."""
        own, other = self.seconds(who), self.seconds(name)
        return other / own if own and other else None


@dataclasses.dataclass
class LayerRow:
    """The measurements of one layer.

    Attributes:
      passes: a row for each of `measuring.layer.PASSES`.
      memory: of forward + backward.
      route_seconds: of routing alone, from logits to sorted rows.
      group_sizes: fewest, median and most rows of an expert.
      failures: what raised, by what was measured, in one line each.
    """

    problem: LayerProblem
    passes: list[Row] = dataclasses.field(init=False)
    memory: Memory | None = None
    route_seconds: float | None = None
    group_sizes: tuple[int, int, int] | None = None
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.passes = [Row(self.problem.layer.name, "", which, self.problem) for which in PASSES]


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
        """Whether no product is wrong and nothing of jgg's failed."""
        rows = [*self.rows, *(row for layer in self.layers for row in layer.passes)]
        measured = [item for row in rows for item in row.measurements.items()]
        return not any(layer.failures for layer in self.layers) and not any(
            m.status == WRONG or (m.status == FAILED and name in (JGG, *BOUNDS.values())) for name, m in measured
        )


def run(settings: Settings, keep: Callable[[Result], Any]) -> Result:
    """Measures everything; an interrupt from the keyboard ends it with what there is.

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
        _measure_all(result, keep)
        result.interrupted = False
    except KeyboardInterrupt:
        result.rows = [row for row in result.rows if row.measurements]
        result.layers = [layer for layer in result.layers if any(row.measurements for row in layer.passes)]
    return result


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a plain copy on the device."""
    array = jnp.zeros(2**28 if jax.default_backend() == "gpu" else 2**23, jnp.int32)
    arrays = {"array": array, "group_sizes": jnp.zeros(1, jnp.int32)}
    num_bytes = 2 * array.nbytes
    timed = measure(lambda arrays: arrays["array"] ^ arrays["group_sizes"][0], arrays, 0, num_bytes)
    return num_bytes / timed.seconds


def _measure_all(result, keep):
    settings, with_dense = result.settings, DENSE in result.peers
    problems = {op: settings.problems(op) for op in settings.gemm_ops}
    plan = _plan(settings.groups, result.peers)
    if settings.is_fp8:
        plan[settings.groups] += [fp8.BFLOAT16, fp8.QUANTIZE]
    rows = [
        Row(layer, gemm, op, problems[op][layer, gemm])
        for layer, gemm in settings.problems("forward")
        for op in settings.gemm_ops
    ]
    layers = [LayerRow(problem) for problem in settings.layer_problems]
    steps = len(rows) * sum(map(len, plan.values())) + len(layers) * (2 + len(PASSES) + with_dense)
    with progress(steps, settings.quiet) as tell:
        for row in rows:
            result.rows.append(row)
            _measure_row(row, settings, plan, tell)
            keep(result)
        for layer in layers:
            result.layers.append(layer)
            _measure_layer(layer, settings.seed, with_dense, tell)
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
    if settings.is_fp8:
        arrays = fp8.add_quantized(op, arrays)
    for groups, names in plan.items():
        sizes = group_sizes(groups, row.problem.num_rows, row.problem.num_experts, settings.seed)
        arrays["group_sizes"] = jnp.asarray(sizes)
        for name, measurement in _measure_each(op, row, names, arrays, settings, tell):
            labels = [name]
            if name == JGG:
                labels = [JGG] if groups == settings.groups else []
                labels += [BOUNDS[groups]] if groups in BOUNDS else []
            row.measurements.update(dict.fromkeys(labels, measurement))


def _measure_each(op, row, names, arrays, settings, tell):
    """Yields each name with its measurement, all against one reference."""
    reference, reason = None, ""
    problem = row.problem
    in_fp8 = _fp8_ways(op, problem, arrays, settings.implementation) if settings.is_fp8 else {}
    arrays = fp8.without_quantized(arrays)
    try:
        reference = Reference.of(op, problem, arrays)
    except Exception as error:  # such as too little memory: report it and go on
        reason = f"no reference: {first_line(error)}"
    own = JaxProduct(product(op, problem, settings.implementation), arrays, problem.flops, problem.bytes_accessed)
    own_ways = {JGG: own, fp8.BFLOAT16: own} | in_fp8
    for name in names:
        what = f"{row.name} {row.op} {name}"
        tell(what)
        if reference is None:
            yield name, Measurement(FAILED, reason=reason)
        else:
            yield name, _measure_one(op, problem, arrays, name, own_ways, reference)
        tell(what, 1)


def _measure_one(op, problem, arrays, name, own_ways, reference):
    """Of jgg's ways, of which a dense product in FP8 and quantizing are only timed, or of a peer."""
    way = own_ways.get(name)
    if way is not None and name in (DENSE, fp8.QUANTIZE):
        return Measurement(RIGHT, way.measure().seconds)
    prepare = functools.partial(PEERS[name].prepare, op, problem, arrays) if way is None else lambda: [way]
    return measure_best(prepare, reference)


def _fp8_ways(op, problem, arrays, implementation):
    run, in_layout = fp8.product(op, problem, implementation)
    arrays = arrays | {"fp8_w": jax.jit(in_layout)(arrays["fp8_w"])}
    functions = {JGG: run, DENSE: fp8.dense(op, problem), fp8.QUANTIZE: fp8.quantize(op)}
    sizes = problem.flops, problem.bytes_accessed
    return {name: JaxProduct(function, arrays, *sizes) for name, function in functions.items()}


def measure_best(prepare: Callable[[], Iterable], reference: Reference | LayerReference) -> Measurement:
    """Checks and times each way that `prepare()` gives: the fastest right one, else the first wrong one."""
    try:
        ways = prepare()
    except Unsupported as error:
        return Measurement(UNSUPPORTED, reason=str(error))
    except Exception as error:  # whatever another library raises
        return Measurement(FAILED, reason=first_line(error))
    measured = [_check_and_time(way, reference) for way in ways]
    order = (RIGHT, WRONG, FAILED)
    best = min(measured, key=lambda m: (order.index(m.status), m.seconds or 0))
    others = tuple(f"{m.variant}: {m}" for m in measured if m is not best and m.status != RIGHT)
    return dataclasses.replace(best, others=others)


def _check_and_time(way, reference):
    """Checks a result, times what computes it if that is right, and checks the result of the calls that were timed."""
    try:
        checked, seconds = reference.check(way.compute()), None
        if checked.status == RIGHT:
            timed = way.measure()
            checked, seconds = reference.check(timed.result), timed.seconds
    except Exception as error:  # such as too little memory, or whatever another library raises
        return Measurement(FAILED, reason=first_line(error), variant=way.variant)
    seconds = seconds if checked.status == RIGHT else None
    return dataclasses.replace(checked, seconds=seconds, variant=way.variant or checked.variant)


def _measure_layer(layer, seed, with_dense, tell):
    """Fills in the measurements, what fails in `failures`; tells of 2 + len(PASSES) + with_dense steps."""
    problem = layer.problem
    arrays = problem.operands(seed)

    @contextlib.contextmanager
    def attempt(what):
        tell(f"{problem.layer.name} {what}", 1)
        try:
            yield
        except Exception as error:  # such as too little memory: report it and go on
            layer.failures[what] = first_line(error)

    with attempt("memory"):  # first, while little else is held
        layer.memory = measure_memory(problem, arrays)
    for row in layer.passes:
        tell(f"{row.layer} {row.op}", 1)
        row.measurements[JGG] = _measure_pass(problem, row.op, arrays)
    with attempt("route + sort"):
        _measure_routing(layer, arrays)
    if with_dense:
        with attempt("dense"):
            _measure_dense(layer, seed)


def _measure_pass(problem, which, arrays):
    function = layer_function(problem, which)
    way = JaxProduct(function, arrays, problem.flops(which), problem.bytes_accessed)
    try:
        reference = LayerReference.of(problem, which, arrays, way.compute()["topk_indices"])
    except Exception as error:  # such as too little memory
        return Measurement(FAILED, reason=first_line(error))
    return measure_best(lambda: [way], reference)


def _measure_routing(layer, arrays):
    topk, implementation = layer.problem.layer.topk, layer.problem.implementation
    logits = jax.jit(logits_of)(arrays["x"], arrays["w_router"])
    arrays = {"logits": logits, "group_sizes": arrays["group_sizes"]}
    way = JaxProduct(lambda a: route(a["logits"], topk, implementation=implementation), arrays, 0, 2 * logits.nbytes)
    sizes = sorted(way.compute().group_sizes.tolist())
    layer.group_sizes = sizes[0], int(statistics.median(sizes)), sizes[-1]
    layer.route_seconds = way.measure().seconds


def _measure_dense(layer, seed):
    """Fills in the time of dense products with the sizes of the experts' ones: up and down, and their gradients."""
    problem = layer.problem
    one_expert = dataclasses.replace(problem.layer, experts=1, topk=1, tokens=problem.num_rows)
    gemms = dataclasses.replace(problem, layer=one_expert).gemms
    seconds = {op: sum(_time_dense(gemm, op, seed) for gemm in gemms) for op in OPS}
    for row in layer.passes:
        row.measurements[DENSE] = Measurement(RIGHT, sum(seconds[op] for op in PASSES[row.op]))


def _time_dense(gemm, op, seed):
    (way,) = PEERS[DENSE].prepare(op, gemm, operands(gemm, "one", seed))
    return way.measure().seconds
