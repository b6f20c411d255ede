"""The queries, keys and values of few tokens, as in decoding: one kernel reads their matrices, and adds LoRA terms."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.core.gpu_target import Target
from jgg.launching.choice import Launcher
from jgg.launching.kernel_configs import power_of_2
from jgg.launching.launch import Launch
from jgg.launching.tuned_configs import tiles_of
from jgg.primitives.operation import Operation, array_type

MOST_ROWS, MOST_ROWS_WITH_TERMS = 64, 256
_STEP_BYTES = 512  # of a row of x in a step
_LEAST_TILES = 80  # of many rows, that make use of a GPU; fewer get half as many columns


class ProjectFew(NamedTuple):
    """Rows and three matrices.

    Attributes:
      x: [M, K].
      w_q, w_k, w_v: [K, N] each, in the dtype of x.
      b_q, b_k, b_v: [N] each, or None for all three.
      low_rows: the rows x @ a of three terms of low rank side by side, [M, sum of r], or None.
      low_q, low_k, low_v: b of the terms, [r, N] each.
    """

    x: jax.Array
    w_q: jax.Array
    w_k: jax.Array
    w_v: jax.Array
    b_q: jax.Array | None = None
    b_k: jax.Array | None = None
    b_v: jax.Array | None = None
    low_rows: jax.Array | None = None
    low_q: jax.Array | None = None
    low_k: jax.Array | None = None
    low_v: jax.Array | None = None

    @property
    def terms(self) -> list[jax.Array]:
        """b of the terms; [] without terms."""
        return [low for low in (self.low_q, self.low_k, self.low_v) if low is not None]

    @property
    def ranks(self) -> list[int]:
        """r of each term; 0 without terms."""
        return [low.shape[0] for low in self.terms] or [0] * 3


class Projected(NamedTuple):
    """The products [M, N], in the dtype of x."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


def _result_types(operands: ProjectFew) -> Projected:
    x, *matrices = operands[:4]
    return Projected(*(array_type((x.shape[0], w.shape[1]), x.dtype) for w in matrices))


def _plain(operands: ProjectFew) -> Projected:
    x, *matrices = operands[:4]
    biases = (None if bias is None else bias.astype(jnp.float32)[None] for bias in operands[4:7])
    products = [_product(x, w) for w in matrices]
    if operands.low_rows is not None:
        ends = itertools.accumulate(operands.ranks)
        rows = jnp.split(operands.low_rows, list(ends)[:-1], axis=1)
        products = [y + _product(*low) for y, *low in zip(products, rows, operands.terms, strict=True)]
    pairs = zip(products, biases, strict=True)
    return Projected(*((y if bias is None else y + bias).astype(x.dtype) for y, bias in pairs))


def _product(rows: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(rows.astype(jnp.float32), w.astype(jnp.float32), precision="highest")


class _Tiles(NamedTuple):
    """How the kernel's programs share its results; the names are those of the kernel's constants, and of a launch."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


def _tiles(target: Target, operands: ProjectFew, columns: Sequence[int]) -> _Tiles:
    """The tiles for the matrices of these numbers of columns."""
    num_rows, size = operands.x.shape[0], operands.x.dtype.itemsize
    own = tiles_of("project_few_kernel", target)
    if num_rows > MOST_ROWS:
        rows, *others = (own[f"{name}_of_many"] for name in ("rows", "step", "warps", "stages"))
        count = sum(math.ceil(each / 128) for each in columns) * math.ceil(num_rows / rows)
        return _Tiles(rows, 128 if count >= _LEAST_TILES else 64, *others)
    stages = max(1, own["stages"] - (num_rows > MOST_ROWS // 2))
    return _Tiles(power_of_2(num_rows), own["columns"], _STEP_BYTES // size, 4, stages)


def _launch(launcher: Launcher, operands: ProjectFew) -> Projected:
    from jgg.kernels.project_few import project_few_kernel

    num_rows, reduced = operands.x.shape
    outputs = _result_types(operands)._asdict()
    columns = {f"{name.upper()}_COLUMNS": y.shape[1] for name, y in outputs.items()}
    tiles = _tiles(launcher.target, operands, list(columns.values()))
    row_tiles = math.ceil(num_rows / tiles.rows)
    launch = Launch(
        operands=operands._asdict() | {"num_rows": num_rows},
        outputs=outputs,
        constants=columns
        | dict(zip(("Q_RANK", "K_RANK", "V_RANK"), operands.ranks, strict=True))
        | {
            "REDUCED": reduced,
            "PRECISION": "ieee" if operands.x.dtype == jnp.float32 else "tf32",
            "ROW_TILES": row_tiles,
            "BLOCK_ROWS": tiles.rows,
            "BLOCK_REDUCED": min(tiles.step, power_of_2(reduced)),
            "BLOCK_COLUMNS": tiles.columns,
        },
        grid=(sum(math.ceil(size / tiles.columns) for size in columns.values()) * row_tiles,),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        flops=2 * num_rows * reduced * sum(columns.values()),
        bytes_accessed=reduced * sum(columns.values()) * operands.x.dtype.itemsize,
    )
    return Projected(**launcher.run(project_few_kernel, launch))


PROJECT_FEW: Operation[Projected] = Operation(
    "project_few",
    ProjectFew,
    result_types=_result_types,
    plain=_plain,
    launch=_launch,
    vmap="several",
)
"""The three products of the same rows: at most MOST_ROWS of them, or MOST_ROWS_WITH_TERMS of 16 bits."""
