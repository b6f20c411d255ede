"""Measure a whole MoE layer on 1, 2, 4, ... of this process's devices, at the same tokens for each.

Forward and backward, router included, by strategies of jgg.sharding. Prints tokens a second, efficiency against one
device and the bytes that devices send, and writes PREFIX.json.
"""

import dataclasses
import json
from pathlib import Path

import jax

from jgg.cli import options
from jgg.cli.console import print_table, progress
from jgg.cli.info import devices, origin
from jgg.cli.options import UsageError, positive_float, positive_int
from jgg.files import replace_text
from jgg.measuring import scaling
from jgg.measuring.cost_model import FAMILIES, Strategy
from jgg.measuring.workloads import Layer

MAX_ERROR = {"bfloat16": 0.03, "float32": 1e-2}  # float32 may be multiplied in TF32
SLOW_IN_A_PROCESS = "ragged_all_to_all"  # 50 times slower than over a network: docs/scaling.md
_HEADINGS = (
    "devices", "strategy", "ms", "tokens/s", "efficiency", "MB sent", "least MB", "load", "overflow", "error",
)  # fmt: skip


def add_arguments(parser):
    """Declares the options of `jgg scale`."""
    options.add_shared(parser, "shapes", "tokens", layer=options.ONE_LAYER)
    parser.add_argument("--devices", type=positive_int, help="at most so many (all that JAX sees)")
    parser.add_argument(
        "--strategy",
        metavar="NAME,...",
        help=f"of {', '.join(FAMILIES)} (all; of one process's devices all but {SLOW_IN_A_PROCESS}, slow there)",
    )
    what = "of the experts' devices (%(default)s)"
    parser.add_argument("--buffer-factor", type=positive_float, default=1.25, help=what)
    parser.add_argument("--steps", type=positive_int, default=10, help="in each of the timed repeats (%(default)s)")
    options.add_shared(
        parser,
        dtype={"choices": MAX_ERROR, "default": "bfloat16", "help": "of the computation (%(default)s)"},
        out={"default": "jgg-scale"},
    )


def run(args) -> int:
    """Measures and reports; returns 0, or 1 where a result was wrong."""
    layer, visible = options.one_layer(args), jax.device_count()
    most = args.devices or visible
    if most > visible:
        raise UsageError(f"--devices must be at most the {visible} that JAX sees, got {most}")
    families = tuple(name for name in FAMILIES if name != SLOW_IN_A_PROCESS or jax.process_count() > 1)
    if args.strategy:
        families = options.names("--strategy", args.strategy, FAMILIES)
    counts = [1 << power for power in range(most.bit_length())]
    chosen = [s for count in counts for s in scaling.choose_strategies(layer, count, args.buffer_factor, families)]
    return run_all(layer, chosen, args.dtype, args.steps, Path(f"{args.out}.json"))


def run_all(layer: Layer, strategies: list[Strategy], dtype: str, steps: int, path: Path) -> int:
    """Measures the strategies, the first of which is one device; returns 1 where a result was wrong, else 0."""
    print(f"{devices()[0].kind}, {dtype}; {layer}; forward and backward with the router.")
    facts = origin() | {"layer": dataclasses.asdict(layer), "dtype": dtype}
    rows, measured = [], []
    try:
        with progress(len(strategies)) as tell:
            for strategy in strategies:
                tell(str(strategy))
                rows.append(scaling.measure(layer, strategy, dtype, steps))
                measured.append(_as_json(rows[-1], rows[0]))
                # now, lest an end of this process lose it
                replace_text(path, json.dumps(facts | {"measurements": measured}, indent=2) + "\n")
                tell(str(strategy), 1)
    finally:  # after an interrupt too
        print_table(_HEADINGS, [_cells(row, rows[0], dtype) for row in rows], texts=("strategy",))
    print(f"Wrote {path}")
    return int(any(_is_wrong(row, dtype) for row in rows))


def _as_json(row, one_device):
    return dataclasses.asdict(row) | {"name": str(row.strategy), "efficiency": row.efficiency(one_device)}


def _is_wrong(row, dtype):
    """Whether y differs from one device's; rows without room make it differ."""
    return not row.error <= MAX_ERROR[dtype] and not row.overflow


def _cells(row, one_device, dtype):
    return (
        row.strategy.devices, row.strategy, f"{row.seconds * 1e3:.3f}", f"{row.tokens / row.seconds:,.0f}",
        f"{row.efficiency(one_device):.3f}", f"{row.moved / 1e6:.1f}", f"{row.minimum / 1e6:.1f}", f"{row.load:.2f}",
        row.overflow, f"{'WRONG: ' * _is_wrong(row, dtype)}{row.error:.2g}",
    )  # fmt: skip
