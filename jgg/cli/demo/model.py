"""The demo's language model over bytes: a small `jgg.models.Decoder`, how it is measured and how it is saved."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jgg.models
from jgg.cli.demo import HEAD_DIM, Settings
from jgg.core.files import fill, replace_text

NUM_BYTES = 256


def make_model(settings: Settings, rngs: nnx.Rngs) -> jgg.models.Decoder:
    """Makes the model, of the family Qwen3-MoE; at first all bytes are equally likely to it."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": NUM_BYTES,
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.hidden // HEAD_DIM,
        "num_key_value_heads": settings.hidden // HEAD_DIM,
        "head_dim": HEAD_DIM,
        "num_experts": settings.experts,
        "num_experts_per_tok": settings.topk,
        "moe_intermediate_size": settings.hidden,
        "norm_topk_prob": settings.topk > 1,
        "hidden_act": "silu",
        "initializer_range": settings.hidden**-0.5,
        "rms_norm_eps": 1e-6,
        # windows are short: with a base of 500 rather than 10,000 the model learned faster
        "rope_theta": 500.0,
        # no byte attends further back than in training, however long the text becomes
        "use_sliding_window": True,
        "sliding_window": settings.seq,
        "max_window_layers": 0,
        "tie_word_embeddings": False,
    }
    model = jgg.models.Decoder(
        jgg.models.model_config(config),
        dtype=settings.dtype,
        unroll=settings.layers,
        quantization=settings.quantization,
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


def sample(model: jgg.models.Decoder, key, prompt: bytes, length: int, temperature: float) -> bytes:
    """Continues `prompt` to `length` bytes."""
    tokens = jnp.array([list(prompt)], jnp.int32)
    new = jgg.models.generate(model, tokens, length - len(prompt), temperature=temperature, key=key)
    return prompt + bytes(new[0].tolist())


def save(model: jgg.models.Decoder, folder: Path) -> Path:
    """Writes the model and its tokenizer, whose tokens are bytes, into a Hugging Face folder, and returns it.

    This is `folder`, or one next to it if there is something in it by now.
    """

    def write(place: Path) -> None:
        jgg.models.save(model, place)
        replace_text(place / "tokenizer.json", json.dumps(_tokenizer(), indent=2) + "\n")
        own = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        replace_text(place / "tokenizer_config.json", json.dumps(own, indent=2) + "\n")

    return fill(folder, "config.json", write)


def _tokenizer() -> dict:
    """The content of tokenizer.json: byte-level BPE without merges, so that a token is the value of its byte.

    Source: the characters that stand for bytes are those of Radford et al., GPT-2, 2019.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {characters[byte]: byte for byte in range(NUM_BYTES)}, "merges": []},
    }
