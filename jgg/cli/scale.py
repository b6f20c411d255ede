"""Measure a whole MoE layer on 1, 2, 4, ... of this process's devices, at the same tokens for each.

Forward and backward, router included, by strategies of jgg.sharding. Prints tokens a second, efficiency against one
device and the bytes that devices send, and writes PREFIX.json.
"""

import argparse
import dataclasses

import jax

from jgg.cli.common import UsageError, check_out, import_with_extra, positive_float, positive_int
from jgg.measuring.scaling import STRATEGIES
from jgg.measuring.workloads import Layer, load_layers

DTYPES = ("bfloat16", "float32")
SLOW_IN_A_PROCESS = "ragged_all_to_all"  # 50 times slower than over a network: docs/scaling.md


def add_arguments(parser):
    """Declares the options of `jgg scale`."""
    parser.add_argument("--layer", default="qwen3-30b-a3b", metavar="NAME", help="a known MoE layer (%(default)s)")
    parser.add_argument("--shapes", metavar="FILE", help="JSON file of layers, of the form of jgg/layers.json")
    parser.add_argument("--tokens", type=positive_int, help="of each device (the layer's own)")
    parser.add_argument("--devices", type=positive_int, help="at most so many (all that JAX sees)")
    parser.add_argument(
        "--strategy",
        type=_strategies,
        metavar="NAME,...",
        help=f"of {', '.join(STRATEGIES)} (all; of one process's devices all but {SLOW_IN_A_PROCESS}, slow there)",
    )
    parser.add_argument(
        "--buffer-factor", type=positive_float, default=1.25, help="of the experts' devices (%(default)s)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the computation (%(default)s)")
    parser.add_argument("--steps", type=positive_int, default=10, help="in each of the timed repeats (%(default)s)")
    parser.add_argument("--out", default="jgg-scale", metavar="PREFIX", help="of the file written (%(default)s)")


def _strategies(text):
    """Argument type: a comma list of STRATEGIES."""
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in STRATEGIES:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(STRATEGIES)}, got {name!r}")
    return names


def run(args) -> int:
    """Measures and reports; returns 0, or 1 where a result was wrong."""
    check_out(args.out)
    layer = _layer(args)
    scale_run = import_with_extra("jgg.cli.scale_run", "bench")
    visible = jax.device_count()
    if args.devices is not None and args.devices > visible:
        raise UsageError(f"--devices must be at most the {visible} that JAX sees, got {args.devices}")
    names = args.strategy or [n for n in STRATEGIES if n != SLOW_IN_A_PROCESS or jax.process_count() > 1]
    strategies = scale_run.strategies(args.devices or visible, layer, args.buffer_factor, names)
    return scale_run.run_all(layer, strategies, args.dtype, args.steps, args.out)


def _layer(args) -> Layer:
    try:
        layers = load_layers(args.shapes)
    except (OSError, ValueError) as error:
        raise UsageError(f"--shapes must name a file of layers: {error}") from error
    if args.layer not in layers:
        raise UsageError(f"--layer must be one of {', '.join(layers)}; got {args.layer!r}")
    layer = layers[args.layer]
    return layer if args.tokens is None else dataclasses.replace(layer, tokens=args.tokens)
