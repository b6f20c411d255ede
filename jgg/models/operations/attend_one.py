"""Attention of one new token of each sequence to a cache of keys and values, which takes the token's own.

Its bits are those of `ATTEND`: the kernels of both take the same steps.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.core.quantized import QuantizedArray, as_bits, from_bits, values_and_scales
from jgg.extend import Launch, Launcher, Operation, array_type, power_of_2, tiles_of
from jgg.models.operations import attend
from jgg.models.operations.attend import block_features, keys_of_step, precision_of, takes_heads_of
from jgg.models.operations.attend_plain import Mask, attend_by_mask
from jgg.models.operations.cache_layout import CacheLayout, keys_of, place_of
from jgg.models.operations.cached_heads import Heads, check_gpu, dense, put


class AttendOne(NamedTuple):
    """One token of each of B sequences, and the cache of a stack of layers.

    Attributes:
      q: [B, heads, D].
      k, v: [B, kv heads, D], the token's own, in the dtype of q, or in FP8 as caches are.
      k_cache, v_cache: [layers, B, C, kv heads, D], in the form of k and v, or as their `CacheLayout` says.
      layer: int32 [], the layer of the cache.
      positions: int32 [B], the positions of the tokens, from 0 to C - 1.
      is_local: bool [], whether the window holds; None if it does, or if there is none.
      sinks: float32 [heads], finite: logits that take part in the softmax and add nothing to the result; None for none.
    """

    q: jax.Array
    k: Heads
    v: Heads
    k_cache: Heads
    v_cache: Heads
    layer: jax.Array
    positions: jax.Array
    is_local: jax.Array | None = None
    sinks: jax.Array | None = None


class Attended(NamedTuple):
    """The result [B, heads, D], and the caches with the tokens' keys and values."""

    attended: jax.Array
    k_cache: Heads
    v_cache: Heads


def written(cache: jax.Array, layer: jax.Array | int, positions: jax.Array, own: jax.Array) -> jax.Array:
    """A cache [layers, B, C, kv heads, D] with a layer's own keys or values [B, S, kv heads, D] at positions [B, S]."""
    if positions.size == 1:  # a scatter of one row would take three kernels more
        start = (jnp.asarray(index, jnp.int32) for index in (layer, 0, positions[0, 0], 0, 0))  # of one dtype
        bits = jax.lax.dynamic_update_slice(as_bits(cache), as_bits(own)[None], tuple(start))
        return from_bits(bits, cache.dtype)
    return put(cache, (layer, jnp.arange(own.shape[0])[:, None], positions), own)


def _result_types(
    operands: AttendOne, scale: float, window: int | None, chunk: int | None = None, layout: CacheLayout | None = None
) -> Attended:
    results = Attended(operands.q, operands.k_cache, operands.v_cache)
    return jax.tree.map(lambda array: array_type(array.shape, array.dtype), results)


def _plain(
    operands: AttendOne, scale: float, window: int | None, chunk: int | None = None, layout: CacheLayout | None = None
) -> Attended:
    layer, positions, is_local = operands.layer, operands.positions[:, None], operands.is_local
    at = place_of(layout, layer, positions, window, is_local)

    def with_own(cache: jax.Array, own: jax.Array) -> jax.Array:
        return written(cache, *at, own[:, None])

    k_cache, v_cache = jax.tree.map(with_own, (operands.k_cache, operands.v_cache), (operands.k, operands.v))
    k, v = (dense(keys_of(layout, cache, layer, window, is_local), operands.q.dtype) for cache in (k_cache, v_cache))
    mask = Mask(positions, None if chunk is None else positions - positions % chunk, window, is_local)
    seen = mask.sees(jnp.arange(k.shape[1], dtype=jnp.int32))
    attended, _ = attend_by_mask(operands.q[:, None], k, v, seen, operands.sinks, scale)
    return Attended(attended[:, 0], k_cache, v_cache)


def _launch(
    launcher: Launcher,
    operands: AttendOne,
    scale: float,
    window: int | None,
    chunk: int | None = None,
    layout: CacheLayout | None = None,
) -> Attended:
    from jgg.kernels.attend_one import attend_one_kernel

    batch, heads, features = operands.q.shape
    slots, kv_heads = operands.k_cache.shape[2:4]
    capacity = slots if layout is None else layout.positions
    tiles = tiles_of("attend_one_kernel", launcher.target)
    row_bytes = block_features(features) * operands.q.dtype.itemsize
    block_keys, block_group = keys_of_step(features, operands.q.dtype), max(16, power_of_2(heads // kv_heads))
    room, bytes_of_step = launcher.target.shared_memory - block_group * row_bytes, 2 * block_keys * row_bytes
    if not takes_heads_of(features, operands.q.dtype) or scale <= 0 or bytes_of_step > room:
        return _plain(operands, scale, window, chunk, layout)
    (k, k_scale), (v, v_scale) = map(values_and_scales, (operands.k, operands.v))
    (k_cache, k_scales), (v_cache, v_scales) = map(values_and_scales, (operands.k_cache, operands.v_cache))
    scales = {"k_scales": k_scales, "v_scales": v_scales}
    if k_scales is not None:
        check_gpu(launcher.target)
    parts = math.ceil(capacity / attend.PART)
    if window is not None and operands.is_local is None:
        parts = min(parts, (window - 2) // attend.PART + 2)
    sizes = {
        "FEATURES": features,
        "WINDOW": window or 0,
        "CHUNK": chunk or 0,
        "PART": attend.PART,
        "BLOCK_FEATURES": block_features(features),
    }
    outputs: dict[str, jax.ShapeDtypeStruct] = {
        "attended": jax.ShapeDtypeStruct((batch, heads, features), operands.q.dtype)
    }
    if parts > 1:
        of_parts = jax.ShapeDtypeStruct((parts, batch, heads), jnp.float32)
        attended = jax.ShapeDtypeStruct((*of_parts.shape, features), jnp.float32)
        outputs = {"attended": attended, "highest_logits": of_parts, "totals": of_parts}
    of_part = Launch(
        operands=operands._asdict()
        | {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale, **scales}
        | {"firsts": None if layout is None else layout.firsts, "capacity": capacity, "slots": slots}
        | ({} if parts > 1 else {"highest_logits": None, "totals": None}),
        outputs={"k_cache": k_cache, "v_cache": v_cache, **({} if k_scales is None else scales), **outputs},
        constants=sizes
        | {
            "RING": 0 if layout is None or window is None else layout.ring,
            "KV_HEADS": kv_heads,
            "GROUP": heads // kv_heads,
            "SCALE": scale,
            "PRECISION": precision_of(operands.q.dtype),
            "BLOCK_GROUP": block_group,
            "BLOCK_KEYS": block_keys,
        },
        grid=(batch, kv_heads, parts),
        num_warps=tiles["warps_of_wide" if operands.q.dtype == jnp.float32 or row_bytes > 512 else "warps"],
        num_stages=max(1, min(tiles["stages"], room * 7 // 8 // bytes_of_step)),
        bytes_accessed=2 * k.nbytes * capacity,
    )
    results = launcher.run(attend_one_kernel, of_part)
    added = results["attended"] if parts == 1 else _sum_of_parts(launcher, operands, results, sizes)
    k_cache, v_cache = results["k_cache"], results["v_cache"]
    if k_scales is None:
        return Attended(added, k_cache, v_cache)
    return Attended(added, QuantizedArray(k_cache, results["k_scales"]), QuantizedArray(v_cache, results["v_scales"]))


def _sum_of_parts(
    launcher: Launcher, operands: AttendOne, parts: dict[str, jax.Array], sizes: dict[str, int]
) -> jax.Array:
    """The result [B, heads, D] of what `attend_one_kernel` gives for each part of a long cache."""
    from jgg.kernels.attend_one import add_parts_kernel

    batch, heads, _ = operands.q.shape
    names = "positions", "is_local", "sinks"
    launch = Launch(
        operands={
            "parts": parts["attended"],
            "highest_logits": parts["highest_logits"],
            "totals": parts["totals"],
            **{name: getattr(operands, name) for name in names},
        },
        outputs={"attended": jax.ShapeDtypeStruct(operands.q.shape, operands.q.dtype)},
        constants=sizes | {"HEADS": heads, "UNROLL": tiles_of("add_parts_kernel", launcher.target)["unroll"]},
        grid=(batch, heads),
        bytes_accessed=4 * parts["attended"].size,
    )
    return launcher.run(add_parts_kernel, launch)["attended"]


ATTEND_ONE: Operation[Attended] = Operation(
    "attend_one",
    AttendOne,
    result_types=_result_types,
    plain=_plain,
    launch=_launch,
    vmap="several",
)
"""Attended; the parameters are the factor of the logits, how many of the last tokens are seen (None for all), the chunk
size where a token sees only its own chunk (None for a single chunk), and the `CacheLayout` of the caches (None where
each layer has C positions). A layer has at most one of window and chunk."""
