"""The gradient of a bias: dbias[e] = sum of topk_weights[i] * dy[i] over the rows i of each expert e."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.core.problem import GroupedGemmProblem
from jgg.core.schedule import GroupBounds, Rows, group_of_rows, guarded
from jgg.launching.choice import Launcher
from jgg.launching.kernel_configs import power_of_2
from jgg.launching.launch import Launch
from jgg.launching.tuned_configs import tiles_of
from jgg.primitives.operation import Operation, array_type
from jgg.primitives.partitioning import Letters
from jgg.products.dw import row_scales
from jgg.products.plain import row_blocks
from jgg.products.plain import rows as plain
from jgg.products.plain.multilinear import outer_dot


class Dbias(NamedTuple):
    """The arrays as `grouped_gemm_dw` takes them, and bounds, the rows of each group."""

    dy: jax.Array
    bounds: GroupBounds
    gather_indices: jax.Array | None = None
    topk_weights: jax.Array | None = None


def _plain(operands: Dbias, problem: GroupedGemmProblem) -> jax.Array:
    dy, bounds, gather_indices, topk_weights = operands
    rows = Rows(dy, plain.y_rows(problem, gather_indices))
    scales = plain.row_scales(problem, bounds, gather_indices, topk_weights)
    options = {"scales": scales, "precision": problem.precision, "out_dtype": jnp.float32}
    return outer_dot(row_blocks.ones(rows), rows, bounds, **options)[:, 0]


def _launch(launcher: Launcher, operands: Dbias, problem: GroupedGemmProblem) -> jax.Array:
    from jgg.kernels.group_sums import group_sums_kernel

    rows, bounds, gather_indices, topk_weights = operands
    num_rows, columns = rows.shape
    tiles = tiles_of("group_sums_kernel", launcher.target)
    block_columns = min(tiles["columns"], power_of_2(columns))
    num_groups = len(bounds.starts)
    launch = Launch(
        operands={
            "rows": rows,
            "positions": gather_indices if problem.permute_y else None,
            "scales": row_scales(topk_weights, gather_indices),
            "group_starts": bounds.starts,
            "group_ends": bounds.ends,
            "num_rows": num_rows,
        },
        outputs={"sums": jax.ShapeDtypeStruct((num_groups, columns), jnp.float32)},
        constants={"COLUMNS": columns, "BLOCK_ROWS": tiles["rows"], "BLOCK_COLUMNS": block_columns},
        grid=(num_groups, math.ceil(columns / block_columns)),
        flops=rows.size,
        bytes_accessed=rows.size * rows.dtype.itemsize,
    )
    return launcher.run(group_sums_kernel, launch)["sums"]


def _letters(operands: Dbias, problem: GroupedGemmProblem) -> Letters:
    return Letters({"dy": ".n", "gather_indices": ".", "topk_weights": None}, ("en",), ("",))


DBIAS: Operation[jax.Array] = Operation(
    "dbias",
    Dbias,
    result_types=lambda operands, problem: array_type((problem.num_experts, problem.out_features), jnp.float32),
    plain=_plain,
    launch=_launch,
    vmap="groups",
    mesh=_letters,
)
"""dbias [E, N] in float32; the parameter is the problem."""


def bias_row_sums(
    problem: GroupedGemmProblem, dy: jax.Array, bias: jax.Array, bounds: GroupBounds, gather_indices: jax.Array | None
) -> jax.Array:
    """For each row in expert order the sum of dy * bias[its expert], [M] float32, for the gradient of topk_weights."""
    experts = group_of_rows(bounds, problem.num_rows)
    in_group = experts < problem.num_experts
    experts = jnp.where(in_group, experts, 0)  # instead of letting `at` clip them, which checkify reports
    if problem.permute_y:
        assert gather_indices is not None
        dy = dy.at[guarded(gather_indices, problem.num_rows)].get(mode="fill", fill_value=0)
    sums = jnp.sum(dy.astype(jnp.float32) * bias[experts].astype(jnp.float32), axis=1)
    return jnp.where(in_group, sums, 0)
