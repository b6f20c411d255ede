"""Ways to compute a product: each is checked, then timed, and the fastest right one counts."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax

from jgg.measuring import timing
from jgg.measuring.timing import FAILED, RIGHT, WRONG, Measurement, Timing, first_line, measure


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
        """Judges a result; the measurement has no seconds."""
        ...


def as_it_is(array: Any) -> Any:
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

    function: Callable[[dict[str, Any]], Any]
    arrays: dict[str, Any]
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


def measure_best(prepare: Callable[[], Iterable[Way]], reference: Reference) -> Measurement:
    """Checks and times each way that `prepare()` gives; returns the fastest right one, else the first wrong one."""
    try:
        ways = prepare()
    except Exception as error:  # whatever another library raises
        return Measurement(FAILED, reason=first_line(error))
    measured = [_check_and_time(way, reference) for way in ways]
    order = (RIGHT, WRONG, FAILED)
    best = min(measured, key=lambda m: (order.index(m.status), m.seconds or 0))
    others = tuple(f"{m.variant}: {m}" for m in measured if m is not best and m.status != RIGHT)
    return dataclasses.replace(best, others=others)


def _check_and_time(way, reference):
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
