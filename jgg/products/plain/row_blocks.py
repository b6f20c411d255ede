"""Loops over blocks of each group's rows; each step gathers and scatters only the rows of its block.

Temporaries stay small, since no operand is gathered or dequantized as a whole.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.core
import jax.export
import jax.numpy as jnp

from jgg.core.manual_axes import vary_over, varying_axes
from jgg.core.quantized import QuantizedArray, ToQuantize, as_bits, from_bits
from jgg.core.schedule import NO_ROW, Rows


class Block(NamedTuple):
    """The rows of a loop step, from `first_row` on; `own`, bool [rows], says which of them this step computes."""

    group: jax.Array
    first_row: jax.Array
    own: jax.Array

    @classmethod
    def at(cls, step, group, size, num_rows, bounds):
        """The block of `size` rows for a step of a group; a block that would pass the last row begins earlier."""
        start = bounds.starts[group] + step * size
        first_row = jnp.minimum(start, num_rows - size)
        rows = first_row + jnp.arange(size, dtype=jnp.int32)
        return cls(group, first_row, (rows >= start) & (rows < bounds.ends[group]))

    def slice(self, array):
        """This block of an array of rows."""
        return jax.lax.dynamic_slice_in_dim(array, self.first_row, self.own.size)


def block_size(num_rows: int, num_groups: int) -> int:
    """The number of rows of a loop step: half of an average group, but enough to multiply at full speed.

    Each group's last block is padded, so larger blocks would compute more padding.
    """
    if jax.export.is_symbolic_dim(num_rows):  # then the rows of an average group are not known either
        return jax.core.min_dim(num_rows, 128)
    share = 1 << (-(-num_rows // max(num_groups, 1)) - 1).bit_length()
    return min(share, max(share // 2, 64), 512, num_rows)


def steps(group, size, bounds):
    """The number of blocks of `size` rows that a group needs."""
    return (bounds.ends[group] - bounds.starts[group] + size - 1) // size


def take(rows: Rows, block):
    """Gathers the rows of a block."""
    if rows.at is None:
        return _part(rows.array, block.slice)
    at = block.slice(rows.at)
    return _part(rows.array, lambda array: array.at[at].get(mode="fill", fill_value=0))


def _part(array, select):
    """select(array); the selected part of a quantized array is dequantized to float32."""
    if isinstance(array, QuantizedArray):
        values = from_bits(select(as_bits(array.values)), array.values.dtype)
        return QuantizedArray(values, select(array.scales)).dequantize(jnp.float32)
    if isinstance(array, ToQuantize):
        return dataclasses.replace(array, array=select(array.array)).dequantize(jnp.float32)
    return select(array)


def put(rows: Rows, block, values, adds=False):
    """The array `rows.array` after the values of the block's own rows are written or, with `adds`, added to it."""
    out, values = rows.array, values.astype(rows.array.dtype)
    if rows.at is None:
        own = block.own.reshape(-1, *[1] * (values.ndim - 1))
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(own, values, block.slice(out)), block.first_row, 0)
    at = out.at[jnp.where(block.own, block.slice(rows.at), NO_ROW)]
    return (at.add if adds else at.set)(values, mode="drop")


def scaled(values, block, scales):
    """A block's values times the scales of its rows, in float32; the values unchanged where `scales` is None."""
    return values if scales is None else values.astype(jnp.float32) * block.slice(scales)[:, None]


def sum_of_products(left, right):
    """For each row the sum of left * right, in float32."""
    return jnp.sum(left.astype(jnp.float32) * right.astype(jnp.float32), axis=1)


def dot(left, right, axes, precision):
    """The float32 product of two matrices over an axis of each; matrices of different dtypes are cast to float32."""
    dtype = left.dtype if left.dtype == right.dtype else jnp.float32
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(
        left.astype(dtype), right.astype(dtype), dims, precision, preferred_element_type=jnp.float32
    )


def zeros(shape, dtype, rows: Rows):
    """Zeros that vary over the mesh axes that `rows` varies over, as a loop's carry must."""
    return vary_over(varying_axes(*jax.tree.leaves(rows.array)), jnp.zeros(shape, dtype))


def ones(rows: Rows):
    """Rows that each hold a single 1, as many as `rows` has."""
    return Rows(jnp.ones((rows.num_rows, 1), rows.dtype))


def over_blocks(body, carry, num_rows, w, bounds, transpose_w, w_dtype, precision):
    """body(block, multiply, carry) -> carry, over all blocks of all groups; multiply(rows) is rows @ w[group].

    A w_dtype other than None is the dtype in which w is multiplied.
    """
    num_groups = len(bounds.ends)
    size = block_size(num_rows, num_groups)
    if 0 in (size, num_groups):
        return carry

    def over_group(group, carry):
        matrix = _part(w, lambda array: jax.lax.dynamic_index_in_dim(array, group, keepdims=False))
        matrix = matrix if w_dtype is None else matrix.astype(w_dtype)
        multiply = functools.partial(dot, right=matrix, axes=(1, int(transpose_w)), precision=precision)

        def over_block(step, carry):
            return body(Block.at(step, group, size, num_rows, bounds), multiply, carry)

        return jax.lax.fori_loop(0, steps(group, size, bounds), over_block, carry)

    return jax.lax.fori_loop(0, num_groups, over_group, carry)
