"""The router's projection, float32: the bits of a row do not depend on the other rows or on their number."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgg.core.gpu_target import Target
from jgg.launching.choice import Launcher
from jgg.launching.kernel_configs import Tile, power_of_2
from jgg.launching.launch import PRECISIONS, Launch, matrix
from jgg.primitives.operation import Operation, array_type
from jgg.products.launches.pieces import Pieces
from jgg.products.plain.pieces import pieces_of, sum_of_products

# Of a program, for 16-bit operands: the first with which there are enough programs, else the last
_TILES = (
    Tile(128, 128, 64),
    Tile(64, 128, 64),
    Tile(64, 64, 128),
    Tile(64, 32, 128),
    Tile(32, 32, 256),
    Tile(16, 32, 256),
    Tile(16, 16, 512),
)
_BUSY = 0.9  # of the multiprocessors have a program, if there are enough of them
_MEMORY = 0.9  # of a multiprocessor's shared memory is for the stages
_LEAST_STAGES, _MOST_STAGES = 3, 6
_FLOAT32_STEP = 32  # the same in all tiles: a product in parts, as tf32x3 is one, sums over a step first


class Logits(NamedTuple):
    """Rows and the router's matrix.

    Attributes:
      x: [T, H].
      w: [H, E], in the dtype of x or in float32.
    """

    x: jax.Array
    w: jax.Array


def computes_in_float32(dtype: DTypeLike, precision: jax.lax.Precision) -> bool:
    """Whether rows are multiplied in float32; otherwise they keep their dtype, and a float32 w is split in two."""
    return dtype == jnp.float32 or precision != jax.lax.Precision.DEFAULT


def _types(operands: Logits, precision: jax.lax.Precision) -> jax.Array:
    return array_type((operands.x.shape[0], operands.w.shape[1]), jnp.float32)


def _plain(operands: Logits, precision: jax.lax.Precision) -> jax.Array:
    x, w = operands
    if x.dtype == jnp.bfloat16 and not computes_in_float32(x.dtype, precision):
        return sum_of_products(x, pieces_of(w), x_axis=1)
    return jnp.dot(x.astype(jnp.float32), w.astype(jnp.float32), precision=precision)


def _launch(launcher: Launcher, operands: Logits, precision: jax.lax.Precision) -> jax.Array:
    from jgg.kernels.logits import logits_kernel

    x, w = operands
    if computes_in_float32(x.dtype, precision):
        x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    (num_rows, reduced), columns = x.shape, w.shape[1]
    w, w_scale = _side_by_side(w, x.dtype)
    num_pieces = w.shape[1] // columns
    tile, num_stages = _tile(launcher.target, num_rows, columns, num_pieces, x.dtype.itemsize)
    by_tma = launcher.target.has_tma and all(a.shape[1] * a.dtype.itemsize % 16 == 0 for a in (x, w))
    launch = Launch(
        operands={"x": x, "w": w, "w_scale": w_scale, "num_rows": num_rows},
        outputs={"logits": _types(operands, precision)},
        constants={
            "REDUCED": reduced,
            "COLUMNS": columns,
            "PIECES": num_pieces,
            "PRECISION": PRECISIONS[precision],
            "TMA": by_tma,
            "BLOCK_ROWS": tile.rows,
            "BLOCK_REDUCED": tile.step,
            "BLOCK_COLUMNS": tile.columns,
        },
        grid=(math.ceil(num_rows / tile.rows) * math.ceil(columns / tile.columns),),
        descriptors={
            "x": matrix(x.shape, (tile.rows, tile.step)),
            "w": matrix(w.shape, (tile.step, num_pieces * tile.columns)),
        }
        if by_tma
        else {},
        num_warps=8 if tile.rows > 64 else 4,
        num_stages=num_stages,
        flops=2 * num_rows * w.size,
        bytes_accessed=(x.size + w.size) * x.dtype.itemsize + 4 * num_rows * columns,
    )
    return launcher.run(logits_kernel, launch)["logits"]


def _tile(target: Target, num_rows: int, columns: int, num_pieces: int, itemsize: int) -> tuple[Tile, int]:
    """The tile of a program and its stages; they decide how fast the product is, and not its bits."""
    tiles = [tile._replace(columns=min(tile.columns, power_of_2(columns))) for tile in _TILES]
    programs = [math.ceil(num_rows / tile.rows) * math.ceil(columns / tile.columns) for tile in tiles]
    busy = (tile for tile, count in zip(tiles, programs, strict=True) if count >= _BUSY * target.num_sms)
    tile = next(busy, tiles[-1])
    memory_of_step = (tile.rows + num_pieces * tile.columns) * itemsize
    most = int(_MEMORY * target.shared_memory) // memory_of_step  # features in shared memory
    step = _FLOAT32_STEP if itemsize == 4 else tile.step
    while itemsize < 4 and step > 32 and most < _LEAST_STAGES * step:
        step //= 2
    return tile._replace(step=step), max(1, min(_MOST_STAGES, most // step))


def _side_by_side(w: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array | None]:
    """w in a dtype, each column as one or two columns whose sum it is, and the factor of these, or None."""
    pieces = Pieces.of(w, dtype)
    if pieces.num_pieces is None:
        return pieces.rows, None
    of_columns = jnp.stack(jnp.split(pieces.rows, 2), axis=-1)  # [H, E, 2]
    return of_columns.reshape(w.shape[0], -1), pieces.scale


LOGITS: Operation[jax.Array] = Operation(
    "logits",
    Logits,
    result_types=_types,
    plain=_plain,
    launch=_launch,
    vmap="rows",
    mesh="rows",
    shared=("w",),
)
"""The product x @ w, float32 [T, E]; the parameter is the precision of float32 products."""
