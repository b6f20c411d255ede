"""Runs `jgg grpo`: teaches a model of a Hugging Face folder by rewards of its answers."""

import dataclasses
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np

import jgg.data
import jgg.train
from jgg.cli.errors import UsageError
from jgg.cli.grpo.prompts import Data, read_prompts
from jgg.cli.grpo.rewards import Reward
from jgg.cli.grpo.rollouts import Sampler
from jgg.cli.training import devices, finetune, folders, loop
from jgg.models import ModelConfig
from jgg.models.decoder_stacks import as_cache_dtype
from jgg.train.grpo import Batch
from jgg.train.steps import Loss


def run(args) -> int:
    """Trains and saves; what can be wrong is looked at before the model is loaded."""
    _check(args)
    args.learning_rate = args.learning_rate or (1e-6 if args.full else 1e-4)
    of_model = {"dtype": np.dtype(args.dtype), "batch_invariant": args.batch_invariant}
    return finetune.train(args, lambda folder, config: _prepare(args, folder, config), **of_model)


def _check(args) -> None:
    """Raises UsageError for options that do not fit together."""
    answers = args.problems * args.samples
    if answers % args.accumulate:
        raise UsageError(f"--accumulate must divide --problems times --samples, {answers}, got {args.accumulate}")
    if args.rows is not None and args.rows < args.samples:
        raise UsageError(f"--rows must be at least --samples, {args.samples}, got {args.rows}")
    if args.delta is not None and args.delta <= 1 + args.clip[1]:
        raise UsageError(f"--delta must be above 1 + HIGH of --clip, {1 + args.clip[1]:g}, got {args.delta:g}")
    if args.cache_dtype is not None and args.batch_invariant:
        raise UsageError(
            "--cache-dtype must be left out with --batch-invariant: the trainer does not round keys and values, "
            f"got {args.cache_dtype}"
        )
    if args.full and args.kl:
        raise UsageError("--kl needs adapters: with --full there is no model without them")


def _prepare(args, folder: Path, config: ModelConfig) -> "_Run":
    """Settles options, reads the prompts and the reward function."""
    if args.cache_dtype is not None:
        as_cache_dtype(args.cache_dtype, config)
    sharding = devices.split_of(args, config.moe.num_experts)
    rows = args.problems * args.samples // args.accumulate
    split = 1 if sharding is None else sharding.size(*sharding.token_axes)
    if rows % split:
        raise UsageError(
            f"--problems times --samples over --accumulate must be a multiple of the {split} devices, got {rows}"
        )
    tokenizer, date = jgg.data.load_tokenizer(folder), folders.first_day(args)
    most = args.max_prompt_tokens
    learned = read_prompts("--prompts", args.prompts, tokenizer, config, most, date)
    held_out = None
    if args.eval_prompts is not None:
        held_out = read_prompts("--eval-prompts", args.eval_prompts, tokenizer, config, most, date)
    data = Data(learned, held_out, jgg.data.stop_tokens(folder), date)
    reward = Reward(args.reward, data.columns)
    reward.check_rows("--prompts", learned)
    if held_out is not None:
        reward.check_rows("--eval-prompts", held_out)
    sampler = Sampler(args, data, tokenizer, reward)
    return _Run(args, sharding, data, *loop.begun(args, data, data.steps(args), learned.digest), sampler=sampler)


@dataclasses.dataclass(frozen=True)
class _Run(loop.Run):
    """A run that learns from rewards."""

    less_memory: ClassVar[str] = "--problems, --samples, --max-new-tokens or --lora-rank, or more of --accumulate"
    sampler: Sampler

    def loss_of(self, config: ModelConfig) -> Loss[dict[str, jax.Array]]:
        """The loss of a Trainer."""
        args = self.args
        names = "temperature", "delta", "importance", "kl", "kl_estimator"
        return jgg.train.grpo.loss_of(clip=tuple(args.clip), **{name: getattr(args, name) for name in names})

    def batch_of(self, trainer: jgg.train.Trainer, step: int) -> Batch:
        """The batch of a step, drawn with the model as it is then."""
        return self.sampler.batch_of(trainer.model, step)

    def lengths_of(self, batch: Batch) -> np.ndarray:
        """None, as model FLOPs utilization says nothing where most of the time is sampling."""
        return np.zeros(0, int)

    def measured(self, record: jgg.train.Record, trainer: jgg.train.Trainer) -> dict[str, float | None]:
        """What a record says, by the names of the log."""
        found, told, args = record.metrics, self.sampler.take_told(), self.args
        tokens, steps = float(np.sum(found["tokens"])), len(found["tokens"])
        sums = {name: float(np.sum(found[name])) / tokens for name in ("clipped", "kl", "entropy") if name in found}
        is_first = np.arange(record.step - steps, record.step) % args.updates == 0
        learning = (record.speed.seconds - told.pop("timed_seconds")) / steps
        seconds = told["sampling_seconds"] + args.updates * learning
        values: dict[str, float | None] = {
            **told,
            **sums,
            # later updates are of another model than the one that drew the batch
            "largest_difference": float(np.max(found["differences"][is_first])) if is_first.any() else None,
            "learning_rate": self.rate(record),
            "epoch": -(-record.step // args.updates) * args.problems / len(self.data.learned.prompts),
            "learning_seconds": learning,
            "tokens_per_second": args.problems * args.samples * told["answer_tokens"] / seconds,
            "peak_memory_bytes": record.speed.peak_memory,
        }
        if self.evaluates(record):
            values["eval_reward"] = self.sampler.held_out_reward(trainer.model)
        return values

    def in_words(self, record: jgg.train.Record, values: dict[str, float | None]) -> str:
        """What a step measured, in one line."""
        line = (
            f"step {record.step}: reward {values['reward']:.3f}, {values['answer_tokens']:.1f} tokens, "
            f"entropy {values['entropy']:.3f}, {values['equal_rewards']:.0%} of prompts with equal rewards, "
            f"{values['sampling_seconds']:.2f} s of sampling, {values['learning_seconds']:.2f} s of learning"
        )
        if values["largest_difference"] is not None:
            line += f", sampler and trainer differ by up to {values['largest_difference']:.3g}"
        if "eval_reward" in values:
            line += f", held out: reward {values['eval_reward']:.3f}"
        return line
