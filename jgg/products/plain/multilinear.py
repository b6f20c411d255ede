"""The xla implementation's three products, as primitives that are each other's derivatives.

All three come from one form, the sum over all rows i of

    scales[i] * left[i] . (right[i] @ w[group of i])

which is linear in each of its four arrays. Its derivatives in them are three products: `rows_dot` (in left, in right),
`outer_dot` (in w) and `row_dots` (in scales). They are primitives, and the transpose of each is one of them again, so
that JAX derives forward mode, reverse mode and all higher orders, and every derivative is a loop over blocks of rows.
(Differentiating the loop itself would add up a dense cotangent of all experts' weights at every step.)
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jgg.core.quantized import NO_DERIVATIVES, is_quantized
from jgg.core.schedule import GroupBounds, Rows
from jgg.primitives.partitioning import Letters, define_partitioned
from jgg.products.plain import row_blocks
from jgg.products.plain.row_blocks import Block


def rows_dot(
    rows: Rows,
    w,
    bounds: GroupBounds,
    *,
    scales=None,
    bias=None,
    write_at=None,
    adds=False,
    shape,
    transpose_w,
    w_dtype=None,
    precision,
    out_dtype,
):
    """out[write_at[i]] = scales[i] * (rows[i] @ w[g] + bias[g]) for the rows i of each group g; the rest is zero.

    Args:
      rows: M rows of R features.
      w: [E, R, C], or [E, C, R] with `transpose_w`; quantized ones are dequantized one group at a time.
      scales: float32 [M] or None for ones.
      bias: [E, C] or None for zero.
      write_at: the row of out for each row i, as in `Rows.at`.
      adds: whether values written to the same row of out are added up, in float32.
      shape: the shape of out, [any, C].
      w_dtype: the dtype that w is rounded to before it is multiplied; None for its own.
    """
    return _rows_dot(
        _RowsDot(rows, w, bounds, scales, bias, write_at),
        adds=adds,
        shape=shape,
        transpose_w=transpose_w,
        w_dtype=w_dtype,
        precision=precision,
        out_dtype=jnp.dtype(out_dtype),
    )


def outer_dot(left: Rows, right: Rows, bounds: GroupBounds, *, scales=None, precision, out_dtype):
    """out[g] = sum over the rows i of group g of scales[i] * left[i] (outer) right[i]: [E, P, Q].

    Args:
      left, right: M rows of P and of Q features.
      scales: float32 [M] or None for ones.
    """
    return _outer_dot(_OuterDot(left, right, bounds, scales), precision=precision, out_dtype=jnp.dtype(out_dtype))


def row_dots(left: Rows, right: Rows, w, bounds: GroupBounds, *, transpose_w, w_dtype=None, precision):
    """out[i] = left[i] . (right[i] @ w[g]) for the rows i of each group g, else zero: float32 [M].

    Args:
      left, right: M rows of C and of R features.
      w: [E, R, C], or [E, C, R] with `transpose_w`.
      w_dtype: as in `rows_dot`.
    """
    return _row_dots(_RowDots(left, right, w, bounds), transpose_w=transpose_w, w_dtype=w_dtype, precision=precision)


class _RowsDot(NamedTuple):
    rows: Rows
    w: jax.Array
    bounds: GroupBounds
    scales: jax.Array | None
    bias: jax.Array | None
    write_at: jax.Array | None


class _OuterDot(NamedTuple):
    left: Rows
    right: Rows
    bounds: GroupBounds
    scales: jax.Array | None


class _RowDots(NamedTuple):
    left: Rows
    right: Rows
    w: jax.Array
    bounds: GroupBounds


def _compute_rows_dot(operands, *, adds, shape, transpose_w, w_dtype, precision, out_dtype):
    rows, w, bounds, scales, bias, write_at = operands

    def body(block, multiply, out):
        product = multiply(row_blocks.take(rows, block))
        if bias is not None:
            product += jax.lax.dynamic_index_in_dim(bias, block.group).astype(product.dtype)
        return row_blocks.put(Rows(out, write_at), block, row_blocks.scaled(product, block, scales), adds)

    out = row_blocks.zeros(shape, jnp.float32 if adds else out_dtype, rows)
    out = row_blocks.over_blocks(body, out, rows.num_rows, w, bounds, transpose_w, w_dtype, precision)
    return out.astype(out_dtype)


def _compute_outer_dot(operands, *, precision, out_dtype):
    left, right, bounds, scales = operands
    num_groups = len(bounds.ends)
    size = row_blocks.block_size(left.num_rows, num_groups)
    out = row_blocks.zeros((num_groups, left.array.shape[1], right.array.shape[1]), out_dtype, left)
    if 0 in (size, num_groups):
        return out

    def set_group(group, out):
        def multiply(step):
            block = Block.at(step, group, size, left.num_rows, bounds)
            left_rows = row_blocks.scaled(row_blocks.take(left, block), block, scales)
            own = block.own[:, None]
            return row_blocks.dot(
                jnp.where(own, left_rows, 0), jnp.where(own, row_blocks.take(right, block), 0), (0, 0), precision
            )

        steps = row_blocks.steps(group, size, bounds)
        total = jax.lax.fori_loop(1, steps, lambda step, total: total + multiply(step), multiply(0))
        return jax.lax.dynamic_update_index_in_dim(out, total.astype(out_dtype), group, 0)

    return jax.lax.fori_loop(0, num_groups, set_group, out)


def _compute_row_dots(operands, *, transpose_w, w_dtype, precision):
    left, right, w, bounds = operands

    def body(block, multiply, out):
        sums = row_blocks.sum_of_products(multiply(row_blocks.take(right, block)), row_blocks.take(left, block))
        return row_blocks.put(Rows(out), block, sums)

    out = row_blocks.zeros((left.num_rows,), jnp.float32, left)
    return row_blocks.over_blocks(body, out, left.num_rows, w, bounds, transpose_w, w_dtype, precision)


def _derivative(left, right, w, bounds, scales, *, transpose_w, w_dtype, precision):
    """The derivative of sum scales[i] * left[i] . (right[i] @ w[g]) in the one array that is an undefined primal."""
    if ad.is_undefined_primal(w):
        pair = (left, right) if transpose_w else (right, left)
        return outer_dot(*pair, bounds, scales=scales, precision=precision, out_dtype=w.aval.dtype)
    if scales is not None and ad.is_undefined_primal(scales):
        return row_dots(left, right, w, bounds, transpose_w=transpose_w, w_dtype=w_dtype, precision=precision)
    if ad.is_undefined_primal(right.array):
        left, right, transpose_w = right, left, not transpose_w
    aval = left.array.aval
    return rows_dot(
        right,
        w,
        bounds,
        scales=scales,
        write_at=left.at,
        adds=left.at is not None,
        shape=aval.shape,
        transpose_w=transpose_w,
        w_dtype=w_dtype,
        precision=precision,
        out_dtype=aval.dtype,
    )


def _transpose_rows_dot(ct, operands, *, transpose_w, w_dtype, precision, **_):
    rows, w, bounds, scales, bias, write_at = operands
    ct = Rows(ct, write_at)
    options = {"transpose_w": transpose_w, "w_dtype": w_dtype, "precision": precision}
    result = _derivative(ct, rows, w, bounds, scales, **options)
    if bias is None:
        return result
    # with a bias the result is linear only in scales
    return result + row_dots(ct, row_blocks.ones(ct), bias[:, None], bounds, transpose_w=False, precision=precision)


def _transpose_outer_dot(ct, operands, *, precision, **_):
    left, right, bounds, scales = operands
    return _derivative(left, right, ct, bounds, scales, transpose_w=True, w_dtype=None, precision=precision)


def _transpose_row_dots(ct, operands, **params):
    left, right, w, bounds = operands
    return _derivative(left, right, w, bounds, ct, **params)


def _dependent_part(operands, changed, **params):
    """Operands and parameters for the part of `rows_dot` that depends on the operand named `changed`, linear in it."""
    if changed == "bias":
        operands = operands._replace(rows=row_blocks.ones(operands.rows), w=operands.bias[:, None], bias=None)
        return operands, params | {"transpose_w": False, "w_dtype": None}
    return operands if changed == "scales" else operands._replace(bias=None), params


def _multilinear(name, out_type, compute, transpose, letters, dependent_part=None):
    """A function that binds a primitive whose operands are a NamedTuple and which is linear in each float array.

    Args:
      out_type: (operands, **parameters) -> shape and dtype of the result.
      compute: (operands, **parameters) -> the result.
      transpose: (cotangent, operands with one array undefined, **parameters) -> cotangent of that array.
      letters: (**parameters) -> Letters, which say how it is split over devices.
      dependent_part: (operands, name of the one that varies, **parameters) -> (operands, parameters) without constant
        terms; needed where the result is not linear because of such terms.
    """

    def bind_operands(operands, **params):
        leaves, structure = jax.tree.flatten(operands)
        return bind(*leaves, structure=structure, **params)[0]

    def on_leaves(function):
        return lambda *leaves, structure, **params: [function(structure.unflatten(leaves), **params)]

    def jvp(leaves, tangents, *, structure, **params):
        out = bind_operands(structure.unflatten(leaves), **params)
        names = [name for name, part in structure.unflatten(leaves)._asdict().items() for _ in jax.tree.leaves(part)]
        terms = []
        for index, tangent in enumerate(tangents):
            if type(tangent) is not ad.Zero:
                if is_quantized(getattr(structure.unflatten(leaves), names[index])):
                    raise NotImplementedError(NO_DERIVATIVES)
                part = structure.unflatten([*leaves[:index], tangent, *leaves[index + 1 :]]), params
                if dependent_part is not None:
                    part = dependent_part(part[0], names[index], **params)
                terms.append(bind_operands(part[0], **part[1]))
        return [out], [functools.reduce(jnp.add, terms)]

    def transpose_leaves(cts, *leaves, structure, **params):
        (undefined,) = (leaf for leaf in leaves if ad.is_undefined_primal(leaf))
        if type(cts[0]) is ad.Zero:
            result = ad.Zero(undefined.aval)
        else:
            result = transpose(cts[0], structure.unflatten(leaves), **params)
        return [result if leaf is undefined else None for leaf in leaves]

    def axes(*leaves, structure, **params):
        return letters(**params).axes(structure.unflatten(leaves), _localize)

    _, bind = define_partitioned(
        name, on_leaves(out_type), on_leaves(compute), axes, jvp=jvp, transpose=transpose_leaves
    )
    return bind_operands


def _localize(params, devices):
    """Parameters for a device's part of the columns; no parameter depends on other axes."""
    if "shape" not in params:
        return params
    rows, columns = params["shape"]
    return params | {"shape": (rows, columns // devices.get("c", 1))}


def _rows_dot_letters(transpose_w, **_):
    w = "ecr" if transpose_w else "erc"
    rows = {"rows": ".r", "w": w, "scales": ".", "bias": "ec", "write_at": "."}
    return Letters(rows, (".c",), ("er",))


def _outer_dot_letters(**_):
    return Letters({"left": ".p", "right": ".q", "scales": "."}, ("epq",), ("",))


def _row_dots_letters(transpose_w, **_):
    return Letters({"left": ".c", "right": ".r", "w": "ecr" if transpose_w else "erc"}, (".",), ("erc",))


_rows_dot = _multilinear(
    "grouped_rows_dot",
    lambda operands, *, shape, out_dtype, **_: jax.ShapeDtypeStruct(shape, out_dtype),
    _compute_rows_dot,
    _transpose_rows_dot,
    _rows_dot_letters,
    _dependent_part,
)
_outer_dot = _multilinear(
    "grouped_outer_dot",
    lambda operands, *, out_dtype, **_: jax.ShapeDtypeStruct(
        (operands.bounds.ends.shape[0], operands.left.array.shape[1], operands.right.array.shape[1]), out_dtype
    ),
    _compute_outer_dot,
    _transpose_outer_dot,
    _outer_dot_letters,
)
_row_dots = _multilinear(
    "grouped_row_dots",
    lambda operands, **_: jax.ShapeDtypeStruct((operands.left.num_rows,), jnp.float32),
    _compute_row_dots,
    _transpose_row_dots,
    _row_dots_letters,
)
