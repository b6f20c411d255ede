"""Launches the kernels of an activation and of its derivative; their results are in a float dtype or quantized."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgg.activations import Activation
from jgg.configs.kernel_configs import power_of_2
from jgg.core.quantized import BLOCK, Format, QuantizedArray
from jgg.launching.choice import Launcher
from jgg.launching.launch import Launch
from jgg.products.quantize import can_quantize, quantizing_constants


class Activated(NamedTuple):
    """The hidden features, and what is kept of the pre-activation for the backward pass.

    Attributes:
      hidden: [M, I].
      kept: the pre-activation or, quantized, the pre-activation as [M, 2, I] with gate before up, or as [M, 1, I] if
        the activation is not gated; None where nothing is kept.
    """

    hidden: jax.Array | QuantizedArray
    kept: jax.Array | QuantizedArray | None = None


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

    @property
    def rows_of_dx(self) -> jax.Array | QuantizedArray:
        """The gradient that dX multiplies: the quantized one where there is one."""
        return self.d_pre_activation if self.quantized is None else self.quantized


def can_launch(launcher: Launcher, activation: Activation, stored_as: Format | None) -> bool:
    """Whether kernels can compute an activation and store it in the format or, for None, unquantized."""
    return activation.curve is not None and (stored_as is None or can_quantize(launcher))


def activate(
    launcher: Launcher,
    pre: jax.Array,
    outputs: Activated,
    activation: Activation,
    interleaved: bool,
    stored_as: Format | None,
) -> Activated:
    """Computes ACTIVATE by its kernel; `outputs` gives the types of the results."""
    from jgg.kernels.activation import activate_kernel
    from jgg.kernels.activation_fp8 import activate_fp8_kernel

    num_rows, columns = outputs.hidden.shape
    constants = _constants(columns, activation, interleaved, stored_as)
    stored = named(**outputs._asdict())
    kernel, absent = activate_kernel, {}
    if stored_as is not None:
        kernel, absent = activate_fp8_kernel, dict.fromkeys({"kept_values", "kept_scales"} - stored.keys())
    launch = Launch(
        operands={"pre": pre, "num_rows": num_rows, **absent},
        outputs=stored,
        constants=constants,
        grid=(math.ceil(num_rows / constants["BLOCK_ROWS"]), math.ceil(columns / constants["BLOCK_COLUMNS"])),
        flops=8 * num_rows * columns,
        bytes_accessed=sum(array.size * array.dtype.itemsize for array in (pre, *stored.values())),
    )
    results = launcher.run(kernel, launch)
    return Activated(written(results, "hidden"), written(results, "kept"))


def differentiate(
    launcher: Launcher,
    pre: jax.Array,
    z: jax.Array,
    weights: jax.Array,
    in_group: jax.Array,
    activation: Activation,
    interleaved: bool,
    scale_hidden: bool,
) -> ActivationGradients:
    """The results of the backward pass, written over the pre-activation and z."""
    from jgg.kernels.activation import activate_backward_kernel

    num_rows, columns = z.shape
    constants = _constants(columns, activation, interleaved, None)
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
    launcher: Launcher,
    kept: QuantizedArray,
    z: jax.Array,
    weights: jax.Array,
    outputs: ActivationGradients,
    activation: Activation,
    interleaved: bool,
    scale_hidden: bool,
    stored_as: Format,
) -> ActivationGradients:
    """The results of the backward pass, hidden written over z; `quantized` is None where the kernel cannot make it."""
    from jgg.kernels.activation_fp8 import activate_backward_fp8_kernel

    num_rows, columns = z.shape
    constants = _constants(columns, activation, interleaved, stored_as)
    # otherwise a block to quantize holds both gate and up, which the kernel does not have side by side
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
    return ActivationGradients(results["d_pre"], written(results, "d"), results["z"], results["row_sums"])


def named(**arrays: Any) -> dict[str, Any]:
    """The outputs of a launch: an array by its name, a QuantizedArray's by NAME_values and NAME_scales."""
    outputs: dict[str, Any] = {}
    for name, array in arrays.items():
        if isinstance(array, QuantizedArray):
            outputs |= {f"{name}_values": array.values, f"{name}_scales": array.scales}
        elif array is not None:
            outputs[name] = array
    return outputs


def written(results: dict[str, jax.Array], name: str) -> Any:
    """The array or QuantizedArray that a launch wrote under a name, or None."""
    if f"{name}_values" in results:
        return QuantizedArray(results[f"{name}_values"], results[f"{name}_scales"])
    return results.get(name)


def activation_constants(activation: Activation, interleaved: bool) -> dict[str, bool | str | float]:
    """The constants that tell kernels which activation to compute; its curve must be one that they know."""
    assert activation.curve is not None
    curve, limit, alpha = activation.curve
    return {
        "GATED": activation.is_gated,
        "INTERLEAVED": interleaved,
        "CURVE": curve,
        "LIMIT": limit,
        "ALPHA": alpha,
    }


def _constants(columns: int, activation: Activation, interleaved: bool, stored_as: Format | None) -> dict[str, Any]:
    """The constants that all of these kernels are compiled for; with a Format also the constants of quantization."""
    block_columns = min(512, power_of_2(columns, least=16 if stored_as is None else BLOCK))
    return {
        "COLUMNS": columns,
        **activation_constants(activation, interleaved),
        **({} if stored_as is None else quantizing_constants(stored_as)),
        "BLOCK_ROWS": 1024 // block_columns,
        "BLOCK_COLUMNS": block_columns,
    }
