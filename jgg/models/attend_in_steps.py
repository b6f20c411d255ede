"""Causal attention whose bits do not depend on the batch: by a kernel that takes keys in a fixed order.

The forward pass is `ATTEND`. The backward pass is the same as in `jgg.models.attend`, and its bits may depend on the
batch: cuDNN computes it from the kernel's result and statistics where it takes the arrays, and plain JAX elsewhere.
"""

import functools
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from jgg.core.manual_axes import alike
from jgg.extend import How
from jgg.models import flash
from jgg.models.attend import Way, attend, choose, finite_sinks, known_gpu
from jgg.models.operations.attend import ATTEND, Attend


class Tokens(NamedTuple):
    """Whole sequences: q, k, v, is_local, starts and sinks as `jgg.models.attend.attend` takes them."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    is_local: jax.Array | None
    starts: jax.Array | None
    sinks: jax.Array | None


class _Options(NamedTuple):
    how: How
    scale: float
    window: int | None


def attend_in_steps(how: How, tokens: Tokens, *, scale: float, window: int | None) -> jax.Array:
    """The result for each query, [B, S, heads, D], computed as `how` says.

    Args:
      tokens: the sequences, or packed segments.
      scale: factor of the products of queries and keys.
      window: how many of the last tokens a token attends to, itself included; None for all.
    """
    if tokens.sinks is not None:
        tokens = tokens._replace(sinks=finite_sinks(tokens.sinks))
    return _attend_in_steps(_Options(how, scale, window), alike(tokens))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_in_steps(options: _Options, tokens: Tokens) -> jax.Array:
    return _forward(options, tokens)[0]


def _forward(options: _Options, tokens: Tokens) -> tuple[jax.Array, tuple[Tokens, jax.Array, jax.Array]]:
    q, k, v, is_local, starts, sinks = tokens
    operands = Attend(q, k[None], v[None], starts=starts, is_local=is_local, sinks=sinks)
    y, log_sums = ATTEND(options.how, operands, scale=options.scale, window=options.window)
    names = flash.NAMES
    y, log_sums = checkpoint_name(y, names[0]), checkpoint_name(log_sums.transpose(0, 2, 1), names[1])
    return y, (tokens, y, log_sums)


def _backward(options: _Options, kept: tuple[Tokens, jax.Array, jax.Array], dy: jax.Array) -> tuple[Tokens]:
    tokens, y, log_sums = kept
    q, k, v, is_local, starts, sinks = tokens
    window = None if options.window is None or options.window >= q.shape[1] else options.window
    arrays = flash.Kept(q, k, v, sinks, starts, y, log_sums), dy
    of_window, of_all = (functools.partial(_gradients, flash.Options(options.scale, size)) for size in (window, None))
    if window is None or is_local is None:
        return (of_window(*arrays),)
    return (jax.lax.cond(is_local, of_window, of_all, *arrays),)


def _gradients(options: flash.Options, kept: flash.Kept, dy: jax.Array) -> Tokens:
    q, k, v, sinks, starts = kept[:5]
    if choose(q, v, options.window, has_segments=starts is not None, gpu=known_gpu()) is Way.FLASH:
        gradients = flash.backward(options, kept, dy)
    else:
        run = functools.partial(attend, scale=options.scale, window=options.window, starts=starts)
        _, pull_back = jax.vjp(lambda q, k, v, sinks: run(q, k, v, sinks=sinks), q, k, v, sinks)
        gradients = *pull_back(dy), None
    d_q, d_k, d_v, d_sinks, _ = gradients
    return Tokens(d_q, d_k, d_v, None, None, d_sinks)


_attend_in_steps.defvjp(_forward, _backward)
