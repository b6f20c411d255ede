"""Causal attention among the tokens of whole sequences: within windows and segments, with sinks, by cuDNN on a GPU.

On a GPU this is `flash_attention` where `jgg.models.cudnn` finds what it needs in JAX. The rest of this file is for
CPUs, float32, large heads and other versions of JAX, with which cuDNN runs by JAX's public function and sinks are keys.
Where cuDNN takes no heads of this size, long sequences attend by `attend_plain`, without a matrix of all pairs.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jgg.core.gpu_target import known_target
from jgg.models import cudnn, flash
from jgg.models.attend_plain import attend_plain, block_size
from jgg.models.blocks import join, split

# features of a head that cuDNN's flash attention takes, forward and backward: on Hopper, and on every GPU
_LARGEST_ON_HOPPER, _LARGEST_HEAD = 256, 128
_LARGEST_SINK = 1e9  # other logits are far smaller
# where queries are in blocks: the least of a block with segments, the least without a kernel, and the most blocks
_QUERIES, _PLAIN_QUERIES, _BLOCKS = 4096, 512, 8
_SINK_KEYS, _SINK_FEATURES = 2, 8  # two: an even number of keys stays even; eight: a head's features stay a multiple


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    is_local: jax.Array | None = None,
    segments: jax.Array | None = None,
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
      segments: int32 [B, S]: a token attends to tokens of the same number alone.
      sinks: [heads], a logit that takes part in the softmax and adds nothing to the result.
    """
    features = v.shape[3]
    if not (window is None and segments is None and _takes_fewer_values(q, k, v)):
        q, k, v = _with_equal_heads(q, k, v)
    arrays = q, k, v, sinks, segments
    of_all = functools.partial(_attend_to_all, scale=scale)
    of_window = functools.partial(_attend, scale=scale, window=window)
    if window is None or window >= q.shape[1]:
        y = of_all(*arrays)
    elif is_local is None:
        y = of_window(*arrays)
    else:
        y = jax.lax.cond(is_local, of_window, of_all, *arrays)
    return y[..., :features]


def _takes_fewer_values(q: jax.Array, k: jax.Array, v: jax.Array) -> bool:
    """Whether causal flash attention takes values of fewer features than queries have, without zeros after them."""
    target = known_target()
    is_fit = target is not None and target.compute_capability == 90 and v.shape[3] < q.shape[3] and v.shape[3] % 8 == 0
    return is_fit and takes_flash(q, k, None, None) and cudnn.takes_unequal_heads()


def _with_equal_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values with as many features as the longest have, zeros after their own."""
    features = max(k.shape[3], v.shape[3])

    def whole(array: jax.Array) -> jax.Array:
        rest = features - array.shape[3]
        return jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, rest))) if rest else array

    return whole(q), whole(k), whole(v)


def finite_sinks(sinks: jax.Array) -> jax.Array:
    """The sinks in float32, where infinite and huge ones become finite: they take nothing or all of the softmax."""
    return jnp.clip(sinks.astype(jnp.float32), -_LARGEST_SINK, _LARGEST_SINK)


def _attend_to_all(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, segments: jax.Array | None, *, scale: float
) -> jax.Array:
    """Causally at once if there are no segments; else by blocks of queries, each with the keys before its end.

    So the mask of a long sequence is never of all pairs of tokens, and half of them are not computed.
    """
    length, dtype = q.shape[1], q.dtype
    is_plain = _is_too_long(q, k, None)
    if (segments is None and not is_plain) or jax.export.is_symbolic_dim(length):
        return _attend(q, k, v, sinks, segments, scale=scale)
    of_block, slices = (
        (_attend_plain, query_blocks(length, _PLAIN_QUERIES)) if is_plain else (_attend, query_blocks(length))
    )
    if len(slices) <= 1:
        return of_block(q, k, v, sinks, segments, scale=scale)
    k, v = (array.astype(jnp.float32) for array in (k, v))  # the gradients of all blocks are added in float32
    blocks = []
    for own, seen in slices:
        k_seen, v_seen = (array[:, seen].astype(dtype) for array in (k, v))
        of_keys = None if segments is None else segments[:, seen]
        blocks.append(of_block(q[:, own], k_seen, v_seen, sinks, of_keys, scale=scale))
    return jnp.concatenate(blocks, axis=1)


def query_blocks(length: int, least: int | None = None) -> list[tuple[slice, slice]]:
    """The blocks of queries of a sequence, each with the keys before its end; by default those with segments."""
    size = max(_QUERIES if least is None else least, -(-length // _BLOCKS) + 1 & -2)  # cuDNN's masks need even lengths
    return [(slice(start, start + size), slice(start + size)) for start in range(0, length, size)]


def takes_flash(q: jax.Array, k: jax.Array, segments: jax.Array | None, window: int | None) -> bool:
    """Whether `flash_attention` takes these arrays, by primitives that this JAX has."""
    is_causal = window is None and segments is None
    lengths = (q.shape[1], k.shape[1]) if window is None else (window,)
    return _fits_cudnn(q) and cudnn.is_available() and (is_causal or _are_even(*lengths))


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    segments: jax.Array | None,
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:
    """The result for q, the last of the tokens that k has."""
    if takes_flash(q, k, segments, window):
        sinks = None if sinks is None else finite_sinks(sinks)
        return flash.flash_attention(q, k, v, sinks, segments, scale=scale, window=window)
    batch, length = q.shape[:2]
    if _is_too_long(q, k, window):
        return _attend_plain(q, k, v, sinks, segments, scale=scale, window=window)
    q, k, v, mask = split(q, k, v, segments, window)
    run = functools.partial(_run, mask=mask, scale=scale)
    y = run(q, k, v) if sinks is None else _with_sinks(run, q, k, v, sinks, mask is None, scale)
    return checkpoint_name(join(y, batch, length, window), flash.NAMES[0])


def _attend_plain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    segments: jax.Array | None,
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:
    """The same by blocks of queries, each computed again in the backward pass."""
    positions = jnp.arange(k.shape[1] - q.shape[1], k.shape[1], dtype=jnp.int32)[None]
    sinks = None if sinks is None else finite_sinks(sinks)
    run = functools.partial(attend_plain, positions=positions, scale=scale, window=window)
    return checkpoint_name(run(q, k, v, segments=segments, sinks=sinks), flash.NAMES[0])


def _with_sinks(
    run: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array,
    is_causal: bool,
    scale: float,
) -> jax.Array:
    """Adds keys before all others whose products with a query are its head's sink, and whose values are zero.

    A query has its sink in two more features, as the sum of two numbers of its dtype, and these keys have ones there.
    """
    logits = (finite_sinks(sinks) - jnp.log(jnp.float32(_SINK_KEYS))) / scale
    largest = float(jnp.finfo(q.dtype).max) / 2  # float16 has hardly more than logits do
    logits = jnp.clip(logits, -largest, largest)
    high = logits.astype(q.dtype)
    low = jax.lax.stop_gradient(logits - high.astype(jnp.float32)).astype(q.dtype)
    of_sink = jnp.pad(jnp.stack([high, low], axis=-1), ((0, 0), (0, _SINK_FEATURES - 2)))
    q = jnp.concatenate([q, jnp.broadcast_to(of_sink, (*q.shape[:3], _SINK_FEATURES))], axis=-1)
    k, v = (jnp.pad(array, ((0, 0), (_SINK_KEYS, 0), (0, 0), (0, _SINK_FEATURES))) for array in (k, v))
    k = k.at[:, :_SINK_KEYS, :, -_SINK_FEATURES : 2 - _SINK_FEATURES].set(1)
    if not is_causal:
        return run(q, k, v)[..., :-_SINK_FEATURES]
    # as many queries more, that queries see the same keys
    return run(jnp.pad(q, ((0, 0), (_SINK_KEYS, 0), (0, 0), (0, 0))), k, v)[:, _SINK_KEYS:, :, :-_SINK_FEATURES]


def _run(q: jax.Array, k: jax.Array, v: jax.Array, *, mask: jax.Array | None, scale: float) -> jax.Array:
    if mask is not None:
        mask = jnp.pad(mask, ((0, 0), (0, 0), (k.shape[1] - mask.shape[2], 0)), constant_values=True)[:, None]
    # JAX's public function refuses odd lengths in training, without a mask too
    implementation = "cudnn" if _fits_cudnn(q) and _are_even(q.shape[1], k.shape[1]) else None
    return dot_product_attention(q, k, v, mask=mask, scale=scale, is_causal=mask is None, implementation=implementation)


def _fits_cudnn(q: jax.Array) -> bool:
    fits = q.size > 0 and q.dtype != jnp.float32 and q.shape[3] <= _largest_head() and q.shape[3] % 8 == 0
    return fits and jax.default_backend() == "gpu"


def _largest_head() -> int:
    """The most features of a head that cuDNN takes."""
    target = known_target()
    return _LARGEST_ON_HOPPER if target is not None and target.compute_capability == 90 else _LARGEST_HEAD


def _is_too_long(q: jax.Array, k: jax.Array, window: int | None) -> bool:
    """Whether no kernel takes these arrays, and the logits of all pairs of tokens would be too many."""
    batch, length, heads, _ = q.shape
    keys = k.shape[1] if window is None else 2 * window
    return not _fits_cudnn(q) and block_size(batch * heads, length, keys) is not None


def _are_even(*lengths: int) -> bool:
    """Whether lengths are even, as cuDNN's masks need."""
    return all(length % 2 == 0 for length in lengths)


def dot_product_attention(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """`jax.nn.dot_product_attention`, in float32 where JAX's product or its gradient does not take 16 bits.

    That is float16 where there is no GPU, and on a GPU what cuDNN does not take, whose gradient promotes dtypes.
    """
    dtype, is_gpu = q.dtype, jax.default_backend() == "gpu"
    if (dtype == jnp.float16 and not is_gpu) or (is_gpu and options.get("implementation") is None):
        q, k, v = (array.astype(jnp.float32) for array in (q, k, v))
    with jax.numpy_dtype_promotion("standard"):  # it promotes bfloat16 to float32
        return jax.nn.dot_product_attention(q, k, v, **options).astype(dtype)
