"""Predicts steps on several GPUs of a machine from bytes, FLOPs and the speed of links, next to measured times.

    python -m benchmarks.links                       # a layer, by each strategy, next to gpus.csv
    python -m benchmarks.links --step --expert 8     # a step of a whole model: options of benchmarks.training

The model of a layer: a device takes the time of one GPU, times the ratio of the least times of their computations
(`benchmarks.layer_roofline`: as many rows, but weights of fewer experts and more tokens, or fewer features), and then
sending takes bytes / LINK. The model of a step: FLOPs at the speed that one GPU had, AdamW's bytes at the speed of a
copy, and bytes / LINK. The predicted time assumes that nothing overlaps; "hidden" is the time if everything were sent
during computations. Bytes are counted as in `benchmarks.sent.bytes_sent`.
"""

import argparse
import csv
import dataclasses
import functools
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jgg.models
from benchmarks.layer import FORWARD_BACKWARD, LayerProblem
from benchmarks.layer_roofline import least_layer_seconds, parts_of
from benchmarks.model_configs import config_of
from benchmarks.model_roofline import Speeds, least_training_seconds, tensors_of
from benchmarks.sent import bytes_of_ragged_exchange
from benchmarks.strategies import Strategy, choose_strategies
from benchmarks.training_step import add_model_options, check_experts
from jgg.cli import run as run_command
from jgg.cli.arguments import positive_float
from jgg.cli.console import print_table
from jgg.cli.errors import UsageError
from jgg.core.choices import OPS
from jgg.tuning.workloads import Layer, load_layers

LINK = 400e9  # bytes/s that a device sends: what NCCL has of NVLink's 450e9, see gpus.csv's rows "data"
COPY = 2.99e12  # bytes/s of a copy on an H100, read and written
DENSE = 700e12  # FLOP/s of dense bfloat16 products on an H100
_LAYER = "qwen3-30b-a3b"
ROWS = Path(__file__).with_name("gpus.csv")
_BYTES = 2  # of a bfloat16
# bytes that AdamW moves for each parameter, gradient included, by the kind of parameters
_OPTIMIZER = {"bfloat16": 14, "masters": 28, "float32": 28}


class Predicted(NamedTuple):
    """Times in seconds, and bytes.

    Attributes:
      computed: without anything sent.
      sent: bytes that a device sends.
    """

    computed: float
    sent: float

    @property
    def seconds(self) -> float:
        """The time if nothing overlaps."""
        return self.computed + self.sent / LINK

    @property
    def hidden(self) -> float:
        """The time if everything is sent during computations."""
        return max(self.computed, self.sent / LINK)


def predict_layer(layer: Layer, strategy: Strategy, one_device: float) -> Predicted:
    """Forward and backward of a layer, by the time of one device with as many tokens in seconds."""
    own = strategy.expert * strategy.tensor
    tokens = layer.tokens * layer.hidden * _BYTES
    weights = 3 * layer.experts * layer.hidden * layer.expert_intermediate * _BYTES / own
    share, sent = layer, 0.0
    if strategy.tensor > 1:
        share = dataclasses.replace(
            layer, tokens=own * layer.tokens, expert_intermediate=layer.expert_intermediate // own
        )
        sent = 4 * (own - 1) * tokens  # gathers of x and dy, sums of y and dx
    elif own > 1:
        share = dataclasses.replace(
            layer, tokens=own * layer.tokens, experts=layer.experts // own, topk=max(1, layer.topk // own)
        )
        sent = exchanged(layer, strategy)
    others = (strategy.replicas - 1) / strategy.replicas
    sent += (3 if strategy.fsdp else 2) * others * weights  # two gathers and a reduce-scatter, or an all-reduce
    return Predicted(one_device * _least(share) / _least(layer), sent)


def exchanged(layer: Layer, strategy: Strategy) -> float:
    """Bytes that a device sends along the expert axis: tokens and results in forward, and their gradients."""
    if strategy.exchange == "ragged_all_to_all":
        return bytes_of_ragged_exchange(layer, strategy, "bfloat16")
    return 4 * (strategy.expert - 1) * layer.tokens * layer.hidden * _BYTES


@functools.cache
def _least(layer: Layer) -> float:
    dense = {f"{name} {op}": gemm.flops / DENSE for name, gemm in layer.gemms(dtype="bfloat16").items() for op in OPS}
    seconds = least_layer_seconds(parts_of(LayerProblem(layer, "bfloat16"), FORWARD_BACKWARD), COPY, dense)
    assert seconds is not None
    return seconds


class Step(NamedTuple):
    """A step of training on each of several devices.

    Attributes:
      flops: those that the model needs, of the device's tokens.
      trained: parameters that are on the device.
      sent: bytes that the device sends, by what they are.
    """

    flops: float
    trained: float
    sent: dict[str, float]

    def predicted(self, flops_per_second: float, params: str) -> Predicted:
        """The times, by the FLOP/s of a device without AdamW."""
        computed = self.flops / flops_per_second + self.trained * _OPTIMIZER[params] / COPY
        return Predicted(computed, sum(self.sent.values()))


def step_of(args, config: jgg.models.ModelConfig) -> Step:
    """The step of a device that the options of `benchmarks.training` describe."""
    if args.data > 1 or args.tensor > 1:
        raise UsageError(f"--data and --tensor must be 1 for a prediction, got {args.data} and {args.tensor}")
    check_experts(args, config)
    model = nnx.eval_shape(lambda: jgg.models.Decoder(config, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    sizes = {path: variable.get_value().size for path, variable in nnx.to_flat_state(nnx.state(model))}
    experts = sum(size for path, size in sizes.items() if "moe" in path and path[-1] in ("w_gate_up", "w_down"))
    ends = sum(size for path, size in sizes.items() if path[-1] in ("w_embedding", "w_head"))
    layers = sum(sizes.values()) - experts - ends
    devices, expert, fsdp = args.fsdp * args.expert, args.expert, args.fsdp
    unbounded = Speeds(math.inf, 1.0, 1.0)  # so that the least time is the number of FLOPs
    flops = least_training_seconds(config, tensors_of(model), unbounded, args.batch, args.sequence, False)
    assert flops is not None
    others = (devices - 1) / devices
    moe, count = config.moe, len(config.is_dense) - sum(config.is_dense)
    layer = Layer("own", args.batch * args.sequence, config.features, 1, moe.num_experts, moe.topk)
    way = Strategy(expert=expert, exchange=args.exchange, buffer_factor=args.buffer_factor or expert)
    sent = {
        "exchange": 5 / 4 * count * exchanged(layer, way),  # x is not kept, so the backward pass sends it again
        "experts": 3 * (fsdp - 1) / fsdp * experts / expert * _BYTES,
        "other matrices of layers": 3 * others * layers * _BYTES,
        "embedding and head": 2 * others * ends * _BYTES,  # gathered once
    }
    return Step(flops, sum(sizes.values()) / devices, sent)


def layer_table() -> list[tuple]:
    """A row for each of gpus.csv, and for each strategy of H100s that is not there."""
    layer, rows = load_layers()[_LAYER], []
    with ROWS.open() as file:
        measured = {(row["gpu"], int(row["gpus"]), row["strategy"]): row for row in csv.DictReader(file)}
    one_device = min(float(row["one_device_ms"]) for (gpu, *_), row in measured.items() if gpu == "H100")
    for (gpu, count, name), row in measured.items():
        found = [s for s in choose_strategies(layer, count, 1.25) if _name(s) == name]
        rows += [_cells(gpu, s, predict_layer(layer, s, float(row["one_device_ms"]) / 1e3), row) for s in found]
    for count in (2, 4, 8):
        for strategy in choose_strategies(layer, count, 1.25):
            if ("H100", count, _name(strategy)) not in measured:
                rows.append(_cells("H100", strategy, predict_layer(layer, strategy, one_device / 1e3), None))
    return rows


def _name(strategy: Strategy) -> str:
    """The name in gpus.csv, where a single axis has no size."""
    text = str(strategy).replace(",", " +")
    return text if " + " in text else text.replace(f" {strategy.devices}", "")


def _cells(gpu, strategy, predicted, row):
    ms = predicted.seconds * 1e3
    measured = float(row["ms"]) if row else None
    return (
        gpu,
        strategy.devices,
        _name(strategy),
        f"{predicted.sent / 1e6:.0f}",
        f"{ms:.2f}",
        f"{predicted.hidden * 1e3:.2f}",
        "-" if measured is None else f"{measured:.2f}",
        "-" if measured is None else f"{100 * (ms / measured - 1):+.0f}%",
    )


def step_table(args) -> list[tuple]:
    """What a step sends and how long it takes."""
    config = config_of(args.model, args.layers, is_small=False)
    step, tokens = step_of(args, config), args.batch * args.sequence
    predicted = step.predicted(args.flops, args.params)
    rows: list[tuple[str, Any]] = [
        ("TFLOP of a GPU", f"{step.flops / 1e12:.1f}"),
        ("ms of products and the rest", f"{step.flops / args.flops * 1e3:.0f}"),
        ("ms of AdamW", f"{step.trained * _OPTIMIZER[args.params] / COPY * 1e3:.0f}"),
    ]
    rows += [(f"GB sent: {what}", f"{number / 1e9:.1f}") for what, number in step.sent.items()]
    rows += [
        ("ms of links", f"{predicted.sent / LINK * 1e3:.0f}"),
        ("ms, nothing hidden", f"{predicted.seconds * 1e3:.0f}"),
        ("tokens/s of a GPU", f"{tokens / predicted.seconds:,.0f}"),
        ("ms, all links hidden", f"{predicted.hidden * 1e3:.0f}"),
        ("tokens/s of a GPU, hidden", f"{tokens / predicted.hidden:,.0f}"),
    ]
    return rows


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.links", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step", action="store_true", help="predict a step of a whole model")
    # 8 layers of Qwen3-30B-A3B on one H100 took 121 ms (models.csv), including 26 for AdamW's bytes
    what = "FLOP/s of a GPU without AdamW (%(default)s)"
    parser.add_argument("--flops", type=positive_float, default=465e12, help=what)
    add_model_options(parser)
    parser.set_defaults(parser=parser)
    return parser


def run(args) -> int:
    """Prints a table."""
    if args.step:
        print_table(("what", "predicted"), step_table(args), ("what",))
    else:
        given = [name for name, value in vars(args).items() if value != args.parser.get_default(name)]
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} is of a model's step, so it needs --step")
        headings = ("GPU", "GPUs", "strategy", "MB sent", "ms predicted", "hidden", "ms measured", "off by")
        print_table(headings, layer_table(), ("GPU", "strategy"))
    return 0


def main(argv=None) -> int:
    """Runs the command and returns the exit code."""
    jax.config.update("jax_platforms", "cpu")
    return run_command(make_parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
