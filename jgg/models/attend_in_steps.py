"""Causal attention whose bits do not depend on the batch: by a kernel that takes keys in a fixed order.

The forward pass is `ATTEND`. The backward pass, in which bits may depend on the batch, is that of `jgg.models.attend`:
by cuDNN, for the kernel's result and statistics, where cuDNN takes the arrays, else in plain JAX.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jgg.core.manual_axes import alike
from jgg.extend import How
from jgg.models import flash
from jgg.models.attend import attend, finite_sinks, query_blocks, takes_flash
from jgg.models.operations.attend import ATTEND, Attend


class Tokens(NamedTuple):
    """Whole sequences: q, k, v, is_local, segments and sinks as `jgg.models.attend.attend` takes them.

    Attributes:
      starts: int32 [B, S], where the segment of each token begins; None without segments.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    is_local: jax.Array | None
    segments: jax.Array | None
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


def _forward(options: _Options, tokens: Tokens) -> tuple[jax.Array, Any]:
    q, k, v, is_local, _, starts, sinks = tokens
    operands = Attend(q, k[None], v[None], starts=starts, is_local=is_local, sinks=sinks)
    y, log_sums = ATTEND(options.how, operands, scale=options.scale, window=options.window)
    names = flash.NAMES
    y, log_sums = checkpoint_name(y, names[0]), checkpoint_name(log_sums.transpose(0, 2, 1), names[1])
    return y, (tokens, y, log_sums)


def _backward(options: _Options, kept: Any, dy: jax.Array) -> tuple[Tokens]:
    tokens, y, log_sums = kept
    q, k, v, is_local, segments, _, sinks = tokens
    scale, window = options.scale, options.window
    if window is not None and window >= q.shape[1]:
        window = None
    if not takes_flash(q, k, segments, window):
        run = functools.partial(attend, scale=scale, window=window, is_local=is_local, segments=segments)
        _, pull_back = jax.vjp(lambda q, k, v, sinks: run(q, k, v, sinks=sinks), q, k, v, sinks)
        return (_gradients(*pull_back(dy)),)
    arrays = q, k, v, sinks, segments, y, log_sums, dy
    of_window, of_all = functools.partial(_of_window, scale, window), functools.partial(_of_all, scale)
    if window is None or is_local is None:
        return (_gradients(*(of_all if window is None else of_window)(*arrays)),)
    return (_gradients(*jax.lax.cond(is_local, of_window, of_all, *arrays)),)


def _gradients(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> Tokens:
    return Tokens(q, k, v, None, None, None, sinks)


def _of_window(scale: float, window: int | None, *arrays: Any) -> tuple[Any, ...]:
    *kept, dy = arrays
    return flash.backward((scale, window), kept, dy)[:4]


def _of_all(
    scale: float,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    segments: jax.Array | None,
    *of_queries: jax.Array,
) -> tuple[Any, ...]:
    """Without segments at once; else by the blocks of queries that `attend` has, whose gradients of keys add up."""
    if segments is None:
        return _of_window(scale, None, q, k, v, sinks, None, *of_queries)
    d_q, d_k, d_v = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    d_sinks = None if sinks is None else jnp.zeros_like(sinks)
    for own, seen in query_blocks(q.shape[1]):
        keys = k[:, seen], v[:, seen], sinks, segments[:, seen]
        block, *of_keys, of_sinks = _of_window(scale, None, q[:, own], *keys, *(each[:, own] for each in of_queries))
        d_q.append(block)
        d_k, d_v = (
            total.at[:, seen].add(part.astype(jnp.float32)) for total, part in zip((d_k, d_v), of_keys, strict=True)
        )
        d_sinks = None if d_sinks is None else d_sinks + of_sinks
    return jnp.concatenate(d_q, axis=1), d_k.astype(k.dtype), d_v.astype(v.dtype), d_sinks


_attend_in_steps.defvjp(_forward, _backward)
