"""Attention of several tokens of each sequence, to each other and to those before them, in a fixed order of keys."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgg.core.gpu_target import Target
from jgg.core.quantized import QuantizedArray, values_and_scales
from jgg.extend import How, Launch, Launcher, Operation, array_type, matrices, power_of_2, tiles_of, vmap
from jgg.models.operations.attend_plain import Mask, attend_by_mask
from jgg.models.operations.cache_layout import CacheLayout, keys_of
from jgg.models.operations.cached_heads import Heads, check_gpu, dense

PART = 512  # keys whose softmax is one; longer sequences add up several
_LARGEST_HEAD = 1024  # bytes of a head that kernels take: more features spill registers


class Attend(NamedTuple):
    """S tokens of each of B sequences, or of several sequences in each row, and all keys and values.

    Attributes:
      q: [B, S, heads, D].
      k, v: [layers, B, C, kv heads, D], in the dtype of q or in FP8: a cache in any layout, or the tokens' own, of one
        layer.
      layer: int32 [], the layer of k and v; None for the first.
      offset: int32 [], the place in k of the first query, the others being at those after it; None for 0.
      starts: int32 [B, S], the place in k of the first token of each query's sequence, where a row has several
        sequences, one after the other; None if all begin at 0.
      is_local: bool [], whether the window holds; None if it does, or if there is none.
      sinks: float32 [heads], finite: logits that take part in the softmax and add nothing to the result; None for none.
    """

    q: jax.Array
    k: Heads
    v: Heads
    layer: jax.Array | None = None
    offset: jax.Array | None = None
    starts: jax.Array | None = None
    is_local: jax.Array | None = None
    sinks: jax.Array | None = None


class AttendedTokens(NamedTuple):
    """The result [B, S, heads, D], and the logarithm of the sum in each softmax, float32 [B, heads, S]."""

    attended: jax.Array
    log_sums: jax.Array


def takes_heads_of(features: int, dtype: DTypeLike) -> bool:
    """Whether kernels take heads with this many features; other heads go to plain JAX."""
    return block_features(features) * jnp.dtype(dtype).itemsize <= _LARGEST_HEAD


def block_features(features: int) -> int:
    """The features of a block, no fewer than tensor cores multiply."""
    return max(16, power_of_2(features))


def keys_of_step(features: int, dtype: DTypeLike) -> int:
    """BLOCK_KEYS: part of the order of additions, so that nothing but the size and dtype of a head decides it."""
    row_bytes = block_features(features) * jnp.dtype(dtype).itemsize
    return max(16, min(64, 16_384 // row_bytes) // (2 if jnp.dtype(dtype).itemsize == 4 else 1))


def precision_of(dtype: DTypeLike) -> str:
    """Triton's name for how products are computed."""
    return "ieee" if dtype == jnp.float32 else "tf32"


def _result_types(
    operands: Attend, scale: float, window: int | None, layout: CacheLayout | None = None
) -> AttendedTokens:
    batch, length, heads, _ = operands.q.shape
    log_sums = array_type((batch, heads, length), jnp.float32)
    return AttendedTokens(array_type(operands.q.shape, operands.q.dtype), log_sums)


def _plain(operands: Attend, scale: float, window: int | None, layout: CacheLayout | None = None) -> AttendedTokens:
    q, k, v, layer, offset, starts, is_local, sinks = operands
    index = 0 if layer is None else layer
    k, v = (dense(keys_of(layout, heads, index, window, is_local), q.dtype) for heads in (k, v))
    places = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    mask = Mask(places if offset is None else places + offset, starts, window, is_local)
    attended, logits = attend_by_mask(q, k, v, mask.sees(jnp.arange(k.shape[1], dtype=jnp.int32)), sinks, scale)
    log_sums = jax.nn.logsumexp(logits, axis=-1)
    return AttendedTokens(attended, log_sums.reshape(q.shape[0], q.shape[2], q.shape[1]))


class _Tiles(NamedTuple):
    """Queries of a program, its warps, and its steps of keys in shared memory; no bit of a result depends on them."""

    queries: int
    num_warps: int
    num_stages: int


def _tiles(target: Target, block: int, dtype: jnp.dtype, block_keys: int, by_tma: bool, is_fp8: bool) -> _Tiles:
    """Tiles for heads of `block` features, by what was measured on Hopper; larger ones spill more registers."""
    tiles = tiles_of("attend_kernel", target)
    width = 2 * block if is_fp8 else block  # keys and values take registers as they are converted
    programs = tiles["programs_by_tma"] if by_tma and width <= 128 else 1  # two of 4 warps may be faster than one of 8
    is_wide = dtype == jnp.float32 or width > tiles["wide"]
    queries = tiles["queries_of_widest" if width > 256 else "queries_of_wide" if is_wide else "queries"]
    row_bytes = block * dtype.itemsize
    room = target.shared_memory // programs - queries * row_bytes
    num_stages = max(1, min(tiles["stages"], room * 7 // 8 // (2 * block_keys * row_bytes)))
    return _Tiles(queries, max(1, tiles["warps"] // programs), num_stages)


def _launch(
    launcher: Launcher, operands: Attend, scale: float, window: int | None, layout: CacheLayout | None = None
) -> AttendedTokens:
    from jgg.kernels.attend import attend_kernel

    batch, length, heads, features = operands.q.shape
    (k, k_scales), (v, v_scales) = map(values_and_scales, (operands.k, operands.v))
    slots, kv_heads = k.shape[2:4]
    capacity = slots if layout is None else layout.positions
    if not takes_heads_of(features, operands.q.dtype) or scale <= 0:
        return _plain(operands, scale, window, layout)
    if k_scales is not None:
        check_gpu(launcher.target)
    block, dtype = block_features(features), operands.q.dtype
    block_keys = keys_of_step(features, dtype)
    is_aligned = features * k.dtype.itemsize % 16 == 0  # where a head begins, too: GPUs stop at other blocks of TMA
    by_tma = launcher.target.has_tma and dtype != jnp.float32 and is_aligned
    tiles = _tiles(launcher.target, block, dtype, block_keys, by_tma, k_scales is not None)
    types = _result_types(operands, scale, window)
    descriptors, keys = {}, {"k": k, "v": v}
    if by_tma:
        rows = k.shape[0] * k.shape[1], slots, kv_heads * features
        descriptors = dict.fromkeys("kv", matrices(rows, (block_keys, block)))
        keys = {name: array.reshape(rows) for name, array in keys.items()}
    launch = Launch(
        operands={
            **operands._asdict(),
            **keys,
            "k_scales": k_scales,
            "v_scales": v_scales,
            "firsts": None if layout is None else layout.firsts,
            "length": length,
            "capacity": capacity,
            "slots": slots,
        },
        outputs=types._asdict(),
        constants={
            "KV_HEADS": kv_heads,
            "GROUP": heads // kv_heads,
            "FEATURES": features,
            "WINDOW": window or 0,
            "RING": 0 if layout is None or window is None else layout.ring,
            "SCALE": scale,
            "PRECISION": precision_of(dtype),
            "PART": PART,
            "BY_TMA": by_tma,
            "BLOCK_QUERIES": tiles.queries,
            "BLOCK_KEYS": block_keys,
            "BLOCK_FEATURES": block,
        },
        grid=(heads, batch, math.ceil(length / tiles.queries)),
        descriptors=descriptors,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        flops=2 * operands.q.size * capacity,
        bytes_accessed=2 * (operands.q.nbytes + batch * capacity * kv_heads * features * k.dtype.itemsize),
    )
    return AttendedTokens(**launcher.run(attend_kernel, launch))


def _merge_batch(
    how: How, operands: Attend, batched: Attend, scale: float, window: int | None, layout: CacheLayout | None = None
) -> AttendedTokens | None:
    """One product of all sequences, where only arrays that have an axis of sequences are batched."""
    if not (batched.q and batched.k and batched.v) or operands.k.shape[1] != 1:
        return None
    if isinstance(operands.k, QuantizedArray) or isinstance(operands.v, QuantizedArray):
        return None
    if batched.layer or batched.offset or batched.is_local or batched.sinks:
        return None
    size = vmap.batch_size(operands, batched)
    starts = operands.starts if batched.starts is None else vmap.for_each(operands.starts, batched.starts, size)
    k, v = (array.reshape(1, -1, *array.shape[3:]) for array in (operands.k, operands.v))
    merged = operands._replace(q=vmap.flat(operands.q), k=k, v=v, starts=vmap.flat(starts))
    results = ATTEND(how, merged, scale=scale, window=window, layout=layout)
    return jax.tree.map(lambda result: result.reshape(size, -1, *result.shape[1:]), results)


ATTEND: Operation[AttendedTokens] = Operation(
    "attend",
    Attend,
    result_types=_result_types,
    plain=_plain,
    launch=_launch,
    vmap=_merge_batch,
)
"""AttendedTokens; the parameters are the factor of the logits, more than 0, how many of the last tokens are seen, None
for all, and the `CacheLayout` of k and v, None where each layer has C positions."""
