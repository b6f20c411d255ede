"""The ways to compute a grouped GEMM, and the choice between them.

"triton" launches the kernels on a CUDA GPU, "xla" is plain differentiable JAX for any platform, "interpret" runs the
kernels on the CPU. None stages both of the first two and leaves the choice to the platform that is compiled for.
"""

import functools
import importlib
import importlib.util

import jax

from jgg.target import device_target

NAMES = ("triton", "xla", "interpret")
MIN_COMPUTE_CAPABILITY = 80


def check_implementation(implementation: str | None):
    """Raises ValueError for a name that is none of NAMES, ImportError for one whose packages are not installed."""
    if implementation is not None and implementation not in NAMES:
        raise ValueError(f"implementation must be one of {NAMES} or None, got {implementation!r}.")
    if implementation in ("triton", "interpret") and not has_triton():
        raise ImportError(
            f"implementation={implementation!r} needs Triton and jax-triton: pip install 'jgg[cuda12]' (Linux only)."
        )


def is_plain_jax(implementation: str | None) -> bool:
    """Whether a choice can only lead to the xla implementation, so that it needs no custom derivative."""
    if implementation is not None:
        return implementation == "xla"
    device = device_target()
    too_old = device is not None and device.compute_capability < MIN_COMPUTE_CAPABILITY
    return too_old or not has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether Triton and jax-triton are installed."""
    return all(importlib.util.find_spec(package) is not None for package in ("triton", "jax_triton"))


def run(product: str, implementation: str | None, problem, config, *arrays, **options):
    """One product ("forward", "backward_dx" or "backward_dw") by an implementation, or by the platform's own."""

    def of(name):
        module = importlib.import_module(f"jgg.implementations.{name}")
        return functools.partial(getattr(module, product), problem, config, **options)

    if problem.is_empty or is_plain_jax(implementation):
        return of("xla")(*arrays)
    if implementation is not None:
        return of(implementation)(*arrays)
    return jax.lax.platform_dependent(*arrays, cuda=of("triton"), default=of("xla"))
