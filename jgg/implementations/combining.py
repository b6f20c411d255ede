"""Rows copied in another order, or added up by token; `call` as in `kernels`."""

import math

import jax
import jax.numpy as jnp

from jgg.implementations import parts
from jgg.implementations.launch import Launch, flat
from jgg.schedule import between_groups, inverse_permutation


def combine(call, rows, positions, topk: int, scales=None, *, y=None, first_column: int = 0, y_columns=None):
    """The weighted sum of each token's rows, in float32: y [T, N] in the dtype of rows.

    Args:
      rows: [M, N].
      positions: int32 [T * topk], a token's rows; one outside [0, M) adds nothing. With topk 1 this gathers rows.
      scales: float [T * topk], or None for 1.
      y: what to write the sums into, from `first_column` on; or None for an array of y_columns, by default N, that has
        nothing but the sums.
    """
    num_tokens, columns = len(positions) // topk, rows.shape[1]
    if y is None:
        y = jax.ShapeDtypeStruct((num_tokens, y_columns or columns), rows.dtype)
    block_rows, block_columns = 16, min(256, max(16, 1 << (columns - 1).bit_length()))
    launch = Launch(
        operands={
            "rows": rows,
            "positions": positions,
            "scales": scales,
            "num_tokens": num_tokens,
            "num_rows": rows.shape[0],
            "first_column": first_column,
        },
        outputs={"y": y},
        constants={
            "COLUMNS": columns,
            "Y_COLUMNS": y.shape[1],
            "TOPK": topk,
            "BLOCK_ROWS": block_rows,
            "BLOCK_COLUMNS": block_columns,
        },
        grid=(math.ceil(num_tokens / block_rows), math.ceil(columns / block_columns)),
        flops=rows.size,
        bytes_accessed=(rows.size + num_tokens * columns) * rows.dtype.itemsize,
    )
    return call("combine_kernel", launch)["y"]


def sum_by_token(call, target, problem, multiply, rows, num_columns, bounds, gather_indices, scales=None):
    """The sums of each token's rows of a product, [T, columns], a part of the columns after the other.

    Rows before the first group and past the last add nothing, whatever their scales are.

    Args:
      multiply: (rows, columns) -> that range of the product's columns, [M, columns].
    """
    named = jnp.where(between_groups(bounds, len(gather_indices)), gather_indices, -1)
    positions = inverse_permutation(named, problem.num_positions)
    scales = flat(scales)

    def add_up(rows, columns, y):
        products = multiply(rows, columns)
        return combine(
            call, products, positions, problem.topk, scales, y=y, first_column=columns.start, y_columns=num_columns
        )  # fmt: skip

    return parts.one_after_the_other(rows, num_columns, parts.summed_width(target, problem, num_columns), add_up)
