"""Causal attention whose bits do not depend on the batch: by a kernel that takes keys in a fixed order.

The forward pass is `ATTEND`, or another kernel for the same result. The backward pass is the same as in
`jgg.models.attend`, and its bits may depend on the batch: cuDNN computes it from the kernel's result and statistics
where it takes the arrays, and plain JAX elsewhere.
"""

import functools
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from jgg.core.manual_axes import alike
from jgg.extend import How
from jgg.models import flash
from jgg.models.attend import Way, as_flash_takes, attend, choose, finite_sinks, known_gpu, padded
from jgg.models.operations.attend import ATTEND, Attend


class Tokens(NamedTuple):
    """Whole sequences: q, k, v, is_local, starts and sinks as `jgg.models.attend.attend` takes them."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    is_local: jax.Array | None
    starts: jax.Array | None
    sinks: jax.Array | None


class _Kept(NamedTuple):
    """What attention is known to give; the two arrays get no gradients, which is None."""

    tokens: Tokens
    y: jax.Array | None
    log_sums: jax.Array | None


def attend_in_steps(how: How, tokens: Tokens, *, scale: float, window: int | None) -> jax.Array:
    """The result for each query, [B, S, heads, D], computed as `how` says.

    Args:
      tokens: the sequences, or packed segments.
      scale: factor of the products of queries and keys.
      window: how many of the last tokens a token attends to, itself included; None for all.
    """
    if tokens.sinks is not None:
        tokens = tokens._replace(sinks=finite_sinks(tokens.sinks))
    q, k, v, is_local, starts, sinks = jax.lax.stop_gradient(alike(tokens))
    operands = Attend(q, k[None], v[None], starts=starts, is_local=is_local, sinks=sinks)
    y, log_sums = ATTEND(how, operands, scale=scale, window=window)
    return with_attention_gradients(tokens, y, log_sums.transpose(0, 2, 1), scale=scale, window=window)


def with_attention_gradients(
    tokens: Tokens, y: jax.Array, log_sums: jax.Array, *, scale: float, window: int | None = None
) -> jax.Array:
    """The result y, with the gradients that attention among the tokens has in them.

    Args:
      tokens, scale, window: as in `attend_in_steps`, with finite sinks.
      y: [B, S, heads, features of a value], the result.
      log_sums: float32 [B, S, heads], the logarithm of the sum in each softmax.
    """
    y, log_sums = (checkpoint_name(array, name) for array, name in zip((y, log_sums), flash.NAMES, strict=True))
    return _with_attention_gradients(flash.Options(scale, window), alike(_Kept(tokens, y, log_sums)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_attention_gradients(options: flash.Options, kept: _Kept) -> jax.Array:
    return _forward(options, kept)[0]


def _forward(options: flash.Options, kept: _Kept) -> tuple[jax.Array, _Kept]:
    assert kept.y is not None
    return kept.y, kept


def _backward(options: flash.Options, kept: _Kept, dy: jax.Array) -> tuple[_Kept]:
    tokens, y, log_sums = kept
    assert y is not None and log_sums is not None
    q, k, v, is_local, starts, sinks = tokens
    window = None if options.window is None or options.window >= q.shape[1] else options.window
    arrays = flash.Kept(q, k, v, sinks, starts, y, log_sums), dy
    of_window, of_all = (functools.partial(_gradients, flash.Options(options.scale, size)) for size in (window, None))
    if window is None or is_local is None:
        gradients = of_window(*arrays)
    else:
        gradients = jax.lax.cond(is_local, of_window, of_all, *arrays)
    return (_Kept(gradients, None, None),)


def _gradients(options: flash.Options, kept: flash.Kept, dy: jax.Array) -> Tokens:
    q, k, v, sinks, starts, *_ = kept
    if choose(q, v, options.window, has_segments=starts is not None, gpu=known_gpu()) is Way.FLASH:
        (d_q, d_k, d_v), d_sinks = _by_flash(options, kept, dy)
    else:
        run = functools.partial(attend, scale=options.scale, window=options.window, starts=starts)
        _, pull_back = jax.vjp(lambda q, k, v, sinks: run(q, k, v, sinks=sinks), q, k, v, sinks)
        d_q, d_k, d_v, d_sinks = pull_back(dy)
    return Tokens(d_q, d_k, d_v, None, None, d_sinks)


def _by_flash(options: flash.Options, kept: flash.Kept, dy: jax.Array) -> tuple[flash.Arrays, jax.Array | None]:
    """The gradients of q, k and v, and of sinks."""
    q, k, v = as_flash_takes(kept.q, kept.k, kept.v, is_causal=options.window is None and kept.starts is None)
    y, dy = (padded(array, v.shape[3]) for array in (kept.y, dy))
    d_q, d_k, d_v, d_sinks, _ = flash.backward(options, kept._replace(q=q, k=k, v=v, y=y), dy)
    features, of_values = kept.q.shape[3], kept.v.shape[3]
    return (d_q[..., :features], d_k[..., :features], d_v[..., :of_values]), d_sinks


_with_attention_gradients.defvjp(_forward, _backward)
