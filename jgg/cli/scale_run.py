"""Runs the measurements of `jgg scale` with a progress bar."""

import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

from jgg.cli.machine import devices, origin
from jgg.files import replace_text
from jgg.measuring import scaling
from jgg.measuring.cost_model import Strategy
from jgg.measuring.workloads import Layer

MAX_ERROR = {"bfloat16": 0.03, "float32": 1e-2}  # float32 may be multiplied in TF32


def strategies(most: int, layer: Layer, buffer_factor: float, names: Iterable[str]) -> list[Strategy]:
    """Those of the names for 1, 2, 4, ... devices, at most so many."""
    counts = [1 << power for power in range(most.bit_length())]
    return [found for count in counts for found in scaling.strategies(count, layer, buffer_factor, names)]


def run_all(layer: Layer, strategies: list[Strategy], dtype: str, steps: int, out: str) -> int:
    """Measures the strategies, the first of which is one device; returns 1 where a result was wrong, else 0."""
    print(f"{devices()[0].kind}, {dtype}; {layer.name}: {layer.tokens} tokens for each device, H {layer.hidden},")
    print(f"I {layer.expert_intermediate}, E {layer.experts}, k {layer.topk}; forward and backward with the router.")
    print(_line("devices", "strategy", "ms", "tokens/s", "efficiency", "MB sent", "least MB", "load", "overflow"))
    path = Path(f"{out}.json")
    facts = origin() | {"layer": dataclasses.asdict(layer), "dtype": dtype}
    measured, base = [], None
    with tqdm(strategies, unit="strategy", file=sys.stderr) as bar:
        for strategy in bar:
            bar.set_postfix_str(str(strategy))
            result = scaling.measure(layer, strategy, dtype, steps)
            base = base or result
            measured.append(_as_json(result, base))
            tqdm.write(_row(result, base, dtype))
            # now, lest an end of this process lose it
            replace_text(path, json.dumps(facts | {"measurements": measured}, indent=2) + "\n")
    print(f"Wrote {path}")
    return int(any(_is_wrong(entry, dtype) for entry in measured))


def _as_json(result, base):
    return dataclasses.asdict(result) | {"name": str(result.strategy), "efficiency": _efficiency(result, base)}


def _efficiency(result, base):
    """Tokens a second of a device, over those of one device alone."""
    return (result.tokens / result.seconds) / (base.tokens / base.seconds) / result.strategy.devices


def _is_wrong(entry, dtype):
    """Whether y differs from one device's; rows without room make it differ."""
    return not entry["error"] <= MAX_ERROR[dtype] and not entry["overflow"]


def _row(result, base, dtype):
    line = _line(
        result.strategy.devices, result.strategy, f"{result.seconds * 1e3:.3f}",
        f"{result.tokens / result.seconds:,.0f}", f"{_efficiency(result, base):.3f}", f"{result.moved / 1e6:.1f}",
        f"{result.minimum / 1e6:.1f}", f"{result.load:.2f}", result.overflow,
    )  # fmt: skip
    return line + (f"  WRONG: error {result.error:.2g}" if _is_wrong(_as_json(result, base), dtype) else "")


def _line(count, strategy, *values):
    return f"{count!s:>7}  {strategy!s:38}" + "".join(f"{value!s:>13}" for value in values)
