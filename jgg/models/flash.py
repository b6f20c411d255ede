"""cuDNN's flash attention with sinks, whose result and statistics `jax.checkpoint` can keep by name."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jgg.core.manual_axes import alike
from jgg.models import cudnn

NAMES = "jgg_attention", "jgg_attention_log_sums"


def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, mask: jax.Array | None, scale: float
) -> jax.Array:
    """Causal attention, or attention by a mask, [B, S, heads, D].

    A sink takes part in the softmax and adds nothing to the result. With the logarithm l of the softmax's sum without
    it, the sum with it has the logarithm l' = log(exp(l) + exp(sink)), and the result is exp(l - l') times what it is
    without. For l' and that result, flash attention's backward pass gives the gradients of q, k and v.

    Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691, for the statistics and the backward pass.

    Args:
      q, k, v: [B, S, heads or kv heads, D], bfloat16 or float16.
      sinks: finite logits, float32 [heads], or None.
      mask: bool [B, queries, keys], in place of causality; None for causal attention.
      scale: factor of the products of queries and keys.
    """
    return _flash_attention(scale, *alike((q, k, v, sinks, mask)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash_attention(scale: float, *arrays: Any) -> jax.Array:
    return _forward(scale, *arrays)[0]


def _forward(
    scale: float, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, mask: jax.Array | None
) -> tuple[jax.Array, Any]:
    y, log_sums = cudnn.forward(q, k, v, _bias(mask, q), scale)
    if sinks is not None:
        without, log_sums = log_sums, jnp.logaddexp(log_sums, sinks[None, :, None])
        share = jnp.exp(without - log_sums).transpose(0, 2, 1)[..., None]
        y = (y.astype(jnp.float32) * share).astype(y.dtype)
    y, log_sums = (checkpoint_name(array, name) for array, name in zip((y, log_sums), NAMES, strict=True))
    return y, (q, k, v, sinks, mask, y, log_sums)


def _backward(scale: float, kept: Any, dy: jax.Array) -> tuple[jax.Array | None, ...]:
    q, k, v, sinks, mask, y, log_sums = kept
    dq, dk, dv = cudnn.backward(q, k, v, _bias(mask, q), scale, y, log_sums, dy)
    return dq, dk, dv, None if sinks is None else _sinks_gradient(sinks, y, log_sums, dy), None


def _sinks_gradient(sinks: jax.Array, y: jax.Array, log_sums: jax.Array, dy: jax.Array) -> jax.Array:
    """The gradient of sinks: each token's share p of the sink, whose value is zero, adds p (0 - dy y)."""
    products = jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)  # [B, S, heads]
    shares = jnp.exp(sinks[None, :, None] - log_sums).transpose(0, 2, 1)
    return -jnp.sum(shares * products, axis=(0, 1))


def _bias(mask: jax.Array | None, q: jax.Array) -> jax.Array | None:
    """A mask as what is added to the logits [B, 1, queries, keys]."""
    if mask is None:
        return None
    least = -(2.0**15) if q.dtype == jnp.float16 else -(2.0**41)  # not the least of all: cuDNN subtracts such numbers
    return jnp.where(mask, 0.0, least).astype(q.dtype)[:, None]


_flash_attention.defvjp(_forward, _backward)
