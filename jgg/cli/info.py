"""Show versions, devices and which implementation runs here.

`gather` collects facts about the machine; `assess`, a pure function, draws conclusions from them.
"""

import collections
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import jax

from jgg.core.gpu_target import MIN_COMPUTE_CAPABILITY
from jgg.core.versions import REQUIREMENTS, __version__, installed, numbers, satisfies, unlike
from jgg.tuning import KERNEL_REQUIREMENTS, tuned_files

CUDA_PLUGINS = {"jax-cuda12-plugin": "cuda12", "jax-cuda13-plugin": "cuda13"}  # and the extras of jgg that install them
# JAX compiles for GPUs with the plugin alone, and runs on them with what the plugin requires.
_PJRT = {"jax-cuda12-plugin": "jax-cuda12-pjrt", "jax-cuda13-plugin": "jax-cuda13-pjrt"}
_PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", *CUDA_PLUGINS, *_PJRT.values(), "flax")


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of JAX's default backend; what it does not tell is None.

    Attributes:
      platform: "cpu", "cuda" or what else JAX calls it.
      kind: the model, such as "NVIDIA H200".
      compute_capability: such as "9.0".
      memory_bytes: bytes that JAX may allocate.
    """

    platform: str
    kind: str
    compute_capability: str | None = None
    num_sms: int | None = None
    memory_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class TunedEntries:
    """The number of configurations in a file that were measured on one device."""

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
    """The facts about this machine and what is installed on it.

    Attributes:
      system: "Linux", "Darwin" or "Windows".
      versions: versions of jgg, Python and packages; None for a package that is not installed.
      devices: devices of JAX's default backend.
      has_nvidia_gpu: whether the NVIDIA driver sees a GPU, whether or not JAX does.
      jax_platforms: the environment variable JAX_PLATFORMS.
      backend_error: why JAX has no device at all.
      tuned_files: files of tuned configurations that exist, in the order in which jgg looks.
    """

    system: str
    versions: dict[str, str | None]
    devices: tuple[Device, ...] = ()
    has_nvidia_gpu: bool = False
    jax_platforms: str = ""
    backend_error: str | None = None
    tuned_files: tuple[TunedFile, ...] = ()


def run(args) -> int:
    """Prints the facts about this machine and the conclusions."""
    facts = gather()
    assessment = assess(facts)
    if args.json:
        print(json.dumps(dataclasses.asdict(facts) | assessment, indent=2))
    else:
        print("\n".join(_lines(facts, assessment)))
    return 0


def assess(facts: Facts) -> dict:
    """Concludes from the facts alone which implementation runs, why, and which command fixes each problem."""
    implementation, reason, command = _choose(facts)
    problems = dict([*_version_problems(facts), *_pjrt_without_gpu(facts)])
    if facts.backend_error:
        problems[f"JAX has no device: {facts.backend_error}"] = "unset JAX_PLATFORMS"
    if command and command not in problems.values():
        problems[f"The GPU cannot be used: {reason}."] = command
    found = [{"what": what, "command": command} for what, command in problems.items()]
    return {"implementation": implementation, "reason": reason, "problems": found}


def _choose(facts: Facts) -> tuple[str, str, str | None]:
    """Returns the implementation, the reason for it, and the command that would make a GPU usable, or None."""
    if not facts.devices or facts.devices[0].platform != "cuda":
        return "xla", *_why_no_cuda_device(facts)
    device = facts.devices[0]
    capability = str(device.compute_capability)
    has = f"{device.kind} has compute capability {capability}"
    least = divmod(MIN_COMPUTE_CAPABILITY, 10)
    if numbers(capability) < least:
        return "xla", f"{has}, and the Triton kernels need {least[0]}.{least[1]}", None
    missing = [name for name in ("triton", "jax-triton") if facts.versions[name] is None]
    if missing:
        requirements = " ".join(f"'{name}{REQUIREMENTS[name]}'" for name in missing)
        return "xla", f"{' and '.join(missing)} not installed", f"pip install {requirements}"
    for kernel, asked in KERNEL_REQUIREMENTS.items():
        other = unlike(asked.versions, facts.versions)
        if other and numbers(capability) in [divmod(each, 10) for each in asked.compute_capabilities or ()]:
            has += f"; without the {kernel} kernels, the fastest: {other}"
    return "triton", has, None


def _why_no_cuda_device(facts: Facts) -> tuple[str, str | None]:
    """Returns why JAX has no CUDA device, and the command that would help, or None."""
    if facts.system != "Linux":
        return f"the Triton kernels run on Linux only, and this is {facts.system}", None
    if not facts.has_nvidia_gpu:
        return "no NVIDIA GPU is visible here", None
    extras = [
        extra for plugin, extra in CUDA_PLUGINS.items() if facts.versions[plugin] and facts.versions[_PJRT[plugin]]
    ]
    if not extras:
        return "JAX's CUDA plugin is not installed", "pip install 'jgg[cuda12]'"
    if not any(_matches_jaxlib(facts, plugin) for plugin in CUDA_PLUGINS):
        return "JAX's CUDA plugin is of another version", f"pip install 'jgg[{extras[0]}]'"
    if facts.jax_platforms and facts.jax_platforms.split(",")[0] not in ("cuda", "gpu"):
        return f"JAX_PLATFORMS is {facts.jax_platforms}", "unset JAX_PLATFORMS"
    return "JAX found no CUDA device", "python -c 'import jax; jax.devices(\"cuda\")'"


def _version_problems(facts):
    """Yields what is wrong with each wrong version, and the command that fixes it."""
    for name, specifier in REQUIREMENTS.items():
        version = facts.versions[name]
        if version is not None and not satisfies(version, specifier):
            yield f"{name} is {version}, and jgg needs {specifier}.", f"pip install '{name}{specifier}'"
    for plugin, extra in CUDA_PLUGINS.items():
        version, jaxlib = facts.versions[plugin], facts.versions["jaxlib"]
        if version is not None and not _matches_jaxlib(facts, plugin):
            what = f"JAX ignores {plugin} {version}: it must be of jaxlib's version, {jaxlib}."
            yield what, f"pip install 'jgg[{extra}]'"


def _pjrt_without_gpu(facts):
    """Yields each package that makes JAX write a traceback where there is no GPU, and the command that fixes it."""
    if facts.has_nvidia_gpu or facts.jax_platforms or any(device.platform == "cuda" for device in facts.devices):
        return
    for plugin, pjrt in _PJRT.items():
        if facts.versions[pjrt] is not None:
            what = (
                f"{pjrt} looks for a GPU whenever JAX starts, and writes a traceback because none is here. "
                f"JAX compiles for GPUs with {plugin} alone. If a machine with a GPU uses this environment too, keep "
                f"{pjrt} and set JAX_PLATFORMS=cpu here."
            )
            yield what, f"pip uninstall -y {pjrt}"


def _matches_jaxlib(facts, plugin):
    version, jaxlib = facts.versions[plugin], facts.versions["jaxlib"]
    return version is not None and numbers(version) == numbers(jaxlib)


def _lines(facts: Facts, assessment: dict):
    yield "Versions"
    yield from (f"  {name:<18} {version or 'not installed'}" for name, version in facts.versions.items())
    yield "Devices"
    yield from map(_describe, facts.devices) if facts.devices else ["  none"]
    yield "Implementation"
    yield f"  {assessment['implementation']}: {assessment['reason']}"
    yield "Tuned configurations, in the order in which they are looked up"
    yield from _tuned_lines(facts)
    yield "To fix" if assessment["problems"] else "No problems found"
    for problem in assessment["problems"]:
        yield f"  {problem['what']}\n    {problem['command']}"


def _tuned_lines(facts):
    here = facts.devices[0] if facts.devices else None
    for file in facts.tuned_files:
        if file.damage:
            yield f"  ignored: {file.damage}"
        for each in file.entries:
            line = f"  {file.path}: {each.count} measured on {each.device}"
            if here is not None and here.compute_capability is not None:
                if each.compute_capability != here.compute_capability:
                    line += ", not used here"
                elif each.device != here.kind:
                    line += f", used here too: {here.kind} has the same multiprocessor"
            yield line
    if not facts.tuned_files:
        yield "  none: the heuristic chooses"


def _describe(device: Device):
    parts = list(dict.fromkeys((device.platform, device.kind)))  # one word if both are the same, as for a CPU
    if device.compute_capability is not None:
        parts += [f"compute capability {device.compute_capability}", f"{device.num_sms} SMs"]
    if device.memory_bytes is not None:
        parts.append(f"{device.memory_bytes / 2**30:.1f} GiB for JAX")
    return "  " + ", ".join(parts)


def gather() -> Facts:
    """Collects the facts about this machine; starts JAX's backends."""
    try:
        found, backend_error = devices(), None
    except (RuntimeError, AssertionError) as error:
        found, backend_error = (), str(error) or "no backend starts"
    paths = tuned_files.user_file(), *tuned_files.shipped_files()
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
    """The origin that files of measurements record: the command, the date, the versions and the device."""
    program = Path(sys.argv[0]).name
    return {
        "command": ["jgg" if program == "__main__.py" else program, *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "device": dataclasses.asdict(devices()[0]),
    }


def versions() -> dict[str, str | None]:
    """Versions of jgg, Python and the packages used; None for one that is not installed."""
    own: dict[str, str | None] = {"jgg": __version__, "python": platform.python_version()}
    return own | {package: installed(package) for package in _PACKAGES}


def devices() -> tuple[Device, ...]:
    """The devices of JAX's default backend. JAX raises an error if no backend starts."""
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
        entries = tuned_files.parse(path)
    except ValueError as error:
        return TunedFile(str(path), damage=str(error))
    names = [(entry.device, "{}.{}".format(*divmod(entry.compute_capability, 10))) for entry in entries]
    return TunedFile(str(path), entries=tuple(TunedEntries(*name, n) for name, n in collections.Counter(names).items()))


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver sees a GPU."""
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return True
    try:  # in a container or under WSL, /proc may not list GPUs
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.stdout.startswith("GPU")
