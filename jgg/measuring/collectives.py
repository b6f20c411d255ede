"""Bytes that a compiled program's collectives send, read from its HLO."""

import math
import re

_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
_COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter)(-start)?\(.*replica_groups=(mesh\[.*?\] \{.*?\}|\S*)"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def bytes_sent(hlo: str) -> float:
    """Bytes that each device sends in the all-gathers, all-reduces and reduce-scatters of an HLO text, each run once.

    They send what a ring does: of g devices, an all-gather g - 1 times its part, a reduce-scatter as much, an
    all-reduce both. Other collectives are not counted; what a ragged all-to-all sends depends on data.
    """
    total = 0.0
    for shapes, kind, is_async, groups in _COLLECTIVE.findall(hlo):
        devices = _group_size(groups)
        if shapes.startswith("(("):  # what starts a collective may show "((operands), results)"
            shapes, is_async = shapes.partition("), ")[2], False
        size = sum(
            _ITEM_BYTES[dtype] * math.prod(int(n) for n in sizes.split(",") if n)
            for dtype, sizes in _ARRAY.findall(shapes)
        )
        if kind == "reduce-scatter":
            total += size * (devices - 1)
        elif kind == "all-reduce":
            total += 2 * size * (devices - 1) / devices
        else:  # or, an all-gather, "(operand, result)"
            results = size * devices / (devices + 1) if is_async else size
            total += results * (devices - 1) / devices
    return total


def _group_size(groups):
    """Of {{0,1},{2,3}}, [2,2]<=[4] or mesh['a'=2,'b'=2] {'b'}."""
    if groups.startswith("mesh"):
        mesh, _, names = groups.partition("] {")
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", names))
    if groups.startswith("["):
        return int(groups[1:].partition("]")[0].split(",")[-1])
    return groups.partition("}")[0].count(",") + 1
