"""Rows in another order, or added up by token."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgg.core.gpu_target import FP8_COMPUTE_CAPABILITY
from jgg.core.problem import MAX_ROWS, GroupedGemmProblem
from jgg.core.quantized import BLOCK, QuantizedArray, is_quantized, values_and_scales
from jgg.core.schedule import GroupBounds, between_groups, guarded, inverse_permutation
from jgg.launching.choice import How, Launcher
from jgg.launching.kernel_configs import power_of_2
from jgg.launching.launch import Launch, flat
from jgg.launching.tuned_configs import tiles_of
from jgg.primitives import vmap
from jgg.primitives.operation import Operation, array_type
from jgg.primitives.partitioning import Letters


class Combine(NamedTuple):
    """Rows, and the positions that say which of them are added up for each token.

    Attributes:
      rows: [M, N]. Those of a QuantizedArray, with a scale for 128 features of a row, are dequantized.
      positions: int32 [T * topk], the rows of each token; a position outside [0, M) adds nothing. With topk 1 the rows
        are only gathered.
      scales: float [T * topk] in any shape, or None for 1.
    """

    rows: jax.Array | QuantizedArray
    positions: jax.Array
    scales: jax.Array | None = None

    def dtype_of_sums(self, dtype: np.dtype | None) -> np.dtype:
        """The dtype of the sums, if COMBINE is given `dtype`."""
        if isinstance(self.rows, QuantizedArray):
            assert dtype is not None
            return dtype
        return self.rows.dtype


def _result_types(operands: Combine, topk: int, dtype: np.dtype | None = None) -> jax.Array:
    shape = operands.positions.shape[0] // topk, operands.rows.shape[1]
    return array_type(shape, operands.dtype_of_sums(dtype))


def _plain(operands: Combine, topk: int, dtype: np.dtype | None = None) -> jax.Array:
    rows, positions, scales = operands
    dtype = operands.dtype_of_sums(dtype)
    if isinstance(rows, QuantizedArray):
        rows = rows.dequantize(jnp.float32)
    terms = rows.at[guarded(positions, rows.shape[0])].get(mode="fill", fill_value=0).astype(jnp.float32)
    if scales is not None:
        terms = terms * scales.reshape(-1).astype(jnp.float32)[:, None]
    terms = terms.reshape(positions.shape[0] // topk, topk, rows.shape[1])
    return jnp.sum(terms, axis=1).astype(dtype)


def _merge_batch(
    how: How, operands: Combine, batched: Combine, topk: int, dtype: np.dtype | None = None
) -> jax.Array | None:
    rows, positions, scales = operands
    if isinstance(rows, QuantizedArray):
        return None
    size = vmap.batch_size(operands, batched)
    positions = vmap.for_each(positions, batched.positions, size)
    if size * max(positions.shape[1], rows.shape[-2]) > MAX_ROWS:
        return None
    if batched.rows:
        positions, rows = vmap.offset(positions, rows.shape[1]), vmap.flat(rows)
    scales = flat(vmap.for_each(scales, batched.scales, size))
    y = COMBINE(how, Combine(rows, positions.reshape(-1), scales), topk=topk)
    return y.reshape(size, -1, y.shape[1])


class Place(NamedTuple):
    """Where COMBINE's kernel writes its sums.

    Attributes:
      y: an array to write into; None for a new one, whose other columns are not written.
      first_column: the column of y at which the sums begin.
      num_columns: the number of columns of y.
    """

    y: jax.Array | None
    first_column: int
    num_columns: int


def combine(
    launcher: Launcher,
    operands: Combine,
    topk: int,
    place: Place | None = None,
    columns: range | None = None,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """Launches COMBINE's kernel.

    Args:
      dtype: as in COMBINE.
      place: by default a new array of as many columns as are added up.
      columns: the columns of the rows that are added up; by default all N.
    """
    if is_quantized(operands.rows) and launcher.target.compute_capability < FP8_COMPUTE_CAPABILITY:
        sums = _plain(operands, topk, dtype)
        return sums if columns is None else sums[:, columns.start : columns.stop]
    from jgg.kernels.combine import combine_kernel

    rows, positions, scales = operands
    dtype, (values, row_scales) = operands.dtype_of_sums(dtype), values_and_scales(rows)
    num_tokens, columns = len(positions) // topk, range(rows.shape[1]) if columns is None else columns
    y, first_column, num_columns = place or Place(None, 0, len(columns))
    tiles = tiles_of("combine_kernel", launcher.target)
    block_rows = max(2, tiles["loads"] // power_of_2(topk, least=1))
    least = {} if row_scales is None else {"least": BLOCK}
    block_columns = min(tiles["columns_of_one" if topk == 1 else "columns"], power_of_2(len(columns), **least))
    launch = Launch(
        operands={
            "rows": values,
            "row_scales": row_scales,
            "positions": positions,
            "scales": flat(scales),
            "num_tokens": num_tokens,
            "num_rows": rows.shape[0],
            "first_of_rows": columns.start,
            "first_of_y": first_column,
        },
        outputs={"y": jax.ShapeDtypeStruct((num_tokens, num_columns), dtype) if y is None else y},
        constants={
            "COLUMNS": len(columns),
            "ROWS_COLUMNS": rows.shape[1],
            "Y_COLUMNS": num_columns,
            "TOPK": topk,
            "BLOCK_ROWS": block_rows,
            "BLOCK_COLUMNS": block_columns,
        },
        grid=(math.ceil(num_tokens / block_rows), math.ceil(len(columns) / block_columns)),
        flops=rows.shape[0] * len(columns),
        bytes_accessed=(rows.shape[0] * values.dtype.itemsize + num_tokens * dtype.itemsize) * len(columns),
    )
    return launcher.run(combine_kernel, launch)["y"]


def _letters(operands: Combine, topk: int, dtype: np.dtype | None = None) -> Letters | None:
    if is_quantized(operands.rows):
        return None
    return Letters({"rows": ".n", "positions": ".", "scales": None}, (".n",), ("",))


COMBINE: Operation[jax.Array] = Operation(
    "combine",
    Combine,
    result_types=_result_types,
    plain=_plain,
    launch=combine,
    vmap=_merge_batch,
    mesh=_letters,
)
"""The weighted sum of each token's rows, in float32: y [T, N] in the dtype of rows.

The parameters are topk and, for quantized rows, the dtype of y.
"""


def gather(how: How, topk: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function (rows, positions) -> the rows at positions // topk, gathered by a kernel."""

    def gathered(rows: jax.Array, positions: jax.Array) -> jax.Array:
        return COMBINE(how, Combine(rows, positions // topk), topk=1)

    return gathered


def expert_order(
    launcher: Launcher,
    x: jax.Array | QuantizedArray,
    gather_indices: jax.Array | None,
    topk: int,
    columns: range | None = None,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """Gathers tokens x [T, K], or a range of their columns, as rows in expert order, by a kernel.

    Args:
      dtype: the dtype of the rows, if x is quantized.
    """
    assert gather_indices is not None  # a problem that permutes has some
    return combine(launcher, Combine(x, gather_indices // topk), 1, columns=columns, dtype=dtype)


def dense_rows(how: How, rows: jax.Array | QuantizedArray, dtype: np.dtype) -> jax.Array:
    """The rows, dequantized by a kernel if they are quantized."""
    if isinstance(rows, QuantizedArray):
        return COMBINE(how, Combine(rows, jnp.arange(rows.shape[0], dtype=jnp.int32)), topk=1, dtype=dtype)
    return rows


def token_order(
    launcher: Launcher,
    rows: jax.Array,
    gather_indices: jax.Array | None,
    topk: int = 1,
    num_positions: int | None = None,
) -> jax.Array:
    """Brings rows [M, N] from expert order to token order by a kernel, adding up the topk rows of each token."""
    assert gather_indices is not None
    return combine(launcher, Combine(rows, inverse_permutation(gather_indices, num_positions)), topk)


def positions_of_tokens(
    problem: GroupedGemmProblem, bounds: GroupBounds, gather_indices: jax.Array | None
) -> jax.Array:
    """The positions with which COMBINE adds up rows of a problem by token, [T * topk].

    Rows before the first group and past the last add nothing, whatever their scales are.
    """
    assert gather_indices is not None
    named = jnp.where(between_groups(bounds, len(gather_indices)), gather_indices, -1)
    return inverse_permutation(named, problem.num_positions)
