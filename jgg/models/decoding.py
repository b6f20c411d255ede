"""The program that generates: prompts through the model, then one token of each row at a time, with a cache.

Prompts are [B, S]; each has `num_samples` rows, R in all, which go on from copies of its cache.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jgg.models.decoder import Caches, Decoder
from jgg.models.generated import Generated
from jgg.models.head import Head
from jgg.models.loss import losses_by
from jgg.models.placement import split_batch
from jgg.models.sampling import Sampling, draw, of_samples
from jgg.primitives.barrier import barrier


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the program is compiled for, beside shapes.

    Attributes:
      most: N, the most new tokens of a row.
      num_samples: the rows of each prompt.
      is_padded: whether prompts may be shorter than others.
      prefill_chunk: how many tokens of each prompt go through the model at once; None for all.
      details: whether more than tokens is kept.
    """

    most: int
    num_samples: int
    is_padded: bool
    prefill_chunk: int | None
    details: bool


class Record(NamedTuple):
    """The details of new tokens [R, N], and the choices of experts [L, R, S + N, k], as in `Generated`."""

    log_probabilities: jax.Array
    sampled_log_probabilities: jax.Array
    topk_indices: jax.Array


class _Loop(NamedTuple):
    """The state between steps.

    Attributes:
      filled: int32 [], how many of the N new tokens of each row are there.
      recent: int32 [R, W], the last of a row's new tokens, as many as the longest stop sequence has; before them -1.
      is_done: bool [R].
      tokens: int32 [R, N].
      lengths: int32 [R], of the new tokens, with the one that ended a row.
    """

    filled: jax.Array
    recent: jax.Array
    is_done: jax.Array
    tokens: jax.Array
    lengths: jax.Array
    caches: Caches
    record: Record | None


@functools.partial(jax.jit, static_argnums=0, static_argnames="plan")
def run(
    graphdef: nnx.GraphDef[Decoder],
    state: Any,
    prompts: jax.Array,
    lengths: jax.Array,
    sampling: Sampling | None,
    stops: jax.Array,
    new_tokens: jax.Array,
    *,
    plan: Plan,
) -> tuple[jax.Array, Generated | None]:
    """The new tokens int32 [R, plan.most], and the same with details if the plan asks for them.

    Args:
      graphdef, state: of the model.
      prompts, lengths: int32 [B, S] and [B].
      sampling: how tokens of the B prompts are drawn; None to take the likeliest.
      stops: int32 [sequences, W], what ends a row, with -1 before those that are not the longest.
      new_tokens: int32 [], of `plan.most`, after which generation ends.
    """
    model = nnx.merge(graphdef, state)
    if model.options.batch_invariant:
        model.put_forms()
        graphdef, state = nnx.split(model)
    head = dataclasses.replace(model.head, mapped=model.options.mapped)
    logits, caches, choices = _prefill(model, prompts, lengths, plan)
    sampling = None if sampling is None else of_samples(sampling, plan.num_samples)
    starts = jnp.repeat(lengths, plan.num_samples)

    def goes_on(loop: _Loop) -> jax.Array:
        return (loop.filled < new_tokens) & ~loop.is_done.all()

    def step(loop: _Loop) -> _Loop:
        model = nnx.merge(graphdef, state)  # of this trace, for what it sows
        logits, loop = _step(model, loop, starts, stops, plan)
        return _next(loop, logits, stops, sampling, head)

    first = _next(_empty(caches, choices, starts, stops, plan), logits, stops, sampling, head)
    ended = jax.lax.while_loop(goes_on, step, first)
    columns = jnp.minimum(jnp.arange(plan.most, dtype=jnp.int32), ended.filled - 1)
    tokens = ended.tokens[:, columns]
    return tokens, None if ended.record is None else Generated(tokens, ended.lengths, *ended.record)


class _Prefilled(NamedTuple):
    """The last features [B, H] of prompts as far as they have run, their caches, and choices [L, B, S + N, k]."""

    last: jax.Array
    caches: Caches
    choices: jax.Array | None


def _prefill(
    model: Decoder, prompts: jax.Array, lengths: jax.Array, plan: Plan
) -> tuple[jax.Array, Caches, jax.Array | None]:
    """The raw logits of the first new tokens [R, V], the caches, and with details the choices [L, R, S + N, k].

    Chunks of prompts that are as long as each other run in a loop, so that many are compiled as quickly as one.
    """
    (batch, longest), config = prompts.shape, model.config
    shape = config.num_moe_layers, batch, longest + plan.most, config.moe.topk
    choices = jnp.full(shape, -1, jnp.int32) if plan.details else None
    last, caches = jnp.zeros((batch, config.features), model.options.dtype), model.empty_caches(batch, shape[2])
    through = functools.partial(_run_chunk, *nnx.split(model), lengths, plan)
    done, size = _Prefilled(last, caches, choices), plan.prefill_chunk or longest
    if size >= longest:
        done = through(done, prompts, 0)
    else:
        rest = longest % size

        def chunk(number: jax.Array, done: _Prefilled) -> _Prefilled:
            start = number * size
            return through(done, jax.lax.dynamic_slice_in_dim(prompts, start, size, axis=1), start)

        done = jax.lax.fori_loop(jnp.int32(0), jnp.int32(longest // size), chunk, done)
        done = through(done, prompts[:, longest - rest :], longest - rest) if rest else done
    sharding, times = model.options.sharding, plan.num_samples
    caches = jax.tree.map(lambda array: split_batch(_repeated(array, times), sharding, axis=1), done.caches)
    logits = jnp.repeat(model.raw_logits(done.last), times, axis=0)
    return logits, caches, None if done.choices is None else _repeated(done.choices, times)


def _run_chunk(
    graphdef: nnx.GraphDef[Decoder],
    state: Any,
    lengths: jax.Array,
    plan: Plan,
    done: _Prefilled,
    tokens: jax.Array,
    start: jax.Array | int,
) -> _Prefilled:
    """What is done after the tokens [B, C] of prompts from `start` on."""
    model = nnx.merge(graphdef, state)  # of this trace, for what it sows
    batch, size = tokens.shape
    positions = (start + jnp.arange(size, dtype=jnp.int32))[None]
    is_token = positions < lengths[:, None]
    place = {"lengths": lengths, "mask": is_token} if plan.is_padded else {}
    x, caches, own = _run_layers(model, tokens, positions, done.caches, is_token, plan, start=start, **place)
    index = lengths - 1 - start  # of the last token, if that is among these
    last = x[jnp.arange(batch), jnp.clip(index, 0, size - 1)]
    last = jnp.where(((index >= 0) & (index < size))[:, None], last, done.last)
    choices = done.choices
    if choices is not None and own is not None:
        choices = jax.lax.dynamic_update_slice_in_dim(choices, own, start, axis=2)
    return _Prefilled(last, caches, choices)


def _repeated(array: jax.Array, times: int) -> jax.Array:
    """An array [layers, B, ...] with each sequence so many times, [layers, B * times, ...]."""
    return array if times == 1 else jnp.repeat(array, times, axis=1)


def _empty(caches: Caches, choices: jax.Array | None, starts: jax.Array, stops: jax.Array, plan: Plan) -> _Loop:
    """The state before the first new token."""
    rows = starts.shape[0]
    none = jnp.zeros((rows, plan.most), jnp.float32)
    return _Loop(
        filled=jnp.int32(0),
        recent=jnp.full((rows, stops.shape[1]), -1, jnp.int32),
        is_done=jnp.zeros(rows, bool),
        tokens=jnp.zeros((rows, plan.most), jnp.int32),
        lengths=jnp.zeros(rows, jnp.int32),
        caches=caches,
        record=None if choices is None else Record(none, none, choices),
    )


def _step(model: Decoder, loop: _Loop, starts: jax.Array, stops: jax.Array, plan: Plan) -> tuple[jax.Array, _Loop]:
    """The raw logits [R, V] after the last token of each row, and the loop with what it adds to caches and record.

    Args:
      starts: int32 [R], the positions of the first new tokens.
      stops: what ends rows.
    """
    # the caches have the padding of prompts at these positions, which is overwritten before a token attends to it
    positions = (starts + loop.filled - 1)[:, None]
    is_on = ~loop.is_done[:, None]
    mask = is_on if len(starts) > 1 and len(stops) else None  # else no row waits for others, unless it is damaged
    x, caches, choices = _run_layers(model, loop.recent[:, -1:], positions, loop.caches, is_on, plan, mask=mask)
    record = loop.record
    if record is not None:
        of_rows = jnp.arange(len(starts))[:, None], positions
        record = record._replace(topk_indices=record.topk_indices.at[:, *of_rows].set(choices))
    return model.raw_logits(x[:, 0]), loop._replace(caches=caches, record=record)


def _run_layers(
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


def _next(loop: _Loop, logits: jax.Array, stops: jax.Array, sampling: Sampling | None, head: Head) -> _Loop:
    """The loop with one more token of each row, by its raw logits [R, V]."""
    final = barrier(head.final(logits))  # else other bits might come of the fusions that another batch has
    drawn = draw(final, sampling, loop.filled, head.of_final)
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
    is_stop = ((stops[None] == recent[:, None]) | (stops[None] < 0)).all(axis=-1).any(axis=-1)
    return loop._replace(
        filled=loop.filled + 1,
        recent=recent,
        is_done=loop.is_done | is_stop | (tokens < 0),
        tokens=loop.tokens.at[:, loop.filled].set(tokens),
        lengths=loop.lengths + is_there.astype(jnp.int32),
        record=record,
    )
