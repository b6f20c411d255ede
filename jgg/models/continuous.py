"""Continuous batching: rows that end make room for the next prompts, in one program.

Source: Yu et al., Orca: A Distributed Serving System for Transformer-Based Generative Models, 2022. Here a group of
prompts runs through the model as soon as as many rows have ended as the group needs, and the other rows wait for it.
Tokens of a prompt are bound by arithmetic and tokens that are decoded by the reading of weights, so that running both
in one pass over the layers would save less than a token's time per group.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jgg.extend import barrier
from jgg.models.decoder import Decoder
from jgg.models.decoder_stacks import Caches
from jgg.models.decoding import decoded, first_tokens
from jgg.models.penalties import Occurrences
from jgg.models.prefill import Plan, prefill
from jgg.models.programs import program
from jgg.models.rows import (
    New,
    Request,
    Rows,
    State,
    each_new,
    each_row,
    no_state,
    no_tokens,
    repeated_last,
    split_rows,
)
from jgg.models.stacks import State as ModelState


class _Loop(NamedTuple):
    """What goes from group to group.

    Attributes:
      group: int32 [], the next one.
      state: of the rows that run.
      numbers: int32 [rows], which of all rows each of them is; past the last if it is none.
      new: the new tokens of all rows that have made room.
    """

    group: jax.Array
    state: State
    numbers: jax.Array
    new: New


@program(static_argnums=0, static_argnames="plan")
def run(
    graphdef: nnx.GraphDef[Decoder],
    state: ModelState,
    prompts: jax.Array,
    request: Request,
    count: jax.Array,
    *,
    plan: Plan,
) -> New:
    """The new tokens of all rows; `plan.rows` run at once.

    Args:
      graphdef, state: of the model, as `split_model` gives them.
      prompts: int32 [B, S]; B is a multiple of `plan.prompts_at_once`.
      request: of the B prompts.
      count: int32 [], how many of the rows of all prompts are wanted, from the first on.
    """
    model, size = nnx.merge(graphdef, state), plan.prompts_at_once * plan.num_samples
    sharding, positions = model.options.sharding, prompts.shape[1]
    if any(own.window is not None for own in model.config.plan):  # prompts' keys have the slots of rows' then
        positions += plan.most

    def is_unfinished(loop: _Loop) -> jax.Array:
        return loop.group * size < count

    def run_group(loop: _Loop) -> _Loop:
        model = nnx.merge(graphdef, state)  # of this trace, for what it sows
        free = jnp.argsort(~loop.state.is_done, stable=True)[:size]
        new = _with(loop.new, loop.numbers, loop.state.new, free)
        first = loop.group * plan.prompts_at_once
        own_prompts = jax.lax.dynamic_slice_in_dim(prompts, first, plan.prompts_at_once)
        own = request._replace(rows=_of_prompts(request.rows, first, plan.prompts_at_once))
        done = prefill(model, own_prompts, own.rows.lengths, plan, positions)
        started = first_tokens(model, own_prompts, done, own, plan)
        numbers = loop.group * size + jnp.arange(size, dtype=jnp.int32)
        started = started._replace(is_done=started.is_done | (numbers >= count))
        running = each_row(functools.partial(_put, free), loop.state, started)
        running = running._replace(caches=_put_caches(running.caches, done.caches, free, plan.num_samples))
        is_last = (loop.group + 1) * size >= count

        def goes_on(running: State) -> jax.Array:
            return jnp.sum(~running.is_done) > jnp.where(is_last, plan.last_rows, len(running.is_done) - size)

        running = decoded(graphdef, state, split_rows(running, sharding), request.stops, goes_on, plan)
        return _Loop(loop.group + 1, split_rows(running, sharding), loop.numbers.at[free].set(numbers), new)

    loop = jax.lax.while_loop(is_unfinished, run_group, _empty(model, prompts, request, plan))
    running = loop.state
    new = _with(loop.new, loop.numbers, running.new, jnp.arange(len(loop.numbers), dtype=jnp.int32))
    if plan.last_rows:
        last = jnp.sort(jnp.argsort(running.is_done, stable=True)[: plan.last_rows])
        alone = decoded(graphdef, state, _alone(running, last), request.stops, lambda rows: ~rows.is_done.all(), plan)
        new = _with(new, loop.numbers[last], alone.new, jnp.arange(plan.last_rows, dtype=jnp.int32))
    return repeated_last(new)


def _empty(model: Decoder, prompts: jax.Array, request: Request, plan: Plan) -> _Loop:
    """The state before the first group: all rows have ended."""
    batch, positions, running = len(prompts), prompts.shape[1] + plan.most, plan.rows
    assert running is not None
    rows = jax.tree.map(
        lambda array: jnp.broadcast_to(array[:1], (running, *array.shape[1:])),
        request.rows.of_samples(plan.num_samples),
    )
    count = batch * plan.num_samples

    def new(count: int) -> New:
        shape = model.config.num_moe_layers, count, positions, model.config.moe.topk
        return no_tokens(count, plan, jnp.full(shape, -1, jnp.int32) if plan.details else None)

    caches = model.empty_caches(running, positions, plan.piece(prompts.shape[1]), plan.cache_dtype)
    occurrences = None
    if rows.penalties is not None:
        none = jnp.zeros((running, model.config.vocabulary), jnp.int32)
        occurrences = Occurrences(none.astype(bool), none)
    state = no_state(rows, new(running), occurrences, caches, request.stops.shape[1])
    numbers = jnp.full(running, count, jnp.int32)
    return _Loop(jnp.int32(0), state._replace(is_done=jnp.ones(running, bool)), numbers, new(count))


def _of_prompts(rows: Rows, first: jax.Array, count: int) -> Rows:
    """What is asked of some of the prompts."""
    return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, first, count), rows)


def _with(new: New, numbers: jax.Array, running: New, rows: jax.Array) -> New:
    """The new tokens of all rows with those of some running rows, each at its number."""

    def put(axis: int, array: jax.Array, own: jax.Array) -> jax.Array:
        return _put(numbers[rows], axis, array, jnp.take(own, rows, axis=axis))

    return each_new(put, new, running)


def _alone(state: State, rows: jax.Array) -> State:
    """The state of some rows, in ascending order, as many as a divisor of all.

    Their caches [layers, R, ...] are moved to the front, in place, for there may be no memory for others. They become
    [R / rows * layers, rows, ...], without a copy.
    """

    def put(number: jax.Array, caches: Caches) -> Caches:
        def put_row(array: jax.Array) -> jax.Array:
            row = barrier(jax.lax.dynamic_slice_in_dim(array, rows[number], 1, axis=1))
            return jax.lax.dynamic_update_slice_in_dim(array, row, number, axis=1)

        return jax.tree.map(put_row, caches)

    caches = jax.lax.fori_loop(jnp.int32(0), jnp.int32(len(rows)), put, state.caches)
    caches = jax.tree.map(lambda array: array.reshape(-1, len(rows), *array.shape[2:]), caches)
    return each_row(lambda axis, array: jnp.take(array, rows, axis=axis), state)._replace(caches=caches)


def _put(rows: jax.Array, axis: int, array: jax.Array, own: jax.Array) -> jax.Array:
    """An array with others' rows at these indices; those past the last row are left out."""
    return array.at[(slice(None),) * axis + (rows,)].set(own, mode="drop")


def _put_caches(caches: Caches, own: Caches, rows: jax.Array, num_samples: int) -> Caches:
    """The caches [layers, R, ...] with those of prompts in some rows, and zeros past them.

    A NaN that the row before left there would reach tokens that do not attend to it, as 0 * NaN is NaN. The caches are
    put one row at a time, since an update of a slice is done in place, without copies of them for each row.
    """

    def put(number: jax.Array, caches: Caches) -> Caches:
        def put_row(array: jax.Array, own: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_slice_in_dim(own, number // num_samples, 1, axis=1)
            missing = [(0, size - has) for size, has in zip(array.shape[2:], own.shape[2:], strict=True)]
            row = jnp.pad(row, ((0, 0), (0, 0), *missing))
            return jax.lax.dynamic_update_slice(array, row, (0, rows[number], *(0,) * (array.ndim - 2)))

        return jax.tree.map(put_row, caches, own)

    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(len(rows)), put, caches)
