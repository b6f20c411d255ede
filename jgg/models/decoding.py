"""The programs that generate: `start` runs prompts through the model, `advance` adds tokens with a cache.

Prompts are [B, S]; each has `num_samples` rows, R in all, which go on from copies of its cache. `generate` and `stream`
run the same two programs, so that their bits are the same.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jgg.extend import barrier
from jgg.models import penalties
from jgg.models.decoder import Caches, Decoder
from jgg.models.head import Head
from jgg.models.loss import losses_by
from jgg.models.penalties import Occurrences, Penalties
from jgg.models.placement import split_batch
from jgg.models.prefill import Plan, prefill, run_layers
from jgg.models.sampling import Sampling, draw, of_samples
from jgg.models.stacks import State as ModelState


class Request(NamedTuple):
    """What is asked for, apart from the prompts [B, S].

    Attributes:
      lengths: int32 [B], of the prompts.
      sampling: how tokens of the B prompts are drawn; None to take the likeliest.
      penalties: of the B prompts; None for no penalties.
      stops: int32 [sequences, W], what ends a row; shorter sequences have -1 in front.
    """

    lengths: jax.Array
    sampling: Sampling | None
    penalties: Penalties | None
    stops: jax.Array

    def of_samples(self, num_samples: int) -> "Request":
        """The request of `num_samples` rows for each prompt."""
        return self._replace(
            lengths=jnp.repeat(self.lengths, num_samples),
            sampling=None if self.sampling is None else of_samples(self.sampling, num_samples),
            penalties=jax.tree.map(lambda array: jnp.repeat(array, num_samples), self.penalties),
        )


class Record(NamedTuple):
    """The details of new tokens [R, N], and the choices of experts [L, R, S + N, k], as in `Generated`."""

    log_probabilities: jax.Array
    sampled_log_probabilities: jax.Array
    topk_indices: jax.Array


class State(NamedTuple):
    """The state between steps.

    Attributes:
      filled: int32 [], how many of the N new tokens of each row are there.
      recent: int32 [R, W], the last of a row's new tokens, as many as the longest stop sequence has; before them -1.
      is_done: bool [R].
      tokens: int32 [R, N]; past the `filled` ones, the last of them is repeated.
      lengths: int32 [R], of the new tokens, with the one that ended a row.
      occurrences: of tokens; None without penalties.
    """

    filled: jax.Array
    recent: jax.Array
    is_done: jax.Array
    tokens: jax.Array
    lengths: jax.Array
    occurrences: Occurrences | None
    caches: Caches
    record: Record | None


def split_model(model: Decoder) -> tuple[nnx.GraphDef[Decoder], ModelState]:
    """The model as the programs take it: its own arrays, and the forms of experts that make forward passes faster."""
    split = nnx.split(model)
    if model.options.batch_invariant:
        model = nnx.merge(*split)  # other variables of the same arrays
        model.put_forms()
        split = nnx.split(model)
    return split


@functools.partial(jax.jit, static_argnums=0, static_argnames="plan")
def start(
    graphdef: nnx.GraphDef[Decoder], state: ModelState, prompts: jax.Array, request: Request, *, plan: Plan
) -> State:
    """The state with the first new token of each row.

    Args:
      graphdef, state: of the model, as `split_model` gives them.
      prompts: int32 [B, S].
    """
    model = nnx.merge(graphdef, state)
    logits, caches, choices = prefill(model, prompts, request.lengths, plan)
    rows = request.of_samples(plan.num_samples)
    empty = _empty(caches, choices, rows, plan)
    if request.penalties is not None:
        of_prompts = penalties.of_prompts(prompts, request.lengths, model.config.vocabulary, plan.num_samples)
        empty = empty._replace(occurrences=of_prompts)
    return _settled(_next(empty, logits, rows, _head(model)), model)


@functools.partial(jax.jit, static_argnums=0, static_argnames="plan", donate_argnames="before")
def advance(
    graphdef: nnx.GraphDef[Decoder],
    state: ModelState,
    before: State,
    request: Request,
    ended: jax.Array,
    new_tokens: jax.Array,
    *,
    plan: Plan,
) -> State:
    """The state with `new_tokens` new tokens in each row, or fewer if all rows have ended.

    Args:
      before: the state of `start` or of this function, which is gone then.
      request: the same as for `start`.
      ended: bool [R], rows to end, in addition to those that have ended.
      new_tokens: int32 [], of `plan.most`.
    """
    outside = nnx.merge(graphdef, state)
    head, rows = _head(outside), request.of_samples(plan.num_samples)

    def goes_on(loop: State) -> jax.Array:
        return (loop.filled < new_tokens) & ~loop.is_done.all()

    def step(loop: State) -> State:
        model = nnx.merge(graphdef, state)  # of this trace, for what it sows
        logits, loop = _step(model, loop, rows, plan)
        return _next(loop, logits, rows, head)

    after = jax.lax.while_loop(goes_on, step, before._replace(is_done=before.is_done | ended))
    return _settled(after, outside)


def _head(model: Decoder) -> Head:
    return dataclasses.replace(model.head, mapped=model.options.mapped)


def _settled(loop: State, model: Decoder) -> State:
    """The state with `tokens` as it says there, and split over devices in one way, so that programs fit each other."""
    columns = jnp.minimum(jnp.arange(loop.tokens.shape[1], dtype=jnp.int32), loop.filled - 1)
    loop = loop._replace(tokens=loop.tokens[:, columns])
    sharding = model.options.sharding
    if sharding is None:
        return loop
    of_rows = functools.partial(split_batch, sharding=sharding)
    of_layers = functools.partial(split_batch, sharding=sharding, axis=1)
    record = loop.record
    if record is not None:
        record = Record(of_rows(record[0]), of_rows(record[1]), of_layers(record.topk_indices))
    return loop._replace(
        recent=of_rows(loop.recent),
        is_done=of_rows(loop.is_done),
        tokens=of_rows(loop.tokens),
        lengths=of_rows(loop.lengths),
        occurrences=jax.tree.map(of_rows, loop.occurrences),
        caches=jax.tree.map(of_layers, loop.caches),
        record=record,
    )


def _empty(caches: Caches, choices: jax.Array | None, rows: Request, plan: Plan) -> State:
    """The state before the first new token."""
    count = len(rows.lengths)
    none = jnp.zeros((count, plan.most), jnp.float32)
    return State(
        filled=jnp.int32(0),
        recent=jnp.full((count, rows.stops.shape[1]), -1, jnp.int32),
        is_done=jnp.zeros(count, bool),
        tokens=jnp.zeros((count, plan.most), jnp.int32),
        lengths=jnp.zeros(count, jnp.int32),
        occurrences=None,
        caches=caches,
        record=None if choices is None else Record(none, none, choices),
    )


def _step(model: Decoder, loop: State, rows: Request, plan: Plan) -> tuple[jax.Array, State]:
    """The raw logits [R, V] after the last token of each row, and the loop with what it adds to caches and record."""
    # the caches have the padding of prompts at these positions, which is overwritten before a token attends to it
    positions = (rows.lengths + loop.filled - 1)[:, None]
    count = len(positions)
    is_on = ~loop.is_done[:, None]
    mask = is_on if count > 1 and len(rows.stops) else None  # else hardly a row waits for others
    x, caches, choices = run_layers(model, loop.recent[:, -1:], positions, loop.caches, is_on, plan, mask=mask)
    record = loop.record
    if record is not None:
        of_rows = jnp.arange(count)[:, None], positions
        record = record._replace(topk_indices=record.topk_indices.at[:, *of_rows].set(choices))
    return model.raw_logits(x[:, 0]), loop._replace(caches=caches, record=record)


def _next(loop: State, logits: jax.Array, rows: Request, head: Head) -> State:
    """The loop with one more token of each row, by its raw logits [R, V]."""
    final, occurrences = head.final(logits), loop.occurrences
    if rows.penalties is not None and occurrences is not None:
        final = penalties.penalized(final, rows.penalties, occurrences)
    # behind a barrier, else other bits might come of the fusions that another batch has
    drawn = draw(barrier(final), rows.sampling, loop.filled, head.of_final)
    tokens = jnp.where(loop.is_done, loop.recent[:, -1], drawn.tokens)
    recent = jnp.concatenate([loop.recent[:, 1:], tokens[:, None]], axis=1)
    is_there = ~loop.is_done & (tokens >= 0)
    record = loop.record
    if record is not None:
        of_model = -losses_by(logits, tokens, head).losses

        def put(array: jax.Array, values: jax.Array) -> jax.Array:
            return array.at[:, loop.filled].set(jnp.where(is_there, values, 0.0))

        record = record._replace(
            log_probabilities=put(record.log_probabilities, of_model),
            sampled_log_probabilities=put(record.sampled_log_probabilities, drawn.log_probabilities),
        )
    stops = rows.stops
    is_stop = ((stops[None] == recent[:, None]) | (stops[None] < 0)).all(axis=-1).any(axis=-1)
    return loop._replace(
        filled=loop.filled + 1,
        recent=recent,
        is_done=loop.is_done | is_stop | (tokens < 0),
        tokens=loop.tokens.at[:, loop.filled].set(tokens),
        lengths=loop.lengths + is_there.astype(jnp.int32),
        occurrences=None if occurrences is None else penalties.counted(occurrences, tokens),
        record=record,
    )
