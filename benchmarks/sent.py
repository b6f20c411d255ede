"""What devices send: in the collectives of a compiled program, and in a ragged exchange, whose bytes depend on data."""

import math
import re

import jax.numpy as jnp

_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
_COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all)(-start)?\(.*replica_groups=(mesh\[.*?\] \{.*?\}|\S*)"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def bytes_of_ragged_exchange(layer, strategy, dtype, quantization=None) -> float:
    """Bytes that a device sends if rows are routed evenly: to the experts and back, in forward and in backward.

    With room for all tokens, a token goes once to each other device that has experts of its k different random choices.
    """
    if strategy.exchange != "ragged_all_to_all":
        return 0.0
    rows = layer.topk * (1 - 1 / strategy.expert)
    if strategy.expert <= strategy.buffer_factor * layer.topk:
        others = layer.experts - layer.experts // strategy.expert
        nothing = math.comb(others, layer.topk) / math.comb(layer.experts, layer.topk)
        rows = (strategy.expert - 1) * (1 - nothing)
    back = layer.hidden * jnp.dtype(dtype).itemsize
    there = back if quantization is None else layer.hidden + 4 * math.ceil(layer.hidden / 128)  # and scales
    return 2 * layer.tokens * rows * (there + back)


def bytes_sent(hlo: str) -> float:
    """Bytes that each device sends in the collectives of an HLO text, each run once.

    They are counted for rings: among g devices, each sends g - 1 times the size of its part in an all-gather, as much
    in a reduce-scatter or an all-to-all, and twice that in an all-reduce. Other collectives are not counted; the bytes
    of a ragged all-to-all depend on data.
    """
    total = 0.0
    for shapes, kind, is_async, groups in _COLLECTIVE.findall(hlo):
        devices = _group_size(groups)
        if shapes.startswith("(("):  # the type of an async start may be "((operands), results)"
            shapes, is_async = shapes.partition("), ")[2], False
        size = sum(
            _ITEM_BYTES[dtype] * math.prod(int(n) for n in sizes.split(",") if n)
            for dtype, sizes in _ARRAY.findall(shapes)
        )
        if kind == "reduce-scatter":
            total += size * (devices - 1)
        elif kind == "all-reduce":
            total += 2 * size * (devices - 1) / devices
        elif kind == "all-to-all":
            total += size * (devices - 1) / devices
        else:  # the type of an async all-gather is "(operand, result)"
            results = size * devices / (devices + 1) if is_async else size
            total += results * (devices - 1) / devices
    return total


def _group_size(groups):
    """Returns the number of devices in a group, from {{0,1},{2,3}}, [2,2]<=[4] or mesh['a'=2,'b'=2] {'b'}."""
    if groups.startswith("mesh"):
        mesh, _, names = groups.partition("] {")
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", names))
    if groups.startswith("["):
        return int(groups[1:].partition("]")[0].split(",")[-1])
    return groups.partition("}")[0].count(",") + 1
