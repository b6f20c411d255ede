"""Measures whole models with random weights: steps of LoRA, steps that train everything, and generation.

    python -m benchmarks.models --model qwen3-30b-a3b --run lora,generate
    python -m benchmarks.models --model qwen3-30b-a3b --run lora --experts fp8
    python -m benchmarks.models --model qwen3-30b-a3b --run train --layers 8
    python -m benchmarks.models --model qwen3-30b-a3b --run train --layers 4 --params masters
    python -m benchmarks.models --model qwen3-30b-a3b --run in-backward --batch 1
    python -m benchmarks.models --model qwen3-30b-a3b --run train,generate --layers 8 --batch-invariant
    python -m benchmarks.models --model gpt-oss-20b --run lora,generate --experts as-stored
    python -m benchmarks.models --model qwen3.5-35b-a3b --run lora,generate --experts fp8

Prints a table: the seconds of the first step, which compiles, the time of a later one, tokens/s, and the most memory
in use on the device so far. Times are compared with the least that a step can take (% of roofline, see
`benchmarks.model_roofline`). On a CPU a small model with the same structure is measured.
"""

import argparse
import functools
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jgg
import jgg.models
import jgg.optim
import jgg.train
from benchmarks.memory import peak_gib
from benchmarks.model_configs import CONFIGS, config_of
from benchmarks.model_roofline import (
    least_decode_seconds,
    least_prefill_seconds,
    least_training_seconds,
    measure_speeds,
    tensors_of,
)
from jgg.cli import run as run_command
from jgg.cli.arguments import new_file
from jgg.cli.console import number, print_table
from jgg.core.choices import REMAT
from jgg.core.quantized import QuantizedArray, WeightForms
from jgg.models.placement import place
from jgg.nnx import Frozen
from jgg.train.steps import step_of
from jgg.tuning.roofline import percent_of_roofline

RUNS = "lora", "train", "in-backward", "generate"
EXPERTS = "bfloat16", "fp8", "as-stored", "mxfp4"
PARAMS = "bfloat16", "float32", "masters"
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(1e-4),
    "momentum": lambda: optax.sgd(1e-4, momentum=0.9, accumulator_dtype=jnp.bfloat16),
    "adamw": lambda: optax.adamw(1e-4),
    "adamw-8bit": lambda: jgg.optim.states_in_8_bits(optax.adamw(1e-4)),
}
_HEADINGS = ("run", "first s", "ms", "tokens/s", "peak GiB", "% of roofline")


def random_model(config: jgg.models.ModelConfig, experts: str, **options: Any) -> jgg.models.Decoder:
    """A Decoder with random parameters, made a layer at a time, so that no more memory than theirs is needed."""
    sharding = options.get("sharding")
    options = {"param_dtype": jnp.bfloat16, "quantization": jgg.Fp8() if experts == "fp8" else None} | options
    create = functools.partial(jgg.models.Decoder, config)
    model = nnx.eval_shape(lambda: create(**options, rngs=nnx.Rngs(0)))
    stacks = [stack.name for stack in config.plan]
    state = nnx.to_flat_state(nnx.state(model))
    for key, (path, variable) in zip(jax.random.split(jax.random.key(0), len(state)), state, strict=True):
        *modules, own = map(str, path)
        shape, is_stacked = variable.shape, bool(modules) and modules[0] in stacks
        is_of_experts = own in ("w_gate_up", "w_down") and "moe" in modules
        form, shape_of_one = (experts if is_of_experts else "bfloat16"), shape[1:] if is_stacked else shape
        make = functools.partial(_random, own, shape_of_one, variable.dtype, config.init_scale, form)
        where = sharding and place((*modules, own), shape, sharding, is_stacked=is_stacked)
        # as `load` keeps them; a copy in the other form would leave no place for large arrays
        if model.options.batch_invariant and form == "fp8" and sharding is None:
            make = functools.partial(_in_one_form, own, shape_of_one, variable.dtype, config.init_scale)
        make_all = functools.partial(jax.lax.map, make) if is_stacked else make
        value = jax.jit(make_all, out_shardings=where)(jax.random.split(key, shape[0]) if is_stacked else key)
        module = functools.reduce(getattr, modules, model)
        if isinstance(value, QuantizedArray | WeightForms):
            setattr(module, own, Frozen(value))
        else:
            getattr(module, own).set_value(value)
    return model


def _in_one_form(name: str, shape: tuple[int, ...], dtype: Any, scale: float, key: jax.Array) -> WeightForms:
    """Matrices in FP8, transposed alone: drawn like this, for XLA would transpose all layers' at once."""
    return WeightForms(None, _random(name, (*shape[:-2], shape[-1], shape[-2]), dtype, scale, "fp8", key))


def _random(name: str, shape: tuple[int, ...], dtype: Any, scale: float, experts: str, key: jax.Array) -> Any:
    """A parameter of a layer, by its name."""
    if name.endswith("norm") or name.startswith("scale"):
        return jnp.ones(shape, dtype)
    w = jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)
    if experts == "fp8":
        return jgg.quantize_weights(w)
    if experts in ("as-stored", "mxfp4"):
        # two rows of a column in a byte, and a scale of 2**-7 for 32, about 0.02 in all
        pairs = jax.random.bits(key, (shape[0], shape[1] // 2, shape[2]), jnp.uint8)
        return QuantizedArray(pairs, jnp.full((shape[0], shape[1] // 32, shape[2]), 120, jnp.uint8))
    return w


def make_step(
    model: jgg.models.Decoder,
    trained: Any,
    has_masters: bool = False,
    optimizer: optax.GradientTransformation = optax.adamw(1e-4),  # noqa: B008
):
    """The jitted step, and its state: (trained parameters, state of the optimizer), parameters not trained."""
    graphdef, *states = nnx.split(model, trained, ...)
    own, frozen = states
    if has_masters:
        optimizer = jgg.train.float32_masters(optimizer)

    def loss_of(own, frozen, tokens):
        return nnx.merge(graphdef, own, frozen).loss(tokens[:, :-1], tokens[:, 1:])

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=jgg.train.compiler_options())
    def step(state, frozen, tokens):
        own, opt_state = state
        loss, gradients = jax.value_and_grad(loss_of)(own, frozen, tokens)
        updates, opt_state = optimizer.update(gradients, opt_state, own)
        return (optax.apply_updates(own, updates), opt_state), loss

    return step, (own, jax.jit(optimizer.init)(own)), frozen


def options_of(args, run: str) -> dict[str, Any]:
    """A model's options: adapters in the run "lora", the dtype of its parameters in the run "train"."""
    options: dict[str, Any] = {"batch_invariant": args.batch_invariant}
    if run == "lora":
        return options | {"lora_rank": args.rank}
    return options | {"param_dtype": jnp.float32 if args.params == "float32" and run == "train" else jnp.bfloat16}


def remat_of(args, run: str) -> str:
    """What a model's backward pass recomputes: in the run in-backward, layers."""
    return "all" if run == "in-backward" and args.remat != "offload" else args.remat


def measure_steps(args, config: jgg.models.ModelConfig, run: str) -> tuple:
    """The cells of a row for steps of training."""
    speeds = measure_speeds(config, args.batch * args.sequence, args.experts == "fp8")
    model = random_model(config, args.experts, remat=remat_of(args, run), **options_of(args, run))
    if run == "in-backward":
        step, state, frozen = make_step_in_backward(model, args.optimizer)
    else:
        step, state, frozen = make_step(model, nnx.LoRAParam if run == "lora" else nnx.Param, args.params == "masters")
    tensors = tensors_of(model)
    del model
    shape = args.batch, args.sequence + 1
    tokens = jax.random.randint(jax.random.key(1), shape, 0, config.vocabulary, jnp.int32)
    begin = time.perf_counter()
    state, loss = jax.block_until_ready(step(state, frozen, tokens))
    first, seconds = time.perf_counter() - begin, []
    for _ in range(args.steps):
        begin = time.perf_counter()
        state, loss = jax.block_until_ready(step(state, frozen, tokens))
        seconds.append(time.perf_counter() - begin)
    if not jnp.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss}")
    median = sorted(seconds)[len(seconds) // 2]
    rate = args.batch * args.sequence / median
    least = least_training_seconds(config, tensors, speeds, args.batch, args.sequence, run == "lora")
    return run, number(first), number(median * 1e3), number(rate), number(peak_gib()), _percent(least, median)


def measure_generation(args, config: jgg.models.ModelConfig) -> list[tuple]:
    """The cells of a row for each batch size."""
    speeds = measure_speeds(config, args.sequence, args.experts == "fp8")
    model, rows = random_model(config, args.experts, batch_invariant=args.batch_invariant), []
    tensors = tensors_of(model)
    for batch in args.batches:
        tokens = jax.random.randint(jax.random.key(1), (batch, args.prompt), 0, config.vocabulary, jnp.int32)
        times, first = {}, 0.0
        for new_tokens in (1, 1 + args.new_tokens):
            run = functools.partial(jgg.models.generate, model, tokens, new_tokens)
            begin = time.perf_counter()
            jax.block_until_ready(run())
            first = time.perf_counter() - begin
            begin = time.perf_counter()
            jax.block_until_ready(run())
            times[new_tokens] = time.perf_counter() - begin
        prefill, whole = times.values()
        of_token = (whole - prefill) / args.new_tokens if whole > prefill else None  # else noise, of a small model
        of_prefill = least_prefill_seconds(config, tensors, speeds, batch, args.prompt)
        of_decode = least_decode_seconds(config, tensors, speeds, batch, args.prompt)
        rows += [
            (
                f"prefill {batch} x {args.prompt}",
                "-",
                number(prefill * 1e3),
                number(batch * args.prompt / prefill),
                number(peak_gib()),
                _percent(of_prefill, prefill),
            ),
            (
                f"decode {batch}",
                number(first),
                number(of_token and of_token * 1e3),
                number(of_token and batch / of_token),
                number(peak_gib()),
                _percent(of_decode, of_token),
            ),
        ]
    return rows


def make_step_in_backward(model: jgg.models.Decoder, optimizer: str):
    """The same for a step that updates all parameters of each layer in the backward pass."""
    in_backward = jgg.train.OptimizerInBackward(OPTIMIZERS[optimizer](), max_norm=1.0)
    in_backward.check(model)
    parts: Any = nnx.split(model, nnx.Param, ...)
    graphdef, own, frozen = parts

    def loss_of(model, tokens):
        return model.loss(tokens[:, :-1], tokens[:, 1:]), ()

    step = step_of(graphdef, in_backward, loss_of, accumulate=False)

    options = jgg.train.compiler_options(in_backward=True)

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=options)
    def alone(state, frozen, tokens):
        state, (loss, _) = step(state, frozen, tokens)
        return state, loss

    return alone, (own, in_backward.init(own)), frozen


def _percent(least: float | None, seconds: float | None) -> str:
    percent = percent_of_roofline(least, seconds)
    return "-" if percent is None else f"{percent:.1f}"


def add_optimizer(parser: argparse.ArgumentParser) -> None:
    """Adds the option of the run in-backward."""
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adamw-8bit", help="of --run in-backward (default: %(default)s)"
    )


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def some_of(choices):
        def parse(text):
            names = tuple(text.split(","))
            if not set(names) <= set(choices):
                raise argparse.ArgumentTypeError(f"must be some of {','.join(choices)}, got {text}")
            return names

        return parse

    def sizes(text):
        return tuple(map(int, text.split(",")))

    for name, default, what in (
        ("layers", None, "number of layers, if fewer than the model's"),
        ("rank", 16, "rank of the adapters"),
        ("batch", 2, "sequences of a step"),
        ("sequence", 4096, "tokens of a sequence"),
        ("steps", 5, "timed steps"),
        ("prompt", 128, "tokens of a prompt"),
        ("new-tokens", 64, "timed tokens of each sequence"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{what} (default: {'all' if default is None else default})"
        )
    parser.add_argument(
        "--model",
        choices=CONFIGS,
        default="qwen3-30b-a3b",
        help="the model whose sizes are taken (default: %(default)s)",
    )
    parser.add_argument(
        "--run", type=some_of(RUNS), default=RUNS[:1], metavar="R,R", help=f"what is measured, some of {','.join(RUNS)}"
    )
    parser.add_argument(
        "--experts", choices=EXPERTS, default="bfloat16", help="format of the experts' weights (default: %(default)s)"
    )
    parser.add_argument(
        "--params",
        choices=PARAMS,
        default="bfloat16",
        help="of --run train; masters: bfloat16, and float32 masters in the optimizer (default: %(default)s)",
    )
    parser.add_argument(
        "--remat",
        choices=REMAT,
        default="attention",
        help="as in Decoder (default: %(default)s)",
    )
    parser.add_argument(
        "--batches",
        type=sizes,
        default=(1, 32),
        metavar="B,B",
        help="numbers of sequences in generation (default: 1,32)",
    )
    parser.add_argument("--batch-invariant", action="store_true", help="as in Decoder")
    add_optimizer(parser)
    parser.add_argument("--json", type=new_file, help="write the table into this file too")
    parser.set_defaults(parser=parser)
    return parser


def run(args) -> int:
    """Measures and prints a table."""
    is_small = jax.default_backend() == "cpu"
    if is_small:
        args.sequence, args.new_tokens = min(args.sequence, 64), min(args.new_tokens, 4)
        print("This is a CPU: a small model is measured.")
    config = config_of(args.model, args.layers, is_small)
    rows: list[tuple] = []
    for each in args.run:
        rows += measure_generation(args, config) if each == "generate" else [measure_steps(args, config, each)]
    print_table(_HEADINGS, rows, _HEADINGS[:1])
    if args.json:
        cells = [dict(zip(_HEADINGS, row, strict=True)) for row in rows]
        args.json.write_text(json.dumps({"device": jax.devices()[0].device_kind, "rows": cells}, indent=2))
    return 0


def main(argv=None) -> int:
    """Runs the benchmark and returns the exit code."""
    return run_command(make_parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
