"""Launches of the kernels of an activation and of its derivative, with results in the dtype of arrays or quantized."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgg.activations import Activation
from jgg.core.quantized import BLOCK, Format, QuantizedArray
from jgg.launching.choice import Launcher
from jgg.launching.launch import Launch, power_of_2
from jgg.products.quantize import can_quantize, quantizing_constants


class Activated(NamedTuple):
    """The hidden features, and what is kept of the pre-activation for the backward pass.

    Attributes:
      hidden: [M, I].
      kept: the pre-activation or, quantized, the same as [M, 2, I] with gate before up, or [M, 1, I]; None where
        nothing is kept.
    """

    hidden: jax.Array | QuantizedArray
    kept: jax.Array | QuantizedArray | None = None


class ActivationGradients(NamedTuple):
    """The results of the backward pass of an activation.

    Attributes:
      d_pre_activation: [M, 2 * I], or [M, I] of an activation that is not gated.
      quantized: the same quantized, or None where it is multiplied as it is.
      hidden: [M, I].
      row_sums: float32 [M], for each row the sum of hidden * z.
    """

    d_pre_activation: jax.Array
    quantized: QuantizedArray | None
    hidden: jax.Array
    row_sums: jax.Array

    @property
    def rows_of_dx(self) -> jax.Array | QuantizedArray:
        """What dX multiplies."""
        return self.d_pre_activation if self.quantized is None else self.quantized


def can_launch(launcher: Launcher, activation: Activation, stored_as: Format | None) -> bool:
    """Whether there are kernels for an activation, with results in that format or, for None, in a dtype."""
    return activation.curve is not None and (stored_as is None or can_quantize(launcher))


def activate(
    launcher: Launcher, pre: jax.Array, outputs: Activated, activation: Activation, interleaved: bool
) -> Activated:
    """The hidden features in the dtype of the pre-activation."""
    from jgg.kernels.activation import activate_kernel

    num_rows, columns = outputs.hidden.shape
    constants = _constants(columns, activation, interleaved)
    launch = Launch(
        operands={"pre": pre, "num_rows": num_rows},
        outputs=named(hidden=outputs.hidden),
        constants=constants,
        grid=_grid(num_rows, columns, constants),
        flops=8 * num_rows * columns,
        bytes_accessed=(pre.size + num_rows * columns) * pre.dtype.itemsize,
    )
    return Activated(**launcher.run(activate_kernel, launch))


def activate_and_quantize(
    launcher: Launcher, pre: jax.Array, outputs: Activated, activation: Activation, interleaved: bool,
    stored_as: Format,
) -> Activated:  # fmt: skip
    """The hidden features and, where outputs have it, the pre-activation, quantized."""
    from jgg.kernels.activation_fp8 import activate_fp8_kernel

    num_rows, columns = outputs.hidden.shape
    constants = _quantizing_constants(columns, activation, interleaved, stored_as)
    keeps = outputs.kept is not None
    launch = Launch(
        operands={"pre": pre, "num_rows": num_rows, **({} if keeps else {"kept_values": None, "kept_scales": None})},
        outputs=named(**outputs._asdict()),
        constants=constants,
        grid=_grid(num_rows, columns, constants),
        flops=8 * num_rows * columns,
        bytes_accessed=pre.size * (pre.dtype.itemsize + keeps) + num_rows * columns,
    )
    results = launcher.run(activate_fp8_kernel, launch)
    return Activated(quantized(results, "hidden"), quantized(results, "kept") if keeps else None)


def differentiate(
    launcher: Launcher, pre: jax.Array, z: jax.Array, weights: jax.Array, in_group: jax.Array,
    activation: Activation, interleaved: bool, scale_hidden: bool,
) -> ActivationGradients:  # fmt: skip
    """The results of the backward pass, written over the pre-activation and z."""
    from jgg.kernels.activation import activate_backward_kernel

    num_rows, columns = z.shape
    constants = _constants(columns, activation, interleaved)
    launch = Launch(
        operands={"weights": weights, "in_group": in_group.astype(jnp.int8), "num_rows": num_rows},
        outputs={"pre": pre, "z": z, "row_sums": jax.ShapeDtypeStruct((num_rows,), jnp.float32)},
        constants=constants | {"SCALE_HIDDEN": scale_hidden},
        grid=(math.ceil(num_rows / constants["BLOCK_ROWS"]),),
        flops=20 * num_rows * columns,
        bytes_accessed=2 * (pre.size + z.size) * pre.dtype.itemsize,
    )
    results = launcher.run(activate_backward_kernel, launch)
    return ActivationGradients(results["pre"], None, results["z"], results["row_sums"])


def differentiate_and_quantize(
    launcher: Launcher, kept: QuantizedArray, z: jax.Array, weights: jax.Array, outputs: ActivationGradients,
    activation: Activation, interleaved: bool, scale_hidden: bool, stored_as: Format,
) -> ActivationGradients:  # fmt: skip
    """The results of the backward pass, hidden written over z; `quantized` is None where the kernel cannot make it."""
    from jgg.kernels.activation_fp8 import activate_backward_fp8_kernel

    num_rows, columns = z.shape
    constants = _quantizing_constants(columns, activation, interleaved, stored_as)
    # else blocks are of gate and up both, which the kernel has not side by side
    quantizes = not activation.is_gated or not (interleaved or columns % BLOCK)
    d_pre, d = outputs.d_pre_activation, named(d=outputs.quantized)
    launch = Launch(
        operands={
            "kept_values": kept.values,
            "kept_scales": kept.scales,
            "weights": weights,
            "num_rows": num_rows,
            **({} if quantizes else dict.fromkeys(d)),
        },
        outputs={"d_pre": d_pre, **(d if quantizes else {}), "z": z, "row_sums": outputs.row_sums},
        constants=constants | {"SCALE_HIDDEN": scale_hidden},
        grid=(math.ceil(num_rows / constants["BLOCK_ROWS"]),),
        flops=20 * num_rows * columns,
        bytes_accessed=2 * (kept.values.size + z.size * z.dtype.itemsize) + d_pre.size * z.dtype.itemsize,
    )
    results = launcher.run(activate_backward_fp8_kernel, launch)
    of_dx = quantized(results, "d") if quantizes else None
    return ActivationGradients(results["d_pre"], of_dx, results["z"], results["row_sums"])


def named(**arrays: Any) -> dict[str, Any]:
    """The outputs of a launch: an array by its name, a QuantizedArray's by NAME_values and NAME_scales."""
    outputs: dict[str, Any] = {}
    for name, array in arrays.items():
        if isinstance(array, QuantizedArray):
            outputs |= {f"{name}_values": array.values, f"{name}_scales": array.scales}
        elif array is not None:
            outputs[name] = array
    return outputs


def quantized(results: dict[str, jax.Array], name: str) -> QuantizedArray:
    """The QuantizedArray that a launch wrote under that name."""
    return QuantizedArray(results[f"{name}_values"], results[f"{name}_scales"])


def activation_constants(activation: Activation, interleaved: bool) -> dict[str, bool | str | float]:
    """The constants that tell kernels an activation whose curve they know."""
    assert activation.curve is not None
    curve, limit, alpha = activation.curve
    return {
        "GATED": activation.is_gated, "INTERLEAVED": interleaved, "CURVE": curve, "LIMIT": limit, "ALPHA": alpha,
    }  # fmt: skip


def _constants(columns: int, activation: Activation, interleaved: bool, least_block: int = 16):
    """The constants that all of these kernels are compiled for."""
    block_columns = min(512, power_of_2(columns, least=least_block))
    return {
        "COLUMNS": columns,
        **activation_constants(activation, interleaved),
        "BLOCK_ROWS": 1024 // block_columns,
        "BLOCK_COLUMNS": block_columns,
    }


def _quantizing_constants(columns: int, activation: Activation, interleaved: bool, stored_as: Format):
    """The same and the constants of quantization, for kernels that quantize."""
    return _constants(columns, activation, interleaved, least_block=BLOCK) | quantizing_constants(stored_as)


def _grid(num_rows: int, columns: int, constants) -> tuple[int, int]:
    """A program for each block of rows and columns."""
    return math.ceil(num_rows / constants["BLOCK_ROWS"]), math.ceil(columns / constants["BLOCK_COLUMNS"])
