"""Where the warp-specialised kernels of `jgg.kernels.hopper` can run."""

import functools
import importlib.metadata
import logging

from jgg.problem import GroupedGemmProblem
from jgg.target import Target

_logger = logging.getLogger("jgg")

COMPUTE_CAPABILITY = 90  # the only one with wgmma instructions
# Gluon, the language of these kernels, changes between releases of Triton, and jax-triton is corrected for it.
TESTED_VERSIONS = {"triton": "3.9.", "jax-triton": "0.4.1"}


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
    return _why_not_here()


@functools.cache
def _why_not_here():
    reason = untested_version()
    if reason is not None:
        _logger.warning("The warp-specialised kernels are not used, others are: %s", reason)
    return reason


@functools.cache
def untested_version() -> str | None:
    """Which package is not here in a version of TESTED_VERSIONS, in words, or None."""
    for package, tested in TESTED_VERSIONS.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed"
        if not version.startswith(tested):
            return f"{package} {version} was not tested with them, only {tested.rstrip('.')}"
    return None
