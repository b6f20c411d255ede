"""The activation between the two products of an expert MLP in FP8, and its derivative."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.activations import Activation
from jgg.core.quantized import BLOCK, E4M3, QuantizedArray, quantize
from jgg.launching.choice import Launcher
from jgg.launching.launch import Launch, power_of_2
from jgg.primitives.product import Product
from jgg.products.activate import Activate, activation_constants
from jgg.products.quantize import (
    QUANTIZE_ROWS,
    Quantize,
    has_fp8,
    quantized_types,
    quantizing_constants,
)

_ROW = 1, BLOCK


def _types(outputs):
    return [(each.shape, each.dtype) for each in outputs.values()]


def _named(name, shape, dtype):
    return {f"{name}_{part}": each for part, each in quantized_types(shape, _ROW, dtype).items()}


def _halves(activation):
    return 2 if activation.is_gated else 1


def activated_types(shape: tuple[int, ...], activation: Activation, keeps: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Of what ACTIVATE_FP8 results in, of a pre-activation of that shape."""
    num_rows, width = shape
    columns = width // _halves(activation)
    kept = _named("kept", (num_rows, _halves(activation), columns), E4M3) if keeps else {}
    return _named("hidden", (num_rows, columns), E4M3) | kept


def _activate_plainly(
    operands: Activate, activation: Activation, interleaved: bool, keeps: bool, power_of_2_scales: bool
):  # fmt: skip
    (pre,) = operands
    results = [quantize(activation(pre, interleaved), _ROW, E4M3, power_of_2_scales)]
    if keeps:
        halves = _halves(activation)
        num_rows, columns = pre.shape[0], pre.shape[1] // halves
        gate_and_up = pre.reshape(num_rows, *((columns, halves) if interleaved else (halves, columns)))
        gate_and_up = gate_and_up.mT if interleaved else gate_and_up
        results.append(quantize(gate_and_up, _ROW, E4M3, power_of_2_scales))
    return jax.tree.leaves(results)


def _launch_activate(
    launcher: Launcher, operands: Activate, activation: Activation, interleaved: bool, keeps: bool,
    power_of_2_scales: bool,
):  # fmt: skip
    if activation.curve is None or not has_fp8(launcher):
        return _activate_plainly(operands, activation, interleaved, keeps, power_of_2_scales)
    from jgg.kernels.activation_fp8 import activate_fp8_kernel

    (pre,) = operands
    num_rows, columns, constants = _constants(pre.shape, activation, interleaved, E4M3, power_of_2_scales)
    launch = Launch(
        operands={"pre": pre, "num_rows": num_rows, **({} if keeps else {"kept_values": None, "kept_scales": None})},
        outputs=activated_types(pre.shape, activation, keeps),
        constants=constants,
        grid=(math.ceil(num_rows / constants["BLOCK_ROWS"]), math.ceil(columns / constants["BLOCK_COLUMNS"])),
        flops=8 * num_rows * columns,
        bytes_accessed=pre.size * (pre.dtype.itemsize + keeps) + num_rows * columns,
    )
    return list(launcher.run(activate_fp8_kernel, launch).values())


ACTIVATE_FP8 = Product(
    "activate_fp8",
    Activate,
    result_types=lambda operands, activation, keeps, **_: _types(
        activated_types(operands.pre_activation.shape, activation, keeps)
    ),
    plain=_activate_plainly,
    launch=_launch_activate,
    several=lambda how, operands, **parameters: _activate_plainly(operands, **parameters),
)
"""[hidden's values [M, I] and scales and, if it `keeps` it, the pre-activation's, [M, 2, I] with gate before up]."""


class ActivateBackwardFp8(NamedTuple):
    """Where d hidden is weights[:, None] * z.

    Attributes:
      kept: the pre-activation as ACTIVATE_FP8 keeps it, [M, 2, I] or [M, 1, I].
      z: [M, I].
      weights: float32 [M].
    """

    kept: QuantizedArray
    z: jax.Array
    weights: jax.Array


def _backward_types(operands: ActivateBackwardFp8, gradient_dtype, **_):
    num_rows, halves, columns = operands.kept.shape
    shape, z = (num_rows, halves * columns), operands.z
    quantized = _types(quantized_types(shape, _ROW, gradient_dtype))
    return [(shape, z.dtype), *quantized, (z.shape, z.dtype), ((num_rows,), jnp.dtype("float32"))]


def _backward_plainly(
    operands: ActivateBackwardFp8, activation: Activation, interleaved: bool, scale_hidden: bool, gradient_dtype,
    power_of_2_scales: bool,
):  # fmt: skip
    kept, z, weights = operands
    z = z.astype(jnp.float32)
    pre = kept.dequantize("float32")
    num_rows, halves, columns = pre.shape
    hidden, vjp = jax.vjp(activation, pre.reshape(num_rows, halves * columns))
    (d_pre,) = vjp(weights[:, None] * z)
    if interleaved:
        d_pre = d_pre.reshape(pre.shape).mT.reshape(d_pre.shape)
    d_pre = d_pre.astype(operands.z.dtype)
    quantized = quantize(d_pre, _ROW, gradient_dtype, power_of_2_scales)
    row_sums = jnp.sum(hidden * z, axis=1)
    if scale_hidden:
        hidden = weights[:, None] * hidden
    dtype = operands.z.dtype
    return [d_pre, *jax.tree.leaves(quantized), hidden.astype(dtype), row_sums]


def _launch_backward(
    launcher: Launcher, operands: ActivateBackwardFp8, activation: Activation, interleaved: bool, scale_hidden: bool,
    gradient_dtype, power_of_2_scales: bool,
):  # fmt: skip
    if activation.curve is None or not has_fp8(launcher):
        return _backward_plainly(operands, activation, interleaved, scale_hidden, gradient_dtype, power_of_2_scales)
    from jgg.kernels.activation_fp8 import activate_backward_fp8_kernel

    kept, z, weights = operands
    halves = kept.shape[1]
    shape = len(z), halves * kept.shape[2]
    num_rows, columns, constants = _constants(shape, activation, interleaved, gradient_dtype, power_of_2_scales)
    # else blocks are of gate and up both, which the kernel has not side by side
    quantizes = halves == 1 or not (interleaved or columns % BLOCK)
    quantized = _named("d", shape, gradient_dtype)
    launch = Launch(
        operands={
            "kept_values": kept.values,
            "kept_scales": kept.scales,
            "weights": weights,
            "num_rows": num_rows,
            **({} if quantizes else dict.fromkeys(quantized)),
        },
        outputs={
            "d_pre": jax.ShapeDtypeStruct(shape, z.dtype),
            **(quantized if quantizes else {}),
            "z": z,
            "row_sums": jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        },
        constants=constants | {"SCALE_HIDDEN": scale_hidden},
        grid=(math.ceil(num_rows / constants["BLOCK_ROWS"]),),
        flops=20 * num_rows * columns,
        bytes_accessed=2 * (kept.values.size + z.size * z.dtype.itemsize) + math.prod(shape) * z.dtype.itemsize,
    )
    results = launcher.run(activate_backward_fp8_kernel, launch)
    d_pre = results["d_pre"]
    options = {"dtype": gradient_dtype, "power_of_2_scales": power_of_2_scales}
    d = [results[key] for key in quantized] if quantizes else QUANTIZE_ROWS.launch(launcher, Quantize(d_pre), **options)
    return [d_pre, *d, results["z"], results["row_sums"]]


ACTIVATE_BACKWARD_FP8 = Product(
    "activate_backward_fp8",
    ActivateBackwardFp8,
    result_types=_backward_types,
    plain=_backward_plainly,
    launch=_launch_backward,
    several=lambda how, operands, **parameters: _backward_plainly(operands, **parameters),
)
"""[d pre-activation as it was [M, 2 * I], its values, its scales, hidden [M, I], sums of hidden * z float32 [M]].

hidden is times its row's weight with scale_hidden.
"""


def _constants(shape, activation, interleaved, dtype, power_of_2_scales):
    """M, I and what both kernels are compiled for."""
    num_rows, width = shape
    columns = width // _halves(activation)
    block_columns = min(512, power_of_2(columns, least=BLOCK))
    return num_rows, columns, {
        "COLUMNS": columns,
        **activation_constants(activation, interleaved),
        **quantizing_constants(dtype, power_of_2_scales),
        "BLOCK_ROWS": 1024 // block_columns,
        "BLOCK_COLUMNS": block_columns,
    }  # fmt: skip
