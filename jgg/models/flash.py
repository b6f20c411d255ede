"""cuDNN's flash attention with sinks, whose result and statistics `jax.checkpoint` can keep by name."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jgg.core.manual_axes import alike
from jgg.models import cudnn
from jgg.models.blocks import blocks, join, split

NAMES = "jgg_attention", "jgg_attention_log_sums"


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    segments: jax.Array | None,
    *,
    scale: float,
    window: int | None,
) -> jax.Array:
    """Causal attention within a window and segments, [B, S, heads, D].

    A sink takes part in the softmax and adds nothing to the result. With the logarithm l of the softmax's sum without
    it, the sum with it has the logarithm l' = log(exp(l) + exp(sink)), and the result is exp(l - l') times what it is
    without. For l' and that result, flash attention's backward pass gives the gradients of q, k and v.

    What is kept for the backward pass has no masks or blocks, so that in a `jax.lax.cond` layers with and without a
    window keep it in the same place.

    Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691, for the statistics and the backward pass.

    Args:
      q, k, v, segments, window: as in `jgg.models.blocks.split`; q, k and v in bfloat16 or float16.
      sinks: finite logits, float32 [heads], or None.
      scale: factor of the products of queries and keys.
    """
    return _flash_attention((scale, window), *alike((q, k, v, sinks, segments)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash_attention(options: tuple[float, int | None], *arrays: Any) -> jax.Array:
    return _forward(options, *arrays)[0]


def _forward(
    options: tuple[float, int | None],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    segments: jax.Array | None,
) -> tuple[jax.Array, Any]:
    scale, window = options
    of_blocks, mask = _split(q, k, v, segments, window)
    y, log_sums = cudnn.forward(*of_blocks, _bias(mask, q), scale)
    y, log_sums = (join(array, q.shape[0], q.shape[1], window) for array in (y, log_sums.transpose(0, 2, 1)))
    if sinks is not None:
        without, log_sums = log_sums, jnp.logaddexp(log_sums, sinks[None, None])
        y = (y.astype(jnp.float32) * jnp.exp(without - log_sums)[..., None]).astype(y.dtype)
    y, log_sums = (checkpoint_name(array, name) for array, name in zip((y, log_sums), NAMES, strict=True))
    return y, (q, k, v, sinks, segments, y, log_sums)


def backward(options: tuple[float, int | None], kept: Any, dy: jax.Array) -> tuple[jax.Array | None, ...]:
    """The gradients of q, k, v, sinks and segments, for what the forward pass keeps, its result and statistics last.

    Args:
      options: scale and window.
      kept: q, k, v, sinks and segments, the result [B, S, heads, D] and the logarithms of the sums [B, S, heads].
      dy: the gradient of the result.
    """
    scale, window = options
    q, k, v, sinks, segments, y, log_sums = kept
    of_blocks: tuple[jax.Array, jax.Array, jax.Array]
    of_blocks, pull_back, mask = jax.vjp(lambda *arrays: _split(*arrays, segments, window), q, k, v, has_aux=True)
    # the queries after the last token have no gradient, as their dy is zero
    y_blocks, sums_blocks, dy_blocks = (blocks(array, window) for array in (y, log_sums, dy))
    sums_blocks = sums_blocks.transpose(0, 2, 1)
    gradients = cudnn.backward(*of_blocks, _bias(mask, q), scale, y_blocks, sums_blocks, dy_blocks)
    return *pull_back(gradients), None if sinks is None else _sinks_gradient(sinks, y, log_sums, dy), None


def _split(*arrays: Any) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array | None]:
    q, k, v, mask = split(*arrays)
    return (q, k, v), mask


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


_flash_attention.defvjp(_forward, backward)
