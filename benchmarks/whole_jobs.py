"""The whole jobs that `benchmarks.whole` runs, at the full sizes of published models: each is a function of one GPU.

Weights are random, which changes neither memory nor times. On a CPU a small model with the same structure is taken.
"""

import contextlib
import dataclasses
import io
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jgg
import jgg.models
import jgg.train
from benchmarks import grpo
from benchmarks.memory import peak_gib
from benchmarks.model_configs import CONFIGS, config_of
from benchmarks.models import make_step, random_model
from benchmarks.random_folder import write_tokenizer
from jgg.cli.console import number
from jgg.cli.demo.preset import load_texts
from jgg.cli.parsing import parse
from jgg.cli.training import finetune

STEPS = 2
SEQUENCE = 4096  # tokens of a sequence in training
PROMPT = NEW_TOKENS = 128
CHUNK = 32  # tokens of a row that are timed together
BATCHES = 1, 64, 256  # sequences of generation
ROWS = 32  # sequences whose losses are computed at once
PROBLEMS, ANSWERS = 32, 8  # of reinforcement learning
ATTENTION = "w_q", "w_k", "w_v", "w_o"  # the matrices of attention


class Line(NamedTuple):
    """What was measured of a job or a part of it.

    Attributes:
      part: which part; empty for the whole job.
      ms: milliseconds of a step, or of a token of all sequences.
      rate: tokens/s.
      result: "OK", or what is wrong.
    """

    part: str
    ms: float | None
    rate: float | None
    result: str = "OK"

    def cells(self) -> list[str]:
        """The cells of a table, with the most memory in use so far."""
        return [self.part, number(self.ms), number(self.rate), number(peak_gib()), self.result]


@dataclasses.dataclass(frozen=True)
class Job:
    """A job, and what it is a job of.

    Attributes:
      run: (job) -> the lines that it measures, one by one.
      model: a name in CONFIGS.
      experts: the format of the experts' weights.
      layers: fewer than the model's; None for all.
      batch_invariant: as in Decoder.
      options: of `jgg finetune`, beside its defaults.
    """

    run: Callable[["Job"], Iterator[Line]]
    model: str
    experts: str = "bfloat16"
    layers: int | None = None
    batch_invariant: bool = False
    options: tuple[str, ...] = ()

    @property
    def config(self) -> jgg.models.ModelConfig:
        """The model's sizes; small on a CPU."""
        return config_of(self.model, self.layers, jax.default_backend() == "cpu", self.experts == "as-stored")

    def model_of(self, **options: Any) -> jgg.models.Decoder:
        """The model, with random weights."""
        return random_model(self.config, self.experts, batch_invariant=self.batch_invariant, **options)


def _is_small() -> bool:
    return jax.default_backend() == "cpu"


def _sequence() -> int:
    return 64 if _is_small() else SEQUENCE


def fine_tuning(job: Job) -> Iterator[Line]:
    """`jgg finetune` with 2 sequences of 4,096 tokens in a step if the job has no other options, and random weights."""
    with tempfile.TemporaryDirectory() as name:
        folder, data, output = (Path(name) / part for part in ("model", "data.jsonl", "adapter"))
        options = ["--data", data, "--output", output, "--experts", job.experts, "--split", "--steps", STEPS]
        options += ["--batch-size", 2, "--sequence-length", SEQUENCE, "--log-every", 1, "--quiet", *job.options]
        args: Any = parse(["finetune", str(folder), *map(str, options)])
        if _is_small():
            args.sequence_length = _sequence()
        tokens = args.batch_size * args.sequence_length
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(job.config.hf))
        write_tokenizer(folder, min(4096, job.config.vocabulary))
        texts, letters = "\n\n".join(load_texts()[0]), 8 * STEPS * tokens  # a token has about 4
        data.write_text(json.dumps({"text": (texts * math.ceil(letters / len(texts)))[:letters]}) + "\n")
        with contextlib.redirect_stdout(io.StringIO()):
            finetune.run(args, load=lambda args, folder, sharding: _with_adapters(job, args))
        records = [json.loads(line) for line in output.with_name("adapter.jsonl").read_text().splitlines()]
        steps = [record for record in records if "tokens_per_second" in record]
        rate, losses = steps[-1]["tokens_per_second"], [record["loss"] for record in steps]
        is_right = len(steps) == STEPS and np.isfinite(losses).all() and (output / "adapter_config.json").exists()
        yield Line("", tokens / rate * 1e3, rate, "OK" if is_right else f"losses {losses}")


def _with_adapters(job: Job, args) -> jgg.models.Decoder:
    """The model as the command loads it."""
    return job.model_of(
        remat=args.remat, lora_rank=args.lora_rank, lora_alpha=args.lora_alpha, lora_targets=tuple(args.targets)
    )


def training(job: Job) -> Iterator[Line]:
    """Steps that train all parameters by AdamW, in bfloat16."""
    step, state, frozen = make_step(job.model_of(remat="attention"), nnx.Param)
    tokens = jax.random.randint(jax.random.key(1), (2, _sequence() + 1), 0, job.config.vocabulary, jnp.int32)
    state, _ = jax.block_until_ready(step(state, frozen, tokens))
    begin = time.perf_counter()
    _, loss = jax.block_until_ready(step(state, frozen, tokens))
    seconds = time.perf_counter() - begin
    yield Line("", seconds * 1e3, 2 * _sequence() / seconds, "OK" if jnp.isfinite(loss) else f"loss {loss}")


def generation(job: Job) -> Iterator[Line]:
    """Generation for each number of sequences; with `batch_invariant` also the trainer's log-probabilities."""
    model = job.model_of()
    for batch in BATCHES:
        draw = np.random.default_rng(batch)
        prompts = draw.integers(job.config.vocabulary, size=(batch, PROMPT), dtype=np.int32)
        lengths = draw.integers(1, PROMPT + 1, size=batch, dtype=np.int32)
        options: Any = {"lengths": lengths, "temperature": 1.0, "seeds": np.arange(batch), "details": True}
        stream = jgg.models.stream(model, prompts, NEW_TOKENS, chunk=CHUNK, **options)
        for _ in range(2):  # which compile
            next(stream)
        begin = time.perf_counter()
        next(stream)
        seconds = (time.perf_counter() - begin) / CHUNK
        for _ in stream:
            pass
        result = _compared(model, stream.result(), prompts, lengths) if job.batch_invariant else "OK"
        yield Line(f"{batch} sequences", seconds * 1e3, batch / seconds, result)


@jax.jit
def _log_probabilities(model: jgg.models.Decoder, rows: Any) -> jax.Array:
    return -model.losses(rows.tokens, rows.targets, mask=rows.mask)


def _compared(model: jgg.models.Decoder, drawn: Any, prompts: np.ndarray, lengths: np.ndarray) -> str:
    """The largest difference between the sampler's log-probabilities and those of `losses`, which should be 0."""
    rows = drawn.training_rows(prompts, lengths)._replace(topk_indices=None)
    largest = 0.0
    for first in range(0, len(prompts), ROWS):
        part = jax.tree.map(lambda array: array[first : first + ROWS], rows)  # noqa: B023
        others = jnp.where(part.is_new, _log_probabilities(model, part) - part.log_probabilities, 0.0)
        largest = max(largest, float(jnp.max(jnp.abs(others))))
    return f"OK, difference {largest}" if largest == 0 else f"difference {largest:.3g}, not 0"


def policy_gradient(job: Job) -> Iterator[Line]:
    """Steps of GRPO, as `benchmarks.grpo` measures them."""
    sizes = {"prompts": PROBLEMS, "answers": ANSWERS, "prompt": PROMPT, "steps": STEPS, "rows": PROBLEMS * ANSWERS}
    if _is_small():
        sizes |= {"length": 2 * (PROMPT + NEW_TOKENS), "prompts": 2, "answers": 2, "rows": 4}
    options = [option for name, size in sizes.items() for option in (f"--{name}", str(size))]
    args = grpo.make_parser().parse_args([*options, "--new-tokens", str(NEW_TOKENS // 4), str(NEW_TOKENS)])
    args.experts, args.no_batch_invariant = job.experts, not job.batch_invariant
    steps = grpo.measure_steps(args, job.config)
    largest, last = max(step.difference for step in steps), steps[-1]
    result = f"OK, difference {largest}" if largest == 0 else f"difference {largest:.3g}, not 0"
    yield Line(f"{last.sampling:.1f} s of it sampling", last.whole * 1e3, last.tokens / last.whole, result)


def _jobs() -> dict[str, Job]:
    """All jobs by name, the longest first."""
    jobs = {"grpo qwen3-30b-a3b fp8": Job(policy_gradient, "qwen3-30b-a3b", "fp8", batch_invariant=True)}
    stored = {model: "as-stored" if model.startswith("gpt-oss") else "fp8" for model in CONFIGS}
    for model, experts in (("qwen3-30b-a3b", "bfloat16"), *stored.items()):
        for how in (True, False):
            name = f"generate {model} {experts}{' batch_invariant' if how else ''}"
            jobs[name] = Job(generation, model, experts, batch_invariant=how)
    for model, length, batch, *options in (
        ("qwen3-30b-a3b", 131072, 1, "--remat", "offload"),
        ("qwen3-30b-a3b", 32768, 1, "--remat", "all"),
        ("gpt-oss-20b", 262144, 1, "--remat", "offload"),
        ("gpt-oss-20b", 131072, 1, "--remat", "all"),
        ("qwen3.5-35b-a3b", 131072, 1, "--remat", "offload"),
        ("gpt-oss-120b", SEQUENCE, 1, "--remat", "all", "--targets", *ATTENTION),
        ("gpt-oss-120b", SEQUENCE, 1, "--remat", "all", "--lora-rank", "8"),
    ):
        name = f"finetune {model} {stored[model]} {batch} x {length} {' '.join(options)}"
        own = "--batch-size", str(batch), "--sequence-length", str(length), *options
        jobs[name] = Job(fine_tuning, model, stored[model], options=own)
    usual = (model for model in CONFIGS if model != "gpt-oss-120b")
    jobs |= {f"finetune {model} {stored[model]}": Job(fine_tuning, model, stored[model]) for model in usual}
    jobs["finetune qwen3-30b-a3b mxfp4"] = Job(fine_tuning, "qwen3-30b-a3b", "mxfp4", options=("--remat", "all"))
    return jobs | {"train qwen3-30b-a3b 8 layers": Job(training, "qwen3-30b-a3b", layers=8)}


JOBS = _jobs()
