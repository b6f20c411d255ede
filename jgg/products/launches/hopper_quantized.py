"""Launches the warp-specialized kernel for FP8 operands, `kernels.hopper_fp8`."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jgg.core.quantized import BLOCK, Format, values_and_scales
from jgg.core.schedule import between_groups
from jgg.launching.choice import Launcher
from jgg.launching.launch import Launch, bounded_rows
from jgg.launching.requirements import checked_tile
from jgg.primitives.operation import array_type
from jgg.products.launches.activations import Activated, Hidden, activated_types, named, written
from jgg.products.launches.clusters import TILE_ROWS, Blocks, launch_of_rows
from jgg.products.launches.operands import RowProduct
from jgg.products.quantize import quantizing_constants

_KERNEL_NAMES = {"hidden_values": "hidden", "kept_values": "kept"}
_RESULTS = {"y", "hidden", "hidden_scales", "kept", "kept_scales"}
# 16-bit features of a term of low rank take as many bytes as twice as many in FP8
_BLOCKS = Blocks(columns=256, step=BLOCK, low_step=BLOCK // 2)


def multiply(launcher: Launcher, product: RowProduct) -> jax.Array:
    """Computes y [M, N] in expert order."""
    from jgg.kernels.hopper_fp8 import hopper_fp8_kernel

    launch = _launch_of_rows(launcher, product, {"y": _product_type(product)}, None)
    return launcher.run(hopper_fp8_kernel, launch)["y"]


def multiply_and_activate(launcher: Launcher, product: RowProduct, hidden: Hidden) -> Activated:
    """Computes the product and its activation: the results of FORWARD followed by ACTIVATE."""
    from jgg.kernels.hopper_fp8 import hopper_fp8_kernel

    outputs = named(**activated_types(_product_type(product), hidden)._asdict())
    stored = {_KERNEL_NAMES.get(key, key): output for key, output in outputs.items()}
    launched = launcher.run(hopper_fp8_kernel, _launch_of_rows(launcher, product, stored, hidden))
    results = {key: launched[_KERNEL_NAMES.get(key, key)] for key in outputs}
    exists = between_groups(product.bounds, product.problem.num_rows)
    for key in results:
        if key.endswith("_scales"):  # the kernel does not write the scales of rows outside every group
            rows = exists.reshape(-1, *[1] * (results[key].ndim - 1))
            results[key] = jnp.where(rows, results[key], 0)
    return Activated(written(results, "hidden"), written(results, "kept"))


def _product_type(product: RowProduct) -> jax.Array:
    problem = product.problem
    return array_type((problem.num_rows, problem.out_features), problem.out_dtype)


def _launch_of_rows(
    launcher: Launcher, product: RowProduct, outputs: Mapping[str, jax.Array], hidden: Hidden | None
) -> Launch:
    (left, left_scales), (right, right_scales) = values_and_scales(product.rows), values_and_scales(product.w)
    checked_tile(product.problem, product.config)
    stored_as = hidden and hidden.stored_as
    return launch_of_rows(
        launcher.target,
        product,
        left,
        right,
        _BLOCKS,
        hidden,
        operands={
            "left_scales": left_scales,
            "right_scales": right_scales,
            **dict.fromkeys(_RESULTS - outputs.keys()),
        },
        results={
            key: bounded_rows(math.prod(output.shape[1:]), (TILE_ROWS, BLOCK), cta_axis=2)
            for key, output in outputs.items()
            if not key.endswith("_scales")
        },
        outputs=outputs,
        constants={"RIGHT_SCALES": right_scales.shape[1], **quantizing_constants(stored_as or Format())},
    )
