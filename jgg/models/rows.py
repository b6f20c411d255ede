"""What the programs that generate keep of each row: what is asked of it, its new tokens, and its caches."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.experts.sharding import MoESharding
from jgg.models.decoder_stacks import Caches
from jgg.models.penalties import Occurrences, Penalties
from jgg.models.placement import split_batch
from jgg.models.prefill import Plan
from jgg.models.sampling import Sampling, of_samples

type Change = Callable[..., jax.Array]  # (axis of the rows, one array of each state) -> array


class Rows(NamedTuple):
    """What is asked of R rows, or of the prompts [B, S] that they continue.

    Attributes:
      lengths: int32 [R], of the prompts.
      sampling: how tokens are drawn; None to take the likeliest.
      penalties: None for no penalties.
      limits: int32 [R], how many new tokens each row may have, for prompts [B, num_samples]; None if all may have as
        many.
    """

    lengths: jax.Array
    sampling: Sampling | None
    penalties: Penalties | None
    limits: jax.Array | None

    def of_samples(self, num_samples: int) -> "Rows":
        """What is asked of `num_samples` rows for each prompt."""
        return Rows(
            lengths=jnp.repeat(self.lengths, num_samples),
            sampling=None if self.sampling is None else of_samples(self.sampling, num_samples),
            penalties=jax.tree.map(lambda array: jnp.repeat(array, num_samples), self.penalties),
            limits=None if self.limits is None else self.limits.reshape(-1),
        )


class Request(NamedTuple):
    """What is asked for, apart from the prompts [B, S].

    Attributes:
      rows: of the B prompts.
      stops: int32 [sequences, W], what ends a row; shorter sequences have -1 in front.
    """

    rows: Rows
    stops: jax.Array


class Record(NamedTuple):
    """The details of new tokens [R, N], and the choices of experts [L, R, S + N, k], as in `Generated`."""

    log_probabilities: jax.Array
    sampled_log_probabilities: jax.Array
    topk_indices: jax.Array


class New(NamedTuple):
    """The new tokens of R rows.

    Attributes:
      tokens: int32 [R, N]; past the `filled` ones, the last of them is repeated.
      filled: int32 [R], how many are there.
      lengths: int32 [R], how many are tokens: all but a -1 for NaN.
    """

    tokens: jax.Array
    filled: jax.Array
    lengths: jax.Array
    record: Record | None


class State(NamedTuple):
    """The state between steps.

    Attributes:
      rows: what is asked of each of the R rows.
      recent: int32 [R, W], the last of a row's new tokens, as many as the longest stop sequence has; before them -1.
      is_done: bool [R].
      occurrences: of tokens; None without penalties.
    """

    rows: Rows
    recent: jax.Array
    is_done: jax.Array
    new: New
    occurrences: Occurrences | None
    caches: Caches


def each_row(change: Change, *states: State) -> State:
    """A state with `change` of all arrays of several, but for the caches, which are those of the first."""

    def changed[Tree](*trees: Tree) -> Tree:
        return jax.tree.map(lambda *arrays: change(0, *arrays), *trees)

    rows, recent, is_done, new, occurrences, caches = zip(*states, strict=True)
    of_rows = changed(*rows), changed(*recent), changed(*is_done)
    return State(*of_rows, each_new(change, *new), changed(*occurrences), caches[0])


def each_new(change: Change, *states: New) -> New:
    """New tokens with `change` of all arrays of several."""
    tokens, filled, lengths, records = zip(*states, strict=True)
    record = None if records[0] is None else Record(*map(change, (0, 0, 1), *records))
    return New(change(0, *tokens), change(0, *filled), change(0, *lengths), record)


def no_tokens(rows: int, plan: Plan, choices: jax.Array | None) -> New:
    """No new tokens of rows, whose prompts have made these choices of experts [L, R, S + N, k]."""
    none = jnp.zeros((rows, plan.most), jnp.float32)
    zeros = jnp.zeros(rows, jnp.int32)
    record = None if choices is None else Record(none, none, choices)
    return New(jnp.zeros((rows, plan.most), jnp.int32), zeros, zeros, record)


def no_state(rows: Rows, new: New, occurrences: Occurrences | None, caches: Caches, width: int) -> State:
    """The state before the first new token; stop sequences have `width` tokens."""
    count = len(rows.lengths)
    recent = jnp.full((count, width), -1, jnp.int32)
    return State(rows, recent, jnp.zeros(count, bool), new, occurrences, caches)


def repeated_last(new: New) -> New:
    """New tokens, past the `filled` ones with the last of them."""
    columns = jnp.arange(new.tokens.shape[1], dtype=jnp.int32)[None]
    columns = jnp.minimum(columns, jnp.maximum(new.filled, 1)[:, None] - 1)
    return new._replace(tokens=jnp.take_along_axis(new.tokens, columns, axis=1))


def split_rows(state: State, sharding: MoESharding | None) -> State:
    """The state, split over devices in one way, so that programs fit each other."""
    if sharding is None:
        return state
    state = each_row(lambda axis, array: split_batch(array, sharding, axis=axis), state)
    return state._replace(caches=jax.tree.map(lambda array: split_batch(array, sharding, axis=1), state.caches))
