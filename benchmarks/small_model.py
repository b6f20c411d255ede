"""A small language model over the bytes of `jgg demo`'s text, for comparisons that train it: its trainer, its loss.

Windows are drawn on the device, so that steps take no longer than the model does.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgg
import jgg.models
from jgg.cli.demo.model import config_of
from jgg.cli.demo.preset import load_texts
from jgg.models import Decoder
from jgg.train import Trainer

_BALANCE_WEIGHT = 0.1


class Corpus(NamedTuple):
    """Bytes to train on and bytes to measure on, both uint8 [bytes]."""

    train: np.ndarray
    held_out: np.ndarray


def load_corpus() -> Corpus:
    """The text of the demo."""
    return Corpus(*(np.frombuffer("\n\n".join(texts).encode(), np.uint8) for texts in load_texts()))


@dataclasses.dataclass(frozen=True)
class Settings:
    """The sizes of the model and of a step."""

    steps: int
    batch: int
    seq: int
    hidden: int
    layers: int
    experts: int
    topk: int
    seed: int
    implementation: str | None
    dtype: str
    fp8: bool


def make_model(settings: Settings, rngs: nnx.Rngs) -> Decoder:
    """Makes the model; at first all bytes are equally likely to it."""
    model = Decoder(
        jgg.models.model_config(config_of(settings)),
        dtype=settings.dtype,
        unroll=settings.layers,
        quantization=jgg.Fp8() if settings.fp8 else None,
        implementation=settings.implementation,
        rngs=rngs,
    )
    model.w_head[...] = jnp.zeros_like(model.w_head[...])
    return model


class Measured(NamedTuple):
    """How well a model predicts windows of text, and how it loads its experts.

    Attributes:
      bits: float32 [B, S], bits that each byte costs.
      group_sizes: int32 [layers, E], rows that each expert got.
      imbalance: float32 [], the layers' mean load-balancing loss: 1 where every router loads its experts evenly.
    """

    bits: jax.Array
    group_sizes: jax.Array
    imbalance: jax.Array


def measure(model: jgg.models.Decoder, windows: jax.Array) -> Measured:
    """Predicts the last S bytes of windows, uint8 [B, S + 1], each from the bytes before it."""
    losses, sown = nnx.capture(model.losses, nnx.Intermediate)(windows[:, :-1], windows[:, 1:])
    (group_sizes,), (imbalances,) = sown["group_sizes"], sown["load_balancing_loss"]
    return Measured(losses / math.log(2), group_sizes, jnp.mean(imbalances))


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


def held_out_windows(text: np.ndarray, seq: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts a text into windows such that every byte but the first is predicted exactly once.

    A window has seq + 1 bytes, and all but its first are predicted; the next window begins at its
    last byte.

    Args:
      text: uint8 [bytes], at least 2.
      seq: bytes that are predicted in a window.
      batch: windows in a batch.

    Returns: windows uint8 [batches, batch, seq + 1], and is_real bool [batches, batch, seq], False
      where a prediction only fills up the last batch.
    """
    targets = len(text) - 1
    count = -(-targets // (seq * batch)) * batch  # windows, the filling ones included
    positions = seq * np.arange(count)[:, None] + np.arange(seq + 1)
    windows = text[np.minimum(positions, targets)]
    is_real = positions[:, 1:] <= targets
    return windows.reshape(-1, batch, seq + 1), is_real.reshape(-1, batch, seq)
