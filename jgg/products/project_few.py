"""The queries, keys and values of few tokens, as in decoding: one kernel reads their matrices."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.launching.choice import Launcher
from jgg.launching.kernel_configs import power_of_2
from jgg.launching.launch import Launch
from jgg.launching.tuned_configs import tiles_of
from jgg.primitives.operation import Operation, array_type

MOST_ROWS = 64
_STEP_BYTES = 512  # of a row of x in a step


class ProjectFew(NamedTuple):
    """Rows and three matrices.

    Attributes:
      x: [M, K].
      w_q, w_k, w_v: [K, N] each, in the dtype of x.
      b_q, b_k, b_v: [N] each, or None for all three.
    """

    x: jax.Array
    w_q: jax.Array
    w_k: jax.Array
    w_v: jax.Array
    b_q: jax.Array | None = None
    b_k: jax.Array | None = None
    b_v: jax.Array | None = None


class Projected(NamedTuple):
    """The products [M, N], in the dtype of x."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


def _result_types(operands: ProjectFew) -> Projected:
    x, *matrices = operands[:4]
    return Projected(*(array_type((x.shape[0], w.shape[1]), x.dtype) for w in matrices))


def _plain(operands: ProjectFew) -> Projected:
    x = operands.x
    biases = (None if bias is None else bias.astype(jnp.float32)[None] for bias in operands[4:])
    products = (jnp.matmul(x.astype(jnp.float32), w.astype(jnp.float32), precision="highest") for w in operands[1:4])
    pairs = zip(products, biases, strict=True)
    return Projected(*((y if bias is None else y + bias).astype(x.dtype) for y, bias in pairs))


def _launch(launcher: Launcher, operands: ProjectFew) -> Projected:
    from jgg.kernels.project_few import project_few_kernel

    tiles = tiles_of("project_few_kernel", launcher.target)
    num_rows, reduced = operands.x.shape
    outputs = _result_types(operands)._asdict()
    columns = {f"{name.upper()}_COLUMNS": y.shape[1] for name, y in outputs.items()}
    block_reduced = _STEP_BYTES // operands.x.dtype.itemsize
    launch = Launch(
        operands=operands._asdict() | {"num_rows": num_rows},
        outputs=outputs,
        constants=columns
        | {
            "REDUCED": reduced,
            "PRECISION": "ieee" if operands.x.dtype == jnp.float32 else "tf32",
            "BLOCK_ROWS": power_of_2(num_rows),
            "BLOCK_REDUCED": min(block_reduced, power_of_2(reduced)),
            "BLOCK_COLUMNS": tiles["columns"],
        },
        grid=(sum(math.ceil(size / tiles["columns"]) for size in columns.values()),),
        num_stages=max(1, tiles["stages"] - (num_rows > MOST_ROWS // 2)),
        flops=2 * num_rows * reduced * sum(columns.values()),
        bytes_accessed=reduced * sum(columns.values()) * operands.x.dtype.itemsize,
    )
    return Projected(**launcher.run(project_few_kernel, launch))


PROJECT_FEW: Operation[Projected] = Operation(
    "project_few",
    ProjectFew,
    result_types=_result_types,
    plain=_plain,
    launch=_launch,
    vmap="several",
)
"""The three products of the same rows, at most MOST_ROWS of them."""
