"""Configurations that `jgg tune` measured, in JSON files, and the choice of one: tuned, else by the heuristic."""

import dataclasses
import functools
import json
import logging
import math
import os
import warnings
from pathlib import Path
from typing import Any, Self, get_type_hints

import jax
import jax.numpy as jnp

from jgg.configs.heuristic import heuristic_config
from jgg.configs.kernel_configs import CONFIG_TYPES, KernelConfig, KernelConfigDX
from jgg.configs.requirements import can_run, why_not_specialized
from jgg.core.files import cache_folder, locked, replace_text
from jgg.core.gpu_target import Target
from jgg.core.problem import DTYPES, W_LAYOUTS, GroupedGemmProblem
from jgg.core.quantized import QUANTIZED_DTYPE

_logger = logging.getLogger("jgg")
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """A measured configuration.

    Attributes:
      problem: what was computed.
      config: the fastest configuration, of the product's type.
      milliseconds: of one call on the device.
      device: as the driver names it.
      compute_capability: 10 * major + minor; the entry serves every device that has it.
      versions: of jgg, JAX and Triton.
      date: ISO 8601.
    """

    problem: GroupedGemmProblem
    config: KernelConfig
    milliseconds: float
    device: str
    compute_capability: int
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    date: str = ""

    @property
    def op(self) -> str:
        """The product: "forward", "dx" or "dw"."""
        return self.config.op

    @property
    def tflops(self) -> float:
        """TF/s, of 2 * M * K * N floating-point operations."""
        return self.problem.flops / self.milliseconds / 1e9

    @property
    def identity(self) -> tuple:
        """What a file has one entry for."""
        return self.op, self.problem, self.device

    def as_json(self) -> dict:
        """The entry as it is in a file."""
        problem = dataclasses.asdict(self.problem)
        problem |= {name: problem[name].name for name in ("dtype", "out_dtype", "precision")}
        own = {name: getattr(self, name) for name in ("device", "compute_capability", "versions", "date")}
        time = {"milliseconds": self.milliseconds, "tflops": round(self.tflops, 1)}
        return {"op": self.op, "problem": problem, "config": dataclasses.asdict(self.config), **time, **own}

    @classmethod
    def from_json(cls, entry: dict) -> Self:
        """Raises KeyError, TypeError or ValueError for what is no entry."""
        problem = dict(entry["problem"])
        problem |= {name: jnp.dtype(problem[name]) for name in ("dtype", "out_dtype")}
        problem["precision"] = jax.lax.Precision[problem["precision"]]
        for name, choices in (("dtype", (*DTYPES, QUANTIZED_DTYPE)), ("out_dtype", DTYPES), ("w_layout", W_LAYOUTS)):
            if problem[name] not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {problem[name]!r}")
        milliseconds = float(entry["milliseconds"])
        if not 0 < milliseconds < math.inf:
            raise ValueError(f"milliseconds must be finite and greater than 0, got {milliseconds}")
        return cls(
            problem=_made_of(GroupedGemmProblem, problem, 2**31 - 1),
            config=_made_of(CONFIG_TYPES[entry["op"]], entry["config"], 2**12),  # kernels multiply by it in int32
            milliseconds=milliseconds,
            device=str(entry["device"]),
            compute_capability=int(entry["compute_capability"]),
            versions=dict(entry["versions"]),
            date=str(entry["date"]),
        )


def _made_of(kind, values, most):
    """An object of a dataclass, if the values are of the types that it declares and ints from 1 to `most`."""
    made = kind(**values)
    declarations = get_type_hints(kind)
    for name in (field.name for field in dataclasses.fields(kind)):
        declared, value = declarations[name], getattr(made, name)
        is_of_type = declared is Any or isinstance(value, declared)
        if not is_of_type or (type(value) is bool and declared is not bool):  # Python takes True for an int
            raise TypeError(f"{name} must be {declared}, got {value!r}")
        if type(value) is int and not 0 < value <= most:
            raise ValueError(f"{name} must be from 1 to {most}, got {value}")
    return made


def choose_config(
    kind: type[KernelConfig], problem: GroupedGemmProblem, target: Target, given: KernelConfig | None = None
) -> KernelConfig:
    """The configuration given, else the nearest tuned one that can run, else the heuristic's.

    The heuristic also chooses in place of a given one for the warp-specialized kernel where that cannot run. Files are
    read at trace time.
    """
    if given is None:
        return _tuned_config(kind, problem, target) or heuristic_config(kind, problem, target)
    reason = why_not_specialized(kind, problem, target) if given.warp_specialized else None
    if reason is None:
        return given
    _logger.info("The warp-specialized kernel is not used for this %s: %s", kind.op, reason)
    return heuristic_config(kind, problem, target)


def _tuned_config(kind, problem, target):
    entry = find(kind, problem, target)
    if entry is None and target.has_tma and problem.dtype.itemsize <= 2:  # what files are about
        _log_miss(kind.op, problem)
    return entry and entry.config


def find(kind: type[KernelConfig], problem: GroupedGemmProblem, target: Target) -> Entry | None:
    """The tuned entry nearest to a problem, from the user's file or else from those that come with jgg, or None.

    An entry must be for the same product with the same options, compute capability and size of dtype, none of K, N and
    rows per expert may be more than twice the other's, and its configuration must be one that can run. One for the
    other layout of w serves too, as if it were half a doubling further away; dW's tiles are turned with dw.
    """
    for path in (user_file(), *shipped_files()):
        near = [
            entry
            for entry in load(path)
            if entry.compute_capability == target.compute_capability
            and type(entry.config) is kind
            and _options(kind, entry.problem) == _options(kind, problem)
            and max(_distances(entry.problem, problem)[:3]) <= 1
        ]
        for entry in sorted(near, key=functools.partial(_remoteness, problem, target)):
            entry = in_layout(problem.w_layout, entry)
            if can_run(problem, target, entry.config):
                return entry
    return None


def _remoteness(problem, target, entry):
    """What to choose the least of."""
    is_turned = entry.problem.w_layout != problem.w_layout
    return sum(_distances(entry.problem, problem)) + is_turned / 2, entry.device != target.name


def in_layout(w_layout: str, entry: Entry) -> Entry:
    """The entry for weights of that layout; dW's tiles are turned with dw, which is stored as w is."""
    if entry.problem.w_layout == w_layout:
        return entry
    config = entry.config.with_tile(entry.config.tile(entry.problem.w_layout), w_layout)
    return dataclasses.replace(entry, problem=dataclasses.replace(entry.problem, w_layout=w_layout), config=config)


def user_file() -> Path | None:
    """The user's file: $JGG_TUNED, else tuned.json in the platform's folder for caches. It need not exist.

    None where there is no such folder.
    """
    named = os.environ.get("JGG_TUNED")
    folder = None if named else cache_folder()
    return Path(named) if named else folder and folder / "tuned.json"


def shipped_files() -> list[Path]:
    """The files that come with jgg."""
    return sorted((Path(__file__).parent / "tuned").glob("*.json"))


def load(path: Path | None) -> tuple[Entry, ...]:
    """The entries of a file; none where there is no such file or, with a warning, where it is damaged."""
    try:
        return () if path is None else _load(path, path.stat().st_mtime_ns)
    except OSError:
        return ()


@functools.lru_cache(maxsize=32)
def _load(path, modified):
    try:
        return parse(path)
    except ValueError as error:
        warnings.warn(f"{error}; it is ignored.", stacklevel=2)
        return ()


def parse(path: Path) -> tuple[Entry, ...]:
    """The entries of a file.

    Raises: ValueError: the file is damaged; the message names it.
    """
    try:
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {_FORMAT}")
        return tuple(Entry.from_json(entry) for entry in content["entries"])
    except (OSError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is no file of tuned configurations: {what}") from error


def merge(path: Path, entry: Entry, keep_faster: bool = False) -> None:
    """Writes a file that has `entry` in place of one for the same product, problem and device.

    Processes that do so at once wait for each other.

    Args:
      keep_faster: leave the file alone if the entry that it has is the faster one.

    Raises: ValueError: the file is damaged; it is left as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        entries = {old.identity: old for old in (parse(path) if path.exists() else ())}
        old = entries.get(entry.identity)
        if keep_faster and old is not None and old.milliseconds <= entry.milliseconds:
            return
        entries[entry.identity] = entry
        lines = ",\n".join(json.dumps(entry.as_json()) for entry in entries.values())
        replace_text(path, f'{{"format": {_FORMAT}, "entries": [\n{lines}\n]}}\n')


def _options(kind, problem):
    """What must be the same; precision is for float32 alone, and dx knows no bias."""
    precision = problem.precision if problem.dtype.itemsize == 4 else None
    return (
        problem.dtype.itemsize,
        precision,
        problem.rows_are_aligned,
        problem.permute_x,
        problem.permute_y,
        problem.has_topk_weights,
        problem.has_bias and kind is not KernelConfigDX,
    )


def _distances(one, other):
    """How far apart K, N, rows per expert and E are, in doublings."""
    return [
        abs(math.log2(a / b))
        for a, b in (
            (one.in_features, other.in_features),
            (one.out_features, other.out_features),
            (one.rows_of_groups / one.num_experts, other.rows_of_groups / other.num_experts),
            (one.num_experts, other.num_experts),
        )
    ]


@functools.cache
def _log_miss(op, problem):
    _logger.info(
        "No tuned configuration is near this %s; the heuristic chose one. To tune it on the GPU: %s",
        op,
        tune_command(op, problem),
    )


def tune_command(op: str, problem: GroupedGemmProblem) -> str:
    """The command line that tunes one product of a problem."""
    sizes: dict[str, int | str] = {
        "m": problem.rows_of_groups,
        "k": problem.in_features,
        "n": problem.out_features,
        "experts": problem.num_experts,
    }
    dtype = "fp8" if problem.is_quantized else problem.dtype.name
    sizes |= {"topk": problem.topk, "op": op, "dtype": dtype, "w-layout": problem.w_layout}
    flags = {
        "permute-x": problem.permute_x,
        "permute-y": problem.permute_y,
        "weighted": problem.has_topk_weights,
        "biased": problem.has_bias,
    }
    words = [f"--{name} {value}" for name, value in sizes.items()]
    return " ".join(["jgg tune", *words, *(f"--{name}" for name, is_set in flags.items() if is_set)])
