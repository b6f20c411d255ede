"""Prompts through the model, which fills the caches of the rows that go on from them."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jgg.models.decoder import Decoder
from jgg.models.decoder_stacks import Caches
from jgg.models.stacks import State


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the program is compiled for, in addition to shapes.

    Attributes:
      most: N, the most new tokens of a row.
      num_samples: the rows of each prompt.
      is_padded: whether prompts may be shorter than others.
      prefill_chunk: how many tokens of each prompt go through the model at once; None for all.
      details: whether more than tokens is kept.
      rows: how many rows run at once; None for all.
      last_rows: how many rows run once no more have not ended and all prompts have begun, a divisor of `rows`; 0 for as
        many as before.
      prompts_at_once: how many prompts take the place of rows that have ended, if not all rows run at once.
      cache_dtype: of keys and values; None for the dtype of the computation.
    """

    most: int
    num_samples: int
    is_padded: bool
    prefill_chunk: int | None
    details: bool
    rows: int | None = None
    last_rows: int = 0
    prompts_at_once: int = 1
    cache_dtype: np.dtype | None = None

    def piece(self, longest: int) -> int:
        """The most tokens of a sequence that run at once after its first ones, for prompts of this length."""
        size = self.prefill_chunk
        return 1 if size is None or size >= longest else size


class Prefilled(NamedTuple):
    """The last features [B, H] of prompts as far as they have run, their caches, and choices [L, B, S, k]."""

    last: jax.Array
    caches: Caches
    choices: jax.Array | None


def prefill(model: Decoder, prompts: jax.Array, lengths: jax.Array, plan: Plan, positions: int) -> Prefilled:
    """Runs prompts [B, S] through the model, with caches of this many positions, and with details the choices.

    Chunks of prompts that are as long as each other run in a loop, so that many are compiled as quickly as one.
    """
    (batch, longest), config = prompts.shape, model.config
    shape = config.num_moe_layers, batch, longest, config.moe.topk
    choices = jnp.full(shape, -1, jnp.int32) if plan.details else None
    last = jnp.zeros((batch, config.features), model.options.dtype)
    caches = model.empty_caches(batch, positions, plan.piece(longest), plan.cache_dtype)
    through = functools.partial(_run_chunk, *nnx.split(model), lengths, plan)
    done, size = Prefilled(last, caches, choices), plan.prefill_chunk or longest
    if size >= longest:
        return through(done, prompts, 0)
    rest = longest % size

    def chunk(number: jax.Array, done: Prefilled) -> Prefilled:
        start = number * size
        return through(done, jax.lax.dynamic_slice_in_dim(prompts, start, size, axis=1), start)

    done = jax.lax.fori_loop(jnp.int32(0), jnp.int32(longest // size), chunk, done)
    return through(done, prompts[:, longest - rest :], longest - rest) if rest else done


def _run_chunk(
    graphdef: nnx.GraphDef[Decoder],
    state: State,
    lengths: jax.Array,
    plan: Plan,
    done: Prefilled,
    tokens: jax.Array,
    start: jax.Array | int,
) -> Prefilled:
    """What is done after the tokens [B, C] of prompts from `start` on."""
    model = nnx.merge(graphdef, state)  # of this trace, for what it sows
    batch, size = tokens.shape
    positions = (start + jnp.arange(size, dtype=jnp.int32))[None]
    is_token = positions < lengths[:, None]
    place = {"lengths": lengths, "mask": is_token} if plan.is_padded else {}
    x, caches, own = run_layers(model, tokens, positions, done.caches, is_token, plan, start=start, **place)
    index = lengths - 1 - start  # of the last token, if that is among these
    last = x[jnp.arange(batch), jnp.clip(index, 0, size - 1)]
    last = jnp.where(((index >= 0) & (index < size))[:, None], last, done.last)
    choices = done.choices
    if choices is not None and own is not None:
        choices = jax.lax.dynamic_update_slice_in_dim(choices, own, start, axis=2)
    return Prefilled(last, caches, choices)


def run_layers(
    model: Decoder,
    tokens: jax.Array,
    positions: jax.Array,
    caches: Caches,
    is_token: jax.Array,
    plan: Plan,
    **place: Any,
) -> tuple[jax.Array, Caches, jax.Array | None]:
    """What `Decoder.run_layers` returns, and with details the choices [L, B, S, k], -1 unless `is_token` [B, S]."""
    if plan.details:
        captured = nnx.capture(model.run_layers, nnx.Intermediate)
        (x, after), sown = captured(tokens, positions, caches, **place)
        choices = jnp.where(is_token[None, :, :, None], nnx.to_pure_dict(sown)["topk_indices"][0], -1)
    else:
        x, after = model.run_layers(tokens, positions, caches, **place)
        choices = None
    assert after is not None  # as there were caches before
    return x, after, choices
