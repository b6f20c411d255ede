"""The operands and results of ACTIVATE and ACTIVATE_BACKWARD, and the launches of their kernels."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jgg.core.activations import Activation
from jgg.core.gpu_target import Target
from jgg.core.quantized import BLOCK, Format, QuantizedArray, quantized_types
from jgg.launching.choice import Launcher
from jgg.launching.kernel_configs import power_of_2
from jgg.launching.launch import Launch
from jgg.launching.tuned_configs import tiles_of
from jgg.primitives.operation import array_type
from jgg.products.quantize import ROW_BLOCK, can_quantize, quantizing_constants


class Hidden(NamedTuple):
    """How hidden features are made of a pre-activation, and how they are stored.

    Attributes:
      interleaved: whether gate and up alternate in the columns of the pre-activation.
      keeps: whether the pre-activation is a result too.
      stored_as: how results are quantized; None for results in a float dtype.
    """

    activation: Activation
    interleaved: bool
    keeps: bool = False
    stored_as: Format | None = None

    @property
    def has_halves(self) -> bool:
        """Whether the columns of gate are one half of the pre-activation and those of up the other."""
        return self.activation.is_gated and not self.interleaved


class Activate(NamedTuple):
    """The pre-activation, [M, 2 * I], or [M, I] for an activation that is not gated."""

    pre_activation: jax.Array


class Activated(NamedTuple):
    """The hidden features, and what is kept of the pre-activation for the backward pass.

    Attributes:
      hidden: [M, I].
      kept: the pre-activation or, quantized, the pre-activation as [M, 2, I] with gate before up, or as [M, 1, I] if
        the activation is not gated; None where nothing is kept.
    """

    hidden: jax.Array | QuantizedArray
    kept: jax.Array | QuantizedArray | None = None


class ActivateBackward(NamedTuple):
    """The operands of the activation's derivative; the gradient of hidden is weights[:, None] * z.

    Attributes:
      pre_activation: as ACTIVATE takes it, or quantized as ACTIVATE keeps it.
      z: [M, I]; in the dtype of pre_activation unless that is quantized.
      weights: float32 [M].
      in_group: bool [M], whether a row belongs to a group. In rows of no group row_sums are 0, and the other results
        mean nothing. None with a quantized pre_activation, which is zero in those rows.
    """

    pre_activation: Any
    z: jax.Array
    weights: jax.Array
    in_group: jax.Array | None = None


class ActivationGradients(NamedTuple):
    """The results of the backward pass of an activation.

    Attributes:
      d_pre_activation: [M, 2 * I], or [M, I] for an activation that is not gated.
      quantized: d_pre_activation quantized, or None where products take it unquantized.
      hidden: [M, I].
      row_sums: float32 [M], for each row the sum of hidden * z.
    """

    d_pre_activation: jax.Array
    quantized: QuantizedArray | None
    hidden: jax.Array
    row_sums: jax.Array


def activated_types(pre_activation: jax.Array, hidden: Hidden) -> Activated:
    """The types of ACTIVATE's results; `pre_activation` is an array or the type of one."""
    num_rows, width = pre_activation.shape
    halves = 2 if hidden.activation.is_gated else 1
    columns, stored_as = width // halves, hidden.stored_as
    if stored_as is None:
        return Activated(array_type((num_rows, columns), pre_activation.dtype))
    kept = quantized_types((num_rows, halves, columns), ROW_BLOCK, stored_as) if hidden.keeps else None
    return Activated(quantized_types((num_rows, columns), ROW_BLOCK, stored_as), kept)


def can_launch(launcher: Launcher, hidden: Hidden) -> bool:
    """Whether kernels can compute an activation and store its results."""
    return hidden.activation.curve is not None and (hidden.stored_as is None or can_quantize(launcher))


def activate(launcher: Launcher, operands: Activate, hidden: Hidden) -> Activated:
    """Computes ACTIVATE by its kernel."""
    from jgg.kernels.activation import activate_kernel
    from jgg.kernels.activation_fp8 import activate_fp8_kernel

    pre = operands.pre_activation
    outputs = activated_types(pre, hidden)
    num_rows, columns = outputs.hidden.shape
    constants, stored = _constants(launcher.target, columns, hidden), named(**outputs._asdict())
    is_quantized = hidden.stored_as is not None
    absent = dict.fromkeys({"kept_values", "kept_scales"} - stored.keys()) if is_quantized else {}
    launch = Launch(
        operands={"pre": pre, "num_rows": num_rows, **absent},
        outputs=stored,
        constants=constants,
        grid=(math.ceil(num_rows / constants["BLOCK_ROWS"]), math.ceil(columns / constants["BLOCK_COLUMNS"])),
        flops=8 * num_rows * columns,
        bytes_accessed=sum(array.size * array.dtype.itemsize for array in (pre, *stored.values())),
    )
    results = launcher.run(activate_fp8_kernel if is_quantized else activate_kernel, launch)
    return Activated(written(results, "hidden"), written(results, "kept"))


def differentiate(
    launcher: Launcher, operands: ActivateBackward, hidden: Hidden, scale_hidden: bool
) -> ActivationGradients:
    """The results of the backward pass."""
    from jgg.kernels.activation import activate_backward_kernel

    pre, z, in_group = operands.pre_activation, operands.z, operands.in_group
    assert in_group is not None  # with an unquantized pre-activation
    num_rows, columns = z.shape
    constants = _constants(launcher.target, columns, hidden)
    launch = Launch(
        operands={
            "pre": pre,
            "z": z,
            "weights": operands.weights,
            "in_group": in_group.astype(jnp.int8),
            "num_rows": num_rows,
        },
        outputs={  # written over the pre-activation and z, they would cost a copy of what a scan keeps
            "d_pre": jax.ShapeDtypeStruct(pre.shape, pre.dtype),
            "hidden": jax.ShapeDtypeStruct(z.shape, z.dtype),
            "row_sums": jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        },
        constants=constants | {"SCALE_HIDDEN": scale_hidden},
        grid=(math.ceil(num_rows / constants["BLOCK_ROWS"]),),
        flops=20 * num_rows * columns,
        bytes_accessed=2 * (pre.size + z.size) * pre.dtype.itemsize,
    )
    results = launcher.run(activate_backward_kernel, launch)
    return ActivationGradients(results["d_pre"], None, results["hidden"], results["row_sums"])


def differentiate_and_quantize(
    launcher: Launcher, operands: ActivateBackward, outputs: ActivationGradients, hidden: Hidden, scale_hidden: bool
) -> ActivationGradients:
    """The results of the backward pass; `quantized` is None where the kernel cannot make it.

    Args:
      outputs: the types of the results.
    """
    from jgg.kernels.activation_fp8 import activate_backward_fp8_kernel

    kept, z = operands.pre_activation, operands.z
    num_rows, columns = z.shape
    constants = _constants(launcher.target, columns, hidden)
    # otherwise a block to quantize holds both gate and up, which the kernel does not have side by side
    quantizes = not hidden.activation.is_gated or not (hidden.interleaved or columns % BLOCK)
    d_pre, d = outputs.d_pre_activation, named(d=outputs.quantized)
    launch = Launch(
        operands={
            "kept_values": kept.values,
            "kept_scales": kept.scales,
            "z": z,
            "weights": operands.weights,
            "num_rows": num_rows,
            **({} if quantizes else dict.fromkeys(d)),
        },
        outputs={
            "d_pre": d_pre,
            **(d if quantizes else {}),
            "hidden": outputs.hidden,
            "row_sums": outputs.row_sums,
        },
        constants=constants | {"SCALE_HIDDEN": scale_hidden},
        grid=(math.ceil(num_rows / constants["BLOCK_ROWS"]),),
        flops=20 * num_rows * columns,
        bytes_accessed=2 * (kept.values.size + z.size * z.dtype.itemsize) + d_pre.size * z.dtype.itemsize,
    )
    results = launcher.run(activate_backward_fp8_kernel, launch)
    return ActivationGradients(results["d_pre"], written(results, "d"), results["hidden"], results["row_sums"])


def named(**arrays: jax.Array | QuantizedArray | None) -> dict[str, jax.Array]:
    """The outputs of a launch: an array by its name, a QuantizedArray's by NAME_values and NAME_scales."""
    outputs: dict[str, jax.Array] = {}
    for name, array in arrays.items():
        if isinstance(array, QuantizedArray):
            outputs |= {
                f"{name}_values": cast(jax.Array, array.values),
                f"{name}_scales": cast(jax.Array, array.scales),
            }
        elif array is not None:
            outputs[name] = array
    return outputs


def written(results: Mapping[str, jax.Array], name: str) -> Any:
    """The array or QuantizedArray that a launch wrote under a name, or None."""
    if f"{name}_values" in results:
        return QuantizedArray(results[f"{name}_values"], results[f"{name}_scales"])
    return results.get(name)


def activation_constants(activation: Activation) -> dict[str, bool | str | float]:
    """The constants that tell kernels which activation to compute; its curve must be one that they know."""
    assert activation.curve is not None
    curve, limit, alpha = activation.curve
    return {"GATED": activation.is_gated, "CURVE": curve, "LIMIT": limit, "ALPHA": alpha}


def _constants(target: Target, columns: int, hidden: Hidden) -> dict[str, Any]:
    """The constants that all of these kernels are compiled for; with a Format also the constants of quantization."""
    stored_as = hidden.stored_as
    tiles = tiles_of("activate_kernel", target)
    block_columns = min(tiles["columns"], power_of_2(columns, least=16 if stored_as is None else BLOCK))
    return {
        "COLUMNS": columns,
        "INTERLEAVED": hidden.interleaved,
        **activation_constants(hidden.activation),
        **({} if stored_as is None else quantizing_constants(stored_as)),
        "BLOCK_ROWS": max(1, tiles["elements"] // block_columns),
        "BLOCK_COLUMNS": block_columns,
    }
