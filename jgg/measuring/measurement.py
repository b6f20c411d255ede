"""What came of checking and timing one thing."""

import dataclasses
from collections.abc import Callable

JGG = "jgg"
DENSE = "dense"  # the peer that is a dense product of the same FLOPs
RIGHT, WRONG, FAILED, UNSUPPORTED = "right", "WRONG", "failed", "unsupported"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What came of one product.

    Attributes:
      status: RIGHT, WRONG, FAILED (it raised) or UNSUPPORTED.
      seconds: of a call; None unless right.
      error: largest error relative to the largest element.
      allowed_error: what error may be.
      reason: why it failed or is unsupported, in one line.
      variant: which of several configurations it is, the fastest.
      others: what came of those configurations that were not right.
    """

    status: str
    seconds: float | None = None
    error: float | None = None
    allowed_error: float | None = None
    reason: str | None = None
    variant: str = ""
    others: tuple[str, ...] = ()

    def __str__(self):
        """The status with what explains it."""
        if self.reason is not None:
            return f"{self.status}: {self.reason}"
        return f"{self.status}: error {self.error:.3g}, at most {self.allowed_error:.3g} is right"


def first_line(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].removesuffix(": ")


def check_and_time(prepare: Callable, time: Callable) -> Measurement:
    """Checks a result, times what computes it if that is right, and checks the result of the calls that were timed.

    Args:
      prepare: () -> the result, and the function from a result to its Measurement without seconds.
      time: () -> `timing.Timing`.
    """
    try:
        result, check = prepare()
        checked, seconds = check(result), None
        if checked.status == RIGHT:
            timed = time()
            checked, seconds = check(timed.result), timed.seconds
    except Exception as error:  # such as too little memory, or whatever another library raises
        return Measurement(FAILED, reason=first_line(error))
    return dataclasses.replace(checked, seconds=seconds if checked.status == RIGHT else None)
