"""The programs that generate: `start` runs prompts through the model, `advance` adds tokens with a cache.

Prompts are [B, S]; each has `num_samples` rows, R in all, which go on from copies of its cache. `generate` and `stream`
run the same two programs, so that their bits are the same.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jgg.extend import barrier
from jgg.models import penalties
from jgg.models.decoder import Decoder
from jgg.models.head import Head
from jgg.models.loss import losses_by
from jgg.models.prefill import Plan, Prefilled, prefill, run_layers
from jgg.models.programs import program
from jgg.models.rows import New, Request, State, no_state, no_tokens, repeated_last, split_rows
from jgg.models.sampling import draw
from jgg.models.stacks import State as ModelState


def split_model(model: Decoder) -> tuple[nnx.GraphDef[Decoder], ModelState]:
    """The model as the programs take it: its own arrays, and what makes forward passes faster.

    These are the forms of experts, and adapters in the dtype that they multiply in, which each token would cast again.
    """
    if model.options.batch_invariant:
        model = nnx.merge(*nnx.split(model))  # another module, of the same variables
        model.put_forms()
    graphdef, *states = nnx.split(model, nnx.LoRAParam, ...)
    adapters, rest = states
    dtype = jnp.dtype(model.options.dtype)
    if any(array.dtype.itemsize > dtype.itemsize for array in jax.tree.leaves(adapters)):
        adapters = _cast(adapters, dtype)
    return graphdef, nnx.merge_state(adapters, rest)


@functools.partial(jax.jit, static_argnums=1)
def _cast(adapters: ModelState, dtype: jnp.dtype) -> ModelState:
    return jax.tree.map(lambda array: array.astype(dtype), adapters)


@program(static_argnums=0, static_argnames="plan")
def start(
    graphdef: nnx.GraphDef[Decoder], state: ModelState, prompts: jax.Array, request: Request, *, plan: Plan
) -> State:
    """The state with the first new token of each row.

    Args:
      graphdef, state: of the model, as `split_model` gives them.
      prompts: int32 [B, S].
    """
    model = nnx.merge(graphdef, state)
    done = prefill(model, prompts, request.rows.lengths, plan, prompts.shape[1] + plan.most)
    started = first_tokens(model, prompts, done, request, plan)
    caches = jax.tree.map(lambda array: repeated(array, plan.num_samples, 1), done.caches)
    return _settled(started._replace(caches=caches), model)


@program(static_argnums=0, static_argnames="plan", donate_argnames="before")
def advance(
    graphdef: nnx.GraphDef[Decoder],
    state: ModelState,
    before: State,
    stops: jax.Array,
    ended: jax.Array,
    new_tokens: jax.Array,
    *,
    plan: Plan,
) -> State:
    """The state with `new_tokens` new tokens in each row, or fewer if all rows have ended.

    Args:
      before: the state of `start` or of this function, which is gone then.
      stops: of the request.
      ended: bool [R], rows to end, in addition to those that have ended.
      new_tokens: int32 [], of `plan.most`.
    """

    def goes_on(loop: State) -> jax.Array:
        return (jnp.max(loop.new.filled, initial=0) < new_tokens) & ~loop.is_done.all()

    after = decoded(graphdef, state, before._replace(is_done=before.is_done | ended), stops, goes_on, plan)
    return _settled(after, nnx.merge(graphdef, state))


def first_tokens(model: Decoder, prompts: jax.Array, done: Prefilled, request: Request, plan: Plan) -> State:
    """The state of the rows of prompts [B, S] with their first new tokens, but without caches."""
    times = plan.num_samples
    rows = request.rows.of_samples(times)
    choices = done.choices
    if choices is not None:
        choices = jnp.pad(repeated(choices, times, 1), ((0, 0), (0, 0), (0, plan.most), (0, 0)), constant_values=-1)
    occurrences = None
    if rows.penalties is not None:
        occurrences = penalties.of_prompts(prompts, request.rows.lengths, model.config.vocabulary, times)
    empty = no_state(rows, no_tokens(len(rows.lengths), plan, choices), occurrences, (), request.stops.shape[1])
    return _next(empty, repeated(model.raw_logits(done.last), times, 0), request.stops, head_of(model))


def decoded(
    graphdef: nnx.GraphDef[Decoder],
    state: ModelState,
    loop: State,
    stops: jax.Array,
    goes_on: Callable[[State], jax.Array],
    plan: Plan,
) -> State:
    """The state after one more token of each row that has not ended, as often as the state `goes_on`."""
    head = head_of(nnx.merge(graphdef, state))

    def step(loop: State) -> State:
        model = nnx.merge(graphdef, state)  # of this trace, for what it sows
        logits, loop = _step(model, loop, plan, len(stops) > 0)
        return _next(loop, logits, stops, head)

    return jax.lax.while_loop(goes_on, step, loop)


def head_of(model: Decoder) -> Head:
    """How the model's logits are computed from raw ones."""
    return dataclasses.replace(model.head, mapped=model.options.mapped)


def repeated(array: jax.Array, times: int, axis: int) -> jax.Array:
    """An array with each of its prompts repeated, for that many rows."""
    return array if times == 1 else jnp.repeat(array, times, axis=axis)


def _settled(loop: State, model: Decoder) -> State:
    return split_rows(loop._replace(new=repeated_last(loop.new)), model.options.sharding)


def _step(model: Decoder, loop: State, plan: Plan, may_stop: bool) -> tuple[jax.Array, State]:
    """The raw logits [R, V] after the last token of each row, and the loop with what it adds to caches and record."""
    # the caches have the padding of prompts at these positions, which is overwritten before a token attends to it
    positions = (loop.rows.lengths + loop.new.filled - 1)[:, None]
    count = len(positions)
    is_on = ~loop.is_done[:, None]
    may_wait = count > 1 and (may_stop or loop.rows.limits is not None)
    mask = is_on if may_wait else None  # else hardly a row waits for others
    x, caches, choices = run_layers(model, loop.recent[:, -1:], positions, loop.caches, is_on, plan, mask=mask)
    record = loop.new.record
    if record is not None:
        of_rows = jnp.arange(count)[:, None], positions
        record = record._replace(topk_indices=record.topk_indices.at[:, *of_rows].set(choices))
    return model.raw_logits(x[:, 0]), loop._replace(caches=caches, new=loop.new._replace(record=record))


def _next(loop: State, logits: jax.Array, stops: jax.Array, head: Head) -> State:
    """The loop with one more token of each row, by its raw logits [R, V]."""
    rows, new = loop.rows, loop.new
    final, occurrences = head.final(logits), loop.occurrences
    if rows.penalties is not None and occurrences is not None:
        final = penalties.penalized(final, rows.penalties, occurrences)
    # behind a barrier, else other bits might come of the fusions that another batch has
    drawn = draw(barrier(final), rows.sampling, new.filled, head.of_final)
    tokens = jnp.where(loop.is_done, loop.recent[:, -1], drawn.tokens)
    recent = jnp.concatenate([loop.recent[:, 1:], tokens[:, None]], axis=1)
    is_there = ~loop.is_done & (tokens >= 0)
    columns = jnp.arange(new.tokens.shape[1], dtype=jnp.int32)[None]
    is_next = ~loop.is_done[:, None] & (columns == new.filled[:, None])

    def put(array: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.where(is_next, values[:, None], array)

    record = new.record
    if record is not None:
        of_model = -losses_by(logits, tokens, head).losses
        record = record._replace(
            log_probabilities=put(record.log_probabilities, jnp.where(is_there, of_model, 0.0)),
            sampled_log_probabilities=put(
                record.sampled_log_probabilities, jnp.where(is_there, drawn.log_probabilities, 0.0)
            ),
        )
    filled = new.filled + (~loop.is_done).astype(jnp.int32)
    is_stop = ((stops[None] == recent[:, None]) | (stops[None] < 0)).all(axis=-1).any(axis=-1)
    is_full = False if rows.limits is None else filled >= rows.limits
    return loop._replace(
        recent=recent,
        is_done=loop.is_done | is_stop | is_full | (tokens < 0),
        new=New(put(new.tokens, tokens), filled, new.lengths + is_there.astype(jnp.int32), record),
        occurrences=None if occurrences is None else penalties.counted(occurrences, tokens),
    )
