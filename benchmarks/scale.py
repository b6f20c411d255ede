"""Measures a whole MoE layer on 1, 2, 4, ... of this process's devices, with as many tokens on each device.

    python -m benchmarks.scale --layer qwen3-30b-a3b

A step is forward and backward, router included, with a strategy of jgg.sharding. Prints tokens a second, the efficiency
relative to one device and the bytes that devices send, and writes PREFIX.json.
"""

import argparse
import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jgg
from benchmarks.sent import bytes_of_ragged_exchange, bytes_sent
from benchmarks.strategies import FAMILIES, Strategy, choose_strategies, powers_of_two
from jgg.cli import options
from jgg.cli import run as run_command
from jgg.cli.arguments import positive_float, positive_int, prefix
from jgg.cli.commands import Bench
from jgg.cli.console import print_table, progress
from jgg.cli.declarations import add_options, changed
from jgg.cli.errors import UsageError
from jgg.cli.info import devices, origin
from jgg.cli.output import Output
from jgg.core.files import replace_text
from jgg.experts.mesh import map_tokens
from jgg.layers import MoELayer
from jgg.sharding import MoESharding
from jgg.tuning.timing import median_seconds
from jgg.tuning.workloads import Layer

MAX_ERROR = {"bfloat16": 0.03, "float32": 1e-2, "fp8": 0.03}  # float32 may be multiplied in TF32
REPEATS = 7
_HEADINGS = ("devices", "strategy", "ms", "tokens/s", "efficiency", "MB sent", "load", "overflow", "error")


@dataclasses.dataclass(frozen=True)
class StrategyRow:
    """The measurements of one strategy for forward and backward of a layer, router included.

    Attributes:
      strategy: the strategy.
      seconds: time of a step, the median of several.
      tokens: tokens of all devices together.
      moved: bytes that a device sends in the compiled program's collectives. For a ragged exchange, they include the
        bytes that the device would send if rows were routed evenly.
      overflow: rows that found no room in the buffers.
      load: rows of the experts on the fullest device, over the mean of the devices.
      error: root mean square error of y for the first device's tokens, relative to the root mean square of y. (The
        largest error would not do: where two experts score equally to the last bit, devices may choose differently.)
    """

    strategy: Strategy
    seconds: float
    tokens: int
    moved: float
    overflow: int
    load: float
    error: float

    def efficiency(self, one_device: "StrategyRow") -> float:
        """Tokens a second of each device, divided by the tokens a second of one device alone."""
        return self.tokens / self.seconds / self.strategy.devices / (one_device.tokens / one_device.seconds)


@dataclasses.dataclass(kw_only=True)
class _Options(Bench):
    layer: list[str] | None = changed(
        Bench,
        "layer",
        what="a layer that jgg knows, by its name",
        shown="the first; a smaller one without a GPU and without --tokens",
    )
    dtype: str | None = changed(
        Bench,
        "dtype",
        what="dtype of the computation; fp8 is bfloat16 with jgg.Fp8",
        choices=tuple(MAX_ERROR),
    )


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, _Options, "layer", "shapes", "dtype", "json")
    what = "how the names of the written files begin (default: %(default)s)"
    parser.add_argument("--out", type=prefix, default="jgg-scale", metavar="PREFIX", help=what)
    parser.add_argument("--tokens", type=positive_int, help="tokens of each device (default: the layer's)")
    parser.add_argument("--devices", type=positive_int, help="the largest number of devices (default: all)")
    what = f"strategies to measure, a comma list of {', '.join(FAMILIES)} (default: all)"
    parser.add_argument("--strategy", metavar="LIST", help=what)
    what = "room of each device for rows, in shares of an even distribution (default: %(default)s)"
    parser.add_argument("--buffer-factor", type=positive_float, default=1.25, help=what)
    what = "steps in each of the timed repeats (default: %(default)s)"
    parser.add_argument("--steps", type=positive_int, default=10, help=what)
    parser.set_defaults(parser=parser)
    return parser


def one_layer(args) -> Layer:
    """The one layer that --layer names, by default the first, with --tokens tokens if given."""
    layer, *others = options.layers(args)
    if args.layer and others:
        raise UsageError(f"--layer must name one layer, got {', '.join(args.layer)}")
    return layer if args.tokens is None else dataclasses.replace(layer, tokens=args.tokens)


def run(args) -> int:
    """Measures and reports; returns 0, or 1 if a result was wrong or the file could not be written."""
    layer, visible = one_layer(args), jax.device_count()
    scaled_down = options.are_scaled_down(args) and args.tokens is None
    if scaled_down:
        layer = options.scaled_down(layer)
    most = args.devices or visible
    if most > visible:
        raise UsageError(f"--devices must be at most the {visible} that JAX sees, got {most}")
    families = options.names("--strategy", args.strategy, FAMILIES) if args.strategy else FAMILIES
    counts = powers_of_two(most)
    chosen = [s for count in counts for s in choose_strategies(layer, count, args.buffer_factor, families)]
    if scaled_down and not args.json:
        print(options.SCALED_DOWN)
    dtype = args.dtype or options.default_dtype()
    return run_all(layer, chosen, dtype, args.steps, Path(f"{args.out}.json"), args.json)


def run_all(layer: Layer, strategies: list[Strategy], dtype: str, steps: int, path: Path, as_json: bool = False) -> int:
    """Measures strategies; the first is one device alone. Returns 1 after a wrong result or file, else 0."""
    if not as_json:
        print(f"{devices()[0].kind}, {dtype}; {layer}; forward and backward with the router.")
        if jax.default_backend() == "cpu" and len(strategies) > 1:
            print("These devices share the cores of one machine: more of them are not faster.")
    facts = origin() | {"layer": dataclasses.asdict(layer), "dtype": dtype, "measurements": []}
    rows: list[StrategyRow] = []
    output = Output()
    try:
        with progress(len(strategies)) as tell:
            for strategy in strategies:
                tell(str(strategy))
                rows.append(measure(layer, strategy, dtype, steps))
                facts["measurements"].append(_as_json(rows[-1], rows[0]))
                text = json.dumps(facts, indent=2) + "\n"
                # after each strategy, in case this process ends early
                output.write(path, functools.partial(replace_text, text=text))
                tell(str(strategy), 1)
    finally:  # after an interrupt too
        if as_json:
            print(json.dumps(facts, indent=2))
        else:
            print_table(_HEADINGS, [_cells(row, rows[0], dtype) for row in rows], texts=("strategy",))
        failed = output.report(quiet=as_json)
    return int(failed or any(_is_wrong(row, dtype) for row in rows))


def _as_json(row, one_device):
    return dataclasses.asdict(row) | {"name": str(row.strategy), "efficiency": row.efficiency(one_device)}


def _is_wrong(row, dtype):
    """Whether y differs from y on one device although all rows found room."""
    return not row.error <= MAX_ERROR[dtype] and not row.overflow


def _cells(row, one_device, dtype):
    return (
        row.strategy.devices,
        row.strategy,
        f"{row.seconds * 1e3:.3f}",
        f"{row.tokens / row.seconds:,.0f}",
        f"{row.efficiency(one_device):.3f}",
        f"{row.moved / 1e6:.1f}",
        f"{row.load:.2f}",
        row.overflow,
        f"{'WRONG: ' * _is_wrong(row, dtype)}{row.error:.2g}",
    )


def measure(layer: Layer, strategy: Strategy, dtype="bfloat16", steps: int = 10) -> StrategyRow:
    """Times a step on the first devices that JAX sees, with `layer.tokens` tokens on each.

    Args:
      dtype: dtype of the computation and of the experts' weights; "fp8" is bfloat16 with `jgg.Fp8`.
      steps: number of steps in a repeat; they run one after the other without waiting for the host.
    """
    quantization = jgg.Fp8() if dtype == "fp8" else None
    # FP8 is fastest with gate and up side by side
    interleaved = quantization is None or strategy.tensor > 1
    module = MoELayer(layer.hidden, layer.expert_intermediate, layer.experts, layer.topk, interleaved=interleaved)
    sharding, dtype = _sharding(strategy), dtype if quantization is None else "bfloat16"
    params, x, dy = _data(module, sharding, layer.tokens * strategy.devices, dtype)

    def loss(params, x):
        y, metrics = module.apply(params, x, sharding=sharding, quantization=quantization)
        return _sum_of_products(y, dy, sharding), (y, metrics)

    program = jax.jit(jax.grad(loss, (0, 1), has_aux=True)).lower(params, x).compile()
    _, (y, metrics) = jax.block_until_ready(program(params, x))

    def run():
        result = None
        for _ in range(steps):
            result = program(params, x)
        return result

    rows = np.asarray(metrics.group_sizes).reshape(strategy.expert, -1).sum(axis=1)
    return StrategyRow(
        strategy=strategy,
        seconds=median_seconds(run, REPEATS)[0] / steps,
        tokens=len(x),
        moved=bytes_sent(str(program.as_text())) + bytes_of_ragged_exchange(layer, strategy, dtype, quantization),
        overflow=int(metrics.overflow),
        load=float(rows.max() / rows.mean()),
        error=_error(functools.partial(module.apply, quantization=quantization), params, x, y, layer.tokens),
    )


def _sharding(strategy) -> MoESharding:
    devices = np.array(jax.devices()[: strategy.devices]).reshape(strategy.replicas, strategy.expert, strategy.tensor)
    mesh = jax.sharding.Mesh(devices, ("replicas", "expert", "tensor"))
    return MoESharding(
        mesh,
        data=() if strategy.fsdp else "replicas",
        fsdp="replicas" if strategy.fsdp else None,
        expert="expert" if strategy.expert > 1 else None,
        tensor="tensor" if strategy.tensor > 1 else None,
        exchange=strategy.exchange,
        buffer_factor=strategy.buffer_factor,
    )


def _data(module, sharding, tokens, dtype):
    """Makes random parameters, x and dy, split over the mesh from the beginning."""
    keys = iter(jax.random.split(jax.random.key(0), len(module.shapes) + 2))
    specs = dict.fromkeys(module.shapes, jax.P()) | sharding.weight_specs("ekn")

    def normal(shape, spec, scale, dtype):
        make = jax.jit(
            lambda key: jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype),
            out_shardings=sharding.named(spec),
        )
        return make(next(keys))

    params = {
        name: normal(shape, specs[name], shape[-2] ** -0.5, jnp.float32 if name == "w_router" else dtype)
        for name, shape in module.shapes.items()
    }
    shape = (tokens, module.in_features)
    return params, *(normal(shape, sharding.token_spec, 1, dtype) for _ in range(2))


class _Pair(NamedTuple):
    y: jax.Array
    dy: jax.Array


def _sum_of_products(y, dy, sharding):
    """Computes sum(y * dy): each device adds up its own part of y, then the sums are added."""

    def on_device(pair):
        product = pair.y.astype(jnp.float32) * pair.dy.astype(jnp.float32)
        return jax.lax.psum(jnp.sum(product), sharding.token_axes)

    return map_tokens(on_device, sharding, _Pair(y, dy), {}, jax.P())


def _error(apply, params, x, y, tokens):
    """Compares the first tokens of y with the same layer on one device; see `StrategyRow.error`."""
    here = jax.devices()[0]
    params, x, y = jax.device_put((params, x[:tokens], y[:tokens]), here)
    want = jax.jit(apply)(params, x)[0].astype(jnp.float32)
    return float(jnp.linalg.norm(y.astype(jnp.float32) - want) / jnp.linalg.norm(want))


def main(argv=None) -> int:
    """Runs the benchmark and returns the exit code."""
    return run_command(make_parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
