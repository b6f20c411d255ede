"""Quantization to FP8 with block scales, `jgg.core.quantized`, by kernels where the device has such numbers."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.configs.requirements import FP8_COMPUTE_CAPABILITY
from jgg.core.quantized import BLOCK, as_bits, from_bits, quantize, scales_shape
from jgg.launching.choice import Launcher
from jgg.launching.launch import Launch, power_of_2
from jgg.primitives.product import Product


class Quantize(NamedTuple):
    """Rows [T, K], or weights [E, N, K] or [E, K, N], of any float dtype."""

    array: jax.Array


def has_fp8(launcher: Launcher) -> bool:
    """Whether kernels can convert to FP8."""
    return launcher.target.compute_capability >= FP8_COMPUTE_CAPABILITY and not launcher.target.is_interpreted


def quantizing_constants(dtype, power_of_2_scales: bool) -> dict[str, float | bool]:
    """What quantizing kernels are compiled for."""
    return {"LARGEST": float(jnp.finfo(dtype).max), "POWER_OF_2": power_of_2_scales}


def quantized_types(shape: tuple[int, ...], block: tuple[int, int], dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Of values and scales."""
    return {
        "values": jax.ShapeDtypeStruct(shape, dtype),
        "scales": jax.ShapeDtypeStruct(scales_shape(shape, block), jnp.float32),
    }


def _row_types(operands: Quantize, dtype, **_):
    return [(each.shape, each.dtype) for each in quantized_types(operands.array.shape, (1, BLOCK), dtype).values()]


def _rows_plainly(operands: Quantize, dtype, power_of_2_scales: bool):
    return jax.tree.leaves(quantize(operands.array, (1, BLOCK), dtype, power_of_2_scales))


def _launch_rows(launcher: Launcher, operands: Quantize, dtype, power_of_2_scales: bool):
    if not has_fp8(launcher):
        return _rows_plainly(operands, dtype, power_of_2_scales)
    from jgg.kernels.quantize import quantize_rows_kernel

    (x,) = operands
    num_rows, columns = x.shape
    block_columns = min(1024, power_of_2(columns, least=BLOCK))
    block_rows = 2048 // block_columns
    launch = Launch(
        operands={"x": x, "num_rows": num_rows},
        outputs=quantized_types(x.shape, (1, BLOCK), dtype),
        constants={
            "COLUMNS": columns,
            **quantizing_constants(dtype, power_of_2_scales),
            "BLOCK_ROWS": block_rows,
            "BLOCK_COLUMNS": block_columns,
        },
        grid=(math.ceil(num_rows / block_rows), math.ceil(columns / block_columns)),
        flops=4 * x.size,
        bytes_accessed=x.size * (x.dtype.itemsize + 1),
    )
    return list(launcher.run(quantize_rows_kernel, launch).values())


QUANTIZE_ROWS = Product(
    "quantize_rows",
    Quantize,
    result_types=_row_types,
    plain=_rows_plainly,
    launch=_launch_rows,
    several=lambda how, operands, **parameters: _rows_plainly(operands, **parameters),
)
"""[values in the shape of the rows, scales float32 [T, K / 128]]."""


def _weight_types(operands: Quantize, dtype, keeps: bool, turns: bool, **_):
    outputs = _weight_outputs(operands.array, dtype, keeps, turns)
    return [(each.shape, each.dtype) for each in outputs.values()]


def _weight_outputs(w, dtype, keeps, turns):
    outputs = quantized_types(w.shape, (BLOCK, BLOCK), dtype)
    if turns:
        outputs["turned"] = jax.ShapeDtypeStruct((*w.shape[:-2], w.shape[-1], w.shape[-2]), dtype)
    return outputs if keeps else {key: output for key, output in outputs.items() if key != "values"}


def _weights_plainly(operands: Quantize, **options):
    """One matrix after the other, so that temporaries are as large as one matrix."""
    dtypes = [dtype for _, dtype in _weight_types(operands, **options)]

    def quantize_one(w):
        return list(map(as_bits, _weights_at_once(Quantize(w), **options)))

    return list(map(from_bits, jax.lax.map(quantize_one, operands.array), dtypes))


def _weights_at_once(operands: Quantize, dtype, power_of_2_scales: bool, keeps: bool, turns: bool):
    """All matrices together: several devices, each with some of them, would gather them for a loop."""
    values, scales = jax.tree.leaves(quantize(operands.array, (BLOCK, BLOCK), dtype, power_of_2_scales))
    return [*([values] if keeps else []), scales, *([values.mT] if turns else [])]


def _launch_weights(
    launcher: Launcher, operands: Quantize, dtype, power_of_2_scales: bool, keeps: bool, turns: bool
):  # fmt: skip
    if not has_fp8(launcher):
        return _weights_at_once(operands, dtype, power_of_2_scales, keeps, turns)
    from jgg.kernels.quantize import quantize_weights_kernel

    (w,) = operands
    matrices, rows, columns = w.shape
    outputs = _weight_outputs(w, dtype, keeps, turns)
    launch = Launch(
        operands={"w": w, **dict.fromkeys({"values", "turned"} - set(outputs))},
        outputs=outputs,
        constants={"ROWS": rows, "COLUMNS": columns, **quantizing_constants(dtype, power_of_2_scales)},
        grid=(math.ceil(columns / BLOCK), math.ceil(rows / BLOCK), matrices),
        num_warps=8,
        flops=4 * w.size,
        bytes_accessed=w.size * (w.dtype.itemsize + len(outputs) - 1),
    )
    return list(launcher.run(quantize_weights_kernel, launch).values())


QUANTIZE_WEIGHTS = Product(
    "quantize_weights",
    Quantize,
    result_types=_weight_types,
    plain=_weights_plainly,
    launch=_launch_weights,
    several=lambda how, operands, **parameters: _weights_at_once(operands, **parameters),
)
"""[values in the shape of w if it `keeps` them, scales, the values with rows and columns exchanged if it `turns`]."""
