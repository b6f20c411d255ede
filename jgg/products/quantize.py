"""Quantization to FP8 with block scales (see `jgg.core.quantized`), by kernels if the device supports FP8."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jgg.core.gpu_target import FP8_COMPUTE_CAPABILITY
from jgg.core.quantized import (
    BLOCK,
    Format,
    QuantizedArray,
    ToQuantize,
    WeightForms,
    as_bits,
    from_bits,
    quantize,
    quantized_types,
    scales_shape,
)
from jgg.launching.choice import Launcher
from jgg.launching.kernel_configs import power_of_2
from jgg.launching.launch import Launch
from jgg.launching.tuned_configs import tiles_of
from jgg.primitives.operation import Operation, array_type

ROW_BLOCK = 1, BLOCK
WEIGHT_BLOCK = BLOCK, BLOCK


class Quantize(NamedTuple):
    """The array to quantize: rows [T, K], or weights [E, N, K] or [E, K, N], of any float dtype."""

    array: jax.Array


def can_quantize(launcher: Launcher) -> bool:
    """Whether kernels can convert to FP8 on the launcher's GPU."""
    return launcher.target.compute_capability >= FP8_COMPUTE_CAPABILITY and not launcher.target.is_interpreted


def quantizing_constants(stored_as: Format) -> dict[str, float | bool]:
    """The constants that quantizing kernels are compiled for."""
    return {"LARGEST": float(jnp.finfo(stored_as.dtype).max), "POWER_OF_2": stored_as.power_of_2_scales}


def _row_types(operands: Quantize, stored_as: Format) -> QuantizedArray:
    return quantized_types(operands.array.shape, ROW_BLOCK, stored_as)


def _rows_plainly(operands: Quantize, stored_as: Format) -> QuantizedArray:
    return quantize(operands.array, ROW_BLOCK, stored_as)


def _launch_rows(launcher: Launcher, operands: Quantize, stored_as: Format) -> QuantizedArray:
    if not can_quantize(launcher):
        return _rows_plainly(operands, stored_as)
    from jgg.kernels.quantize import quantize_rows_kernel

    (x,) = operands
    num_rows, columns = x.shape
    tiles = tiles_of("quantize_rows_kernel", launcher.target)
    block_columns = min(tiles["columns"], power_of_2(columns, least=BLOCK))
    block_rows = max(1, tiles["elements"] // block_columns)
    outputs = _row_types(operands, stored_as)
    launch = Launch(
        operands={"x": x, "num_rows": num_rows},
        outputs={name: cast(jax.Array, part) for name, part in vars(outputs).items()},
        constants={
            "COLUMNS": columns,
            **quantizing_constants(stored_as),
            "BLOCK_ROWS": block_rows,
            "BLOCK_COLUMNS": block_columns,
        },
        grid=(math.ceil(num_rows / block_rows), math.ceil(columns / block_columns)),
        flops=4 * x.size,
        bytes_accessed=x.size * (x.dtype.itemsize + 1),
    )
    return QuantizedArray(**launcher.run(quantize_rows_kernel, launch))


QUANTIZE_ROWS: Operation[QuantizedArray] = Operation(
    "quantize_rows",
    Quantize,
    result_types=_row_types,
    plain=_rows_plainly,
    launch=_launch_rows,
)
"""The rows as a QuantizedArray, with a scale for 128 features of a row; the parameter is the Format."""


class QuantizedMatrices(NamedTuple):
    """Quantized weights: the values in their own order, transposed, or both.

    Attributes:
      values: the values in the shape of the weights, or None.
      scales: float32, one per block of 128 x 128, in the order of `values`.
      transposed: the values with rows and columns exchanged, or None.
    """

    values: jax.Array | None
    scales: jax.Array
    transposed: jax.Array | None

    @property
    def forms(self) -> WeightForms:
        """The QuantizedArrays of the values and of the transposed values, each None where it was not asked for."""
        straight = None if self.values is None else QuantizedArray(self.values, self.scales)
        transposed = None if self.transposed is None else QuantizedArray(self.transposed, self.scales.mT)
        return WeightForms(straight, transposed)


def _weight_types(operands: Quantize, stored_as: Format, keeps: bool, transposes: bool) -> QuantizedMatrices:
    w = operands.array
    values, scales = array_type(w.shape, stored_as.dtype), array_type(scales_shape(w.shape, WEIGHT_BLOCK), jnp.float32)
    transposed = array_type((*w.shape[:-2], w.shape[-1], w.shape[-2]), stored_as.dtype)
    return QuantizedMatrices(values if keeps else None, scales, transposed if transposes else None)


def _weights_plainly(operands: Quantize, **options: Any) -> QuantizedMatrices:
    """Quantizes one matrix after the other, so that temporaries are only as large as one matrix."""
    types = _weight_types(operands, **options)
    bits = jax.lax.map(lambda w: jax.tree.map(as_bits, _weights_at_once(Quantize(w), **options)), operands.array)
    return jax.tree.map(lambda array, type: from_bits(array, type.dtype), bits, types)


def _weights_at_once(operands: Quantize, stored_as: Format, keeps: bool, transposes: bool) -> QuantizedMatrices:
    """Quantizes all matrices together; if devices have some of the matrices each, a loop would make them gather all."""
    values, scales = jax.tree.leaves(quantize(operands.array, WEIGHT_BLOCK, stored_as))
    return QuantizedMatrices(values if keeps else None, scales, values.mT if transposes else None)


def _launch_weights(
    launcher: Launcher, operands: Quantize, stored_as: Format, keeps: bool, transposes: bool
) -> QuantizedMatrices:
    if not can_quantize(launcher):
        return _weights_at_once(operands, stored_as, keeps, transposes)
    from jgg.kernels.quantize import quantize_weights_kernel

    (w,) = operands
    matrices, rows, columns = w.shape
    results = _weight_types(operands, stored_as, keeps, transposes)._asdict()
    outputs = {name: result for name, result in results.items() if result is not None}
    absent: dict[str, Any] = dict.fromkeys(results.keys() - outputs)
    launch = Launch(
        operands={"w": w, **absent},
        outputs=outputs,
        constants={"ROWS": rows, "COLUMNS": columns, **quantizing_constants(stored_as)},
        grid=(math.ceil(columns / BLOCK), math.ceil(rows / BLOCK), matrices),
        num_warps=tiles_of("quantize_weights_kernel", launcher.target)["warps"],
        flops=4 * w.size,
        bytes_accessed=w.size * (w.dtype.itemsize + len(outputs) - 1),
    )
    return QuantizedMatrices(**absent | launcher.run(quantize_weights_kernel, launch))


QUANTIZE_WEIGHTS: Operation[QuantizedMatrices] = Operation(
    "quantize_weights",
    Quantize,
    result_types=_weight_types,
    plain=_weights_plainly,
    launch=_launch_weights,
    several=lambda how, operands, **options: _weights_at_once(operands, **options),
)
"""QuantizedMatrices of weights: their values if it `keeps` them, and the values transposed if it `transposes` them."""


def with_quantized(
    w: QuantizedArray | ToQuantize, quantize_weights: Callable[..., QuantizedMatrices]
) -> QuantizedArray:
    """The weights of a product as a QuantizedArray; ToQuantize weights are quantized.

    Args:
      quantize_weights: computes QUANTIZE_WEIGHTS by the implementation that computes the product.
    """
    if isinstance(w, QuantizedArray):
        return w
    options = {"stored_as": w.stored_as, "keeps": not w.is_transposed, "transposes": w.is_transposed}
    forms = quantize_weights(Quantize(w.array), **options).forms
    form = forms.transposed if w.is_transposed else forms.straight
    assert form is not None
    return form
