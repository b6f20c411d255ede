"""Trains the demo's model and measures it: bits per byte, speed, load of the experts."""

import dataclasses
import functools
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jgg.cli.console import progress
from jgg.cli.demo import Settings
from jgg.cli.demo.data import held_out_windows, load_corpus
from jgg.cli.demo.model import make_model, measure, sample, save
from jgg.cli.options import UsageError
from jgg.models import Decoder

_LOG_EVERY = 10  # steps; the host waits for the device no more often
_MEASUREMENTS = 8
_PEAK_RATE = 3e-3
_BALANCE_WEIGHT = 0.1
_PROMPT = b"The "
_SAMPLE_BYTES = 400


class TrainState(NamedTuple):
    """The state that a step of training takes and replaces; its buffers are donated."""

    params: optax.Params
    opt_state: optax.OptState
    step: jax.Array


class Metrics(NamedTuple):
    """What a step measures before its update: bits_per_byte float32 [], and group_sizes int32 [layers, E]."""

    bits_per_byte: jax.Array
    group_sizes: jax.Array


@dataclasses.dataclass
class Result:
    """The measurements of a run, filled in as training goes on.

    Attributes:
      settings: options of the run.
      implementation: grouped GEMM's implementation, as found in the compiled step.
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


class Trainer:
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
        self._graphdef, params = nnx.split(model)
        optimizer = _make_optimizer(settings)
        self._state = TrainState(params, optimizer.init(params), jnp.int32(0))
        self._text = jax.device_put(corpus.train)
        self._held_out = held_out_windows(corpus.held_out, settings.seq, settings.batch)
        self._evaluate = make_evaluate(self._graphdef)
        step = make_step(self._graphdef, optimizer, settings, data_key)
        self._lowered_step = step.lower(self._state, self._text)
        implementation = implementation_in(self._lowered_step.as_text())
        self.result = Result(settings, implementation, len(corpus.train), len(corpus.held_out), *parameters)

    def run(self) -> Result:
        """Trains, measures and samples; an interrupt from the keyboard ends it early."""
        try:
            self._fit()
            text = sample(self.model, self._sample_key, _PROMPT, _SAMPLE_BYTES, self.settings.temperature)
            self.result.sample = text.decode(errors="replace")
        except KeyboardInterrupt:
            self.result.interrupted = True
        return self.result

    @property
    def model(self) -> Decoder:
        """The model with the weights that it has learned so far."""
        return nnx.merge(self._graphdef, self._state.params)

    def save(self, folder: Path) -> None:
        """Writes the model and its tokenizer into a new or empty folder."""
        save(self.model, folder)

    def _fit(self):
        steps = self.settings.steps
        measure_every = -(-steps // _MEASUREMENTS)
        pending = []
        with progress(steps, self.settings.quiet) as tell:
            tell("compiling")
            step = self._lowered_step.compile()
            tell("training")
            start = time.perf_counter()
            for n in range(1, steps + 1):
                self._state, metrics = step(self._state, self._text)
                pending.append(metrics)
                is_measured = n % measure_every == 0 or n == steps
                if n % _LOG_EVERY == 0 or is_measured:
                    self._log(n, jax.device_get(pending), time.perf_counter() - start)
                    if is_measured:
                        self._measure(n)
                    tell(progress_line(self.result), len(pending))
                    pending.clear()
                    start = time.perf_counter()

    def _log(self, step, metrics, seconds):
        """Records the metrics of the last few steps, which together took `seconds`."""
        group_sizes = np.sum([m.group_sizes for m in metrics], axis=0)
        tokens = len(metrics) * self.settings.batch * self.settings.seq
        self.result.train_seconds += seconds
        self.result.expert_load = (group_sizes / group_sizes.sum(axis=1, keepdims=True)).tolist()
        bits_per_byte = float(np.mean([m.bits_per_byte for m in metrics]))
        self.result.train.append({"step": step, "bits_per_byte": bits_per_byte, "tokens_per_second": tokens / seconds})

    def _measure(self, step):
        bits_per_byte = self._evaluate(self._state.params, *self._held_out).item()
        self.result.held_out.append({"step": step, "bits_per_byte": bits_per_byte})


def make_step(graphdef, optimizer, settings: Settings, key):
    """The jitted step of training: (state, text uint8 [bytes]) -> (state, metrics).

    It draws its windows from the text on the device, so that the host only starts steps.
    """

    def loss(params, windows):
        measured = measure(graphdef, params, windows)
        bits_per_byte = jnp.mean(measured.bits)
        penalty = _BALANCE_WEIGHT * measured.imbalance
        return bits_per_byte + penalty, Metrics(bits_per_byte, measured.group_sizes)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, text):
        draw = jax.random.fold_in(key, state.step)
        last_start = text.shape[0] - settings.seq - 1
        starts = jax.random.randint(draw, (settings.batch, 1), 0, last_start + 1)
        windows = text[starts + jnp.arange(settings.seq + 1)[None, :]]
        gradients, metrics = jax.grad(loss, has_aux=True)(state.params, windows)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.step + 1), metrics

    return step


def make_evaluate(graphdef):
    """The jitted measurement: (params, windows, is_real) -> bits per byte of the whole text.

    `windows` and `is_real` are as `held_out_windows` returns them.
    """

    @jax.jit
    def evaluate(params, windows, is_real):
        def batch_bits(batch):
            windows, is_real = batch
            bits = measure(graphdef, params, windows).bits
            return jnp.sum(jnp.where(is_real, bits, 0))

        bits = jnp.sum(jax.lax.map(batch_bits, (windows, is_real)))
        return bits / jnp.sum(is_real, dtype=jnp.float32)

    return evaluate


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
