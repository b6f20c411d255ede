"""Files of configurations that `jgg tune` measured: where they are, what they hold, how an entry gets into one."""

import dataclasses
import functools
import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self, get_type_hints

import jax
import jax.numpy as jnp

from jgg.core.arguments import as_flag
from jgg.core.choices import W_LAYOUTS
from jgg.core.files import cache_folder, check_regular, locked, replace_text
from jgg.core.problem import DTYPES, GroupedGemmProblem
from jgg.core.quantized import QUANTIZED_DTYPE
from jgg.launching.kernel_configs import CONFIG_TYPES, KernelConfig
from jgg.launching.tiles import check_tiles

_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """A measured configuration.

    Attributes:
      problem: what was computed.
      config: the fastest configuration, of the product's type.
      milliseconds: the time of one call on the device.
      device: the device's name, as the driver gives it.
      compute_capability: 10 * major + minor; the entry serves every device that has it.
      versions: versions of jgg, JAX and Triton.
      date: date of the measurement, ISO 8601.
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
    def identity(self) -> tuple[str, GroupedGemmProblem, str]:
        """The product, problem and device, for which a file has one entry."""
        return self.op, self.problem, self.device

    def as_json(self) -> dict[str, object]:
        """The entry in the form that a file stores."""
        problem = dataclasses.asdict(self.problem)
        named = {name: problem[name] for name in ("dtype", "out_dtype", "dw_dtype", "precision")}
        problem |= {name: value and value.name for name, value in named.items()}
        own = {name: getattr(self, name) for name in ("device", "compute_capability", "versions", "date")}
        time = {"milliseconds": self.milliseconds, "tflops": round(self.tflops, 1)}
        return {"op": self.op, "problem": problem, "config": dataclasses.asdict(self.config), **time, **own}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Self:
        """The entry that a file holds as `entry`.

        Raises: KeyError, TypeError or ValueError: it is no entry.
        """
        problem = dict(entry["problem"])
        problem |= {name: jnp.dtype(problem[name]) for name in ("dtype", "out_dtype")}
        problem["dw_dtype"] = problem.get("dw_dtype") and jnp.dtype(problem["dw_dtype"])
        problem.setdefault("is_quantized", problem["dtype"] == QUANTIZED_DTYPE)  # which older files lack
        problem["precision"] = jax.lax.Precision[problem["precision"]]
        known = {
            "dtype": (*DTYPES, QUANTIZED_DTYPE),
            "out_dtype": DTYPES,
            "dw_dtype": (*DTYPES, None),
            "w_layout": W_LAYOUTS,
        }
        for name, choices in known.items():
            if problem[name] not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {problem[name]!r}")
        milliseconds = float(entry["milliseconds"])
        if not 0 < milliseconds < math.inf:
            raise ValueError(f"milliseconds must be finite and greater than 0, got {milliseconds}")
        # bounded, because kernels multiply by these numbers in int32
        config = _made_of(CONFIG_TYPES[entry["op"]], _with_kernel(entry["config"]), 2**12)
        return cls(
            problem=_made_of(GroupedGemmProblem, problem, 2**31 - 1),
            config=config,
            milliseconds=milliseconds,
            device=str(entry["device"]),
            compute_capability=int(entry["compute_capability"]),
            versions=dict(entry["versions"]),
            date=str(entry["date"]),
        )


def _with_kernel(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration; older files have `warp_specialized` in place of `kernel`."""
    if "warp_specialized" not in config:
        return config
    others = {name: value for name, value in config.items() if name != "warp_specialized"}
    return others | {"kernel": "hopper" if as_flag("warp_specialized", config["warp_specialized"]) else "plain"}


def _made_of(kind: Any, values: dict[str, Any], most: int) -> Any:
    """An object of the dataclass `kind`.

    Raises: TypeError: a value is not of the type that the field declares. ValueError: an int is not from 1 to `most`.
    """
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


def user_file() -> Path | None:
    """The user's file, which need not exist: $JGG_TUNED, else tuned.json in the platform's folder for caches.

    None if there is no such folder.
    """
    named = os.environ.get("JGG_TUNED")
    folder = None if named else cache_folder()
    return Path(named) if named else folder and folder / "tuned.json"


def shipped_files() -> list[Path]:
    """The files that come with jgg."""
    return sorted((Path(__file__).parent / "tuned").glob("*.json"))


class Tuned(NamedTuple):
    """What a file holds.

    Attributes:
      tiles: those that replace some of `tiles.TILES`, by compute capability and kernel.
    """

    entries: tuple[Entry, ...] = ()
    tiles: Mapping[str, Mapping[str, Mapping[str, int]]] = {}


def load(path: Path | None) -> Tuned:
    """What a file holds; nothing if there is no such file or, with a warning, if it is damaged."""
    try:
        return Tuned() if path is None else _load(path, path.stat().st_mtime_ns)
    except OSError:
        return Tuned()


@functools.lru_cache(maxsize=32)
def _load(path: Path, modified: int) -> Tuned:
    try:
        return read(path)
    except ValueError as error:
        warnings.warn(f"{error}; it is ignored.", stacklevel=2)
        return Tuned()


def parse(path: Path) -> tuple[Entry, ...]:
    """The entries of a file. Raises: as `read`."""
    return read(path).entries


def read(path: Path) -> Tuned:
    """What a file holds.

    Raises: ValueError: the file is damaged; the message names it.
    """
    try:
        check_regular(path)
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {_FORMAT}")
        tiles = content.get("tiles", {})
        for of_kernels in tiles.values():
            for kernel, of_kernel in of_kernels.items():
                check_tiles(kernel, of_kernel)
        return Tuned(tuple(Entry.from_json(entry) for entry in content["entries"]), tiles)
    except (OSError, KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is no file of tuned configurations: {what}") from error


def merge(path: Path, entry: Entry, keep_faster: bool = False) -> None:
    """Writes `entry` into a file, in place of one for the same product, problem and device.

    Processes that write at the same time wait for each other.

    Args:
      keep_faster: leave the file unchanged if the entry it already has is faster.

    Raises: ValueError: the file is damaged; it stays unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        found = read(path) if path.exists() else Tuned()
        entries = {old.identity: old for old in found.entries}
        old = entries.get(entry.identity)
        if keep_faster and old is not None and old.milliseconds <= entry.milliseconds:
            return
        entries[entry.identity] = entry
        lines = ",\n".join(json.dumps(entry.as_json()) for entry in entries.values())
        kept = f', "tiles": {json.dumps(found.tiles)}' if found.tiles else ""
        replace_text(path, f'{{"format": {_FORMAT}, "entries": [\n{lines}\n]{kept}}}\n')
