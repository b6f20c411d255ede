"""What came of checking and timing one thing."""

import dataclasses

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
