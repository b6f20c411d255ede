"""The activation between the two products of an expert MLP, and its derivative; each makes one pass over memory.

Their results are stored in the dtype of the arrays that they read or, if a Format is given, quantized.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jgg.core.activations import Activation
from jgg.core.quantized import Format, QuantizedArray, quantize, quantized_types
from jgg.launching.choice import How, Launcher
from jgg.primitives import vmap
from jgg.primitives.operation import Operation, array_type, split_by_xla
from jgg.primitives.partitioning import WHOLE, Letters
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

_EACH = "t" + WHOLE  # the letters of rows that do not depend on each other, so that they may be split


def _activate_types(operands: Activate, **parameters: Any) -> Activated:
    return activated_types(operands.pre_activation, Hidden(**parameters))


def _activate_plainly(operands: Activate, **parameters: Any) -> Activated:
    (pre,), (activation, interleaved, keeps, stored_as) = operands, Hidden(**parameters)
    hidden = activation(pre, interleaved)
    if stored_as is None:
        return Activated(hidden.astype(pre.dtype))
    if not keeps:
        return Activated(quantize(hidden, ROW_BLOCK, stored_as))
    halves = 2 if activation.is_gated else 1
    num_rows, columns = pre.shape[0], pre.shape[1] // halves
    gate_and_up = pre.reshape(num_rows, *((columns, halves) if interleaved else (halves, columns)))
    gate_and_up = gate_and_up.mT if interleaved else gate_and_up
    return Activated(quantize(hidden, ROW_BLOCK, stored_as), quantize(gate_and_up, ROW_BLOCK, stored_as))


def _launch_activate(launcher: Launcher, operands: Activate, **parameters: Any) -> Activated:
    hidden = Hidden(**parameters)
    if not launches.can_launch(launcher, hidden):
        return _activate_plainly(operands, **parameters)
    return launches.activate(launcher, operands, hidden)


def _merge_activate(
    how: How, operands: Activate, batched: Activate, stored_as: Format | None = None, **parameters: Any
) -> Activated | None:
    compute = functools.partial(ACTIVATE, how, **parameters)
    return vmap.more_rows(compute, operands, batched) if stored_as is None else None


ACTIVATE: Operation[Activated] = Operation(
    "activate",
    Activate,
    result_types=_activate_types,
    plain=_activate_plainly,
    launch=_launch_activate,
    letters=lambda operands, stored_as=None, **_: (
        Letters({"pre_activation": _EACH}, (_EACH,), ("",)) if stored_as is None else None
    ),
    several=split_by_xla(_activate_plainly),
    merge_batch=_merge_activate,
)
"""The activation of a pre-activation, as Activated; XLA computes an activation that the kernels do not know.

Its parameters are the activation, whether gate and up are interleaved, the Format to quantize results by, or None, and
whether it `keeps` the pre-activation: with a Format, the quantized pre-activation is then a result too.
"""


def _backward_types(operands: ActivateBackward, stored_as: Format | None = None, **_: Any) -> ActivationGradients:
    pre, z = operands.pre_activation, operands.z
    d_pre = array_type((z.shape[0], math.prod(pre.shape[1:])), z.dtype)
    quantized = None if stored_as is None else quantized_types(d_pre.shape, ROW_BLOCK, stored_as)
    return ActivationGradients(d_pre, quantized, array_type(z.shape, z.dtype), array_type(z.shape[:1], jnp.float32))


def _backward_plainly(
    operands: ActivateBackward,
    activation: Activation,
    interleaved: bool,
    scale_hidden: bool,
    stored_as: Format | None = None,
) -> ActivationGradients:
    pre, z, weights, in_group = operands
    dtype, z = z.dtype, z.astype(jnp.float32)
    if isinstance(pre, QuantizedArray):  # with gate before up
        dense, has_turns = pre.dequantize("float32").reshape(z.shape[0], math.prod(pre.shape[1:])), False
    else:
        dense, has_turns = pre, interleaved
    hidden, vjp = jax.vjp(functools.partial(activation, interleaved=has_turns), dense)
    (d_pre,) = vjp(weights[:, None] * z)
    if interleaved and not has_turns:
        d_pre = d_pre.reshape(pre.shape).mT.reshape(d_pre.shape)
    d_pre = d_pre.astype(dtype)
    row_sums = jnp.sum(hidden * z, axis=1)
    if in_group is not None:
        row_sums = jnp.where(in_group, row_sums, 0)
    if scale_hidden:
        hidden = weights[:, None] * hidden
    quantized = None if stored_as is None else quantize(d_pre, ROW_BLOCK, stored_as)
    return ActivationGradients(d_pre, quantized, hidden.astype(dtype), row_sums)


def _launch_backward(
    launcher: Launcher,
    operands: ActivateBackward,
    activation: Activation,
    interleaved: bool,
    scale_hidden: bool,
    stored_as: Format | None = None,
) -> ActivationGradients:
    hidden = Hidden(activation, interleaved, stored_as=stored_as)
    if not launches.can_launch(launcher, hidden):
        return _backward_plainly(operands, activation, interleaved, scale_hidden, stored_as)
    if stored_as is None:
        return launches.differentiate(launcher, operands, hidden, scale_hidden)
    outputs = _backward_types(operands, stored_as)
    results = launches.differentiate_and_quantize(launcher, operands, outputs, hidden, scale_hidden)
    if results.quantized is None:
        d_pre = Quantize(results.d_pre_activation)
        return results._replace(quantized=QUANTIZE_ROWS.launch(launcher, d_pre, stored_as=stored_as))
    return results


def _merge_backward(
    how: How, operands: ActivateBackward, batched: ActivateBackward, stored_as: Format | None = None, **parameters: Any
) -> ActivationGradients | None:
    if stored_as is not None:
        return None
    in_group = vmap.for_each(operands.in_group, batched.in_group, vmap.batch_size(operands, batched))
    operands, batched = operands._replace(in_group=in_group), batched._replace(in_group=True)
    return vmap.more_rows(functools.partial(ACTIVATE_BACKWARD, how, **parameters), operands, batched)


def _backward_letters(operands: ActivateBackward, stored_as: Format | None = None, **_: Any) -> Letters | None:
    if stored_as is not None:
        return None
    letters = {"pre_activation": _EACH, "z": _EACH, "weights": "t", "in_group": "t"}
    return Letters(letters, (_EACH, _EACH, "t"), ("", "", ""))


ACTIVATE_BACKWARD: Operation[ActivationGradients] = Operation(
    "activate_backward",
    ActivateBackward,
    result_types=_backward_types,
    plain=_backward_plainly,
    launch=_launch_backward,
    letters=_backward_letters,
    several=split_by_xla(_backward_plainly),
    merge_batch=_merge_backward,
)
"""The gradients of ACTIVATE, as ActivationGradients.

Its parameters are the activation, whether gate and up are interleaved, whether hidden is multiplied by its row's weight
(scale_hidden), and the Format to quantize the gradient of a quantized pre_activation by, or None.
"""
