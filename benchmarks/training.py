"""Measures steps that train a whole model on all GPUs of a machine, with random weights and tokens.

    python -m benchmarks.training --layers 20 --expert 4 --buffer-factor 1.25
    python -m benchmarks.training --layers 20 --fsdp 4 --balanced
    python -m benchmarks.training --layers 8 --params bfloat16 --data 2
    python -m benchmarks.training --expert 8 --exchange ragged_all_to_all --trace trace --json FILE

The step is `jgg.train.Trainer`'s, with AdamW. Before anything is allocated, it compiles the program and prints how much
memory of each GPU it needs. Then come tokens/s, model FLOPs utilization (MFU) and, with --trace, how long collectives
ran, and how much of that time no other kernel did. On CPUs a small model with the same structure is trained.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import jgg.models
from benchmarks.model_configs import config_of
from benchmarks.traces import Shares, shares_of
from benchmarks.training_step import (
    Training,
    add_model_options,
    model_of,
    optimizer_of,
    places_of,
    sharding_of,
    training_of,
)
from jgg.cli import run as run_command
from jgg.cli.arguments import new_file, positive_int
from jgg.cli.console import print_table
from jgg.cli.errors import UsageError
from jgg.core.program_memory import planned_memory
from jgg.train.meter import Meter, Speed


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured of steps.

    Attributes:
      compile_seconds, first_seconds: of the program, and of its first step.
      speed: of the steps after the first.
      planned_bytes: memory of each device that the compiled program needs: arguments, results and temporaries; None if
        XLA cannot say.
      load: rows of the experts on the fullest device over the mean of the devices, in the layer where it is largest.
      overflow: rows of a step that found no room in the buffers.
      shares: of a traced step; None without a trace of GPUs.
    """

    compile_seconds: float
    first_seconds: float
    speed: Speed
    num_devices: int
    planned_bytes: int | None
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
    planned_bytes = _planned(run)

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


def _planned(compiled: jax.stages.Compiled) -> int | None:
    """Bytes that a compiled program needs of each device, which it prints; None if XLA cannot say.

    Raises: UsageError: JAX may not have as many.
    """
    try:
        planned = planned_memory(compiled).total
    except RuntimeError as error:
        # docs/troubleshooting.md, on control predecessors
        print(f"what each device needs is not known: {str(error)[:300]}", flush=True)
        return None
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    text = f"each device needs {planned / 2**30:.2f} GiB" + ("" if limit is None else f" of {limit / 2**30:.2f}")
    if limit is not None and planned > limit:
        raise UsageError(f"{text}: take fewer --layers or --batch, or more of --remat")
    print(text, flush=True)
    return planned


def _values(args, config: jgg.models.ModelConfig, training: Training) -> tuple[Any, Any, jax.Array, Meter]:
    """The arguments of a step, with values, and a meter of its speed."""
    states, _, tokens = training.arguments
    model = model_of(args, config, sharding_of(args, jax.devices()))
    meter = Meter(model, nnx.Param)
    parts: Any = nnx.split(model, nnx.Param, ...)
    _, own, frozen = parts
    opt_state = jax.jit(optimizer_of(args).init, out_shardings=places_of(states[1]))(own)
    values = jax.random.randint(jax.random.key(1), tokens.shape, 0, config.vocabulary, tokens.dtype)
    return (own, opt_state), frozen, jax.device_put(values, tokens.sharding), meter


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    parser.add_argument("--steps", type=positive_int, default=5, help="timed steps (%(default)s)")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="trace one more step by the profiler, into DIR")
    parser.add_argument("--json", type=new_file, help="write what was measured into this file too")
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
