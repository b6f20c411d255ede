"""The activation between the two products of an expert MLP, and its derivative; each makes one pass over memory."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.activations import Activation
from jgg.launching.choice import How, Launcher
from jgg.launching.launch import Launch, power_of_2
from jgg.primitives import vmap
from jgg.primitives.partitioning import WHOLE, Letters
from jgg.primitives.product import Product

_EACH = "t" + WHOLE  # of rows that do not depend on each other


class Activate(NamedTuple):
    """[M, 2 * I], or [M, I] of an activation that is not gated."""

    pre_activation: jax.Array


def _activate_types(operands, activation, interleaved):
    rows, width = operands.pre_activation.shape
    return [((rows, width // 2 if activation.is_gated else width), operands.pre_activation.dtype)]


def _activate_plainly(operands, activation, interleaved):
    (pre_activation,) = operands
    return [activation(pre_activation, interleaved).astype(pre_activation.dtype)]


def _launch_activate(launcher: Launcher, operands: Activate, activation: Activation, interleaved: bool):
    if activation.curve is None:
        return _activate_plainly(operands, activation, interleaved)
    from jgg.kernels.activation import activate_kernel

    (pre_activation,) = operands
    num_rows, columns, constants = _activation(pre_activation, activation, interleaved)
    launch = Launch(
        operands={"pre": pre_activation, "num_rows": num_rows},
        outputs={"hidden": jax.ShapeDtypeStruct((num_rows, columns), pre_activation.dtype)},
        constants=constants,
        grid=(math.ceil(num_rows / constants["BLOCK_ROWS"]), math.ceil(columns / constants["BLOCK_COLUMNS"])),
        flops=8 * num_rows * columns,
        bytes_accessed=(pre_activation.size + num_rows * columns) * pre_activation.dtype.itemsize,
    )
    return [launcher.run(activate_kernel, launch)["hidden"]]


ACTIVATE: Product = Product(
    "activate",
    Activate,
    result_types=_activate_types,
    plain=_activate_plainly,
    launch=_launch_activate,
    letters=lambda operands, **_: Letters({"pre_activation": _EACH}, (_EACH,), ("",)),
    merge_batch=lambda *args, **parameters: vmap.more_rows(ACTIVATE, *args, **parameters),
)
"""[hidden [M, I] in the dtype of pre_activation]; XLA computes an activation that the kernels do not know."""


class ActivateBackward(NamedTuple):
    """Where d hidden is weights[:, None] * z.

    Attributes:
      z: [M, I] in the dtype of pre_activation.
      weights: float32 [M].
      in_group: bool [M]; in other rows the sum is 0, and the other results mean nothing.
    """

    pre_activation: jax.Array
    z: jax.Array
    weights: jax.Array
    in_group: jax.Array


def _backward_types(operands, **_):
    pre_activation, z, *_ = operands
    return [(pre_activation.shape, pre_activation.dtype), (z.shape, z.dtype), (z.shape[:1], jnp.float32)]


def _backward_plainly(operands, activation, interleaved, scale_hidden):
    pre_activation, z, weights, in_group = operands
    z = z.astype(jnp.float32)
    hidden, vjp = jax.vjp(functools.partial(activation, interleaved=interleaved), pre_activation)
    (d_pre_activation,) = vjp(weights[:, None] * z)
    row_sums = jnp.where(in_group, jnp.sum(hidden * z, axis=1), 0)
    if scale_hidden:
        hidden = weights[:, None] * hidden
    return [d_pre_activation, hidden.astype(pre_activation.dtype), row_sums]


def _launch_backward(
    launcher: Launcher, operands: ActivateBackward, activation: Activation, interleaved: bool, scale_hidden: bool
):  # fmt: skip
    if activation.curve is None:
        return _backward_plainly(operands, activation, interleaved, scale_hidden)
    from jgg.kernels.activation import activate_backward_kernel

    pre_activation, z, weights, in_group = operands
    num_rows, columns, constants = _activation(pre_activation, activation, interleaved)
    launch = Launch(
        operands={"weights": weights, "in_group": in_group.astype(jnp.int8), "num_rows": num_rows},
        outputs={"pre": pre_activation, "z": z, "row_sums": jax.ShapeDtypeStruct((num_rows,), jnp.float32)},
        constants=constants | {"SCALE_HIDDEN": scale_hidden},
        grid=(math.ceil(num_rows / constants["BLOCK_ROWS"]),),
        flops=20 * num_rows * columns,
        bytes_accessed=2 * (pre_activation.size + z.size) * pre_activation.dtype.itemsize,
    )
    results = launcher.run(activate_backward_kernel, launch)
    return [results["pre"], results["z"], results["row_sums"]]


def _merge_backward(how: How, operands, batched, **parameters):
    in_group = vmap.for_each(operands.in_group, batched.in_group, vmap.batch_size(operands, batched))
    operands, batched = operands._replace(in_group=in_group), batched._replace(in_group=True)
    return vmap.more_rows(ACTIVATE_BACKWARD, how, operands, batched, **parameters)


ACTIVATE_BACKWARD: Product = Product(
    "activate_backward",
    ActivateBackward,
    result_types=_backward_types,
    plain=_backward_plainly,
    launch=_launch_backward,
    letters=lambda operands, **_: Letters(
        {"pre_activation": _EACH, "z": _EACH, "weights": "t", "in_group": "t"}, (_EACH, _EACH, "t"), ("", "", "")
    ),
    merge_batch=_merge_backward,
)
"""[d pre_activation, hidden [M, I], times its row's weight with scale_hidden, float32 [M] sums of hidden * z]."""


def activation_constants(activation: Activation, interleaved: bool) -> dict[str, bool | str | float]:
    """What kernels are compiled for, of an activation whose curve they know."""
    assert activation.curve is not None
    curve, limit, alpha = activation.curve
    return {
        "GATED": activation.is_gated, "INTERLEAVED": interleaved, "CURVE": curve, "LIMIT": limit, "ALPHA": alpha,
    }  # fmt: skip


def _activation(pre_activation, activation, interleaved):
    """M, I and what both kernels are compiled for."""
    num_rows, width = pre_activation.shape
    columns = width // 2 if activation.is_gated else width
    block_columns = min(512, power_of_2(columns))
    return num_rows, columns, {
        "COLUMNS": columns,
        **activation_constants(activation, interleaved),
        "BLOCK_ROWS": 1024 // block_columns,
        "BLOCK_COLUMNS": block_columns,
    }  # fmt: skip
