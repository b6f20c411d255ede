"""Trains the demo's model and measures it: bits per byte, speed, load of the experts."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jgg.cli.console import progress
from jgg.cli.demo import Settings
from jgg.cli.demo.data import held_out_windows, load_corpus
from jgg.cli.demo.model import make_model, measure, sample, save
from jgg.cli.errors import UsageError
from jgg.models import Decoder
from jgg.train import Trainer, TrainingError

_LOG_EVERY = 10  # steps; the host waits for the device no more often
_MEASUREMENTS = 8
_PEAK_RATE = 3e-3
_BALANCE_WEIGHT = 0.1
_PROMPT = b"The "
_SAMPLE_BYTES = 400


@dataclasses.dataclass
class Result:
    """The measurements of a run, filled in as training goes on.

    Attributes:
      settings: options of the run.
      implementation: grouped GEMM's implementation, as found in the model's program.
      train_bytes, held_out_bytes: sizes of the two texts.
      parameters: number of parameters of the model.
      active_parameters: number of parameters that act on one byte; of the experts, only topk count.
      train: step, bits_per_byte and tokens_per_second (a token is a byte) of every few steps.
      held_out: step and bits_per_byte of each measurement of the whole held-out text.
      expert_load: fraction of the rows that each expert of each layer got in the last few steps.
      train_seconds: time in steps of training, without compilation and measurements.
      sample: text that the model wrote.
      interrupted: whether an interrupt from the keyboard ended the run early.
    """

    settings: Settings
    implementation: str
    train_bytes: int
    held_out_bytes: int
    parameters: int
    active_parameters: int
    train: list[dict] = dataclasses.field(default_factory=list)
    held_out: list[dict] = dataclasses.field(default_factory=list)
    expert_load: list[list[float]] = dataclasses.field(default_factory=list)
    train_seconds: float = 0.0
    sample: str = ""
    interrupted: bool = False


class Demo:
    """A model, its optimizer and its text, ready to run.

    Attributes:
      result: only what is known before training; `run` fills in the rest.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        corpus = load_corpus()
        if settings.seq >= len(corpus.held_out):
            raise UsageError(f"--seq must be less than {len(corpus.held_out)}, the held-out bytes")
        init_key, data_key, self._sample_key = jax.random.split(jax.random.key(settings.seed), 3)
        model = make_model(settings, nnx.Rngs(init_key))
        parameters = _count_parameters(model, settings)
        self._trainer, self._batch_of = make_trainer(model, _make_optimizer(settings), settings, corpus.train, data_key)
        self._held_out = held_out_windows(corpus.held_out, settings.seq, settings.batch)
        implementation = implementation_in(jax.jit(measure).lower(model, self._held_out[0][0]).as_text())
        self.result = Result(settings, implementation, len(corpus.train), len(corpus.held_out), *parameters)

    def run(self) -> Result:
        """Trains, measures and samples; an interrupt from the keyboard ends it early."""
        try:
            self._fit()
            text = sample(self._trainer.model, self._sample_key, _PROMPT, _SAMPLE_BYTES, self.settings.temperature)
            self.result.sample = text.decode(errors="replace")
        except KeyboardInterrupt:
            self.result.interrupted = True
        except TrainingError as error:
            raise SystemExit(f"jgg: {error}") from error
        return self.result

    def save(self, folder: Path) -> Path:
        """Writes the model and its tokenizer into a new or empty folder."""
        return save(self._trainer.model, folder)

    def _fit(self):
        steps = self.settings.steps
        measure_every = -(-steps // _MEASUREMENTS)
        with progress(steps, self.settings.quiet) as tell:
            tell("compiling")
            for record in self._trainer.fit(self._batch_of, steps, every=(_LOG_EVERY, measure_every)):
                bits, speed = record.metrics["bits_per_byte"], record.speed.tokens_per_second
                group_sizes = record.metrics["group_sizes"].sum(axis=0)
                point = {"step": record.step, "bits_per_byte": float(np.mean(bits)), "tokens_per_second": speed}
                self.result.train.append(point)
                self.result.train_seconds += record.speed.seconds
                self.result.expert_load = (group_sizes / group_sizes.sum(axis=1, keepdims=True)).tolist()
                if record.step % measure_every == 0 or record.step == steps:
                    held_out = held_out_bits(self._trainer.model, *self._held_out).item()
                    self.result.held_out.append({"step": record.step, "bits_per_byte": held_out})
                tell(progress_line(self.result), len(bits))


def make_trainer(model: Decoder, optimizer: optax.GradientTransformation, settings: Settings, text: np.ndarray, key):
    """The trainer of a model, and the function that makes the batch of a step.

    A step draws its windows from the text, uint8 [bytes], on the device, so that the host only starts steps. It
    measures bits_per_byte float32 [] and group_sizes int32 [layers, E] before its update.
    """

    def loss(model, batch):
        text, step = batch
        last_start = text.shape[0] - settings.seq - 1
        starts = jax.random.randint(jax.random.fold_in(key, step), (settings.batch, 1), 0, last_start + 1)
        measured = measure(model, text[starts + jnp.arange(settings.seq + 1)[None, :]])
        bits_per_byte = jnp.mean(measured.bits)
        metrics = {"bits_per_byte": bits_per_byte, "group_sizes": measured.group_sizes}
        return bits_per_byte + _BALANCE_WEIGHT * measured.imbalance, metrics

    text, lengths = jax.device_put(text), np.full(settings.batch, settings.seq)
    return Trainer(model, optimizer, loss, lengths_of=lambda _: lengths), lambda step: (text, np.int32(step - 1))


@jax.jit
def held_out_bits(model: Decoder, windows: jax.Array, is_real: jax.Array) -> jax.Array:
    """Bits per byte of a whole text, in windows as `held_out_windows` returns them."""
    graphdef, state = nnx.split(model)

    def batch_bits(batch):
        windows, is_real = batch
        bits = measure(nnx.merge(graphdef, state), windows).bits  # a module cannot be changed by a nested trace
        return jnp.sum(jnp.where(is_real, bits, 0))

    bits = jnp.sum(jax.lax.map(batch_bits, (windows, is_real)))
    return bits / jnp.sum(is_real, dtype=jnp.float32)


def implementation_in(program: str) -> str:
    """Which implementation of grouped GEMM a lowered program contains."""
    if "triton_kernel_call" in program:
        return "triton"
    return "interpret" if "python_cpu_callback" in program else "xla"


def progress_line(result: Result) -> str:
    """The last measurements in one line."""
    last = result.train[-1]
    loads = np.concatenate(result.expert_load)
    held_out = f" (held out {result.held_out[-1]['bits_per_byte']:.2f})" if result.held_out else ""
    return (
        f"{last['bits_per_byte']:.2f} bits/byte{held_out}, {last['tokens_per_second']:,.0f} tokens/s,"
        f" expert load {loads.min():.0%} to {loads.max():.0%}"
    )


def _make_optimizer(settings):
    """AdamW with a warm-up and a cosine decay of the rate; the scales of norms have no weight decay."""
    warmup = max(settings.steps // 10, 1)
    decay_end = max(settings.steps, warmup + 1)
    rate = optax.warmup_cosine_decay_schedule(0.0, _PEAK_RATE, warmup, decay_end, end_value=_PEAK_RATE / 20)

    def is_matrix(params):
        return jax.tree.map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), params)

    adamw = optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def _count_parameters(model, settings):
    """Counts all parameters, and the parameters that act on one byte."""
    total = sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    experts = model.layers.moe.w_gate_up.size + model.layers.moe.w_down.size
    return total, total - experts * (settings.experts - settings.topk) // settings.experts
