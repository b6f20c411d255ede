"""The activation between the two products of an expert MLP, and its derivative; each makes one pass over memory.

Their results are stored in the dtype of the arrays that they read or, if a Format is given, quantized.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jgg.core.quantized import QuantizedArray, quantize, quantized_types
from jgg.launching.choice import Launcher
from jgg.primitives.operation import Operation, array_type
from jgg.products.launches import activations as launches
from jgg.products.launches.activations import (
    Activate,
    ActivateBackward,
    Activated,
    ActivationGradients,
    Hidden,
    activated_types,
)
from jgg.products.quantize import QUANTIZE_ROWS, ROW_BLOCK, Quantize


def _activate_types(operands: Activate, hidden: Hidden) -> Activated:
    return activated_types(operands.pre_activation, hidden)


def _activate_plainly(operands: Activate, hidden: Hidden) -> Activated:
    (pre,), (activation, interleaved, keeps, stored_as) = operands, hidden
    features = activation(pre, interleaved)
    if stored_as is None:
        return Activated(features.astype(pre.dtype))
    if not keeps:
        return Activated(quantize(features, ROW_BLOCK, stored_as))
    halves = 2 if activation.is_gated else 1
    num_rows, columns = pre.shape[0], pre.shape[1] // halves
    gate_and_up = pre.reshape(num_rows, *((columns, halves) if interleaved else (halves, columns)))
    gate_and_up = gate_and_up.mT if interleaved else gate_and_up
    return Activated(quantize(features, ROW_BLOCK, stored_as), quantize(gate_and_up, ROW_BLOCK, stored_as))


def _launch_activate(launcher: Launcher, operands: Activate, hidden: Hidden) -> Activated:
    can_launch = launches.can_launch(launcher, hidden)
    return launches.activate(launcher, operands, hidden) if can_launch else _activate_plainly(operands, hidden)


ACTIVATE: Operation[Activated] = Operation(
    "activate",
    Activate,
    result_types=_activate_types,
    plain=_activate_plainly,
    launch=_launch_activate,
    vmap="rows",
    mesh="rows",
)
"""The activation of a pre-activation, as Activated; XLA computes an activation that the kernels do not know.

Its parameter is a Hidden. With a Format, the quantized pre-activation is a result too if it `keeps` the pre-activation.
"""


def _backward_types(operands: ActivateBackward, hidden: Hidden, scale_hidden: bool) -> ActivationGradients:
    pre, z, stored_as = operands.pre_activation, operands.z, hidden.stored_as
    d_pre = array_type((z.shape[0], math.prod(pre.shape[1:])), z.dtype)
    quantized = None if stored_as is None else quantized_types(d_pre.shape, ROW_BLOCK, stored_as)
    return ActivationGradients(d_pre, quantized, array_type(z.shape, z.dtype), array_type(z.shape[:1], jnp.float32))


def _backward_plainly(operands: ActivateBackward, hidden: Hidden, scale_hidden: bool) -> ActivationGradients:
    (pre, z, weights, in_group), (activation, interleaved, _, stored_as) = operands, hidden
    dtype, z = z.dtype, z.astype(jnp.float32)
    if isinstance(pre, QuantizedArray):  # with gate before up
        dense, has_turns = pre.dequantize("float32").reshape(z.shape[0], math.prod(pre.shape[1:])), False
    else:
        dense, has_turns = pre, interleaved
    features, vjp = jax.vjp(functools.partial(activation, interleaved=has_turns), dense)
    (d_pre,) = vjp(weights[:, None] * z)
    if interleaved and not has_turns:
        d_pre = d_pre.reshape(pre.shape).mT.reshape(d_pre.shape)
    d_pre = d_pre.astype(dtype)
    row_sums = jnp.sum(features * z, axis=1)
    if in_group is not None:
        row_sums = jnp.where(in_group, row_sums, 0)
    if scale_hidden:
        features = weights[:, None] * features
    quantized = None if stored_as is None else quantize(d_pre, ROW_BLOCK, stored_as)
    return ActivationGradients(d_pre, quantized, features.astype(dtype), row_sums)


def _launch_backward(
    launcher: Launcher, operands: ActivateBackward, hidden: Hidden, scale_hidden: bool
) -> ActivationGradients:
    if not launches.can_launch(launcher, hidden):
        return _backward_plainly(operands, hidden, scale_hidden)
    if hidden.stored_as is None:
        return launches.differentiate(launcher, operands, hidden, scale_hidden)
    outputs = _backward_types(operands, hidden, scale_hidden)
    results = launches.differentiate_and_quantize(launcher, operands, outputs, hidden, scale_hidden)
    if results.quantized is None:
        d_pre = Quantize(results.d_pre_activation)
        return results._replace(quantized=QUANTIZE_ROWS.launch(launcher, d_pre, stored_as=hidden.stored_as))
    return results


ACTIVATE_BACKWARD: Operation[ActivationGradients] = Operation(
    "activate_backward",
    ActivateBackward,
    result_types=_backward_types,
    plain=_backward_plainly,
    launch=_launch_backward,
    vmap="rows",
    mesh="rows",
)
"""The gradients of ACTIVATE, as ActivationGradients.

Its parameters are a Hidden, whose Format is the format of a quantized pre_activation's gradient, and whether hidden is
multiplied by its row's weight (scale_hidden).
"""
