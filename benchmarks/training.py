"""Measures steps that train a whole model on all GPUs of a machine, with random weights and tokens.

    python -m benchmarks.training --layers 20 --expert 4 --buffer-factor 1.25
    python -m benchmarks.training --layers 20 --fsdp 4 --balanced
    python -m benchmarks.training --expert 8 --exchange ragged_all_to_all --trace trace --json FILE

A step is that of `jgg.train.Trainer`, with AdamW. Before anything is allocated, the program is compiled, and what it
needs of each GPU's memory is printed. Then come tokens/s, model FLOPs utilization (MFU) and, with --trace, how long
collectives ran, and for how much of that no other kernel did. On CPUs a small model with the same structure is trained.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgg
import jgg.models
import jgg.train
from benchmarks.model_configs import CONFIGS, config_of
from benchmarks.models import PARAMS, random_model
from benchmarks.traces import Shares, shares_of
from jgg.cli import run as run_command
from jgg.cli.console import print_table
from jgg.cli.options import UsageError
from jgg.experts.exchange import EXCHANGES
from jgg.models.parts import REMAT
from jgg.models.placement import place
from jgg.sharding import MoESharding
from jgg.train.loop import step_of
from jgg.train.meter import Meter, Speed

AXES = "fsdp", "expert", "tensor"


class Training(NamedTuple):
    """A step of training without values.

    Attributes:
      step: jitted, ((parameters, state of the optimizer), what is not trained, tokens) -> (the first, (loss, metrics)).
      arguments: of the step, each array with its shape, dtype and place.
    """

    step: Any
    arguments: tuple[Any, ...]


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the model and of how devices split it."""
    parser.add_argument("--model", choices=CONFIGS, default="qwen3-30b-a3b", help="(%(default)s)")
    parser.add_argument("--params", choices=PARAMS, default="masters", help="as in benchmarks.models (%(default)s)")
    parser.add_argument("--remat", choices=REMAT, default="attention", help="as in Decoder (%(default)s)")
    parser.add_argument("--exchange", choices=EXCHANGES, default="all_gather", help="of tokens (%(default)s)")
    parser.add_argument("--buffer-factor", type=float, help="as in MoESharding (room for all rows)")
    parser.add_argument("--fp8", action="store_true", help="train with the experts' products in FP8")
    parser.add_argument("--batch-invariant", action="store_true", help="as in Decoder")
    parser.add_argument("--balanced", action="store_true", help="each expert gets as many tokens, whatever routers say")
    parser.add_argument("--unroll", type=int, default=1, help="layers of an iteration of the scan (%(default)s)")
    parser.add_argument("--layers", type=int, help="number of layers, if fewer than the model's")
    parser.add_argument("--batch", type=int, default=2, help="sequences of each GPU (%(default)s)")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a sequence (%(default)s)")
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"devices along MoESharding's {axis} axis")


def sharding_of(args, devices: Any) -> MoESharding | None:
    """The sharding that the options name, on the first of the devices; None for one device."""
    sizes = tuple(getattr(args, axis) for axis in AXES)
    count = math.prod(sizes)
    if min(sizes) < 1 or count > len(devices):
        raise UsageError(f"--fsdp, --expert and --tensor must split the {len(devices)} devices, got {sizes}")
    if count == 1:
        return None
    kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
    mesh = jax.sharding.Mesh(np.asarray(devices[:count]).reshape(sizes), AXES, axis_types=kinds)
    return MoESharding(
        mesh,
        fsdp="fsdp",
        expert="expert" if args.expert > 1 else None,
        tensor="tensor" if args.tensor > 1 else None,
        exchange=args.exchange,
        buffer_factor=args.buffer_factor,
    )


def balanced_choices(config: jgg.models.ModelConfig, shape: tuple[int, int]) -> jax.Array:
    """Experts int32 [L, B, S, k] of tokens [B, S], each as often as any other, those of a token on all devices."""
    experts, topk = config.moe.num_experts, config.moe.topk
    first = jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(*shape, 1)
    choices = (first + jnp.arange(topk, dtype=jnp.int32)[None, None] * (experts // topk)) % experts
    return jnp.broadcast_to(choices, (len(config.is_dense) - sum(config.is_dense), *choices.shape))


def training_of(args, config: jgg.models.ModelConfig, devices: Any) -> Training:
    """The step that the options describe, on devices that need not be there."""
    sharding, made = sharding_of(args, devices), []

    def make():
        parts: Any = nnx.split(_model(args, config, sharding), nnx.Param, ...)
        graphdef, own, frozen = parts
        made.append(graphdef)
        return (own, _optimizer(args).init(own)), frozen

    def loss_of(model, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        choices = balanced_choices(config, inputs.shape) if args.balanced else None
        loss, sown = nnx.capture(model.loss, nnx.Intermediate)(inputs, targets, topk_indices=choices)
        (sizes,), (overflow,) = sown["group_sizes"], sown["overflow"]
        rows = jnp.sum(sizes.astype(jnp.float32).reshape(len(sizes), args.expert, -1), axis=-1)
        load = jnp.max(jnp.max(rows, axis=-1) / jnp.mean(rows, axis=-1))
        return loss, {"load": load, "overflow": jnp.sum(overflow)}

    states, frozen = placed(jax.eval_shape(make), devices, sharding)
    everywhere = _place(jax.P(), devices, sharding)
    tokens = tokens_of(args.batch * args.fsdp * args.expert, args.sequence + 1, devices, sharding)
    step = jax.jit(
        step_of(made[0], _optimizer(args), loss_of, accumulate=False),
        donate_argnums=0,
        out_shardings=(_places(states), everywhere),
        compiler_options=jgg.train.compiler_options(math.prod(getattr(args, axis) for axis in AXES)),
    )
    return Training(step, (states, frozen, tokens))


def tokens_of(batch: int, length: int, devices: Any, sharding: MoESharding | None) -> jax.ShapeDtypeStruct:
    """Tokens [B, S] on the devices."""
    spec = jax.P() if sharding is None else sharding.token_spec
    return jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=_place(spec, devices, sharding))


def placed(arguments: Any, devices: Any, sharding: MoESharding | None) -> Any:
    """Arrays without values on the devices: parameters and the optimizer's state as a model splits them."""

    def put(path, array):
        where = _place(jax.P(), devices, sharding)
        names = tuple(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))
        if sharding is not None and names and array.shape:
            stacked = names[0].startswith(("layers", "dense_layers"))
            where = place(names, array.shape, sharding, is_stacked=stacked)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)

    return jax.tree_util.tree_map_with_path(put, arguments)


def _place(spec: jax.P, devices: Any, sharding: MoESharding | None) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(devices[0]) if sharding is None else sharding.named(spec)


def _places(arrays: Any) -> Any:
    return jax.tree.map(lambda array: array.sharding, arrays)


def _model(args, config, sharding):
    dtype = jnp.float32 if args.params == "float32" else jnp.bfloat16
    return random_model(
        config,
        "bfloat16",
        param_dtype=dtype,
        remat=args.remat,
        unroll=args.unroll,
        quantization=jgg.Fp8() if args.fp8 else None,
        batch_invariant=args.batch_invariant,
        sharding=sharding,
    )


def _optimizer(args):
    adamw = optax.adamw(1e-4)
    return jgg.train.float32_masters(adamw) if args.params == "masters" else adamw


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured of steps.

    Attributes:
      compile_seconds, first_seconds: of the program, and of its first step.
      speed: of the steps after the first.
      planned_bytes: memory of each device that the compiled program needs: arguments, results and temporaries.
      load: rows of the experts on the fullest device over the mean of the devices, in the layer where it is largest.
      overflow: rows of a step that found no room in the buffers.
      shares: of a traced step; None without a trace.
    """

    compile_seconds: float
    first_seconds: float
    speed: Speed
    num_devices: int
    planned_bytes: int
    loss: float
    load: float
    overflow: int
    shares: Shares | None


def measure(args, config: jgg.models.ModelConfig) -> Measured:
    """Compiles, tells what memory is needed, and measures steps."""
    begin = time.perf_counter()
    training = training_of(args, config, jax.devices())
    run = training.step.lower(*training.arguments).compile()
    compile_seconds = time.perf_counter() - begin
    planned_bytes = _planned(run.memory_analysis())

    state, frozen, tokens, meter = _values(args, config, training)
    begin = time.perf_counter()
    state, measured = jax.block_until_ready(run(state, frozen, tokens))
    first_seconds = time.perf_counter() - begin
    meter.restart()
    for _ in range(args.steps):
        state, measured = run(state, frozen, tokens)
        meter.add(np.full(len(tokens), args.sequence))
    loss, metrics = jax.device_get(measured)
    speed = meter.read()
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss}")
    print(f"{args.steps} steps: {speed}", flush=True)  # in case the profiler fails
    shares = None
    if args.trace is not None:
        with jax.profiler.trace(str(args.trace)):
            jax.block_until_ready(run(state, frozen, tokens))
        shares = shares_of(args.trace)
    return Measured(
        compile_seconds=compile_seconds,
        first_seconds=first_seconds,
        speed=speed,
        num_devices=meter.num_devices,
        planned_bytes=planned_bytes,
        loss=float(loss),
        load=float(metrics["load"]),
        overflow=int(metrics["overflow"]),
        shares=shares,
    )


def _planned(memory: Any) -> int:
    """Bytes that a compiled program needs of each device, which it prints.

    Raises: UsageError: JAX may not have as many.
    """
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    planned = int(memory.argument_size_in_bytes + results + memory.temp_size_in_bytes)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    text = f"each device needs {planned / 2**30:.2f} GiB" + ("" if limit is None else f" of {limit / 2**30:.2f}")
    if limit is not None and planned > limit:
        raise UsageError(f"{text}: take fewer --layers or --batch, or more of --remat")
    print(text, flush=True)
    return planned


def _values(args, config: jgg.models.ModelConfig, training: Training) -> tuple[Any, Any, jax.Array, Meter]:
    """The arguments of a step, with values, and a meter of its speed."""
    states, _, tokens = training.arguments
    model = _model(args, config, sharding_of(args, jax.devices()))
    meter = Meter(model, nnx.Param)
    parts: Any = nnx.split(model, nnx.Param, ...)
    _, own, frozen = parts
    opt_state = jax.jit(_optimizer(args).init, out_shardings=_places(states[1]))(own)
    values = jax.random.randint(jax.random.key(1), tokens.shape, 0, config.vocabulary, tokens.dtype)
    return (own, opt_state), frozen, jax.device_put(values, tokens.sharding), meter


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    parser.add_argument("--steps", type=int, default=5, help="timed steps (%(default)s)")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="trace one more step by the profiler, into DIR")
    parser.add_argument("--json", type=Path, help="write what was measured into this file too")
    parser.set_defaults(parser=parser)
    return parser


def run(args) -> int:
    """Measures and prints a table."""
    is_small = jax.default_backend() == "cpu"
    if is_small:
        args.sequence = min(args.sequence, 64)
        print("This is a CPU: a small model is trained.")
    found = measure(args, config_of(args.model, args.layers, is_small))
    print_table(("what", "measured"), _rows(found, args.steps), ("what",))
    if args.json:
        options = {name: str(value) for name, value in vars(args).items() if name != "parser"}
        facts = {"device": jax.devices()[0].device_kind, "options": options} | dataclasses.asdict(found)
        args.json.write_text(json.dumps(facts | {"speed": found.speed._asdict()}, indent=2) + "\n")
    return 0


def _rows(found: Measured, steps: int) -> list[tuple[str, str]]:
    speed = found.speed
    rows = [
        ("s to compile", f"{found.compile_seconds:.0f}"),
        ("ms of a step", f"{speed.seconds / steps * 1e3:.1f}"),
        ("tokens/s of a GPU", f"{speed.tokens_per_second / found.num_devices:,.0f}"),
        ("MFU", "-" if speed.mfu is None else f"{speed.mfu:.1%}"),
        ("peak memory, GiB", "-" if speed.peak_memory is None else f"{speed.peak_memory / 2**30:.2f}"),
        ("loss", f"{found.loss:.4f}"),
        ("largest load", f"{found.load:.2f}"),
        ("overflow", str(found.overflow)),
    ]
    shares = {} if found.shares is None else dataclasses.asdict(found.shares)
    return rows + [(f"traced ms: {name}", f"{value:.1f}") for name, value in shares.items()]


def main(argv=None) -> int:
    """Runs the benchmark and returns the exit code."""
    return run_command(make_parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
