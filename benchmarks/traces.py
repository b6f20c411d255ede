"""Reads JAX's traces of GPUs: how long collectives ran, and for how much of that no other kernel did."""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np

# NCCL's kernels, and those that XLA has for collectives within a machine
_COLLECTIVE = re.compile(r"nccl|ragged_?all_?to_?all|all_?(gather|reduce)|reduce_?scatter|PtoP|P2P", re.IGNORECASE)
Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Shares:
    """The times of a traced step in ms, means over the devices.

    Attributes:
      span: from the first kernel's start to the last one's end.
      collectives: when a collective ran, or waited for another device.
      alone: when a collective ran and no other kernel did.
      idle: when nothing ran.
    """

    span: float
    collectives: float
    alone: float
    idle: float


def shares_of(folder: Path) -> Shares | None:
    """The shares in the newest trace in a folder that `jax.profiler.trace` wrote; None if it has no GPU."""
    traces = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    planes = jax.profiler.ProfileData.from_file(str(traces[-1])).planes
    devices = [
        [line for line in plane.lines if "Stream" in line.name]
        for plane in planes
        if plane.name.startswith("/device:GPU")
    ]
    found = [
        times_of([(event.name, event.start_ns, event.end_ns) for line in lines for event in line.events])
        for lines in devices
        if lines
    ]
    if not found:
        return None
    return Shares(*(float(each) / 1e6 for each in np.mean(found, axis=0)))


def times_of(events: list[tuple[str, float, float]]) -> tuple[float, float, float, float]:
    """The times of `Shares` in ns, of a device's kernels by name, start and end."""
    both = _length((start, end) for _, start, end in events)
    others = _length((start, end) for name, start, end in events if not _COLLECTIVE.search(name))
    collectives = _length((start, end) for name, start, end in events if _COLLECTIVE.search(name))
    span = max(end for _, _, end in events) - min(start for _, start, _ in events)
    return span, collectives, both - others, span - both


def _length(intervals: Iterable[Interval]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, -np.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
