"""Attention of one new token of each sequence to a cache of latents, which are the keys and the values of all heads."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.extend import Launch, Launcher, Operation, array_type, power_of_2, tiles_of
from jgg.models.operations.attend_latents import PART, tile_of
from jgg.models.operations.attend_plain import Mask, attend_by_mask


class AttendLatentsOne(NamedTuple):
    """One token of each of B sequences, and the cache of a stack of layers, which has the token's own latent.

    Attributes:
      q: [B, heads, rank + rest], what latents are multiplied by.
      latents: [layers, B, C, 1, rank + rest], in the dtype of q.
      layer: int32 [], the layer of the cache.
      positions: int32 [B], the positions of the tokens, from 0 to C - 1.
    """

    q: jax.Array
    latents: jax.Array
    layer: jax.Array
    positions: jax.Array


def _result_types(operands: AttendLatentsOne, scale: float, rank: int) -> jax.Array:
    return array_type((*operands.q.shape[:2], rank), operands.q.dtype)


def _plain(operands: AttendLatentsOne, scale: float, rank: int) -> jax.Array:
    latents = operands.latents[operands.layer]  # [B, C, 1, rank + rest]
    seen = Mask(operands.positions[:, None]).sees(jnp.arange(latents.shape[1], dtype=jnp.int32))
    # the other features' sums are not used: latents without them would be copied
    return attend_by_mask(operands.q[:, None], latents, latents, seen, None, scale)[0][:, 0, :, :rank]


def _launch(launcher: Launcher, operands: AttendLatentsOne, scale: float, rank: int) -> jax.Array:
    from jgg.kernels.attend_latents_one import attend_latents_one_kernel
    from jgg.kernels.attend_one import add_parts_kernel

    (batch, heads, features), capacity, dtype = operands.q.shape, operands.latents.shape[2], operands.q.dtype
    tile = tile_of(launcher.target, rank, features, dtype, scale)
    if tile is None:
        return _plain(operands, scale, rank)
    block_heads = max(16, min(tile.most_rows, power_of_2(heads)))
    parts = math.ceil(capacity / PART)
    of_parts = jax.ShapeDtypeStruct((parts, batch, heads), jnp.float32)
    launch = Launch(
        operands={**operands._asdict(), "capacity": capacity},
        outputs={
            "attended": jax.ShapeDtypeStruct((*of_parts.shape, rank), jnp.float32),
            "highest_logits": of_parts,
            "totals": of_parts,
        },
        constants=tile.constants | {"HEADS": heads, "BLOCK_HEADS": block_heads},
        grid=(math.ceil(heads / block_heads), batch, parts),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        bytes_accessed=batch * capacity * features * dtype.itemsize,
    )
    of_part = launcher.run(attend_latents_one_kernel, launch)
    launch = Launch(
        operands={
            "parts": of_part["attended"],
            "highest_logits": of_part["highest_logits"],
            "totals": of_part["totals"],
            "positions": operands.positions,
            "is_local": None,
            "sinks": None,
        },
        outputs={"attended": jax.ShapeDtypeStruct((batch, heads, rank), dtype)},
        constants={
            "HEADS": heads,
            "FEATURES": rank,
            "WINDOW": 0,
            "CHUNK": 0,
            "PART": PART,
            "UNROLL": tiles_of("add_parts_kernel", launcher.target)["unroll"],
            "BLOCK_FEATURES": tile.constants["BLOCK_RANK"],
        },
        grid=(batch, heads),
        bytes_accessed=4 * of_part["attended"].size,
    )
    return launcher.run(add_parts_kernel, launch)["attended"]


ATTEND_LATENTS_ONE: Operation[jax.Array] = Operation(
    "attend_latents_one",
    AttendLatentsOne,
    result_types=_result_types,
    plain=_plain,
    launch=_launch,
    vmap="several",
)
"""The sums of the first `rank` features of latents, [B, heads, rank]; the other parameter is the factor of the logits,
more than 0."""
