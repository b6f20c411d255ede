"""Reads the collectives of XLA's optimized programs: the bytes that a device sends, and the kernels they overlap."""

import collections
import dataclasses
import re

from benchmarks.sent import bytes_sent
from tools.hlo import Loop, loops_of

_COLLECTIVE = re.compile(
    r"^  (?:ROOT )?%(\S+) = .*? "
    r"(all-gather|all-reduce|reduce-scatter|ragged-all-to-all|all-to-all|collective-permute)(-start)?\("
)
_DONE = re.compile(r" (?:[a-z-]+)-done\(%([\w.-]+)\)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a loop.

    Attributes:
      kind: such as "all-gather".
      bytes_sent: by each device in one pass, as `benchmarks.sent.bytes_sent` counts; 0 for a ragged exchange.
      beside: names of the kernels that start after it does and before its result is waited for.
    """

    kind: str
    bytes_sent: float
    beside: tuple[str, ...]


def collectives_of(loop: Loop) -> list[Collective]:
    """The collectives of a loop, in the order in which they start."""
    kernels = {kernel.instruction: kernel.name for kernel in loop.kernels if kernel.kind == "call"}
    ends = {found[1]: number for number, line in enumerate(loop.lines) if (found := _DONE.search(line))}
    results = []
    for number, line in enumerate(loop.lines):
        if found := _COLLECTIVE.match(line):
            end = ends.get(found[1], number)
            names = (_name(inner) for inner in loop.lines[number + 1 : end] if not _COLLECTIVE.match(inner))
            beside = tuple(kernels[name] for name in names if name in kernels)
            results.append(Collective(found[2], bytes_sent(line), beside))
    return results


def report(text: str, top: int = 2) -> str:
    """For each loop its collectives, with the kernels they overlap most often, and the bytes that a device sends."""
    lines, total = [], 0.0
    for loop in loops_of(text):
        found = collectives_of(loop)
        of_step = loop.passes * sum(each.bytes_sent for each in found)
        total += of_step
        if found:
            lines += ["", f"{loop.name}: {loop.passes} x {len(found)} collectives, {of_step / 1e9:.2f} GB sent"]
        lines += [f"  {each.kind}: {each.bytes_sent / 1e6:.1f} MB, overlaps {_beside(each, top)}" for each in found]
    return "\n".join([f"each device sends {total / 1e9:.2f} GB in a step", *lines])


def _beside(collective: Collective, top: int) -> str:
    names = collections.Counter(collective.beside).most_common()
    parts = [f"{count} x {name}" for name, count in names[:top]]
    others = sum(count for _, count in names[top:])
    return ", ".join([*parts, f"{others} others"] if others else parts) or "nothing"


def _name(line: str) -> str:
    return line.partition(" = ")[0].split("%")[-1]
