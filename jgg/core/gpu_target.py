"""The GPU that kernels are compiled and chosen for: the one at hand, or one named for ahead-of-time lowering."""

import dataclasses
from contextlib import AbstractContextManager

import jax

from jgg.core.arguments import as_int


@dataclasses.dataclass(frozen=True)
class Target:
    """The properties of a CUDA device that kernels depend on.

    Attributes:
      compute_capability: 10 * major + minor, such as 90 for sm_90.
      num_sms: multiprocessors; each runs one or more persistent programs.
      name: as the driver gives it, such as "NVIDIA H200"; "" if no device was asked for it.
      is_interpreted: whether it stands for Triton's interpreter, which runs only plain Triton kernels.
    """

    compute_capability: int
    num_sms: int
    name: str = ""
    is_interpreted: bool = False

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory one program can have."""
        return _SHARED_MEMORY.get(self.compute_capability, 101_376)  # as 8.6, 8.9, 12.0 and 12.1 have

    @property
    def has_tma(self) -> bool:
        """Whether the device has the tensor memory accelerator, which loads and stores tiles by descriptor."""
        return self.compute_capability >= 90


# Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", less 1 KB for the system.
_SHARED_MEMORY = {80: 166_912, 87: 166_912, 90: 232_448, 100: 232_448, 103: 232_448, 110: 232_448}
_TYPICAL_SMS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 148, 110: 20, 120: 170, 121: 48}
MIN_COMPUTE_CAPABILITY = 80
FP8_COMPUTE_CAPABILITY = 89  # the lowest one that multiplies in FP8 and converts to it and from it

# Part of jit's cache key, so a function traced for one target is traced again for another.
_context = jax.make_user_context(None)


def target(compute_capability: int, num_sms: int | None = None) -> AbstractContextManager[None]:
    """Inside `with jgg.target(90): ...`, traced kernels are compiled for that GPU, even if none is present.

    Without it they are compiled for the first CUDA device. If there is none, they are compiled for compute capability
    8.0, whose code runs on every later GPU too, though not at its full speed.

    Args:
      compute_capability: 10 * major + minor, at least 80: 80 (A100), 89 (L40S), 90 (H100, H200), 100 (B200),
        103 (B300), 120 (RTX 5090).
      num_sms: streaming multiprocessors (SMs) of the GPU; by default the SM count of the largest common GPU with this
        compute capability.

    Raises: ValueError: a number is too small. TypeError: it is no int.
    """
    compute_capability = as_int("compute_capability", compute_capability)
    if compute_capability < MIN_COMPUTE_CAPABILITY:
        raise ValueError(
            f"compute_capability must be {MIN_COMPUTE_CAPABILITY} or more (sm_80, Ampere), got {compute_capability}."
        )
    if num_sms is None:
        num_sms = _TYPICAL_SMS.get(compute_capability, 108)
    return _context(Target(compute_capability, as_int("num_sms", num_sms, least=1)))


def current_target() -> Target:
    """The target set by `target`, else the first CUDA device, else the portable one."""
    return known_target() or Target(MIN_COMPUTE_CAPABILITY, _TYPICAL_SMS[MIN_COMPUTE_CAPABILITY])


def known_target() -> Target | None:
    """The target set by `target`, else the first CUDA device; None if there is neither."""
    return _context.value or device_target()


def device_target() -> Target | None:
    """The first CUDA device of this process, or None."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # no such backend
        return None
    major, minor = device.compute_capability.split(".")
    return Target(10 * int(major) + int(minor), device.core_count, device.device_kind)
