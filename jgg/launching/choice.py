"""The ways to compute an operation, and the choice between them.

"triton" launches the kernels on a CUDA GPU, "xla" is plain differentiable JAX for any platform, "interpret" runs the
kernels on the CPU. With None a traced program holds both "triton" and "xla", and the platform that it is compiled for
decides between them.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import jax

from jgg.core.choices import IMPLEMENTATIONS
from jgg.core.files import warn_once
from jgg.core.gpu_target import MIN_COMPUTE_CAPABILITY, Target, current_target, device_target, known_target
from jgg.core.problem import GroupedGemmProblem
from jgg.launching import interpret, triton
from jgg.launching.launch import Kernel, Launch


class How(NamedTuple):
    """How to compute an operation.

    Attributes:
      implementation: one of IMPLEMENTATIONS or None.
      target: the GPU that "triton" is for.
    """

    implementation: str | None
    target: Target

    def sparing(self, sms: int) -> "How":
        """A copy whose persistent programs leave `sms` multiprocessors idle."""
        return self._replace(target=dataclasses.replace(self.target, num_sms=max(1, self.target.num_sms - sms)))


class Launcher(NamedTuple):
    """Runs an operation's kernels, either on a GPU or in Triton's interpreter.

    Attributes:
      run: (kernel, Launch) -> the outputs by name.
      target: the GPU that launches are chosen for.
    """

    run: Callable[[Kernel, Launch], dict[str, jax.Array]]
    target: Target

    @classmethod
    def of(cls, how: How) -> "Launcher":
        """The launcher for the implementation "triton" or "interpret" that `how` names."""
        if how.implementation == "interpret":
            return cls(interpret.call, interpret.TARGET)
        triton.load()  # before an operation imports its kernels
        return cls(functools.partial(triton.call, how.target.compute_capability), how.target)


def how_of(problem: GroupedGemmProblem, implementation: str | None) -> How:
    """How to compute a problem: the requested implementation, and the GPU that is here or that `jgg.target` names.

    Symbolic shapes are computed by "xla".

    Raises:
      ValueError: no implementation has that name, or it cannot compute such shapes.
      ImportError: a package that it needs is missing.
    """
    check_implementation(implementation)
    if problem.is_symbolic:
        if implementation not in (None, "xla"):
            raise ValueError(
                "implementation must be None or 'xla' for symbolic shapes, since kernels are chosen by sizes, "
                f"got {implementation!r}."
            )
        implementation = "xla"
    return How(implementation, current_target())


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError if the name is unknown or the GPU is too old, ImportError if a package is missing."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS} or None, got {implementation!r}.")
    if implementation in ("triton", "interpret") and not has_triton():
        raise ImportError(
            f"implementation={implementation!r} needs Triton and jax-triton: pip install 'jgg[triton]' (Linux only)."
        )
    device = device_target() if implementation == "triton" else None
    if device is not None and _is_too_old(device):
        raise ValueError(
            f"implementation must be 'xla' on {device.name}, whose compute capability is below "
            f"{MIN_COMPUTE_CAPABILITY / 10}, got 'triton'."
        )


def is_plain_jax(implementation: str | None) -> bool:
    """Whether this choice always means the xla implementation, which needs no custom derivative."""
    if implementation is not None:
        return implementation == "xla"
    if not has_triton():
        target = known_target()  # or the target set by `jgg.target`: a program exported for it would have no kernels
        if target is not None and not _is_too_old(target):
            gpu = target.name or f"compute capability {target.compute_capability / 10}"
            warn_once(
                f"All runs in plain JAX, slower than by the kernels for {gpu}: Triton and jax-triton are not "
                "installed. pip install 'jgg[triton]'"
            )
        return True
    return _is_too_old(device_target())


def _is_too_old(device: Target | None) -> bool:
    return device is not None and device.compute_capability < MIN_COMPUTE_CAPABILITY


@functools.cache
def has_triton() -> bool:
    """Whether Triton and jax-triton are installed."""
    return all(importlib.util.find_spec(package) is not None for package in ("triton", "jax_triton"))
