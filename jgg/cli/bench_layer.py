"""Measures for `jgg bench --op layer`: whole MoE layers, checked, timed, their memory and their routing too."""

import dataclasses
import functools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jgg.measuring.layer import (
    FORWARD,
    PASSES,
    LayerProblem,
    LayerReference,
    Memory,
    layer_function,
    logits_of,
    measure_memory,
    route_function,
)
from jgg.measuring.measurement import DENSE, RIGHT, WRONG, Measurement, check_and_time, first_line
from jgg.measuring.peers import PEERS
from jgg.measuring.timing import measure
from jgg.measuring.workloads import operands
from jgg.problem import GroupedGemmProblem

CHOICE_ERROR = 1e-5  # relative to the largest logit: float32 sums of products of 16-bit numbers, in another order
STEPS = 2 + len(PASSES)  # of measuring a layer: its memory and its routing besides
_DENSE_OPS = {FORWARD: ("forward",)}  # else all three


@dataclasses.dataclass
class LayerRow:
    """The measurements of one layer.

    Attributes:
      passes: by the names of `measuring.layer.PASSES`.
      dense_seconds: by the same names, of dense products of the same FLOPs; without those that were not measured.
      memory: of forward + backward.
      route_seconds: of routing alone, from logits to sorted rows.
      group_sizes: fewest, median and most rows of an expert.
      failures: what raised, by what was measured, in one line each.
    """

    problem: LayerProblem
    passes: dict[str, Measurement] = dataclasses.field(default_factory=dict)
    dense_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    memory: Memory | None = None
    route_seconds: float | None = None
    group_sizes: tuple[int, int, int] | None = None
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong and nothing failed."""
        return not self.failures and all(m.status == RIGHT for m in self.passes.values())

    def tflops(self, which: str) -> float | None:
        """TF/s of the experts' products in a pass; None where it is not right."""
        measurement = self.passes.get(which)
        return self._speed(which, measurement and measurement.seconds)

    def dense_tflops(self, which: str) -> float | None:
        """TF/s of the dense products."""
        return self._speed(which, self.dense_seconds.get(which))

    def _speed(self, which, seconds):
        return seconds and self.problem.flops(which) / seconds / 1e12

    def percent_of_dense(self, which: str) -> float | None:
        """The layer's speed relative to that of the dense products."""
        own, dense = self.tflops(which), self.dense_tflops(which)
        return 100 * own / dense if own and dense else None


def measure_layer(row: LayerRow, seed: int, with_dense: bool, tell: Callable) -> None:
    """Fills in the measurements of a layer; tell(what, 1) is called STEPS times, and once more with dense products."""
    problem = row.problem
    arrays = problem.operands(seed)

    def attempt(what, function):
        tell(f"{problem.layer.name} {what}", 1)
        try:
            return function()
        except Exception as error:  # such as too little memory: report it and go on
            row.failures[what] = first_line(error)
            return None

    row.memory = attempt("memory", lambda: measure_memory(problem, arrays))  # first, while little else is held
    for which in PASSES:
        tell(f"{problem.layer.name} {which}", 1)
        row.passes[which] = _measure_pass(problem, which, arrays)
    attempt("route + sort", lambda: _measure_routing(row, arrays))
    if with_dense:
        attempt("dense", lambda: row.dense_seconds.update(_dense_seconds(problem, seed)))


def _measure_pass(problem, which, arrays):
    function = layer_function(problem, which)

    def prepare():
        results = jax.jit(function)(arrays)
        reference = LayerReference.of(problem, which, arrays, results["topk_indices"])
        return results, functools.partial(_check, reference)

    return check_and_time(prepare, lambda: measure(function, arrays, problem.flops(which), problem.bytes_accessed))


def _check(reference, results):
    """The status, with the error of the result that comes closest to its bound or passes it."""
    choice_error = reference.choice_error(results["topk_indices"])
    if not choice_error <= CHOICE_ERROR:
        reason = f"an expert left out beats one chosen by {choice_error:.3g} of the largest logit"
        return Measurement(WRONG, reason=reason)
    errors = reference.errors(results)
    is_right = all(errors[name] <= bound for name, bound in reference.bounds.items())
    worst = min(errors, key=lambda name: reference.bounds[name] - errors[name] if errors[name] < jnp.inf else -jnp.inf)
    return Measurement(
        RIGHT if is_right else WRONG, error=errors[worst], allowed_error=reference.bounds[worst], variant=worst
    )


def _measure_routing(row, arrays):
    problem = row.problem
    logits = jax.jit(logits_of)(arrays["x"], arrays["w_router"])
    function = route_function(problem)
    sizes = sorted(jax.jit(function)({"logits": logits}).group_sizes.tolist())
    row.group_sizes = sizes[0], int(statistics.median(sizes)), sizes[-1]
    timed = measure(function, {"logits": logits, "group_sizes": arrays["group_sizes"]}, 0, 2 * logits.nbytes)
    row.route_seconds = timed.seconds


def _dense_seconds(problem, seed):
    """By pass, the time of dense products with the sizes of the experts' ones: up and down, and their gradients."""
    seconds = {op: sum(_time_dense(gemm, op, seed) for gemm in _one_expert(problem)) for op in ("forward", "dx", "dw")}
    return {which: sum(seconds[op] for op in _DENSE_OPS.get(which, seconds)) for which in PASSES}


def _one_expert(problem) -> list[GroupedGemmProblem]:
    layer = dataclasses.replace(problem.layer, experts=1, topk=1, tokens=problem.num_rows)
    return list(layer.gemms(dtype=problem.dtype, w_layout=problem.w_layout).values())


def _time_dense(gemm, op, seed):
    (way,) = PEERS[DENSE].prepare(op, gemm, operands(gemm, "one", seed))
    return way.measure().seconds
