"""cuDNN's flash attention within windows and segments and with sinks, whose result `jax.checkpoint` can keep by name.

JAX's public `jax.nn.dot_product_attention` has no backward pass for a result and statistics that were changed or kept.
So this module binds the two primitives below it, which are private: tested with JAX 0.11.1, 0.11.2 and 0.12.0.1.
"""

import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jgg.models.operations.attend_plain import Mask

_jax: Any
try:
    _jax = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
except ImportError:
    _jax = None

NAMES = "jgg_attention", "jgg_attention_log_sums"
_FORWARD, _BACKWARD = (f"_dot_product_attention_{name}_p_wrapper" for name in ("fwd", "bwd"))
_QUERIES, _BLOCKS = 4096, 8  # the least of a block of queries within segments, and the most blocks

type Arrays = tuple[jax.Array, jax.Array, jax.Array]  # q, k and v
type Gradients = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, None]  # those, and of sinks and starts


class Options(NamedTuple):
    """The factor of the products of queries and keys, and how many of the last tokens are seen, None for all."""

    scale: float
    window: int | None


class Kept(NamedTuple):
    """What the backward pass takes: arguments, the result [B, S, heads, D] and the logarithms of sums [B, S, heads]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    sinks: jax.Array | None
    starts: jax.Array | None
    y: jax.Array
    log_sums: jax.Array


def is_available() -> bool:
    """Whether this JAX has the private primitives."""
    return hasattr(_jax, _FORWARD) and hasattr(_jax, _BACKWARD)


@functools.cache
def takes_fewer_values() -> bool:
    """Whether this cuDNN takes values of fewer features than queries and keys have, on Hopper: from 9.10 on."""
    return hasattr(_jax, "check_cudnn_version") and _jax.check_cudnn_version() >= 91000


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash_attention(
    options: Options, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, starts: jax.Array | None
) -> jax.Array:
    """Causal attention within a window and segments, [B, S, heads, features of a value].

    A sink takes part in the softmax and adds nothing to the result. With the logarithm l of the softmax's sum without
    it, the sum with it has the logarithm l' = log(exp(l) + exp(sink)), and the result is exp(l - l') times what it is
    without. For l' and that result, flash attention's backward pass gives the gradients of q, k and v.

    What is kept for the backward pass has no masks or blocks, so that in a `jax.lax.cond` layers with and without a
    window keep it in the same place.

    Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691, for the statistics and the backward pass.

    Args:
      q, k, v: [B, S, heads or kv heads, D], bfloat16 or float16; v may have fewer features if `takes_fewer_values`.
      sinks: finite logits, float32 [heads], or None.
      starts: int32 [B, S], the first token of each token's segment; None for one segment.
    """
    return _forward(options, q, k, v, sinks, starts)[0]


def _forward(
    options: Options, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, starts: jax.Array | None
) -> tuple[jax.Array, Kept]:
    parts = []
    for own, seen in _slices(q, starts, options.window):
        (own_q, *arrays), bias = _masked((q[:, own], k[:, seen], v[:, seen]), _of(starts, own), options.window)
        unused, others = _others(q, bias, options.scale)
        y, log_sums = getattr(_jax, _FORWARD).bind(own_q, *arrays, *unused, is_training=True, **others)
        parts.append([_tokens(each, q[:, own], options.window) for each in (y, log_sums.transpose(0, 2, 1))])
    y, log_sums = parts[0] if len(parts) == 1 else (jnp.concatenate(each, axis=1) for each in zip(*parts, strict=True))
    if sinks is not None:
        without, log_sums = log_sums, jnp.logaddexp(log_sums, sinks[None, None])
        y = (y.astype(jnp.float32) * jnp.exp(without - log_sums)[..., None]).astype(y.dtype)
    y, log_sums = (checkpoint_name(array, name) for array, name in zip((y, log_sums), NAMES, strict=True))
    return y, Kept(q, k, v, sinks, starts, y, log_sums)


def backward(options: Options, kept: Kept, dy: jax.Array) -> Gradients:
    """The gradients of q, k, v, sinks and starts for the gradient dy of the result.

    With p = exp(scale q k + bias - log_sums), they follow from the gradient p (dy v - dy y) of the logits. Those of
    keys and values by several blocks of queries are added in float32.
    """
    q, k, v, sinks, starts, y, log_sums = kept
    slices = _slices(q, starts, options.window)
    parts: list[jax.Array] = []
    totals = [] if len(slices) == 1 else [jnp.zeros(array.shape, jnp.float32) for array in (k, v)]
    for own, seen in reversed(slices):
        rows = [array[:, own] for array in (y, log_sums, dy)]
        d_q, *of_keys = _block_gradients(options, (q[:, own], k[:, seen], v[:, seen]), _of(starts, own), *rows)
        parts.insert(0, d_q)
        both = zip(totals, of_keys, strict=True) if totals else ()
        totals = [total.at[:, seen].add(part.astype(jnp.float32)) for total, part in both] or of_keys
    d_q, d_k, d_v = jnp.concatenate(parts, axis=1), *totals
    d_sinks = None if sinks is None else _sinks_gradient(sinks, y, log_sums, dy)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), d_sinks, None


flash_attention.defvjp(_forward, backward)


def query_blocks(length: int, least: int) -> list[tuple[slice, slice]]:
    """Blocks of at least `least` queries of a sequence, each with the keys before its end."""
    size = max(least, -(-length // _BLOCKS) + 1 & -2)  # cuDNN's masks need even lengths
    return [(slice(start, start + size), slice(start + size)) for start in range(0, length, size)]


def _slices(q: jax.Array, starts: jax.Array | None, window: int | None) -> list[tuple[slice, slice]]:
    """The blocks of queries with their keys. So the mask of segments is never of all pairs of tokens."""
    if window is not None or starts is None or jax.export.is_symbolic_dim(q.shape[1]):
        return [(slice(None), slice(None))]
    return query_blocks(q.shape[1], _QUERIES)


def _of(array: jax.Array | None, own: slice) -> jax.Array | None:
    return None if array is None else array[:, own]


def _block_gradients(
    options: Options, arrays: Arrays, starts: jax.Array | None, y: jax.Array, log_sums: jax.Array, dy: jax.Array
) -> Arrays:
    """The gradients of q, k and v by the results of these queries."""
    arrays, pull_back, bias = jax.vjp(lambda *arrays: _masked(arrays, starts, options.window), *arrays, has_aux=True)
    # the queries after the last token have no gradient, as their dy is zero
    y, log_sums, dy = (_blocks(array, options.window) for array in (y, log_sums, dy))
    log_sums = log_sums.transpose(0, 2, 1)
    unused, others = _others(dy, bias, options.scale)
    of_blocks = getattr(_jax, _BACKWARD).bind(*arrays, *unused, log_sums, y, dy, **others)
    gradients: Arrays = pull_back(tuple(of_blocks))
    return gradients


def _sinks_gradient(sinks: jax.Array, y: jax.Array, log_sums: jax.Array, dy: jax.Array) -> jax.Array:
    """The gradient of sinks: each token's share p of the sink, whose value is zero, adds p (0 - dy y)."""
    products = jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)  # [B, S, heads]
    return -jnp.sum(jnp.exp(sinks[None, None] - log_sums) * products, axis=(0, 1))


def _others(q: jax.Array, bias: jax.Array | None, scale: float) -> tuple[list[jax.Array], dict[str, object]]:
    """What both primitives take in addition to q, k and v: arrays by position, options by name."""
    unused = jnp.zeros(0, q.dtype)
    options = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, False),  # whether there is a bias, and whether it needs a gradient
        "mask_type": _jax.MaskType.CAUSAL if bias is None else _jax.MaskType.NO_MASK,
        "layout": _jax.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
    if jax.__version_info__ >= (0, 12):
        options["score_mod"] = None
    return [unused if bias is None else bias, *[unused] * 6], options  # bias, lengths, offsets, tables of pages


def _masked(arrays: Arrays, starts: jax.Array | None, window: int | None) -> tuple[Arrays, jax.Array | None]:
    """Queries, the last of the tokens that k has, keys and values; and what a mask adds to the logits, None if causal.

    With a window, blocks take the place of sequences: they have as many queries as the window, each with the keys of
    its own block and of the one before.
    """
    q, k, v = arrays
    (batch, length), num_keys = q.shape[:2], k.shape[1]
    if window is None and starts is None:
        return arrays, None
    if window is None:
        mask = Mask(jnp.arange(num_keys - length, num_keys, dtype=jnp.int32)[None], starts)
    else:
        number = jnp.arange(length, dtype=jnp.int32)[None] // window
        starts = (jnp.zeros((batch, 1), jnp.int32) if starts is None else starts) - (number - 1) * window
        mask = Mask(jnp.arange(window, 2 * window, dtype=jnp.int32)[None], _blocks(starts, window), window)
        q, k, v, num_keys = _blocks(q, window), _with_previous(k, window), _with_previous(v, window), 2 * window
    seen = mask.sees(jnp.arange(num_keys, dtype=jnp.int32))
    least = -(2.0**15) if q.dtype == jnp.float16 else -(2.0**41)  # not the least of all: cuDNN subtracts such numbers
    return (q, k, v), jnp.where(seen, 0.0, least).astype(q.dtype)[:, None]


def _blocks(array: jax.Array, window: int | None) -> jax.Array:
    """Tokens [B, S, ...] as blocks [B * blocks, window, ...], the last with zeros after its tokens."""
    if window is None:
        return array
    count = -(-array.shape[1] // window)
    array = jnp.pad(array, ((0, 0), (0, count * window - array.shape[1]), *((0, 0) for _ in array.shape[2:])))
    return array.reshape(array.shape[0] * count, window, *array.shape[2:])


def _with_previous(array: jax.Array, window: int) -> jax.Array:
    """For each block of tokens [B, S, ...] those of the block before and its own, [B * blocks, 2 * window, ...]."""
    own = _blocks(array, window).reshape(array.shape[0], -1, window, *array.shape[2:])
    before = jnp.pad(own[:, :-1], ((0, 0), (1, 0), *((0, 0) for _ in own.shape[2:])))
    return jnp.concatenate([before, own], axis=2).reshape(-1, 2 * window, *array.shape[2:])


def _tokens(array: jax.Array, q: jax.Array, window: int | None) -> jax.Array:
    """Blocks [B * blocks, window, ...] as tokens [B, S, ...], cut to the length of q."""
    if window is None:
        return array
    return array.reshape(q.shape[0], -1, *array.shape[2:])[:, : q.shape[1]]
