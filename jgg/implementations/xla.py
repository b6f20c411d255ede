"""Plain differentiable JAX for every platform: loops over the groups, with no operand made dense.

The two products are primitives of their own, bilinear and each the other's transpose, so that JAX derives forward
mode, reverse mode and all higher orders, and every derivative is again such a loop. (Differentiating the loop itself
would add up a dense cotangent of all experts' weights at every step.)
"""

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jgg.implementations.primitive import define_primitive
from jgg.problem import GroupedGemmProblem
from jgg.schedule import GroupBounds, inverse_permutation
from jgg.varying import vary_over, varying_axes


def grouped_gemm(problem: GroupedGemmProblem, x, w, bounds: GroupBounds, gather_indices, topk_weights, bias):
    """y [M, N] of `jgg.grouped_gemm`, differentiable to any order in x, w, topk_weights and bias."""
    exact = any(option is not None for option in (topk_weights, bias))
    y = rows_dot(
        expert_order(problem, x, gather_indices, problem.permute_x),
        w,
        bounds,
        transpose_w=problem.w_layout == "enk",
        precision=problem.precision,
        out_dtype=jnp.dtype(jnp.float32) if exact else problem.out_dtype,
    )
    if bias is not None:
        experts = jnp.searchsorted(bounds.ends, jnp.arange(problem.num_rows), side="right", method="scan_unrolled")
        y = y + bias.astype(y.dtype).at[experts].get(mode="fill", fill_value=0)
    if topk_weights is not None:
        y = y * _row_scales(problem, gather_indices, topk_weights)[:, None]
    if exact:
        y = jnp.where(_in_groups(problem, bounds)[:, None], y, 0).astype(problem.out_dtype)
    return _token_order(problem, y, gather_indices) if problem.permute_y else y


def forward(target, problem, config, x, w, bounds, gather_indices, topk_weights, bias):
    """The forward product; see `implementations.kernels.forward`."""
    return [grouped_gemm(problem, x, w, bounds, gather_indices, topk_weights, bias)]


def backward_dx(target, problem, config, dy, w, x, bounds, gather_indices, topk_weights):
    """The dX product and the row sums; see `implementations.kernels.backward_dx`."""
    plain = x is None and topk_weights is None and not problem.permute_x
    dx = rows_dot(
        expert_order(problem, dy, gather_indices, problem.permute_y),
        w,
        bounds,
        transpose_w=problem.w_layout == "ekn",
        precision=problem.precision,
        out_dtype=problem.dtype if plain else jnp.dtype(jnp.float32),
    )
    row_sums = []
    if x is not None:
        x_rows = expert_order(problem, x, gather_indices, problem.permute_x)
        row_sums = [jnp.where(_in_groups(problem, bounds), jnp.sum(dx * x_rows.astype(dx.dtype), axis=1), 0)]
    if topk_weights is not None:
        scaled = dx * _row_scales(problem, gather_indices, topk_weights)[:, None]
        dx = jnp.where(_in_groups(problem, bounds)[:, None], scaled, 0)
    if problem.permute_x:
        inverse = inverse_permutation(gather_indices).reshape(-1, problem.topk)
        dx = jnp.sum(dx.at[inverse].get(mode="fill", fill_value=0), axis=1)
    return [dx.astype(problem.dtype), *row_sums]


def backward_dw(target, problem, config, x, dy, bounds, gather_indices, topk_weights, with_bias):
    """The dW product and the gradient of the bias; see `implementations.kernels.backward_dw`."""
    x = expert_order(problem, x, gather_indices, problem.permute_x)
    dy = expert_order(problem, dy, gather_indices, problem.permute_y)
    if topk_weights is not None:
        scales = _row_scales(problem, gather_indices, topk_weights)[:, None]
        dy = (dy.astype(jnp.float32) * scales).astype(dy.dtype)
    left, right = (dy, x) if problem.w_layout == "enk" else (x, dy)
    dot = functools.partial(outer_dot, precision=problem.precision)
    dw = dot(left, right, bounds, out_dtype=problem.dtype)
    if not with_bias:
        return [dw]
    ones = jnp.ones((problem.num_rows, 1), dy.dtype)
    return [dw, dot(dy, ones, bounds, out_dtype=jnp.dtype(jnp.float32))[:, :, 0]]


def rows_dot(rows, w, bounds: GroupBounds, *, transpose_w: bool, precision, out_dtype):
    """out[i] = rows[i] @ w[g] for the rows i of each group g, other rows zero.

    Args:
      rows: [M, R].
      w: [E, R, C], or [E, C, R] with `transpose_w`.
    Returns: [M, C].
    """
    return _rows_dot(rows, w, *bounds, transpose_w=transpose_w, precision=precision, out_dtype=out_dtype)


def outer_dot(left, right, bounds: GroupBounds, *, precision, out_dtype):
    """out[g] = left[rows of g]^T @ right[rows of g], zero for a group without rows.

    Args:
      left: [M, P].
      right: [M, Q].
    Returns: [E, P, Q].
    """
    return _outer_dot(left, right, *bounds, precision=precision, out_dtype=out_dtype)


def expert_order(problem, array, gather_indices, permuted):
    """Rows of x or dy in expert order; a bad index reads zero."""
    if not permuted:
        return array
    divisor = problem.num_rows // array.shape[0] if array.shape[0] else 1
    return array.at[_guarded(problem, gather_indices) // divisor].get(mode="fill", fill_value=0)


def _token_order(problem, y, gather_indices):
    return jnp.zeros_like(y).at[_guarded(problem, gather_indices)].set(y, mode="drop")


def _row_scales(problem, gather_indices, topk_weights):
    scales = topk_weights.reshape(-1).astype(jnp.float32)
    if gather_indices is None:
        return scales
    return scales.at[_guarded(problem, gather_indices)].get(mode="fill", fill_value=0)


def _guarded(problem, gather_indices):
    """Indices with every one outside [0, M) far past the end, where `at` neither wraps it around nor writes it."""
    in_range = (gather_indices >= 0) & (gather_indices < problem.num_rows)
    return jnp.where(in_range, gather_indices, 2 * problem.num_rows * problem.topk)


def _in_groups(problem, bounds):
    row = jnp.arange(problem.num_rows)
    return (row >= bounds.starts[0]) & (row < bounds.ends[-1])


def _block_rows(num_rows: int, num_groups: int) -> int:
    """Rows of a loop step: about a group's share, so that short groups do not multiply mostly padding."""
    share = -(-num_rows // max(num_groups, 1))
    return min(max(1 << (share - 1).bit_length(), 8), 512, num_rows)


def _common(left, right):
    """The dtype of two dtypes' product; those that differ meet in float32."""
    return left if left == right else jnp.dtype(jnp.float32)


def _group_block(array, start, block, first, end):
    """The block of rows that holds row `start`, moved up where it would pass the end, and which of it are its own."""
    first_row = jnp.minimum(start, array.shape[0] - block)
    rows = first_row + jnp.arange(block, dtype=jnp.int32)
    own = (rows >= start) & (rows < end)
    return jax.lax.dynamic_slice_in_dim(array, first_row, block), own[:, None], first_row


def _rows_dot_impl(rows, w, starts, ends, *, transpose_w, precision, out_dtype):
    num_groups, columns = w.shape[0], w.shape[1 if transpose_w else 2]
    block = _block_rows(rows.shape[0], num_groups)
    dims = (((1,), (1 if transpose_w else 0,)), ((), ()))
    dtype = _common(rows.dtype, w.dtype)
    out = vary_over(varying_axes(rows), jnp.zeros((rows.shape[0], columns), out_dtype))
    if 0 in (block, num_groups):
        return out

    def add_group(group, out):
        matrix = jax.lax.dynamic_index_in_dim(w, group, keepdims=False).astype(dtype)

        def add_block(step, out):
            start = starts[group] + step * block
            part, own, first_row = _group_block(rows, start, block, starts[group], ends[group])
            product = jax.lax.dot_general(
                part.astype(dtype), matrix, dims, precision, preferred_element_type=jnp.float32
            )
            before = jax.lax.dynamic_slice_in_dim(out, first_row, block)
            after = jnp.where(own, product.astype(out_dtype), before)
            return jax.lax.dynamic_update_slice_in_dim(out, after, first_row, 0)

        steps = (ends[group] - starts[group] + block - 1) // block
        return jax.lax.fori_loop(0, steps, add_block, out)

    return jax.lax.fori_loop(0, num_groups, add_group, out)


def _outer_dot_impl(left, right, starts, ends, *, precision, out_dtype):
    num_groups = len(ends)
    block = _block_rows(left.shape[0], num_groups)
    dims = (((0,), (0,)), ((), ()))
    dtype = _common(left.dtype, right.dtype)
    shape = (left.shape[1], right.shape[1])
    axes = varying_axes(left)
    out = vary_over(axes, jnp.zeros((num_groups, *shape), out_dtype))
    if block == 0:
        return out

    def set_group(group, out):
        def add_block(step, acc):
            start = starts[group] + step * block
            parts = []
            for array in (left, right):
                part, own, _ = _group_block(array, start, block, starts[group], ends[group])
                parts.append(jnp.where(own, part, 0).astype(dtype))
            return acc + jax.lax.dot_general(*parts, dims, precision, preferred_element_type=acc.dtype)

        steps = (ends[group] - starts[group] + block - 1) // block
        zeros = vary_over(axes, jnp.zeros(shape, jnp.float32))
        acc = jax.lax.fori_loop(0, steps, add_block, zeros)
        return jax.lax.dynamic_update_index_in_dim(out, acc.astype(out_dtype), group, 0)

    return jax.lax.fori_loop(0, num_groups, set_group, out)


def _rows_dot_types(rows, w, starts, ends, *, transpose_w, precision, out_dtype):
    return [((rows.shape[0], w.shape[1 if transpose_w else 2]), out_dtype)]


def _outer_dot_types(left, right, starts, ends, *, precision, out_dtype):
    return [((ends.shape[0], left.shape[1], right.shape[1]), out_dtype)]


def _transpose_rows_dot(ct, rows, w, starts, ends, *, transpose_w, precision, out_dtype):
    bounds = GroupBounds(starts, ends)
    if ad.is_undefined_primal(rows):
        if type(ct) is ad.Zero:
            return ad.Zero(rows.aval), None, None, None
        dot = functools.partial(rows_dot, transpose_w=not transpose_w, out_dtype=rows.aval.dtype)
        return dot(ct, w, bounds, precision=precision), None, None, None
    if type(ct) is ad.Zero:
        return None, ad.Zero(w.aval), None, None
    pair = (ct, rows) if transpose_w else (rows, ct)
    return None, outer_dot(*pair, bounds, precision=precision, out_dtype=w.aval.dtype), None, None


def _transpose_outer_dot(ct, left, right, starts, ends, *, precision, out_dtype):
    bounds = GroupBounds(starts, ends)
    is_left = ad.is_undefined_primal(left)
    linear, other = (left, right) if is_left else (right, left)
    result = ad.Zero(linear.aval)
    if type(ct) is not ad.Zero:
        # ct is [E, P, Q]: left's cotangent is right @ ct^T, right's is left @ ct
        result = rows_dot(other, ct, bounds, transpose_w=is_left, precision=precision, out_dtype=linear.aval.dtype)
    return (result, None, None, None) if is_left else (None, result, None, None)


def _bilinear(name, static_names, out_types, impl, transpose):
    """The function that binds a primitive (a, b, starts, ends) -> array, linear in a and in b."""

    def jvp(primals, tangents, **params):
        bounds = primals[2:]
        parts = [
            bind_one(*primals[:index], tangent, *primals[index + 1 : 2], *bounds, **params)
            for index, tangent in enumerate(tangents[:2])
            if type(tangent) is not ad.Zero
        ]
        out = bind_one(*primals, **params)
        return [out], [functools.reduce(jnp.add, parts) if parts else ad.Zero.from_primal_value(out)]

    def bind_one(*operands, **params):
        return bind(*operands, **params)[0]

    def compute(*operands, **params):
        return [impl(*operands, **params)]

    primitive, bind = define_primitive(name, static_names, out_types, compute)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = lambda cts, *primals, **params: transpose(cts[0], *primals, **params)
    return bind_one


_rows_dot = _bilinear(
    "grouped_rows_dot",
    ("transpose_w", "precision", "out_dtype"),
    _rows_dot_types,
    _rows_dot_impl,
    _transpose_rows_dot,
)
_outer_dot = _bilinear(
    "grouped_outer_dot", ("precision", "out_dtype"), _outer_dot_types, _outer_dot_impl, _transpose_outer_dot
)
