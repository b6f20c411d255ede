"""The experts with the highest scores of each token."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.launching.choice import Launcher
from jgg.launching.kernel_configs import power_of_2
from jgg.launching.launch import MAX_EXPERTS, Launch
from jgg.launching.tuned_configs import tiles_of
from jgg.primitives.operation import Operation, array_type


class TopK(NamedTuple):
    """The scores, float32 [rows, columns]; a NaN counts as infinity."""

    scores: jax.Array


def _plain(operands: TopK, topk: int) -> jax.Array:
    (scores,) = operands
    # lax.top_k has the total order: -0.0 below 0.0, and a NaN at one end or the other by its sign
    scores = jnp.where(scores == 0, 0.0, jnp.where(jnp.isnan(scores), jnp.inf, scores))
    return jax.lax.top_k(scores, topk)[1]


def _launch(launcher: Launcher, operands: TopK, topk: int) -> jax.Array:
    (scores,) = operands
    if scores.shape[1] > MAX_EXPERTS:
        return _plain(operands, topk)
    from jgg.kernels.routing import top_k_kernel

    num_rows, columns = scores.shape
    block_columns = power_of_2(columns)
    block_rows = max(1, tiles_of("top_k_kernel", launcher.target)["elements"] // block_columns)
    launch = Launch(
        operands={"scores": scores, "num_rows": num_rows},
        outputs={"indices": jax.ShapeDtypeStruct((num_rows, topk), jnp.int32)},
        constants={"COLUMNS": columns, "TOPK": topk, "BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns},
        grid=(math.ceil(num_rows / block_rows),),
        bytes_accessed=4 * (scores.size + num_rows * topk),
    )
    return launcher.run(top_k_kernel, launch)["indices"]


TOP_K: Operation[jax.Array] = Operation(
    "top_k",
    TopK,
    result_types=lambda operands, topk: array_type((operands.scores.shape[0], topk), jnp.int32),
    plain=_plain,
    launch=_launch,
    vmap="rows",
    mesh="rows",
)
"""The columns of the highest scores, int32 [rows, topk], highest score first and of equal ones the lower column."""
