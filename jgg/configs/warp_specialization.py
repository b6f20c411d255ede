"""Where the warp-specialised kernels of `jgg.kernels.hopper` can run."""

from jgg.files import warn_once
from jgg.gpu_target import Target
from jgg.problem import GroupedGemmProblem
from jgg.versions import WARP_SPECIALIZED, unlike

COMPUTE_CAPABILITY = 90  # the only one with wgmma instructions


def max_columns(op: str, problem: GroupedGemmProblem) -> int:
    """Columns of an output tile, of which a warpgroup holds the finished one in registers beside the next."""
    return 128 if op == "forward" and problem.out_dtype.itemsize == 4 else 256


def why_not(op: str, problem: GroupedGemmProblem, target: Target) -> str | None:
    """Why a product cannot be computed by them, or None if it can.

    Args:
      op: "forward", "dx" or "dw".
    """
    if target.compute_capability != COMPUTE_CAPABILITY:
        return "they are for compute capability 9.0"
    if problem.dtype.itemsize != 2:
        return "they multiply 16-bit floats"
    if not problem.rows_are_aligned:
        return "rows of K and of N elements must be multiples of 16 bytes"
    if op == "dx" and problem.has_topk_weights:
        return "the gradient of topk_weights is another kernel's epilogue"
    other = unlike(WARP_SPECIALIZED)
    if other:
        warn_once(f"The warp-specialised kernels are not used, others are: {other}")
    return other
