"""Ways to compute a product: jgg's own, and others to compare it with. Each is checked, then timed."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import QuantizedArray
from jgg.tuning import timing
from jgg.tuning.timing import FAILED, RIGHT, Measurement, Timing, first_line, measure
from jgg.tuning.workloads import Arrays, gathered_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A way to compute a product.

    Attributes:
      variant: a name that distinguishes it from other ways of the same library.
      is_checked: False for a bound, which computes another product of the same size.
    """

    variant: str = ""
    is_checked: bool = True

    def compute(self) -> Any:
        """Computes the result, in jgg's layout."""
        raise NotImplementedError

    def measure(self) -> Timing:
        """Times the computation; the result is in jgg's layout."""
        raise NotImplementedError


class Reference(Protocol):
    """The expected result, against which results are checked."""

    def check(self, result: Any, /) -> Measurement:
        """Checks a result; the measurement's `seconds` is None."""
        ...


def as_it_is[Result](array: Result) -> Result:
    """Returns the array, which is in jgg's layout already."""
    return array


@dataclasses.dataclass(frozen=True)
class JaxProduct(Way):
    """A product, or another function of arrays, computed by JAX.

    Attributes:
      function, arrays: `function(arrays)` is the product.
      flops, bytes_accessed: the FLOPs and the bytes of one call.
      finish: brings the product into jgg's layout; not timed.
    """

    function: Callable[[Arrays], Any]
    arrays: Arrays
    flops: int
    bytes_accessed: int
    finish: Callable[[Any], Any] = as_it_is

    def compute(self) -> Any:
        """Computes the product, in jgg's layout."""
        return self.finish(jax.jit(self.function)(self.arrays))

    def measure(self) -> Timing:
        """Times the product; its result is in jgg's layout."""
        program = jax.jit(self.function)
        jax.block_until_ready(program(self.arrays))  # compiles it
        is_slow = timing.calls_of_repeat(timing.median_seconds(lambda: program(self.arrays), 1)[0]) == 1
        arguments = self.function, self.arrays, self.flops, self.bytes_accessed
        timed = measure(*arguments, max_calls=1) if is_slow else measure(*arguments)
        return Timing(timed.seconds, self.finish(timed.result))


def check_and_time(way: Way, reference: Reference) -> Measurement:
    """Checks the result of a way; if it is right, times the way and checks the result of the timed calls too."""
    try:
        if not way.is_checked:
            return Measurement(RIGHT, way.measure().seconds, variant=way.variant)
        checked, seconds = reference.check(way.compute()), None
        if checked.status == RIGHT:
            timed = way.measure()
            checked, seconds = reference.check(timed.result), timed.seconds
    except Exception as error:  # such as too little memory, or whatever another library raises
        return Measurement(FAILED, reason=first_line(error), variant=way.variant)
    seconds = seconds if checked.status == RIGHT else None
    return dataclasses.replace(checked, seconds=seconds, variant=way.variant or checked.variant)


def own(op: str, problem: GroupedGemmProblem, arrays: Arrays, implementation: str | None = None) -> JaxProduct:
    """jgg's product of the arrays, which `workloads.operands` makes."""
    function = timing.product(op, problem, implementation)
    return JaxProduct(function, arrays, problem.flops, problem.bytes_accessed(op))


def dense(op: str, problem: GroupedGemmProblem, arrays: Arrays) -> JaxProduct:
    """The product of all rows with the first expert's matrix: the same FLOPs, and right if no other group has rows.

    For quantized operands it multiplies their values without the scales: as much work, but no result to check.
    """
    axes = problem.w_layout[1:]
    left, right, einsum = {
        "forward": ("x", "w", f"mk,{axes}->mn"),
        "dx": ("dy", "w", f"mn,{axes}->mk"),
        "dw": ("dy", "x", "mn,mk->nk") if axes == "nk" else ("x", "dy", "mk,mn->kn"),
    }[op]
    values = {
        name: jnp.asarray(each.values) if isinstance(each, QuantizedArray) else each for name, each in arrays.items()
    }
    operands = values | {"x": gathered_rows(problem, values), "w": values["w"][0]}

    def run(arrays):
        precision, dtype = problem.precision, problem.out_dtype
        return jnp.einsum(einsum, arrays[left], arrays[right], precision=precision, preferred_element_type=dtype)

    def among_experts(result):
        return jnp.zeros(problem.w_shape, result.dtype).at[0].set(result)

    used = {name: operands[name] for name in (left, right, "group_sizes")}
    finish, is_checked = among_experts if op == "dw" else as_it_is, not isinstance(arrays["w"], QuantizedArray)
    return JaxProduct(run, used, problem.flops, problem.bytes_accessed(op), finish, is_checked=is_checked)


def ragged_dot(
    op: str,
    problem: GroupedGemmProblem,
    arrays: Arrays,
    function: Callable = jax.lax.ragged_dot,
    variant: str = "",
) -> JaxProduct:
    """The product by a function that takes what jax.lax.ragged_dot takes; dX and dW come from jax.vjp."""
    precision = None if problem.precision == jax.lax.Precision.DEFAULT else problem.precision
    swap = functools.partial(jnp.swapaxes, axis1=1, axis2=2) if problem.w_layout == "enk" else as_it_is

    def run(arrays):
        x = gathered_rows(problem, arrays)

        def product(x, w):
            return function(x, w, arrays["group_sizes"], precision=precision)

        if op == "forward":
            return product(x, arrays["w"])
        gradients = jax.vjp(product, x, arrays["w"])[1](arrays["dy"])
        return gradients[("dx", "dw").index(op)]

    operands = arrays | {"w": swap(arrays["w"])}
    finish, num_bytes = swap if op == "dw" else as_it_is, problem.bytes_accessed(op)
    return JaxProduct(run, operands, problem.flops, num_bytes, finish, variant=variant)


def in_bfloat16(op: str, problem: GroupedGemmProblem, arrays: Arrays) -> JaxProduct:
    """jgg's product in bfloat16 of the dequantized operands, which bfloat16 can hold exactly."""
    plain = dataclasses.replace(problem, dtype=jnp.dtype("bfloat16"))
    floats = {name: each.dequantize("bfloat16") for name, each in arrays.items() if isinstance(each, QuantizedArray)}
    return own(op, plain, arrays | floats)
