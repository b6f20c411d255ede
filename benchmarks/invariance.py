"""Compares the bits of a token's result among few and among many tokens, by jgg's kernels and by XLA.

    python -m benchmarks.invariance
    python -m benchmarks.invariance --layers 8 --json FILE

The first table compares, for each part of a model, the results of the first rows with those of a call with all rows:
what percentage of elements have different bits if only these rows are in the call, and if all rows are in another
order. The second table is for a model of Qwen3-30B's sizes with few layers: what percentage of the first sequences'
losses differ from those in a batch of all sequences, what percentage of the log-probabilities of generated tokens
differ from the trainer's, and by how much at most.

`python -m benchmarks.models`, with and without `--batch-invariant`, measures what it costs a whole model. On a CPU,
small sizes are compared, with XLA's kernels alone.
"""

import argparse
import concurrent.futures
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jgg
import jgg.models
from benchmarks.model_configs import config_of
from benchmarks.models import EXPERTS, random_model
from jgg.cli import run as run_command
from jgg.cli.arguments import new_file
from jgg.cli.console import print_table
from jgg.core.matrix import Matrix
from jgg.core.quantized import QuantizedArray
from jgg.layers import MoELayer
from jgg.linear.dense import dense
from jgg.models.norms import norm

COUNTS = (1, 8, 64, 1024)
IMPLEMENTATIONS = {"jgg": None, "XLA": "xla"}
PART_HEADINGS = ("part", "by", *map(str, COUNTS), "other order")
MODEL_HEADINGS = ("experts", "batch_invariant", "losses, batch 1", "losses, batch 4", "generated", "largest difference")


def bits(array: jax.Array) -> np.ndarray:
    """The bits of an array, as unsigned integers."""
    return np.asarray(array).view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def percent_of_others(got: jax.Array, want: jax.Array) -> float:
    """The percentage of elements with other bits."""
    return float((bits(got) != bits(want)).mean() * 100) if got.size else 0.0


def compare(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> list[float]:
    """For each of COUNTS, the percentage of results that differ with only this many rows, then in another order."""
    counts = [count for count in COUNTS if count <= len(x)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = {count: pool.submit(_compiled, function, x, count) for count in [*counts, len(x)]}
        programs = {count: program.result() for count, program in compiled.items()}
    of_all = programs[len(x)](x)
    found = [percent_of_others(programs[count](x[:count]), of_all[:count]) for count in counts]
    order = np.random.default_rng(1).permutation(len(x))
    return [*found, percent_of_others(programs[len(x)](x[order]), of_all[order])]


def _compiled(function: Callable[[jax.Array], jax.Array], x: jax.Array, count: int) -> jax.stages.Compiled:
    return jax.jit(function).lower(x[:count]).compile()


def parts(features: int, implementation: str | None) -> Iterator[tuple[str, Callable[[jax.Array], jax.Array]]]:
    """The parts of a model, by name: functions of rows [T, H]."""
    draw = np.random.default_rng(0)

    def matrix(*shape: int) -> jax.Array:
        return jnp.asarray(draw.standard_normal(shape) * shape[-2] ** -0.5, jnp.bfloat16)

    w_router, w = matrix(features, 128).astype(jnp.float32), matrix(features, 2 * features)
    yield "router's logits", lambda x: jgg.router_logits(x, w_router, implementation=implementation)
    yield (
        "dense product",
        lambda x: dense(x, Matrix(dense=w), implementation=implementation, batch_invariant=implementation is None),
    )
    yield "RMS norm", lambda x: norm(x[None], jnp.ones(features), 1e-6, implementation)[0]
    if implementation is None:  # plain JAX multiplies experts' rows in blocks, which would take minutes
        yield from layers(features, matrix)


def layers(features: int, matrix: Callable[..., jax.Array]) -> Iterator[tuple[str, Callable[[jax.Array], jax.Array]]]:
    """Whole MoE layers, router included."""
    options: dict[str, Any] = {"in_features": features, "hidden_features": 3 * features // 8, "num_experts": 128}
    layer = MoELayer(**options, topk=8, shared_features=features // 2, use_shared_gate=True)
    params = {name: matrix(*shape) for name, shape in layer.shapes.items()}
    experts = {name: params[name] for name in ("w_gate_up", "w_down")}
    stored = params | {name: jgg.quantize_weights(w) for name, w in experts.items()}
    packed = params | {name: _packed(w.shape) for name, w in experts.items()}
    in_float16 = jax.tree.map(lambda w: w.astype(jnp.float16), params)
    with_lora = MoELayer(**options, topk=8, lora_rank=16)
    adapted = {name: matrix(*shape) for name, shape in (with_lora.shapes | with_lora.adapter_shapes).items()}
    yield "layer, bfloat16", lambda x: layer.apply(params, x)[0]
    yield "layer, float16", lambda x: layer.apply(in_float16, x.astype(jnp.float16))[0]
    yield "layer, `Fp8()`", lambda x: layer.apply(params, x, quantization=jgg.Fp8())[0]
    yield "layer, FP8 as stored", lambda x: layer.apply(stored, x)[0]
    yield "layer, FP8 as stored, `Fp8()`", lambda x: layer.apply(stored, x, quantization=jgg.Fp8())[0]
    yield "layer, MXFP4 as stored", lambda x: layer.apply(packed, x)[0]
    yield "layer with LoRA", lambda x: with_lora.apply(adapted, x)[0]


def _packed(shape: tuple[int, ...]) -> QuantizedArray:
    """Random weights in MXFP4: two rows of a column in a byte, and a scale of 2**-6 for 32."""
    pairs = jax.random.bits(jax.random.key(0), (shape[0], shape[1] // 2, shape[2]), jnp.uint8)
    return QuantizedArray(pairs, jnp.full((shape[0], shape[1] // 32, shape[2]), 121, jnp.uint8))


def compare_parts(num_rows: int, features: int) -> Iterator[tuple[str, ...]]:
    """The cells of each row of the first table."""
    x = jnp.asarray(np.random.default_rng(2).standard_normal((num_rows, features)), jnp.bfloat16)
    for by, implementation in IMPLEMENTATIONS.items():
        for name, function in parts(features, implementation):
            *of_counts, of_order = (f"{percent:.3g}" for percent in compare(function, x))
            yield name, by, *of_counts, *["-"] * (len(COUNTS) - len(of_counts)), of_order


def compare_models(args) -> Iterator[tuple[str, ...]]:
    """The cells of each row of the second table."""
    is_small = jax.default_backend() == "cpu"
    for experts in args.experts:
        for is_invariant in (False, True):
            model_name = "gpt-oss-20b" if experts == "as-stored" else "qwen3-30b-a3b"
            config = config_of(model_name, args.layers, is_small)
            model = random_model(config, experts, batch_invariant=is_invariant)
            losses, tokens = _of_losses(model, args.batch, 64 if is_small else args.sequence)
            generated, difference = _of_generated(model, tokens[:, :33])
            yield experts, str(is_invariant), *(f"{each:.3g}" for each in (*losses, generated, difference))
            del model


def _of_losses(model: jgg.models.Decoder, batch: int, length: int) -> tuple[tuple[float, float], jax.Array]:
    """How many percent of the losses of 1 and of 4 sequences are others than in the batch; the tokens."""
    tokens = jax.random.randint(jax.random.key(3), (batch, length + 1), 0, model.config.vocabulary, jnp.int32)
    losses_of = jax.jit(lambda model, tokens: model.losses(tokens[:, :-1], tokens[:, 1:]))
    of_all = losses_of(model, tokens)
    one, four = (percent_of_others(losses_of(model, tokens[:count]), of_all[:count]) for count in (1, 4))
    return (one, four), tokens


def _of_generated(model: jgg.models.Decoder, prompts: jax.Array) -> tuple[float, float]:
    """How many percent of new tokens' log-probabilities are others than the trainer's; the largest difference."""
    batch, longest = prompts.shape
    lengths = jnp.asarray(np.random.default_rng(4).integers(1, longest + 1, batch), jnp.int32)
    options: dict[str, Any] = {"temperature": 1.0, "seeds": jnp.arange(batch), "details": True}
    generated = jgg.models.generate(model, prompts, 32, lengths=lengths, **options)
    at = lengths[:, None] + jnp.arange(32)[None]
    rows = jnp.zeros((batch, longest + 32), jnp.int32).at[:, :longest].set(prompts)
    rows = rows.at[jnp.arange(batch)[:, None], at].set(generated.tokens)
    losses = jax.jit(lambda model, rows: model.losses(rows[:, :-1], rows[:, 1:]))(model, rows)
    of_trainer = -jnp.take_along_axis(losses, at - 1, axis=1)
    difference = jnp.max(jnp.abs(generated.log_probabilities - of_trainer))
    return percent_of_others(generated.log_probabilities, of_trainer), float(difference)


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.invariance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, what in (
        ("rows", 8192, "all rows of the first table"),
        ("layers", 4, "layers of the models of the second"),
        ("batch", 16, "sequences of the second table's batch"),
        ("sequence", 512, "tokens of each"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
    parser.add_argument(
        "--experts", nargs="*", choices=EXPERTS, default=EXPERTS, help="of the models of the second table"
    )
    parser.add_argument("--json", type=new_file, help="write the tables into this file too")
    parser.set_defaults(parser=parser)
    return parser


def run(args) -> int:
    """Compares and prints two tables."""
    is_small = jax.default_backend() == "cpu"
    features = 256 if is_small else 2048
    of_parts = list(compare_parts(min(args.rows, 1024) if is_small else args.rows, features))
    print_table(PART_HEADINGS, of_parts, PART_HEADINGS[:2])
    of_models = list(compare_models(args))
    print_table(MODEL_HEADINGS, of_models, MODEL_HEADINGS[:2])
    if args.json:
        tables = {
            "device": jax.devices()[0].device_kind,
            "parts": [dict(zip(PART_HEADINGS, row, strict=True)) for row in of_parts],
            "models": [dict(zip(MODEL_HEADINGS, row, strict=True)) for row in of_models],
        }
        args.json.write_text(json.dumps(tables, indent=2))
    return 0


def main(argv=None) -> int:
    """Runs the benchmark and returns the exit code."""
    return run_command(make_parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
