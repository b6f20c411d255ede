"""Measures how fast a model trains: tokens per second, model FLOPs utilization (MFU) and memory."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from jgg.core.mixers import MixerConfig
from jgg.models import Decoder

PEAK_FLOPS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12}  # dense bfloat16, by the beginning of a device's name


class Speed(NamedTuple):
    """The speed of some steps; `str` writes it in words.

    Attributes:
      tokens: number of tokens in these steps' sequences.
      seconds: time that the steps took.
      mfu: model FLOPs utilization, the FLOPs that the model needs as a fraction of the devices' bfloat16 peak; None if
        the peak is unknown. Each token counts, per parameter of a matrix that acts on it (top-k of the experts), 2
        FLOPs for the forward pass, 2 for the gradient of x and, if the matrix is trained, 2 for the matrix's gradient.
        Attention counts 12 per feature of the heads and per token attended to. Rematerialization does not count
        (Chowdhery et al., PaLM, 2022, appendix B).
      peak_memory: most bytes in use on the first device since the process began; None if unknown.
    """

    tokens: int
    seconds: float
    mfu: float | None
    peak_memory: int | None

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, on all devices together."""
        return self.tokens / self.seconds

    def __str__(self) -> str:
        mfu = "unknown" if self.mfu is None else f"{self.mfu:.1%}"
        memory = "unknown" if self.peak_memory is None else f"{self.peak_memory / 2**30:.1f} GiB"
        return f"{self.tokens_per_second:,.0f} tokens/s, MFU {mfu}, peak memory {memory}"


class Meter:
    """Counts the tokens, the FLOPs and the time of the steps that train the variables of type `wrt` of a model."""

    def __init__(self, model: nnx.Module, wrt: type[nnx.Variable[jax.Array]]) -> None:
        self.num_devices = len(jax.tree.leaves(nnx.state(model, wrt))[0].sharding.device_set)
        self.mixers: Sequence[MixerConfig] = ()
        self.flops_per_token = 0.0
        if isinstance(model, Decoder):
            self.mixers = model.config.mixers
            of_mixers = 3.0 * sum(mixer.flops_per_token for mixer in self.mixers)
            self.flops_per_token = _flops_per_token(model, wrt) + of_mixers
        self.restart()

    def restart(self) -> None:
        """Starts over."""
        self.tokens, self.flops, self.start = 0, 0.0, time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the time spent in the context."""
        begin = time.perf_counter()
        yield
        self.start += time.perf_counter() - begin

    def add(self, lengths: np.ndarray) -> None:
        """Counts a batch of sequences, by their lengths, integer [sequences]."""
        tokens = int(np.sum(lengths))
        self.tokens += tokens
        self.flops += tokens * self.flops_per_token
        for mixer in self.mixers:
            # the backward pass has twice as many
            self.flops += 3.0 * mixer.flops_per_pair * float(np.sum(mixer.pairs(lengths)))

    def read(self) -> Speed:
        """The speed since the last restart."""
        seconds, device = time.perf_counter() - self.start, jax.local_devices()[0]
        peak = next((flops for name, flops in PEAK_FLOPS.items() if device.device_kind.startswith(name)), None)
        mfu = self.flops / (seconds * peak * self.num_devices) if peak and self.flops else None
        return Speed(self.tokens, seconds, mfu, (device.memory_stats() or {}).get("peak_bytes_in_use"))


def _flops_per_token(model: Decoder, wrt: type[nnx.Variable[jax.Array]]) -> float:
    """FLOPs of all products for one token, excluding attention."""

    def flops(matrix: nnx.Variable[jax.Array]) -> float:
        """FLOPs for each parameter."""
        return 6.0 if isinstance(matrix, wrt) else 4.0

    config = model.config
    total = flops(model.w_embedding if config.is_tied else model.w_head) * config.features * config.vocabulary
    for path, matrix in nnx.to_flat_state(nnx.state(model)):
        name = str(path[-1])
        if name.startswith("w_") and name not in ("w_embedding", "w_head"):
            is_of_experts = "moe" in path and name.startswith(("w_gate_up", "w_down"))
            share = config.moe.topk / config.moe.num_experts if is_of_experts else 1.0
            total += flops(matrix) * share * math.prod(matrix.get_value().shape)
    return total
