"""Plain differentiable JAX for every platform: what the kernels compute, as `multilinear`'s products of a problem."""

import functools

import jax.numpy as jnp

from jgg.implementations import blocks, xla_layer
from jgg.implementations.blocks import Rows
from jgg.implementations.multilinear import outer_dot, row_dots, rows_dot
from jgg.problem import GroupedGemmProblem
from jgg.schedule import GroupBounds


def grouped_gemm(problem: GroupedGemmProblem, x, w, bounds: GroupBounds, gather_indices, topk_weights, bias):
    """y of `problem.y_shape`, differentiable to any order in x, w, topk_weights and bias."""
    return rows_dot(
        Rows(x, x_rows(problem, gather_indices)),
        w,
        bounds,
        scales=row_scales(problem, gather_indices, topk_weights),
        bias=bias,
        write_at=_y_rows(problem, gather_indices),
        adds=problem.combine_y,
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
    dy, x_at = Rows(dy, _y_rows(problem, gather_indices)), x_rows(problem, gather_indices)
    dot = {"transpose_w": problem.w_layout == "ekn", "precision": problem.precision}
    dx = rows_dot(
        dy, w, bounds, scales=row_scales(problem, gather_indices, topk_weights), write_at=x_at, adds=x_at is not None,
        shape=problem.x_shape, out_dtype=problem.dtype, **dot,
    )  # fmt: skip
    return [dx] if x is None else [dx, row_dots(Rows(x, x_at), dy, w, bounds, **dot)]


def backward_dw(target, problem, config, x, dy, bounds, gather_indices, topk_weights, with_bias):
    """The dW product and the gradient of the bias; see `implementations.weight_gradient.backward_dw`."""
    x, dy = Rows(x, x_rows(problem, gather_indices)), Rows(dy, _y_rows(problem, gather_indices))
    scales = row_scales(problem, gather_indices, topk_weights)
    dot = functools.partial(outer_dot, bounds=bounds, scales=scales, precision=problem.precision)
    dw = dot(*((dy, x) if problem.w_layout == "enk" else (x, dy)), out_dtype=problem.dtype)
    return [dw, dot(blocks.ones(dy), dy, out_dtype=jnp.float32)[:, 0]] if with_bias else [dw]


def combine(target, problem, config, rows, positions, scales, topk):
    """The weighted sum of each token's rows; see `implementations.combining.combine`."""
    return [blocks.combine(rows, positions, scales, topk)]


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


def x_rows(problem: GroupedGemmProblem, gather_indices):
    """The row of x that each row is, past the end for a bad index; None where they are in one order."""
    return _tokens(problem, gather_indices) if problem.permute_x else None


def _tokens(problem, gather_indices):
    return blocks.guarded(gather_indices, problem.num_positions) // problem.topk


def _y_rows(problem, gather_indices):
    if problem.combine_y:
        return _tokens(problem, gather_indices)
    return blocks.guarded(gather_indices, problem.num_rows) if problem.permute_y else None


def row_scales(problem: GroupedGemmProblem, gather_indices, topk_weights):
    """topk_weights of each row, float32 [M], zero for a bad index; or None."""
    if topk_weights is None:
        return None
    scales = topk_weights.reshape(-1).astype(jnp.float32)
    if gather_indices is None:
        return scales
    return scales.at[blocks.guarded(gather_indices, problem.num_positions)].get(mode="fill", fill_value=0)
