"""dW: dw[e] = sum of topk_weights[i] * dy[i]^T x[i] over the rows i of each expert e."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import QuantizedArray
from jgg.core.schedule import GroupBounds, Rows, guarded, row_parts
from jgg.launching.choice import How, Launcher
from jgg.launching.kernel_configs import KernelConfigDW
from jgg.launching.launch import flat
from jgg.primitives.operation import Operation, array_type
from jgg.primitives.partitioning import Letters
from jgg.products.combine import Combine, combine, dense_rows, expert_order
from jgg.products.launches import column_parts, every_gpu, hopper
from jgg.products.launches.operands import OuterProduct
from jgg.products.launches.pieces import Pieces
from jgg.products.launches.plans import plan_dw
from jgg.products.plain import dense
from jgg.products.plain import rows as plain
from jgg.products.plain.multilinear import outer_dot


class Dw(NamedTuple):
    """The arrays as `grouped_gemm_dw` takes them, and bounds, the rows of each group.

    With a 16-bit x, dy may have another dtype; the kernels then multiply dy as two pieces (see `launches.pieces`).
    x may be a QuantizedArray, with a scale for 128 features of a row; it stands for what it dequantizes to.
    """

    x: jax.Array | QuantizedArray
    dy: jax.Array
    bounds: GroupBounds
    gather_indices: jax.Array | None = None
    topk_weights: jax.Array | None = None


def _plain(operands: Dw, problem: GroupedGemmProblem) -> jax.Array:
    x, dy, bounds, gather_indices, topk_weights = operands
    x = x.dequantize(problem.dtype) if isinstance(x, QuantizedArray) else x
    if problem.is_dense:
        return dense.dw(problem, x, dy)
    x_rows, dy_rows = Rows(x, plain.x_rows(problem, gather_indices)), Rows(dy, plain.y_rows(problem, gather_indices))
    left, right = (dy_rows, x_rows) if problem.w_layout == "enk" else (x_rows, dy_rows)
    scales = plain.row_scales(problem, bounds, gather_indices, topk_weights)
    options = {"precision": problem.precision, "out_dtype": KernelConfigDW.result_dtype(problem)}
    return outer_dot(left, right, bounds, scales=scales, **options)


def _launch(
    launcher: Launcher, operands: Dw, problem: GroupedGemmProblem, config: KernelConfigDW | None = None
) -> jax.Array:
    x: Any = operands.x
    dy, gather_indices = operands.dy, operands.gather_indices
    scales = row_scales(operands.topk_weights, gather_indices)
    plan = plan_dw(problem, launcher.target, scales_dy=scales is not None, config=config)
    if plan.copies_dy:
        positions = gather_indices if problem.permute_y else jnp.arange(problem.num_rows, dtype=jnp.int32)
        assert positions is not None
        dy = combine(launcher, Combine(dy, positions, scales), topk=1)
    if isinstance(operands.x, QuantizedArray) and not plan.copies_x:
        rows = jnp.arange(x.shape[0], dtype=jnp.int32)
        x = combine(launcher, Combine(x, rows), topk=1, dtype=problem.dtype)
    pieces = Pieces.of(dy, problem.dtype)
    product = OuterProduct(plan.problem, plan.config, x, pieces, operands.bounds, gather_indices)
    if plan.part_features is None:
        multiply = hopper.multiply_dw if plan.config.kernel == "hopper" else every_gpu.multiply_dw
        if plan.copies_x:
            x = expert_order(launcher, x, gather_indices, problem.topk, dtype=problem.dtype)
            product = dataclasses.replace(product, x=x)
        return multiply(launcher, product) if plan.row_parts == 1 else _sum_of_parts(launcher, product, plan.row_parts)
    dw: Any = None
    for features in column_parts.ranges(problem.in_features, plan.part_features):
        x, dw = column_parts.after(x, dw)
        rows = expert_order(launcher, x, gather_indices, problem.topk, features, problem.dtype)
        part = dataclasses.replace(product, x=rows, first_feature=features.start)
        dw = hopper.multiply_dw(launcher, part, dw)
    return dw


def _sum_of_parts(launcher: Launcher, product: OuterProduct, parts: int) -> jax.Array:
    """Computes dw as the sum of the products of parts of each group's rows, in float32 and in their order."""
    problem, config = product.problem, product.config
    of_parts = dataclasses.replace(problem.repeated(1, groups=parts), dw_dtype=jnp.dtype(jnp.float32))
    bounds = row_parts(product.bounds, parts, config.block_m)
    dw = every_gpu.multiply_dw(launcher, dataclasses.replace(product, problem=of_parts, bounds=bounds))
    dw = dw.reshape(problem.num_experts, parts, *dw.shape[1:])
    return jnp.sum(dw, axis=1).astype(config.result_dtype(problem))


def row_scales(topk_weights: jax.Array | None, gather_indices: jax.Array | None) -> jax.Array | None:
    """The weight of each row in expert order, zero for a row whose index is out of range; None without weights."""
    weights = flat(topk_weights)
    if weights is None or gather_indices is None:
        return weights
    return weights.at[guarded(gather_indices, len(weights))].get(mode="fill", fill_value=0)


def _several(how: How, operands: Dw, problem: GroupedGemmProblem) -> jax.Array:
    """Computes on several devices: a quantized x is dequantized first."""
    return DW(how, operands._replace(x=dense_rows(how, operands.x, problem.dtype)), problem=problem)


def _letters(operands: Dw, problem: GroupedGemmProblem) -> Letters | None:
    if isinstance(operands.x, QuantizedArray):
        return None
    rows = {"x": ".k", "dy": ".n", "gather_indices": ".", "topk_weights": None}
    return Letters(rows, (problem.w_layout,), ("",))


DW: Operation[jax.Array] = Operation(
    "dw",
    Dw,
    result_types=lambda operands, problem: array_type(problem.w_shape, KernelConfigDW.result_dtype(problem)),
    plain=_plain,
    launch=_launch,
    vmap="groups",
    mesh=_letters,
    several=_several,
)
"""dw in the shape and layout of w and in `problem.dw_dtype`; the parameter is the problem."""
