"""The demo's language model over bytes: causal attention and MoE layers, in Flax NNX."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jgg.nnx
from jgg.cli.demo import HEAD_DIM, Settings

NUM_BYTES = 256


class Attention(nnx.Module):
    """Causal self-attention with rotary positions and normalized queries and keys."""

    def __init__(self, hidden: int, *, dtype, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(hidden, 3 * hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.q_norm = nnx.RMSNorm(HEAD_DIM, dtype=dtype, rngs=rngs)
        self.k_norm = nnx.RMSNorm(HEAD_DIM, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(hidden, hidden, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [B, S, H] to [B, S, H]; position s reads positions 0 to s."""
        heads = self.qkv(x).reshape(*x.shape[:2], -1, HEAD_DIM)
        q, k, v = jnp.split(heads, 3, axis=2)
        q, k = _rotate(self.q_norm(q)), _rotate(self.k_norm(k))
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of x [B, S, heads, HEAD_DIM].

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """
    half = HEAD_DIM // 2
    # windows are short: with a base of 500 rather than 10,000 the model learned faster
    frequencies = 500.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    positions = jnp.arange(x.shape[1], dtype=jnp.float32)
    angles = jnp.outer(positions, frequencies)[None, :, None]  # [1, S, 1, half]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Block(nnx.Module):
    """One layer: attention, then experts, each with a residual connection."""

    def __init__(self, settings: Settings, *, rngs: nnx.Rngs):
        hidden, dtype = settings.hidden, settings.dtype
        self.attention_norm = nnx.RMSNorm(hidden, dtype=dtype, rngs=rngs)
        self.attention = Attention(hidden, dtype=dtype, rngs=rngs)
        self.moe_norm = nnx.RMSNorm(hidden, dtype=dtype, rngs=rngs)
        self.moe = jgg.nnx.MoE(
            hidden, hidden, num_experts=settings.experts, topk=settings.topk, dtype=dtype,
            implementation=settings.implementation, quantization=settings.quantization, rngs=rngs,
        )  # fmt: skip

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [B, S, H] to [B, S, H]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x))


class LanguageModel(nnx.Module):
    """Gives the logits of each next byte."""

    def __init__(self, settings: Settings, *, rngs: nnx.Rngs):
        hidden, dtype = settings.hidden, settings.dtype
        self.embed = nnx.Embed(NUM_BYTES, hidden, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(settings, rngs=rngs) for _ in range(settings.layers)])
        self.norm = nnx.RMSNorm(hidden, dtype=dtype, rngs=rngs)
        # zeros make all bytes equally likely, so that training starts at 8 bits per byte
        zeros = nnx.initializers.zeros
        self.head = nnx.Linear(hidden, NUM_BYTES, use_bias=False, dtype=dtype, kernel_init=zeros, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        """Maps text uint8 [B, S] to float32 logits [B, S, 256] of the bytes that follow."""
        x = self.embed(text.astype(jnp.int32))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


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


def measure(graphdef, params, windows: jax.Array) -> Measured:
    """Predicts the last S bytes of windows, uint8 [B, S + 1], each from the bytes before it.

    `graphdef` and `params` are what `nnx.split` returns for a LanguageModel.
    """
    logits, sown = _forward(graphdef, params, windows[:, :-1])
    targets = windows[:, 1:, None].astype(jnp.int32)
    log_probabilities = jnp.take_along_axis(jax.nn.log_softmax(logits), targets, axis=2)[:, :, 0]
    layers = [sown["blocks"][layer]["moe"] for layer in sorted(sown["blocks"])]
    group_sizes, losses = (
        jnp.stack([layer[name][0] for layer in layers]) for name in ("group_sizes", "load_balancing_loss")
    )
    return Measured(-log_probabilities / math.log(2), group_sizes, jnp.mean(losses))


def sample(graphdef, params, key, settings: Settings, prompt: bytes, length: int) -> bytes:
    """Continues `prompt` to `length` bytes, each drawn after reading up to `settings.seq` bytes."""
    seq = settings.seq
    text = np.zeros(max(length, seq), np.uint8)
    text[: len(prompt)] = list(prompt)

    @jax.jit
    def fill(params, key, text):
        def add_byte(n, text):
            start = jnp.maximum(n - seq, 0)
            window = jax.lax.dynamic_slice_in_dim(text, start, seq)
            # bytes from n on are still zero; no position before them reads them
            logits = _forward(graphdef, params, window[None])[0][0, n - 1 - start]
            draw = jax.random.fold_in(key, n)
            byte = jax.random.categorical(draw, logits / settings.temperature)
            return text.at[n].set(byte.astype(jnp.uint8))

        return jax.lax.fori_loop(len(prompt), length, add_byte, text)

    return bytes(np.asarray(fill(params, key, text))[:length])


def _forward(graphdef, params, text):
    """Returns the logits of text [B, S], and the values that the layers sow."""
    model = nnx.merge(graphdef, params)
    return nnx.capture(model, nnx.Intermediate)(text)
