"""Measures steps of GRPO with a whole model on one GPU: one model samples the answers and learns from them.

    python -m benchmarks.grpo
    python -m benchmarks.grpo --model gpt-oss-20b --experts as-stored --rows 512
    python -m benchmarks.grpo --rows 64 128 256 --only-sampling

Weights, prompts and rewards are random, and the number of new tokens of each answer is drawn from --new-tokens, as
answers of a real model differ in length. Rows that end make room for the next ones (`generate(rows=)`). LoRA adapters
learn, from answers packed into sequences of --length tokens. Printed are the milliseconds of a step's parts, answer
tokens/s of the whole step, the most memory in use, and the largest difference between the sampler's and the trainer's
log-probabilities. The first step compiles. On a CPU a small model with the same structure is measured.
"""

import argparse
import json
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgg.models
import jgg.train
from benchmarks.memory import peak_gib
from benchmarks.model_configs import CONFIGS, config_of
from benchmarks.models import EXPERTS, random_model
from jgg.cli import run as run_command
from jgg.cli.arguments import new_file, positive_int
from jgg.cli.console import number, print_table
from jgg.train import grpo

_HEADINGS = ("part", "first s", "ms", "answer tokens/s", "peak GiB", "sampler - trainer")


class Timed(NamedTuple):
    """What was measured of a step: seconds of sampling, packing and all, and how many tokens the answers have."""

    sampling: float
    packing: float
    whole: float
    tokens: int
    difference: float
    sequences: int


def loss_of(model: jgg.models.Decoder, part: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The loss of a part of a batch, and the largest difference between sampler and trainer."""
    losses = model.losses(part["tokens"], part["targets"], part["segments"], mask=part["segments"] > 0)
    # each token is a row of its own, as a sequence has several answers
    own, old, weights = (array.reshape(-1, 1) for array in (-losses, part["log_probabilities"], part["weights"]))
    loss, metrics = grpo.policy_loss(own, old, part["advantages"].reshape(-1), weights)
    return loss, part["place"] * metrics["difference"]


class Sampler:
    """Draws answers to random prompts, and makes batches of them."""

    def __init__(self, args: argparse.Namespace, config: jgg.models.ModelConfig, model: jgg.models.Decoder) -> None:
        self.args, self.config, self.model = args, config, model
        self.timed: list[tuple[float, float, int, int]] = []
        self.draw = np.random.default_rng(0)

    def sample(self, rows: int) -> tuple[jgg.models.Generated, np.ndarray]:
        """Answers to new prompts, `rows` of them at once, and the prompts."""
        args, draw = self.args, self.draw
        prompts = draw.integers(self.config.vocabulary, size=(args.prompts, args.prompt), dtype=np.int32)
        least, most = args.new_tokens
        limits = draw.integers(least, most + 1, (args.prompts, args.answers))
        limits[0, 0] = most  # or another number might be compiled for
        options: dict[str, Any] = {"num_samples": args.answers, "temperature": 1.0, "details": True, "rows": rows}
        seeds = draw.integers(2**31, size=args.prompts)
        drawn = jgg.models.generate(self.model, prompts, limits, seeds=seeds, **options)
        return jax.block_until_ready(drawn), prompts

    def batch_of(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step."""
        begin = time.perf_counter()
        drawn, prompts = self.sample(self.args.rows[0])
        sampled = time.perf_counter()
        rows = drawn.training_rows(prompts)
        rows = rows._replace(topk_indices=jnp.zeros((0, *rows.tokens.shape, 0), jnp.int32))
        # a multiple that two draws of as many answers hardly differ in, since the step is compiled for one number
        packed = jgg.train.pack_rows(rows, self.args.length, multiple=8 * self.args.sequences)
        rewards = self.draw.standard_normal((self.args.prompts, self.args.answers))
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)).reshape(-1).astype(np.float32)
        parts = len(packed.tokens) // self.args.sequences
        batch = packed._asdict() | {
            "advantages": advantages[packed.rows],
            "weights": packed.is_new * np.float32(parts / packed.is_new.sum()),
        }
        batch = {name: batch[name] for name in batch.keys() - {"topk_indices", "rows", "sampled_log_probabilities"}}
        batch = {name: array.reshape(parts, -1, *array.shape[1:]) for name, array in batch.items()}
        tokens = int(np.sum(np.asarray(drawn.lengths)))
        self.timed.append((sampled - begin, time.perf_counter() - sampled, tokens, len(packed.tokens)))
        return batch | {"place": parts * np.eye(parts, dtype=np.float32)}


def measure_steps(args: argparse.Namespace, config: jgg.models.ModelConfig) -> list[Timed]:
    """Runs the steps."""
    options = {"remat": args.remat, "lora_rank": args.rank, "batch_invariant": not args.no_batch_invariant}
    sampler = Sampler(args, config, random_model(config, args.experts, **options))
    trainer = jgg.train.Trainer(sampler.model, optax.adam(1e-4), loss_of, wrt=nnx.LoRAParam, accumulate=True)
    sampler.model = trainer.model
    begin, done = time.perf_counter(), []
    for record in trainer.fit(sampler.batch_of, args.steps, every=(1,)):
        sampler.model = trainer.model
        end = time.perf_counter()
        sampling, packing, tokens, sequences = sampler.timed[-1]
        done.append(Timed(sampling, packing, end - begin, tokens, float(np.max(record.metrics)), sequences))
        begin = end
        print(done[-1], peak_gib(), flush=True)
    return done


def rows_of_steps(args: argparse.Namespace, config: jgg.models.ModelConfig) -> list[tuple]:
    """The rows of the table for steps."""
    first, *others = measure_steps(args, config)
    median = sorted(others or [first], key=lambda each: each.whole)[len(others) // 2]
    learning = median.whole - median.sampling - median.packing
    parts = (
        (f"sampling, {args.rows[0]} rows", first.sampling, median.sampling),
        ("packing", first.packing, median.packing),
        (f"learning, {median.sequences} x {args.length}", first.whole - first.sampling - first.packing, learning),
        ("step", first.whole, median.whole),
    )
    difference = f"{max(each.difference for each in (first, *others)):.3g}"
    return [
        (
            part,
            number(compiled),
            number(seconds * 1e3),
            number(median.tokens / seconds),
            number(peak_gib()),
            difference if part == "step" else "",
        )
        for part, compiled, seconds in parts
    ]


def rows_of_sampling(args: argparse.Namespace, config: jgg.models.ModelConfig) -> list[tuple]:
    """The rows of the table for sampling alone, with each number of rows."""
    sampler = Sampler(args, config, random_model(config, args.experts, batch_invariant=not args.no_batch_invariant))
    found = []
    for rows in args.rows:
        seconds, tokens = [], 0
        for _ in range(args.steps):
            begin = time.perf_counter()
            drawn, _ = sampler.sample(rows)
            seconds.append(time.perf_counter() - begin)
            tokens = int(np.sum(np.asarray(drawn.lengths)))
            del drawn
        rate = tokens / seconds[-1]
        cells = number(seconds[0]), number(seconds[-1] * 1e3), number(rate), number(peak_gib()), ""
        found.append((f"sampling, {rows} rows", *cells))
        print(found[-1], flush=True)
    return found


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.grpo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=CONFIGS, default="qwen3-30b-a3b", help="(default: %(default)s)")
    parser.add_argument("--experts", choices=EXPERTS, default="fp8", help="(default: %(default)s)")
    for name, default, what in (
        ("layers", None, "number of layers, if fewer than the model's"),
        ("rank", 16, "rank of the adapters"),
        ("prompts", 64, "prompts of a step"),
        ("answers", 8, "answers to a prompt"),
        ("prompt", 128, "tokens of a prompt"),
        ("length", 2304, "tokens of a sequence that answers are packed into"),
        ("sequences", 8, "sequences that are learned at once"),
        ("steps", 3, "steps; the first compiles"),
    ):
        shown = "all" if default is None else default
        parser.add_argument(f"--{name}", type=positive_int, default=default, help=f"{what} (default: {shown})")
    parser.add_argument("--rows", type=positive_int, nargs="+", default=[256], help="rows that run at once (256)")
    parser.add_argument(
        "--new-tokens", type=positive_int, nargs=2, default=(100, 1024), help="fewest and most of an answer (100 1024)"
    )
    parser.add_argument("--remat", default="all", help="as in Decoder (default: %(default)s)")
    parser.add_argument("--no-batch-invariant", action="store_true", help="without equal bits")
    parser.add_argument("--only-sampling", action="store_true", help="no learning, and several numbers of rows")
    parser.add_argument("--json", type=new_file, help="write the table into this file too")
    parser.set_defaults(parser=parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measures and prints a table."""
    is_small = jax.default_backend() == "cpu"
    if is_small:
        args.prompts, args.answers, args.prompt, args.new_tokens, args.rows = 3, 2, 8, (2, 6), [4]
        args.length, args.sequences = 32, 2
        print("This is a CPU: a small model is measured.")
    config = config_of(args.model, args.layers, is_small, args.experts == "as-stored")
    rows = (rows_of_sampling if args.only_sampling else rows_of_steps)(args, config)
    print_table(_HEADINGS, rows, _HEADINGS[:1])
    if args.json:
        cells = [dict(zip(_HEADINGS, row, strict=True)) for row in rows]
        args.json.write_text(json.dumps({"device": jax.devices()[0].device_kind, "rows": cells}, indent=2) + "\n")
    return 0


def main(argv=None) -> int:
    """Runs the benchmark and returns the exit code."""
    return run_command(make_parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
