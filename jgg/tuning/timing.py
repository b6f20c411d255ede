"""Times products on the device and checks whether their results are right."""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from jgg.core.gpu_target import current_target
from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import QuantizedArray
from jgg.core.schedule import group_bounds
from jgg.launching.choice import How
from jgg.linear.grouped_gemm import grouped_gemm_dw, grouped_gemm_dx, grouped_gemm_forward
from jgg.products.dx import DX, Dx
from jgg.tuning.workloads import operands

REPEATS = 5
MAX_CALLS = 256
# Approximate seconds of a repeat: a GPU at its power limit takes some 50 ms to settle on the clock that it can sustain.
_SECONDS = {"gpu": 0.1, "cpu": 0.02}
# FLOP/s and bytes/s near the best possible: they estimate the time of a call, and so how many calls make a repeat.
_FAST = {"gpu": (6e14, 3e12), "cpu": (5e10, 1e10)}
LARGER_THAN_L2 = 128 * 2**20  # bytes
RIGHT, WRONG, FAILED = "right", "WRONG", "failed"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The outcome of checking and timing one computation.

    Attributes:
      status: RIGHT, WRONG or FAILED (it raised).
      seconds: time of a call; None unless right.
      error: largest error relative to the largest element.
      allowed_error: the largest `error` that is still right.
      reason: why it failed, in one line.
      variant: the fastest of several configurations; for a layer, the name of the result that has `error`.
    """

    status: str
    seconds: float | None = None
    error: float | None = None
    allowed_error: float | None = None
    reason: str | None = None
    variant: str = ""

    def __str__(self):
        """The status and its explanation: a reason or the error."""
        if self.reason is not None:
            return f"{self.status}: {self.reason}"
        return f"{self.status}: error {self.error:.3g}, at most {self.allowed_error:.3g} is right"

    def as_json(self) -> dict[str, object]:
        """The attributes; NaN and infinity, which JSON cannot hold, are text."""
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in dataclasses.asdict(self).items()
        }


def first_line(error: Exception) -> str:
    """An error in one line; of a group of errors, the first."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].removesuffix(": ")


@functools.cache  # so that programs of the same product share what is compiled
def product(op: str, problem: GroupedGemmProblem, implementation: str | None, config=None) -> Callable:
    """Returns the function that computes y, dx or dw from arrays, which `workloads.operands` makes."""
    options = {
        "topk": problem.topk,
        "permute_x": problem.permute_x,
        "permute_y": problem.permute_y,
        "w_layout": problem.w_layout,
        "precision": problem.precision,
        "kernel_config": config,
        "implementation": implementation,
    }

    def run(arrays):
        shared = {name: arrays.get(name) for name in ("gather_indices", "topk_weights")}
        sizes = arrays["group_sizes"]
        if op == "forward":
            y_options = {"bias": arrays.get("bias"), "preferred_element_type": problem.out_dtype}
            return grouped_gemm_forward(arrays["x"], arrays["w"], group_sizes=sizes, **shared, **y_options, **options)
        if op == "dx" and problem.has_topk_weights:  # as in training, with the gradient of topk_weights
            dx_operands = Dx(arrays["dy"], arrays["w"], group_bounds(sizes, problem.num_rows), arrays["x"], **shared)
            return DX(How(implementation, current_target()), dx_operands, config, problem=problem).dx
        if op == "dx":
            return grouped_gemm_dx(arrays["dy"], arrays["w"], group_sizes=sizes, **shared, **options)
        return grouped_gemm_dw(arrays["x"], arrays["dy"], group_sizes=sizes, **shared, **options)

    return run


@dataclasses.dataclass(frozen=True)
class Reference:
    """The expected product, computed by the xla implementation in float32, and the largest error allowed.

    `of` allows twice the error that the xla implementation itself has in the problem's dtype.

    Attributes:
      exact: the product in float32.
      bound: largest error allowed, relative to the largest element.
    """

    exact: jax.Array
    bound: float

    @classmethod
    def of(cls, op: str, problem: GroupedGemmProblem, arrays, lock: AbstractContextManager = nullcontext()):  # noqa: B008
        """Computes the product in float32 and in the problem's dtype; `lock` is as in `measure`."""
        programs = _reference_programs(op, problem)
        with lock:
            exact, own = (program(arrays) for program in programs)
            return cls.beside(exact, own, 2)

    @classmethod
    def beside(cls, exact: jax.Array, own: jax.Array, factor: float):
        """Makes a reference that allows `factor` times the error of `own`, the product in the dtype to be checked."""
        return cls(exact, factor * float(relative_error(own, exact)) + 1e-5)

    def error(self, result) -> float:
        """The largest error of a result relative to the largest element; NaN or Inf where the result has some."""
        return float(relative_error(result, self.exact))

    def check(self, result) -> Measurement:
        """Checks a result; the measurement's `seconds` is None."""
        error = self.error(result)
        return Measurement(RIGHT if error <= self.bound else WRONG, error=error, allowed_error=self.bound)


@functools.lru_cache(maxsize=8)
def _reference_programs(op, problem):
    """The product compiled in float32 and in the problem's dtype."""
    in_float32 = dataclasses.replace(
        problem,
        dtype=jnp.dtype("float32"),
        out_dtype=jnp.dtype("float32"),
        precision=jax.lax.Precision.HIGHEST,
        is_quantized=False,
    )
    own, exact = (product(op, each, "xla") for each in (problem, in_float32))

    def compute_exact(arrays):
        names = [name for name in ("x", "w", "dy", "bias") if name in arrays]
        floats = {name: _in_float32(arrays[name]) for name in names}
        return exact(arrays | floats)

    shapes = jax.eval_shape(functools.partial(operands, problem))
    return [jit_reference(function).lower(shapes).compile() for function in (compute_exact, own)]


def _in_float32(array):
    return array.dequantize("float32") if isinstance(array, QuantizedArray) else array.astype(jnp.float32)


def jit_reference(function: Callable) -> jax.stages.Wrapped:
    """jax.jit without XLA's autotuning of GEMMs, which would take far longer than one or two runs of the program."""
    return jax.jit(function, compiler_options={"xla_gpu_autotune_level": 0})


@jax.jit
def relative_error(result: jax.Array, exact: jax.Array) -> jax.Array:
    """The largest error relative to the largest element of exact; NaN or Inf where the result has some."""
    error = jnp.max(jnp.abs(result.astype(jnp.float32) - exact), initial=0)
    return error / jnp.maximum(jnp.max(jnp.abs(exact), initial=0), 1e-30)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of a call, the median of several repeats, and the result of one call."""

    seconds: float
    result: Any


def measure(
    function: Callable,
    arrays: dict[str, jax.Array],
    flops: int,
    bytes_accessed: int,
    max_calls: int = MAX_CALLS,
    lock: AbstractContextManager = nullcontext(),  # noqa: B008
) -> Timing:
    """Times `function(arrays)` on the device; the arrays must include group_sizes.

    Many calls run one after the other inside one compiled program, so that none waits for the host. If the
    arrays could stay in the L2 cache, a larger array is read between the calls, and the time for that is subtracted.

    Args:
      flops, bytes_accessed: FLOPs and bytes of one call; the number of calls depends on them.
      max_calls: the largest number of calls.
      lock: held while the device is used, but not while programs are compiled.
    """
    calls = min(_calls(flops, bytes_accessed), max_calls)
    flushes = jax.default_backend() == "gpu" and stays_in_l2(bytes_accessed)
    leaves, structure = jax.tree.flatten(arrays)
    program = _compiled(function, calls, flushes, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
    baseline = _baseline(calls) if flushes else None
    with lock:
        seconds, (_, result) = _time(program, arrays)
        if baseline is not None:
            seconds -= _time(baseline, {"group_sizes": jnp.zeros(1, jnp.int32)})[0]
    return Timing(max(seconds, 1e-9) / calls, result)


@functools.lru_cache(maxsize=4)  # jgg's product is timed with several kinds of groups
def _compiled(function, calls, flushes, structure, types):
    arrays = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*each) for each in types])
    return _repeated(function, calls, flushes).lower(arrays).compile()


@functools.cache
def _baseline(calls):
    """Compiles the program whose time is subtracted: it only reads the larger array, as often as `calls` calls do."""
    shapes = {"group_sizes": jax.ShapeDtypeStruct((1,), jnp.int32)}
    return _repeated(lambda arrays: arrays["group_sizes"], calls, True).lower(shapes).compile()


def stays_in_l2(bytes_accessed: int) -> bool:
    """Whether the arrays of a call might still be in the L2 cache at the next."""
    return bytes_accessed < 2 * LARGER_THAN_L2


def _calls(flops, bytes_accessed):
    flop_rate, byte_rate = _FAST.get(jax.default_backend(), _FAST["cpu"])
    return calls_of_repeat(flops / flop_rate + bytes_accessed / byte_rate + 1e-5)


def calls_of_repeat(seconds: float) -> int:
    """Returns how many calls make a repeat if one takes `seconds`."""
    return max(1, min(MAX_CALLS, int(_SECONDS.get(jax.default_backend(), _SECONDS["cpu"]) / seconds)))


def _repeated(function, calls, flushes):
    """A program with many calls; each depends on the one before, so that XLA cannot compute a part of it just once."""

    def program(arrays):
        def call(_, carry):
            filler, highest, _, sizes = carry
            if flushes:
                highest = jnp.max(filler)
            filler, highest, tied = jax.lax.optimization_barrier((filler, highest, arrays | {"group_sizes": sizes}))
            return jax.lax.optimization_barrier((filler, highest, function(tied), tied["group_sizes"]))

        filler = jnp.zeros(LARGER_THAN_L2 // 4 if flushes else 1, jnp.int32)
        result = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(function, arrays))
        carry = (filler, jnp.int32(0), result, arrays["group_sizes"])
        # not unrolled: XLA would leave out all calls but the last, whose result alone is used
        _, highest, result, _ = jax.lax.fori_loop(0, calls, call, carry)
        return highest, result

    return jax.jit(program)


def _time(program, arrays):
    jax.block_until_ready(program(arrays))
    return median_seconds(lambda: program(arrays), REPEATS)


def median_seconds(call: Callable[[], object], repeats: int) -> tuple[float, Any]:
    """Makes `repeats` calls; returns the median of their times on the device, in seconds, and the last result."""
    seconds, result = [], None
    for _ in range(repeats):
        start = time.perf_counter()
        result = jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), result
