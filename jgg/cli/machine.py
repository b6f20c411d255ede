"""What this machine has: versions of packages, JAX's devices, GPUs that JAX may not see."""

import collections
import dataclasses
import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

import jax

import jgg
from jgg.configs import tuned_configs
from jgg.versions import installed

CUDA_PLUGINS = {"jax-cuda12-plugin": "cuda12", "jax-cuda13-plugin": "cuda13"}  # and jgg's extras
_PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", *CUDA_PLUGINS, "flax")


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of JAX's default backend; None is what it does not tell.

    Attributes:
      platform: "cpu", "cuda" or what else JAX calls it.
      kind: the model, such as "NVIDIA H200".
      compute_capability: such as "9.0".
      memory_bytes: that JAX may allocate.
    """

    platform: str
    kind: str
    compute_capability: str | None = None
    num_sms: int | None = None
    memory_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class TunedEntries:
    """How many configurations of a file were measured on a device."""

    device: str
    compute_capability: str
    count: int


@dataclasses.dataclass(frozen=True)
class TunedFile:
    """A file of tuned configurations, or why it is ignored."""

    path: str
    damage: str | None = None
    entries: tuple[TunedEntries, ...] = ()


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the machine says.

    Attributes:
      system: "Linux", "Darwin" or "Windows".
      versions: of jgg, Python and packages; None where one is not installed.
      devices: of JAX's default backend.
      has_nvidia_gpu: the NVIDIA driver sees a GPU, whether or not JAX does.
      jax_platforms: the environment variable JAX_PLATFORMS.
      backend_error: why JAX has no device at all.
      tuned_files: those that exist, in the order in which jgg looks.
    """

    system: str
    versions: dict[str, str | None]
    devices: tuple[Device, ...] = ()
    has_nvidia_gpu: bool = False
    jax_platforms: str = ""
    backend_error: str | None = None
    tuned_files: tuple[TunedFile, ...] = ()


def gather() -> Facts:
    """Asks the machine; starts JAX's backends."""
    try:
        found, backend_error = devices(), None
    except (RuntimeError, AssertionError) as error:
        found, backend_error = (), str(error) or "no backend starts"
    paths = tuned_configs.user_file(), *tuned_configs.shipped_files()
    return Facts(
        system=platform.system(),
        versions=versions(),
        devices=found,
        has_nvidia_gpu=has_nvidia_gpu(),
        jax_platforms=os.environ.get("JAX_PLATFORMS", ""),
        backend_error=backend_error,
        tuned_files=tuple(_tuned_file(path) for path in paths if path is not None and os.path.exists(path)),
    )


def origin() -> dict:
    """What a file of measurements says of where it is from: the command, the date, the versions and the device."""
    return {
        "command": ["jgg", *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "device": dataclasses.asdict(devices()[0]),
    }


def versions() -> dict[str, str | None]:
    """Versions of jgg, Python and the packages used; None for one that is not installed."""
    own: dict[str, str | None] = {"jgg": jgg.__version__, "python": platform.python_version()}
    return own | {package: installed(package) for package in _PACKAGES}


def devices() -> tuple[Device, ...]:
    """The devices of JAX's default backend. JAX raises where none starts."""
    default = jax.local_devices()
    try:
        cuda = jax.local_devices(backend="cuda")
    except RuntimeError:  # no such backend
        cuda = []
    return tuple(
        _cuda_device(device) if device in cuda else Device(device.platform, device.device_kind) for device in default
    )


def _cuda_device(device):
    memory = (device.memory_stats() or {}).get("bytes_limit")
    return Device("cuda", device.device_kind, device.compute_capability, device.core_count, memory)


def _tuned_file(path):
    try:
        entries = tuned_configs.parse(path)
    except ValueError as error:
        return TunedFile(str(path), damage=str(error))
    names = [(entry.device, "{}.{}".format(*divmod(entry.compute_capability, 10))) for entry in entries]
    return TunedFile(str(path), entries=tuple(TunedEntries(*name, n) for name, n in collections.Counter(names).items()))


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver sees a GPU."""
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return True
    try:  # in a container or under WSL /proc may not tell
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.stdout.startswith("GPU")
