"""Trains a model: the optimizer, the loop, its log, its lines and what is held out."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import optax
from flax import nnx

import jgg.optim
import jgg.train
from jgg.cli.console import progress
from jgg.cli.errors import TERMINATED, UsageError, enough_memory
from jgg.cli.training import devices, folders
from jgg.cli.training.data import counted, data_of
from jgg.core.quantized import count_numbers
from jgg.data import lengths_of
from jgg.experts.sharding import MoESharding
from jgg.models import Decoder, ModelConfig
from jgg.train.losses import Batch, perplexity_of
from jgg.train.steps import Loss, Optimizer

_B2 = 0.95  # of AdamW
_CLIP = 1.0  # norm of all gradients
_RMS = 0.2  # of Muon's updates, as of AdamW's, so that its rates fit


def say(args, text: str) -> None:
    """Prints a line, of several processes in the first alone."""
    if not args.quiet and is_first():
        print(text, flush=True)


def is_first() -> bool:
    """Whether this is the process that writes files."""
    return jax.process_index() == 0


def schedule_of(args, steps: int) -> optax.Schedule:
    """The rate of each step: it rises from a first part, not from 0, so that the first step learns too, and falls."""
    rate, warmup = args.learning_rate, args.warmup or max(1, steps // 20)
    return optax.warmup_cosine_decay_schedule(rate / warmup, rate, warmup, max(steps, warmup + 1))


def optimizer_of(args, schedule: optax.Schedule, shardings: object = None) -> optax.GradientTransformation:
    """AdamW or Muon behind a bound of the gradients' norm, with states in float32 or in 8 bits.

    Biases and the scales of norms have no weight decay.

    Args:
      shardings: where the parameters are on a mesh; None for one device.
    """
    optimizer = _muon(args, schedule, shardings) if args.optimizer == "muon" else _adamw(args, schedule)
    return optax.chain(optax.clip_by_global_norm(_CLIP), optimizer)


def _adamw(args, schedule: optax.Schedule, nesterov: bool = False) -> optax.GradientTransformation:
    own = optax.adamw(schedule, b2=_B2, weight_decay=args.weight_decay, mask=_is_matrix, nesterov=nesterov)
    return jgg.optim.states_in_8_bits(own) if _are_small(args) else own


def _muon(args, schedule: optax.Schedule, shardings: object = None) -> optax.GradientTransformation:
    dtype = "bfloat16" if _are_small(args) else None  # Muon writes out a parameter's new momentum
    updates = jgg.optim.muon(1.0, consistent_rms=_RMS, adam_b2=_B2, mu_dtype=dtype, shardings=shardings)
    decay = optax.add_decayed_weights(-args.weight_decay, _is_matrix)  # updates are negative here
    own = optax.chain(updates, decay, optax.scale_by_schedule(schedule))
    return jgg.optim.states_in_8_bits(own) if _are_small(args) else own


def _are_small(args) -> bool:
    """Whether states are in 8 bits."""
    are_small: bool = args.optimizer_states == "8bit"
    return are_small


def _is_matrix(params: object) -> object:
    return jax.tree.map_with_path(
        lambda path, _: any(str(getattr(key, "key", "")).startswith("w_") for key in path), params
    )


def optimizer_for(
    args, schedule: optax.Schedule, wrt: type[nnx.Variable[jax.Array]], shardings: object = None
) -> Optimizer:
    """`optimizer_of` for variables of a type: parameters of 16 bits, which adapters are not, have float32 masters.

    With --optimizer-in-backward, the norm of the step before is bounded, and parameters of 16 bits have no masters but
    are rounded stochastically.
    """
    if args.optimizer_in_backward:
        is_muon = args.optimizer == "muon"  # which there is none of outside layers
        own = _muon(args, schedule) if is_muon else _adamw(args, schedule)
        others = _adamw(args, schedule, nesterov=is_muon)
        return jgg.train.OptimizerInBackward(own, others=others, max_norm=_CLIP)
    optimizer = optimizer_of(args, schedule, shardings)
    return jgg.train.float32_masters(optimizer) if wrt is nnx.Param else optimizer


def check_in_backward(args) -> None:
    """Raises UsageError if --optimizer-in-backward stands with options that it does not fit."""
    if not args.optimizer_in_backward:
        return
    name = "--optimizer-in-backward"
    if args.remat not in ("all", "offload"):
        raise UsageError(f"{name} needs --remat all or offload, got {args.remat}")
    if args.accumulate > 1:
        raise UsageError(f"{name} needs --accumulate 1, got {args.accumulate}: gradients are not kept to be added up")
    if jax.device_count() > 1:
        raise UsageError(
            f"{name} needs one device, got {jax.device_count()}: let it see one, such as by CUDA_VISIBLE_DEVICES"
        )


def loss_of(args, config: ModelConfig) -> Loss[dict[str, jax.Array]]:
    """The loss of a run that learns the next tokens of texts."""
    return jgg.train.next_token_loss(packed=args.packing, balance_weight=jgg.train.balance_weight(config))


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run has before there is a model; its methods are those of a run that learns the next tokens of texts.

    Attributes:
      args: the options, settled.
      sharding: how the devices split the model; None for one device.
      data: what is learned, and what is held out.
      steps: number of the last step.
      schedule: the rate of each step, from 0.
      log: where measurements go.
      noted: what is noted about the run in addition to its options.
      less_memory: options that take less memory.
    """

    args: Any
    sharding: MoESharding | None
    data: Any
    steps: int
    schedule: optax.Schedule
    log: jgg.train.Log
    noted: Mapping[str, object]
    less_memory: ClassVar[str] = "--batch-size or --sequence-length, or more of --remat"

    def loss_of(self, config: ModelConfig) -> Loss[dict[str, jax.Array]]:
        """The loss of a Trainer."""
        return loss_of(self.args, config)

    def batch_of(self, trainer: jgg.train.Trainer, step: int) -> Batch:
        """The batch of a step."""
        return self.data.batches.of_step(step)

    def lengths_of(self, batch: Batch) -> np.ndarray:
        """The lengths of the sequences in a batch."""
        return lengths_of(batch)

    def measured(self, record: jgg.train.Record, trainer: jgg.train.Trainer) -> dict[str, float | None]:
        """What a record says, by the names of the log, and now and then the loss of what is held out."""
        speed, data, args = record.speed, self.data, self.args
        values = {
            "loss": float(np.mean(record.metrics["loss"])),
            "learning_rate": self.rate(record),
            "epoch": record.step * args.batch_size * args.accumulate / data.batches.num_sequences,
            "expert_load": float(np.max(record.metrics["load"][-1])),
            "expert_overflow": float(np.sum(record.metrics["overflow"][-1])),
            "tokens_per_second": speed.tokens_per_second,
            "mfu": speed.mfu,
            "peak_memory_bytes": speed.peak_memory,
            **data.skipped,
        }
        if self.evaluates(record):
            place = None if self.sharding is None else self.sharding.named(self.sharding.token_spec)
            loss = jgg.train.held_out_loss(
                trainer.model, iter(data.held_out), packed=args.packing, batch_sharding=place
            )
            values |= {"eval_loss": loss, "eval_perplexity": perplexity_of(loss)}
        return values

    def rate(self, record: jgg.train.Record) -> float:
        """The rate of a record's last step."""
        return float(np.asarray(self.schedule(record.step - 1)))

    def evaluates(self, record: jgg.train.Record) -> bool:
        """Whether what is held out is measured at a record."""
        return bool(self.data.held_out) and (record.step % self.args.eval_every == 0 or record.step == self.steps)

    def in_words(self, record: jgg.train.Record, values: dict[str, float | None]) -> str:
        """What a step measured, in one line."""
        line = f"step {record.step}: loss {values['loss']:.4f}, {record.speed}"
        if "eval_loss" in values:
            line += f", held out: loss {values['eval_loss']:.4f}, perplexity {values['eval_perplexity']:.2f}"
        return line


def prepare(args, tokenizer: Path, model: Path, config: ModelConfig) -> Run:
    """Settles options and reads the data; what can be wrong is looked at here.

    Raises: UsageError, OSError, ValueError, ImportError: something is wrong.
    """
    jgg.train.balance_weight(config)
    sharding = devices.sharding_of(args, config.moe.num_experts)
    data = data_of(args, tokenizer, model, config)
    return Run(args, sharding, data, *begun(args, data, data.steps(args), data.batches.digest))


def begun(args, data: Any, steps: int, digest: str) -> tuple[int, optax.Schedule, jgg.train.Log, dict[str, object]]:
    """Says what is learned; returns the last attributes of a Run, from the steps on.

    Raises: UsageError, OSError, ValueError, ImportError: the folder of the checkpoints or a tracker is wrong.
    """
    noted = folders.noted_of(steps, digest, data.date)
    folders.check_same(args, noted)
    say(args, f"{data.in_words()}, for {counted(steps, 'step')}")
    settings = {name: str(value) for name, value in args.noted().items()} | {"total_steps": steps}
    trackers = args.log_to if args.log_to and is_first() else ()
    log = jgg.train.Log(folders.beside(args.output, ".jsonl"), trackers=trackers, settings=settings)
    return steps, schedule_of(args, steps), log, noted


def fit(run: Run, model: Decoder, wrt: type[nnx.Variable[jax.Array]]) -> tuple[Decoder, int]:
    """Trains the variables of a type, from the last checkpoint on, and tells what is measured.

    Returns: the model, and the exit code: 1 if the log or the checkpoint of the last step could not be written.
    """
    args, steps, last = run.args, run.steps, 0
    with enough_memory(run.less_memory):
        trainer = trainer_of(run, model, wrt)
        try:
            for last in _told_steps(run, trainer):  # noqa: B007
                pass
        except (jgg.train.TrainingError, OSError) as error:
            if isinstance(error, OSError):
                message = f"jgg: could not write {run.log.path}: {error.strerror or error}"
            else:
                last, message = error.step or last, f"jgg: {error}"
            if last < steps:
                raise SystemExit(message) from error
            print(message, file=sys.stderr)  # what was learned can still be saved
            return trainer.model, 1
        except jgg.train.Preempted as stopped:
            if is_first():
                print(f"jgg: {stopped}; run the same command again to go on", file=sys.stderr)
            raise SystemExit(TERMINATED) from stopped
        if last == 0:
            folders.note(args, run.noted)
            say(args, f"--checkpoints {args.checkpoints} has all {steps} steps already")
        return trainer.model, 0


def _told_steps(run: Run, trainer: jgg.train.Trainer) -> Iterator[int]:
    """Trains, and yields the number of each step with a record before it writes what was measured.

    Raises: TrainingError, Preempted: see `Trainer.fit`. OSError: the log cannot be written.
    """
    args, done, is_quiet = run.args, 0, run.args.quiet or not is_first()
    with (
        run.log as log,
        progress(run.steps, is_quiet) as tell,
        contextlib.closing(records(run, trainer)) as found,
    ):
        for record in found:
            yield record.step
            if done == 0:
                folders.note(args, run.noted)  # now that the checkpoints are this run's alone
                if record.step > 1:
                    say(args, f"goes on from step {record.step - 1}, which --checkpoints {args.checkpoints} has")
            values = run.measured(record, trainer)
            words = run.in_words(record, values)
            say(args, words)
            if is_first():
                log.write(record.step, values)
            tell(words.split(", ")[0].partition(": ")[2], record.step - done)
            done = record.step


def records(run: Run, trainer: jgg.train.Trainer) -> Generator[jgg.train.Record, None, None]:
    """Trains; yields the record of each step that is measured, see `Trainer.fit`."""
    args = run.args
    every = {args.log_every, args.eval_every} if run.data.held_out else {args.log_every}
    saving = {"checkpoints": args.checkpoints, "save_every": args.save_every}
    yield from trainer.fit(functools.partial(run.batch_of, trainer), run.steps, every=every, first=True, **saving)


def trainer_of(run: Run, model: Decoder, wrt: type[nnx.Variable[jax.Array]]) -> jgg.train.Trainer:
    """What trains the variables of a type."""
    args, sharding = run.args, run.sharding
    shardings = None if sharding is None else jax.tree.map(lambda p: p.sharding, nnx.state(model, wrt))
    optimizer = optimizer_for(args, run.schedule, wrt, shardings)
    trained, total = (count_numbers(nnx.state(model, kind)) for kind in (wrt, nnx.Variable))
    say(args, f"{trained:,} of {total:,} parameters are trained on {devices.in_words(args, sharding)}")
    return jgg.train.Trainer(
        model,
        optimizer,
        run.loss_of(model.config),
        wrt=wrt,
        accumulate=True,
        lengths_of=run.lengths_of,
        batch_sharding=None if sharding is None else sharding.named(jax.P(None, *sharding.token_spec)),
    )
