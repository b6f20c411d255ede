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
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    mask: jax.Array | None,
    scale: float,
    blocks: int = 1,
) -> jax.Array:
    """Causal attention, or attention by a mask, [B, blocks * S, heads, D].

    A sink takes part in the softmax and adds nothing to the result. With the logarithm l of the softmax's sum without
    it, the sum with it has the logarithm l' = log(exp(l) + exp(sink)), and the result is exp(l - l') times what it is
    without. For l' and that result, flash attention's backward pass gives the gradients of q, k and v.

    Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691, for the statistics and the backward pass.

    Args:
      q, k, v: [B * blocks, S or keys, heads or kv heads, D], bfloat16 or float16.
      sinks: finite logits, float32 [heads], or None.
      mask: bool [B * blocks, S, keys], in place of causality; None for causal attention.
      scale: factor of the products of queries and keys.
      blocks: into how many blocks of S queries each sequence is split. What is kept has whole sequences, so that layers
        with and without blocks, one of which runs in a `jax.lax.cond`, keep it in the same place.
    """
    return _flash_attention((scale, blocks), *alike((q, k, v, sinks, mask)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash_attention(options: tuple[float, int], *arrays: Any) -> jax.Array:
    return _forward(options, *arrays)[0]


def _forward(
    options: tuple[float, int],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    mask: jax.Array | None,
) -> tuple[jax.Array, Any]:
    scale, blocks = options
    y, log_sums = cudnn.forward(q, k, v, _bias(mask, q), scale)
    y, log_sums = (_joined(array, blocks) for array in (y, log_sums.transpose(0, 2, 1)))
    if sinks is not None:
        without, log_sums = log_sums, jnp.logaddexp(log_sums, sinks[None, None])
        y = (y.astype(jnp.float32) * jnp.exp(without - log_sums)[..., None]).astype(y.dtype)
    y, log_sums = (checkpoint_name(array, name) for array, name in zip((y, log_sums), NAMES, strict=True))
    return y, (q, k, v, sinks, mask, y, log_sums)


def _backward(options: tuple[float, int], kept: Any, dy: jax.Array) -> tuple[jax.Array | None, ...]:
    scale, blocks = options
    q, k, v, sinks, mask, y, log_sums = kept
    in_blocks = [_split(array, blocks) for array in (y, log_sums, dy)]
    in_blocks[1] = in_blocks[1].transpose(0, 2, 1)
    dq, dk, dv = cudnn.backward(q, k, v, _bias(mask, q), scale, *in_blocks)
    return dq, dk, dv, None if sinks is None else _sinks_gradient(sinks, y, log_sums, dy), None


def _joined(array: jax.Array, blocks: int) -> jax.Array:
    """Blocks [B * blocks, S, ...] as sequences [B, blocks * S, ...]."""
    return array.reshape(array.shape[0] // blocks, array.shape[1] * blocks, *array.shape[2:])


def _split(array: jax.Array, blocks: int) -> jax.Array:
    """Sequences [B, blocks * S, ...] as blocks [B * blocks, S, ...]."""
    return array.reshape(array.shape[0] * blocks, array.shape[1] // blocks, *array.shape[2:])


def _sinks_gradient(sinks: jax.Array, y: jax.Array, log_sums: jax.Array, dy: jax.Array) -> jax.Array:
    """The gradient of sinks: each token's share p of the sink, whose value is zero, adds p (0 - dy y)."""
    products = jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)  # [B, S, heads]
    return -jnp.sum(jnp.exp(sinks[None, None] - log_sums) * products, axis=(0, 1))


def _bias(mask: jax.Array | None, q: jax.Array) -> jax.Array | None:
    """A mask as what is added to the logits [B, 1, queries, keys]."""
    if mask is None:
        return None
    least = -(2.0**15) if q.dtype == jnp.float16 else -(2.0**41)  # not the least of all: cuDNN subtracts such numbers
    return jnp.where(mask, 0.0, least).astype(q.dtype)[:, None]


_flash_attention.defvjp(_forward, _backward)
