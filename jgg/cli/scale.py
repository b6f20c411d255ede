"""Measure a whole MoE layer on 1, 2, 4, ... of this process's devices, at the same tokens for each.

Forward and backward, router included, by every strategy of jgg.sharding. Prints tokens a second, efficiency against one
device and the bytes that devices send, and writes PREFIX.json.
"""

import dataclasses
import json
from pathlib import Path

import jax

import jgg.measuring.scaling as scaling
from jgg.cli.common import UsageError, check_out, positive_float, positive_int
from jgg.cli.machine import devices, origin
from jgg.files import replace_text
from jgg.measuring.workloads import Layer, load_layers

DTYPES = ("bfloat16", "float32")
MAX_ERROR = {"bfloat16": 0.03, "float32": 1e-2}  # float32 may be multiplied in TF32


def add_arguments(parser):
    """Declares the options of `jgg scale`."""
    parser.add_argument("--layer", default="qwen3-30b-a3b", metavar="NAME", help="a known MoE layer (%(default)s)")
    parser.add_argument("--shapes", metavar="FILE", help="JSON file of layers, of the form of jgg/layers.json")
    parser.add_argument("--tokens", type=positive_int, help="of each device (the layer's own)")
    parser.add_argument("--devices", type=positive_int, help="at most so many (all that JAX sees)")
    parser.add_argument(
        "--buffer-factor", type=positive_float, default=1.25, help="of the experts' devices (%(default)s)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the computation (%(default)s)")
    parser.add_argument("--steps", type=positive_int, default=10, help="in each of the timed repeats (%(default)s)")
    parser.add_argument("--out", default="jgg-scale", metavar="PREFIX", help="of the file written (%(default)s)")


def run(args) -> int:
    """Measures and reports; returns 0, or 1 where a result was wrong."""
    check_out(args.out)
    layer = _layer(args)
    visible = jax.device_count()
    if args.devices is not None and args.devices > visible:
        raise UsageError(f"--devices must be at most the {visible} that JAX sees, got {args.devices}")
    print(f"{devices()[0].kind}, {args.dtype}; {layer.name}: {layer.tokens} tokens for each device, H {layer.hidden},")
    print(f"I {layer.expert_intermediate}, E {layer.experts}, k {layer.topk}; forward and backward with the router.")
    print(_line("devices", "strategy", "ms", "tokens/s", "efficiency", "MB sent", "least MB", "load", "overflow"))
    path = Path(f"{args.out}.json")
    facts = origin() | {"layer": dataclasses.asdict(layer), "dtype": args.dtype}
    measured, base = [], None
    count = 1
    while count <= (args.devices or visible):
        for strategy in scaling.strategies(count, layer, args.buffer_factor):
            result = scaling.measure(layer, strategy, args.dtype, args.steps)
            base = base or result
            measured.append(_as_json(result, base))
            print(_row(result, base, args.dtype), flush=True)
            # now, lest an end of this process lose it
            replace_text(path, json.dumps(facts | {"measurements": measured}, indent=2) + "\n")
        count *= 2
    print(f"Wrote {path}")
    return int(any(_is_wrong(entry, args.dtype) for entry in measured))


def _layer(args) -> Layer:
    try:
        layers = load_layers(args.shapes)
    except (OSError, ValueError) as error:
        raise UsageError(f"--shapes must name a file of layers: {error}") from error
    if args.layer not in layers:
        raise UsageError(f"--layer must be one of {', '.join(layers)}; got {args.layer!r}")
    layer = layers[args.layer]
    return layer if args.tokens is None else dataclasses.replace(layer, tokens=args.tokens)


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
