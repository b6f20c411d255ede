"""Attention of several tokens to latents, which are the keys and the values of all heads, in a fixed order of keys."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgg.core.gpu_target import Target
from jgg.extend import Launch, Launcher, Operation, array_type, power_of_2, tiles_of
from jgg.models.operations.attend import block_features, precision_of
from jgg.models.operations.attend_plain import Mask, attend_by_mask

PART = 256  # latents whose softmax is one, and that one program takes when a single token attends
_LARGEST = 1024  # bytes of the latents that a kernel sums: more spill registers


class AttendLatents(NamedTuple):
    """S tokens of each of B sequences, or of several sequences in each row, and all latents.

    Attributes:
      q: [B, S, heads, rank + rest], what latents are multiplied by.
      latents: [layers, B, C, 1, rank + rest], in the dtype of q: a cache, or the tokens' own, of one layer.
      layer, offset, starts: as in `Attend`.
    """

    q: jax.Array
    latents: jax.Array
    layer: jax.Array | None = None
    offset: jax.Array | None = None
    starts: jax.Array | None = None


class SummedLatents(NamedTuple):
    """The sums [B, S, heads, rank], and the logarithm of the sum in each softmax, float32 [B, S, heads]."""

    summed: jax.Array
    log_sums: jax.Array


class Tile(NamedTuple):
    """The most rows of a kernel's tile, its warps and stages, and the constants of both kernels that sum latents."""

    most_rows: int
    num_warps: int
    num_stages: int
    constants: dict[str, int | float | str]


def takes_latents_of(rank: int, dtype: DTypeLike) -> bool:
    """Whether kernels sum this many features of a latent; others go to plain JAX."""
    return block_features(rank) * jnp.dtype(dtype).itemsize <= _LARGEST


def tile_of(target: Target, rank: int, features: int, dtype: DTypeLike, scale: float) -> Tile | None:
    """The tile for latents of `features` features, `rank` of them summed; None if no kernel takes them."""
    block_rank, block_rest = block_features(rank), block_features(features - rank)
    tiles = tiles_of("attend_latents_kernel", target)
    row_bytes = (block_rank + block_rest) * jnp.dtype(dtype).itemsize
    room = target.shared_memory // row_bytes - 2 * tiles["keys"]  # a tile's rows, next to two steps of keys
    if not takes_latents_of(rank, dtype) or room < 16 or scale <= 0:
        return None
    constants: dict[str, int | float | str] = {
        "RANK": rank,
        "REST": features - rank,
        "SCALE": scale,
        "PRECISION": precision_of(dtype),
        "PART": PART,
        "BLOCK_KEYS": tiles["keys"],
        "BLOCK_RANK": block_rank,
        "BLOCK_REST": block_rest,
    }
    return Tile(min(tiles["rows"], power_of_2(room + 1) // 2), tiles["warps"], tiles["stages"], constants)


def _types(operands: AttendLatents, scale: float, rank: int) -> SummedLatents:
    of_heads = operands.q.shape[:3]
    return SummedLatents(array_type((*of_heads, rank), operands.q.dtype), array_type(of_heads, jnp.float32))


def _plain(operands: AttendLatents, scale: float, rank: int) -> SummedLatents:
    q, latents, layer, offset, starts = operands
    latents = latents[0 if layer is None else layer]
    places = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    mask = Mask(places if offset is None else places + offset, starts)
    # the other features' sums are not used: latents without them would be copied
    seen = mask.sees(jnp.arange(latents.shape[1], dtype=jnp.int32))
    summed, logits = attend_by_mask(q, latents, latents, seen, None, scale)
    log_sums = jax.nn.logsumexp(logits, axis=-1)  # [B, 1, heads, S]
    return SummedLatents(summed[..., :rank], log_sums[:, 0].transpose(0, 2, 1))


def _launch(launcher: Launcher, operands: AttendLatents, scale: float, rank: int) -> SummedLatents:
    from jgg.kernels.attend_latents import attend_latents_kernel

    (batch, length, heads, features), capacity, dtype = operands.q.shape, operands.latents.shape[2], operands.q.dtype
    tile = tile_of(launcher.target, rank, features, dtype, scale)
    if tile is None:  # plain JAX would give a token other bits in another batch
        raise ValueError(
            f"batch_invariant must be False for latents of {features} features in {dtype} on this GPU, whose "
            f"{launcher.target.shared_memory} bytes of shared memory hold no tile of them."
        )
    launch = Launch(
        operands={**operands._asdict(), "length": length, "capacity": capacity},
        outputs=_types(operands, scale, rank)._asdict(),
        constants=tile.constants | {"HEADS": heads, "BLOCK_ROWS": tile.most_rows},
        grid=(math.ceil(length * heads / tile.most_rows), batch),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        flops=2 * operands.q.size * capacity,
        bytes_accessed=(2 * operands.q.size + batch * capacity * features) * dtype.itemsize,
    )
    results = launcher.run(attend_latents_kernel, launch)
    return SummedLatents(**results)


ATTEND_LATENTS: Operation[SummedLatents] = Operation(
    "attend_latents",
    AttendLatents,
    result_types=_types,
    plain=_plain,
    launch=_launch,
)
"""SummedLatents; the parameters are the factor of the logits, more than 0, and the number of features to sum."""
