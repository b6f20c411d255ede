"""The sum of the experts' rows and the shared experts', these times a gate; no row's bits depend on other rows."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.launching.choice import Launcher
from jgg.launching.kernel_configs import power_of_2
from jgg.launching.launch import Launch
from jgg.launching.tuned_configs import tiles_of
from jgg.primitives.operation import Operation, array_type


class AddGated(NamedTuple):
    """Two matrices and the logits of the second one's factors.

    Attributes:
      y, added: [T, H], of one dtype.
      gate: float32 [T, 1], or None for a factor of 1.
    """

    y: jax.Array
    added: jax.Array
    gate: jax.Array | None = None


def _types(operands: AddGated) -> jax.Array:
    return array_type(operands.y.shape, operands.y.dtype)


def _plain(operands: AddGated) -> jax.Array:
    y, added, gate = operands
    if gate is None:
        return y + added
    total = y.astype(jnp.float32) + added.astype(jnp.float32) * jnp.broadcast_to(jax.nn.sigmoid(gate), added.shape)
    return total.astype(y.dtype)


def _launch(launcher: Launcher, operands: AddGated) -> jax.Array:
    from jgg.kernels.add_gated import add_gated_kernel

    num_rows, columns = operands.y.shape
    tiles = tiles_of("add_gated_kernel", launcher.target)
    block = min(tiles["columns"], power_of_2(columns))
    launch = Launch(
        operands=operands._asdict(),
        outputs={"total": _types(operands)},
        constants={"COLUMNS": columns, "BLOCK_COLUMNS": block},
        grid=(num_rows, math.ceil(columns / block)),
        num_warps=max(1, block // tiles["columns_of_warp"]),
        bytes_accessed=3 * operands.y.size * operands.y.dtype.itemsize,
    )
    return launcher.run(add_gated_kernel, launch)["total"]


ADD_GATED: Operation[jax.Array] = Operation(
    "add_gated",
    AddGated,
    result_types=_types,
    plain=_plain,
    launch=_launch,
    vmap="rows",
    mesh="rows",
)
"""y + sigmoid(gate) * added, [T, H] in their dtype."""
