"""Plain differentiable JAX for every platform: loops over blocks of each group's rows, with no operand made dense.

Everything here comes from one form, the sum over all rows i of

    scales[i] * left[i] . (right[i] @ w[group of i])

which is linear in each of its four arrays. Its derivatives in them are three products: `rows_dot` (in left, in right),
`outer_dot` (in w) and `row_dots` (in scales). They are primitives, and the transpose of each is one of them again, so
that JAX derives forward mode, reverse mode and all higher orders, and every derivative is such a loop. (Differentiating
the loop itself would add up a dense cotangent of all experts' weights at every step.)

The loops gather and scatter the rows of their own block, so that temporaries stay small too.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jgg.implementations import xla_layer
from jgg.implementations.partitioning import ROWS, Axes, define_partitioned
from jgg.problem import GroupedGemmProblem
from jgg.schedule import GroupBounds
from jgg.varying import vary_over, varying_axes

_NO_ROW = jnp.iinfo(jnp.int32).max


class Rows(NamedTuple):
    """M routed rows: row `at[i]` of `array` [any, features] is the i-th; `at` is int32 [M] or None for i itself.

    An index past the end reads zero and writes nothing.
    """

    array: jax.Array
    at: jax.Array | None = None

    @property
    def count(self) -> int:
        """M."""
        return (self.array if self.at is None else self.at).shape[0]


def grouped_gemm(problem: GroupedGemmProblem, x, w, bounds: GroupBounds, gather_indices, topk_weights, bias):
    """y [M, N] of `jgg.grouped_gemm`, differentiable to any order in x, w, topk_weights and bias."""
    return rows_dot(
        Rows(x, _x_rows(problem, gather_indices)),
        w,
        bounds,
        scales=_row_scales(problem, gather_indices, topk_weights),
        bias=bias,
        write_at=_y_rows(problem, gather_indices),
        shape=problem.y_shape,
        transpose_w=problem.w_layout == "enk",
        precision=problem.precision,
        out_dtype=problem.out_dtype,
    )


def forward(target, problem, config, x, w, bounds, gather_indices, topk_weights, bias):
    """The forward product; see `implementations.kernels.forward`."""
    return [grouped_gemm(problem, x, w, bounds, gather_indices, topk_weights, bias)]


def backward_dx(target, problem, config, dy, w, x, bounds, gather_indices, topk_weights):
    """The dX product and the row sums; see `implementations.kernels.backward_dx`."""
    scales = _row_scales(problem, gather_indices, topk_weights)
    dy, x = Rows(dy, _y_rows(problem, gather_indices)), Rows(x, _x_rows(problem, gather_indices))
    adds = x.at is not None
    dx = _zeros(problem.x_shape, jnp.float32 if adds else problem.dtype, dy)
    row_sums = None if x.array is None else _zeros((problem.num_rows,), jnp.float32, dy)

    def body(block, multiply, results):
        dx, row_sums = results
        product = multiply(_take(dy, block))
        if row_sums is not None:
            row_sums = _put(Rows(row_sums), block, _sum_of_products(product, _take(x, block)))
        return _put(Rows(dx, x.at), block, _scaled(product, block, scales), adds), row_sums

    transpose_w = problem.w_layout == "ekn"
    dx, row_sums = _over_blocks(body, (dx, row_sums), dy.count, w, bounds, transpose_w, problem.precision)
    return [dx.astype(problem.dtype)] + ([] if row_sums is None else [row_sums])


def backward_dw(target, problem, config, x, dy, bounds, gather_indices, topk_weights, with_bias):
    """The dW product and the gradient of the bias; see `implementations.kernels.backward_dw`."""
    x, dy = Rows(x, _x_rows(problem, gather_indices)), Rows(dy, _y_rows(problem, gather_indices))
    scales = _row_scales(problem, gather_indices, topk_weights)
    dot = functools.partial(outer_dot, bounds=bounds, scales=scales, precision=problem.precision)
    dw = dot(*((dy, x) if problem.w_layout == "enk" else (x, dy)), out_dtype=problem.dtype)
    return [dw, dot(_ones(dy), dy, out_dtype=jnp.float32)[:, 0]] if with_bias else [dw]


def combine(target, problem, config, rows, positions, scales, topk):
    """The weighted sum of each token's rows; see `implementations.kernels.combine`."""
    terms = rows.at[_guarded(positions, rows.shape[0])].get(mode="fill", fill_value=0).astype(jnp.float32)
    if scales is not None:
        terms = terms * scales.reshape(-1).astype(jnp.float32)[:, None]
    terms = terms.reshape(positions.shape[0] // topk, topk, rows.shape[1])
    return [jnp.sum(terms, axis=1).astype(rows.dtype)]


def activate(target, problem, config, *arrays, **options):
    """See `implementations.layer_kernels.activate`."""
    return xla_layer.activate(*arrays, **options)


def activate_backward(target, problem, config, *arrays, **options):
    """See `implementations.layer_kernels.activate_backward`."""
    return xla_layer.activate_backward(*arrays, **options)


def top_k(target, problem, config, *arrays, **options):
    """See `implementations.layer_kernels.top_k`."""
    return xla_layer.top_k(*arrays, **options)


def sort(target, problem, config, *arrays, **options):
    """See `implementations.layer_kernels.sort`."""
    return xla_layer.sort(*arrays, **options)


def _x_rows(problem, gather_indices):
    return _guarded(gather_indices, problem.num_rows) // problem.topk if problem.permute_x else None


def _y_rows(problem, gather_indices):
    return _guarded(gather_indices, problem.num_rows) if problem.permute_y else None


def _row_scales(problem, gather_indices, topk_weights):
    if topk_weights is None:
        return None
    scales = topk_weights.reshape(-1).astype(jnp.float32)
    if gather_indices is None:
        return scales
    return scales.at[_guarded(gather_indices, problem.num_rows)].get(mode="fill", fill_value=0)


def _guarded(indices, num_rows):
    """Indices with every one outside [0, M) far past the end, where `at` neither wraps it around nor writes it."""
    return jnp.where((indices >= 0) & (indices < num_rows), indices, _NO_ROW)


def rows_dot(
    rows: Rows, w, bounds: GroupBounds, *, scales=None, bias=None, write_at=None, adds=False, shape, transpose_w,
    precision, out_dtype,
):  # fmt: skip
    """out[write_at[i]] = scales[i] * (rows[i] @ w[g] + bias[g]) for the rows i of each group g; the rest is zero.

    Args:
      rows: M rows of R features.
      w: [E, R, C], or [E, C, R] with `transpose_w`.
      scales: float32 [M] or None for ones.
      bias: [E, C] or None for zero.
      write_at: as `Rows.at`.
      adds: sum, in float32, what is written to the same row.
      shape: of out, [any, C].
    """
    return _rows_dot(
        _RowsDot(rows, w, bounds, scales, bias, write_at),
        adds=adds, shape=shape, transpose_w=transpose_w, precision=precision, out_dtype=jnp.dtype(out_dtype),
    )  # fmt: skip


def outer_dot(left: Rows, right: Rows, bounds: GroupBounds, *, scales=None, precision, out_dtype):
    """out[g] = sum over the rows i of group g of scales[i] * left[i] (outer) right[i]: [E, P, Q].

    Args:
      left, right: M rows of P and of Q features.
      scales: float32 [M] or None for ones.
    """
    return _outer_dot(_OuterDot(left, right, bounds, scales), precision=precision, out_dtype=jnp.dtype(out_dtype))


def row_dots(left: Rows, right: Rows, w, bounds: GroupBounds, *, transpose_w, precision):
    """out[i] = left[i] . (right[i] @ w[g]) for the rows i of each group g, else zero: float32 [M].

    Args:
      left, right: M rows of C and of R features.
      w: [E, R, C], or [E, C, R] with `transpose_w`.
    """
    return _row_dots(_RowDots(left, right, w, bounds), transpose_w=transpose_w, precision=precision)


class _Block(NamedTuple):
    """A loop step: rows from `first_row` on, of which `own` [rows] tells those of `group`."""

    group: jax.Array
    first_row: jax.Array
    own: jax.Array

    @classmethod
    def at(cls, step, group, size, num_rows, bounds):
        """The block of `size` rows at a step of a group, moved up where it would pass the last row."""
        start = bounds.starts[group] + step * size
        first_row = jnp.minimum(start, num_rows - size)
        rows = first_row + jnp.arange(size, dtype=jnp.int32)
        return cls(group, first_row, (rows >= start) & (rows < bounds.ends[group]))

    def slice(self, array):
        return jax.lax.dynamic_slice_in_dim(array, self.first_row, self.own.size)


def _block_size(num_rows: int, num_groups: int) -> int:
    """Rows of a loop step: half a group's share, as its last block is padded, but enough to multiply at full speed."""
    share = 1 << (-(-num_rows // max(num_groups, 1)) - 1).bit_length()
    return min(share, max(share // 2, 64), 512, num_rows)


def _steps(group, size, bounds):
    return (bounds.ends[group] - bounds.starts[group] + size - 1) // size


def _take(rows: Rows, block):
    """A block's rows."""
    if rows.at is None:
        return block.slice(rows.array)
    return rows.array.at[block.slice(rows.at)].get(mode="fill", fill_value=0)


def _put(rows: Rows, block, values, adds=False):
    """`rows.array` with the block's own rows written."""
    out, values = rows.array, values.astype(rows.array.dtype)
    if rows.at is None:
        own = block.own.reshape(-1, *[1] * (values.ndim - 1))
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(own, values, block.slice(out)), block.first_row, 0)
    at = out.at[jnp.where(block.own, block.slice(rows.at), _NO_ROW)]
    return (at.add if adds else at.set)(values, mode="drop")


def _scaled(values, block, scales):
    return values if scales is None else values.astype(jnp.float32) * block.slice(scales)[:, None]


def _sum_of_products(left, right):
    """For each row the sum of left * right, in float32."""
    return jnp.sum(left.astype(jnp.float32) * right.astype(jnp.float32), axis=1)


def _dot(left, right, axes, precision):
    """float32 product of two matrices over an axis of each; those of different dtypes meet in float32."""
    dtype = left.dtype if left.dtype == right.dtype else jnp.float32
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(
        left.astype(dtype), right.astype(dtype), dims, precision, preferred_element_type=jnp.float32
    )


def _zeros(shape, dtype, rows: Rows):
    return vary_over(varying_axes(rows.array), jnp.zeros(shape, dtype))


def _ones(rows: Rows):
    return Rows(jnp.ones((rows.count, 1), rows.array.dtype))


def _over_blocks(body, carry, num_rows, w, bounds, transpose_w, precision):
    """body(block, multiply, carry) -> carry, over all blocks of all groups; multiply(rows) is rows @ w[group]."""
    num_groups = len(bounds.ends)
    size = _block_size(num_rows, num_groups)
    if 0 in (size, num_groups):
        return carry

    def over_group(group, carry):
        matrix = jax.lax.dynamic_index_in_dim(w, group, keepdims=False)
        multiply = functools.partial(_dot, right=matrix, axes=(1, int(transpose_w)), precision=precision)

        def over_block(step, carry):
            return body(_Block.at(step, group, size, num_rows, bounds), multiply, carry)

        return jax.lax.fori_loop(0, _steps(group, size, bounds), over_block, carry)

    return jax.lax.fori_loop(0, num_groups, over_group, carry)


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


def _compute_rows_dot(operands, *, adds, shape, transpose_w, precision, out_dtype):
    rows, w, bounds, scales, bias, write_at = operands

    def body(block, multiply, out):
        product = multiply(_take(rows, block))
        if bias is not None:
            product += jax.lax.dynamic_index_in_dim(bias, block.group).astype(product.dtype)
        return _put(Rows(out, write_at), block, _scaled(product, block, scales), adds)

    out = _zeros(shape, jnp.float32 if adds else out_dtype, rows)
    return _over_blocks(body, out, rows.count, w, bounds, transpose_w, precision).astype(out_dtype)


def _compute_outer_dot(operands, *, precision, out_dtype):
    left, right, bounds, scales = operands
    num_groups = len(bounds.ends)
    size = _block_size(left.count, num_groups)
    out = _zeros((num_groups, left.array.shape[1], right.array.shape[1]), out_dtype, left)
    if size == 0:
        return out

    def set_group(group, out):
        def multiply(step):
            block = _Block.at(step, group, size, left.count, bounds)
            left_rows = _scaled(_take(left, block), block, scales)
            own_rows = [jnp.where(block.own[:, None], rows, 0) for rows in (left_rows, _take(right, block))]
            return _dot(*own_rows, (0, 0), precision)

        steps = _steps(group, size, bounds)
        total = jax.lax.fori_loop(1, steps, lambda step, total: total + multiply(step), multiply(0))
        return jax.lax.dynamic_update_index_in_dim(out, total.astype(out_dtype), group, 0)

    return jax.lax.fori_loop(0, num_groups, set_group, out)


def _compute_row_dots(operands, *, transpose_w, precision):
    left, right, w, bounds = operands

    def body(block, multiply, out):
        return _put(Rows(out), block, _sum_of_products(multiply(_take(right, block)), _take(left, block)))

    out = _zeros((left.count,), jnp.float32, left)
    return _over_blocks(body, out, left.count, w, bounds, transpose_w, precision)


def _derivative(left, right, w, bounds, scales, *, transpose_w, precision):
    """Of sum scales[i] * left[i] . (right[i] @ w[g]), in the one array that is undefined."""
    if ad.is_undefined_primal(w):
        pair = (left, right) if transpose_w else (right, left)
        return outer_dot(*pair, bounds, scales=scales, precision=precision, out_dtype=w.aval.dtype)
    if scales is not None and ad.is_undefined_primal(scales):
        return row_dots(left, right, w, bounds, transpose_w=transpose_w, precision=precision)
    if ad.is_undefined_primal(right.array):
        left, right, transpose_w = right, left, not transpose_w
    aval = left.array.aval
    return rows_dot(
        right, w, bounds, scales=scales, write_at=left.at, adds=left.at is not None, shape=aval.shape,
        transpose_w=transpose_w, precision=precision, out_dtype=aval.dtype,
    )  # fmt: skip


def _transpose_rows_dot(ct, operands, *, transpose_w, precision, **_):
    rows, w, bounds, scales, bias, write_at = operands
    ct = Rows(ct, write_at)
    result = _derivative(ct, rows, w, bounds, scales, transpose_w=transpose_w, precision=precision)
    if bias is None:
        return result
    # only scales are linear beside a bias
    return result + row_dots(ct, _ones(ct), bias[:, None], bounds, transpose_w=False, precision=precision)


def _transpose_outer_dot(ct, operands, *, precision, **_):
    left, right, bounds, scales = operands
    return _derivative(left, right, ct, bounds, scales, transpose_w=True, precision=precision)


def _transpose_row_dots(ct, operands, **params):
    left, right, w, bounds = operands
    return _derivative(left, right, w, bounds, ct, **params)


def _dependent_part(operands, changed, **params):
    """What of `rows_dot` depends on one of its operands, by name, in a form linear in that operand."""
    if changed == "bias":
        operands = operands._replace(rows=_ones(operands.rows), w=operands.bias[:, None], bias=None)
        return operands, params | {"transpose_w": False}
    return operands if changed == "scales" else operands._replace(bias=None), params


def _multilinear(name, out_type, compute, transpose, letters, dependent_part=None):
    """The function that binds a primitive of a NamedTuple of operands, linear in each of its float arrays.

    Args:
      out_type: (operands, **parameters) -> shape and dtype of the result.
      compute: (operands, **parameters) -> the result.
      transpose: (cotangent, operands of which one array is undefined, **parameters) -> cotangent of that array.
      letters: (**parameters) -> those of the operands by name, of the result, and of what it is summed over, as in
        `partitioning.Axes`.
      dependent_part: (operands, name of the one that varies, **parameters) -> (operands, parameters) that leave out
        what is constant, where the result is not linear without.
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
                part = structure.unflatten([*leaves[:index], tangent, *leaves[index + 1 :]]), params
                if dependent_part is not None:
                    part = dependent_part(part[0], names[index], **params)
                terms.append(bind_operands(part[0], **part[1]))
        return [out], [functools.reduce(jnp.add, terms) if terms else ad.Zero.from_primal_value(out)]

    def transpose_leaves(cts, *leaves, structure, **params):
        (undefined,) = (leaf for leaf in leaves if ad.is_undefined_primal(leaf))
        if type(cts[0]) is ad.Zero:
            result = ad.Zero(undefined.aval)
        else:
            result = transpose(cts[0], structure.unflatten(leaves), **params)
        return [result if leaf is undefined else None for leaf in leaves]

    def axes(*leaves, structure, **params):
        of_operands, of_result, summed = letters(**params)
        operands = structure.unflatten(leaves)._asdict()
        present = [name for name, part in operands.items() for _ in jax.tree.leaves(part)]
        each = [letter for name, part in operands.items() for letter in _letters_of(part, of_operands[name])]
        added = present.index("bias") if "bias" in present else None
        return Axes(tuple(each), (of_result,), (summed,), _localize, added)

    primitives, bind = define_partitioned(name, on_leaves(out_type), on_leaves(compute), axes)
    for primitive in primitives:
        ad.primitive_jvps[primitive] = jvp
        ad.primitive_transposes[primitive] = transpose_leaves
    return bind_operands


def _letters_of(part, letters):
    """Those of each array of an operand."""
    if part is None:
        return []
    if isinstance(part, GroupBounds):
        return ["e", "e"]
    return [letters, ROWS] if isinstance(part, Rows) and part.at is not None else [letters]


def _localize(params, devices):
    """Parameters for a device's part of the columns; those of other axes are in no parameter."""
    if "shape" not in params:
        return params
    rows, columns = params["shape"]
    return params | {"shape": (rows, columns // devices.get("c", 1))}


def _product_letters(transpose_w, **_):
    """Of rows [M, R], w and the product's C columns."""
    w = "ecr" if transpose_w else "erc"
    rows = {"rows": ".r", "w": w, "bounds": "", "scales": ".", "bias": "ec", "write_at": "."}
    return rows, ".c", "er"


def _outer_letters(**_):
    return {"left": ".p", "right": ".q", "bounds": "", "scales": "."}, "epq", ""


def _row_dots_letters(transpose_w, **_):
    w = "ecr" if transpose_w else "erc"
    return {"left": ".c", "right": ".r", "w": w, "bounds": ""}, ".", "erc"


_rows_dot = _multilinear(
    "grouped_rows_dot",
    lambda operands, *, shape, out_dtype, **_: (shape, out_dtype),
    _compute_rows_dot,
    _transpose_rows_dot,
    _product_letters,
    _dependent_part,
)
_outer_dot = _multilinear(
    "grouped_outer_dot",
    lambda operands, *, out_dtype, **_: (
        (operands.bounds.ends.shape[0], operands.left.array.shape[1], operands.right.array.shape[1]),
        out_dtype,
    ),
    _compute_outer_dot,
    _transpose_outer_dot,
    _outer_letters,
)
_row_dots = _multilinear(
    "grouped_row_dots",
    lambda operands, **_: ((operands.left.count,), jnp.float32),
    _compute_row_dots,
    _transpose_row_dots,
    _row_dots_letters,
)
