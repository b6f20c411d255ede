"""Causal attention among the tokens of whole sequences, within windows and segments and with sinks."""

import enum
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jgg.core.gpu_target import known_target
from jgg.core.manual_axes import alike
from jgg.models import flash
from jgg.models.operations.attend_plain import Mask, attend_by_mask, attend_in_blocks, block_size

_LARGEST_SINK = 1e9  # other logits are far smaller
_QUERIES = 512  # the least of a block of queries that has the keys before its end alone, without a kernel


class Way(enum.Enum):
    """How whole sequences attend: by cuDNN, or in plain JAX, all queries at once or a block at a time."""

    FLASH = "flash"
    WHOLE = "whole"
    BLOCKS = "blocks"


def choose(q: jax.Array, v: jax.Array, window: int | None, *, has_segments: bool, gpu: int | None) -> Way:
    """How queries q [B, S, heads, D] attend to values v [B, S, kv heads, features of a value].

    Args:
      window: how many of the last tokens a token attends to; None for all.
      has_segments: whether rows have segments.
      gpu: compute capability of the GPU; 0 if unknown, None without a GPU.
    """
    batch, length, heads, _ = q.shape
    features, largest = max(q.shape[3], v.shape[3]), 256 if gpu == 90 else 128
    fits = q.size > 0 and q.dtype != jnp.float32 and features <= largest and features % 8 == 0
    is_even = (length if window is None else window) % 2 == 0  # as cuDNN's masks need
    if gpu is not None and flash.is_available() and fits and (is_even or (window is None and not has_segments)):
        return Way.FLASH
    return Way.WHOLE if block_size(batch * heads, length, length) is None else Way.BLOCKS


def known_gpu() -> int | None:
    """The GPU as `choose` takes it."""
    if jax.default_backend() != "gpu":
        return None
    target = known_target()
    return 0 if target is None else target.compute_capability


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    is_local: jax.Array | None = None,
    starts: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """The result for each query, [B, S, heads, features of a value].

    Args:
      q: [B, S, heads, D].
      k: [B, S, kv heads, D].
      v: [B, S, kv heads, D or another number of features].
      scale: factor of the products of queries and keys.
      window: how many of the last tokens a token attends to, itself included; None for all.
      is_local: bool [], whether there is a window; None if there always is.
      starts: int32 [B, S], where the segment of each token begins, which attends to no token before; None for 0.
      sinks: [heads], a logit that takes part in the softmax and adds nothing to the result.
    """
    arrays = q, k, v, None if sinks is None else finite_sinks(sinks), starts
    window = None if window is None or window >= q.shape[1] else window
    of_window, of_all = (functools.partial(_attend, flash.Options(scale, size)) for size in (window, None))
    if window is None or is_local is None:
        return of_window(*arrays)
    return jax.lax.cond(is_local, of_window, of_all, *arrays)


def _attend(
    options: flash.Options,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    starts: jax.Array | None,
) -> jax.Array:
    gpu, features = known_gpu(), v.shape[3]
    way = choose(q, v, options.window, has_segments=starts is not None, gpu=gpu)
    if way is Way.FLASH:
        q, k, v = as_flash_takes(q, k, v, is_causal=options.window is None and starts is None)
        return flash.flash_attention(options, *alike((q, k, v, sinks, starts)))[..., :features]
    places = jnp.arange(q.shape[1], dtype=jnp.int32)
    mask = Mask(places[None], starts, options.window)
    if way is Way.WHOLE:
        y, _ = attend_by_mask(q, k, v, mask.sees(places), sinks, options.scale)
    elif options.window is not None:
        y = attend_in_blocks(q, k, v, mask, sinks, options.scale)
    else:
        y = _attend_to_those_before(q, k, v, mask, sinks, options.scale)
    return checkpoint_name(y, flash.NAMES[0])


def _attend_to_those_before(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, sinks: jax.Array | None, scale: float
) -> jax.Array:
    """Several blocks of queries, each with the keys before its end: half of all pairs of tokens are not computed."""
    keys, values = k.astype(jnp.float32), v.astype(jnp.float32)  # the gradients of all blocks are added in float32
    parts = []
    for own, seen in flash.query_blocks(q.shape[1], _QUERIES):
        k_seen, v_seen = keys[:, seen].astype(k.dtype), values[:, seen].astype(v.dtype)
        of_queries = Mask(mask.places[:, own], None if mask.starts is None else mask.starts[:, own])
        parts.append(attend_in_blocks(q[:, own], k_seen, v_seen, of_queries, sinks, scale))
    return jnp.concatenate(parts, axis=1)


def as_flash_takes(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool) -> list[jax.Array]:
    """q, k and v with equally many features, of zeros where there were none, unless cuDNN takes fewer of v."""
    features = v.shape[3]
    takes_fewer = is_causal and known_gpu() == 90 and features < q.shape[3] and features % 8 == 0
    if features == q.shape[3] or (takes_fewer and flash.takes_fewer_values()):
        return [q, k, v]
    return [padded(array, max(q.shape[3], features)) for array in (q, k, v)]


def padded(array: jax.Array, features: int) -> jax.Array:
    """Heads [B, S, heads, D] with zeros after their own features."""
    return jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, features - array.shape[3])))


def finite_sinks(sinks: jax.Array) -> jax.Array:
    """The sinks in float32, where infinite and huge ones become finite: they take nothing or all of the softmax."""
    return jnp.clip(sinks.astype(jnp.float32), -_LARGEST_SINK, _LARGEST_SINK)
