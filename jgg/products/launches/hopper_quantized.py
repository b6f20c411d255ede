"""Launches the warp-specialized kernel for FP8 operands, `kernels.hopper_fp8`."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jgg.configs.requirements import checked_tile
from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import BLOCK, Format, QuantizedArray
from jgg.core.schedule import GroupBounds, between_groups, tile_schedule
from jgg.launching.choice import Launcher
from jgg.launching.launch import Launch, bounded_rows, halves, matrices, matrix
from jgg.primitives.product import array_type
from jgg.products.activate import activated_types
from jgg.products.launches.activations import Activated, activation_constants, named, written
from jgg.products.launches.hopper import Hidden
from jgg.products.launches.row_tiles import (
    CTAS,
    TILE_ROWS,
    WHOLE_PRODUCT,
    Part,
    cluster_options,
    hopper_constants,
    row_operands,
)
from jgg.products.low_rank import LowRankTerm
from jgg.products.quantize import quantizing_constants

_KERNEL_NAMES = {"hidden_values": "hidden", "kept_values": "kept"}
_TILE_COLUMNS = 256  # columns of a CTA's output tile
_LOW_STEP = BLOCK // 2  # features of 16 bits that take the bytes of BLOCK in FP8


def multiply_rows(
    launcher: Launcher,
    problem: GroupedGemmProblem,
    x: QuantizedArray,
    w: QuantizedArray,
    bounds: GroupBounds,
    gather_indices=None,
    topk_weights=None,
    bias=None,
    low_rank: LowRankTerm | None = None,
    *,
    part: Part = WHOLE_PRODUCT,
) -> jax.Array:
    """Computes y [M, N] in expert order; `problem` and `part` may describe a range of a product's columns.

    Args:
      x: rows in expert order or, with `problem.permute_x`, in token order; the kernel then gathers them.
    """
    outputs = {"y": jax.ShapeDtypeStruct((problem.num_rows, problem.out_features), problem.out_dtype)}
    arrays = x, w, bounds, gather_indices, topk_weights, bias, low_rank
    return _launch(launcher, problem, outputs, *arrays, part=part)["y"]


def multiply_and_activate(
    launcher: Launcher,
    problem: GroupedGemmProblem,
    x: QuantizedArray,
    w: QuantizedArray,
    bounds: GroupBounds,
    gather_indices=None,
    topk_weights=None,
    bias=None,
    low_rank: LowRankTerm | None = None,
    *,
    hidden: Hidden,
) -> Activated:
    """Computes the product and its activation: the results of FORWARD followed by ACTIVATE."""
    product = array_type((problem.num_rows, problem.out_features), problem.out_dtype)
    outputs = named(**activated_types(product, hidden.activation, hidden.stored_as, hidden.keeps)._asdict())
    arrays = x, w, bounds, gather_indices, topk_weights, bias, low_rank
    results = _launch(launcher, problem, outputs, *arrays, hidden=hidden)
    exists = between_groups(bounds, problem.num_rows)
    for key in results:
        if key.endswith("_scales"):  # the kernel does not write the scales of rows outside every group
            rows = exists.reshape(-1, *[1] * (results[key].ndim - 1))
            results[key] = jnp.where(rows, results[key], 0)
    return Activated(written(results, "hidden"), written(results, "kept"))


def _launch(
    launcher: Launcher,
    problem: GroupedGemmProblem,
    outputs: dict[str, Any],
    x,
    w,
    bounds,
    gather_indices,
    topk_weights,
    bias,
    low_rank: LowRankTerm | None,
    *,
    part: Part = WHOLE_PRODUCT,
    hidden: Hidden | None = None,
):
    """Launches the kernel; returns its results by the names in `outputs`."""
    from jgg.kernels.hopper_fp8 import hopper_fp8_kernel

    config = launcher.config
    checked_tile(problem, config)
    schedule = tile_schedule(bounds, problem.num_rows, TILE_ROWS)
    columns = problem.out_features
    tiles = math.ceil(len(schedule.group) / CTAS) * math.ceil(columns / _TILE_COLUMNS)
    gathers = problem.permute_x
    has_halves = hidden is not None and hidden.activation.is_gated

    def right(shape, step):
        return halves(shape, (BLOCK, step), axis=1) if has_halves else matrices(shape, (_TILE_COLUMNS, step))

    low_descriptors = {}
    if low_rank is not None:
        low_rank = low_rank.aligned(reduced_is_minor=True)
        low_left = matrix(low_rank.rows.shape, (TILE_ROWS, _LOW_STEP), cta_axis=0)
        low_descriptors = {"low_left": low_left, "low_right": right(low_rank.matrices.shape, _LOW_STEP)}
    stored = {_KERNEL_NAMES.get(key, key): output for key, output in outputs.items()}
    launch = Launch(
        operands={
            "left": x.values,
            "left_scales": x.scales,
            "right": w.values,
            "right_scales": w.scales,
            "low_left": low_rank and low_rank.rows,
            "low_right": low_rank and low_rank.matrices,
            "bias": bias,
            "topk_weights": topk_weights,
            "gather_indices": None if topk_weights is None and not gathers else gather_indices,
            **row_operands(problem, part, bounds, schedule),
            **dict.fromkeys({"y", "hidden", "hidden_scales", "kept", "kept_scales"} - set(stored)),
        },
        descriptors={
            **({} if gathers else {"left": matrix(x.shape, (TILE_ROWS, BLOCK), cta_axis=0)}),
            "right": right(w.shape, BLOCK),
            **low_descriptors,
            **{
                key: bounded_rows(math.prod(output.shape[1:]), (TILE_ROWS, BLOCK), cta_axis=2)
                for key, output in stored.items()
                if not key.endswith("_scales")
            },
        },
        outputs=stored,
        constants={
            "RIGHT_SCALES": w.scales.shape[1],
            "LOW_STEPS": 0 if low_rank is None else math.ceil(low_rank.rank / _LOW_STEP),
            **hopper_constants(problem, config, _TILE_COLUMNS, gathers),
            **_activation(hidden),
        },
        **cluster_options(launcher.target, problem, tiles),
    )
    results = launcher.run(hopper_fp8_kernel, launch)
    return {key: results[_KERNEL_NAMES.get(key, key)] for key in outputs}


def _activation(hidden: Hidden | None):
    stored_as = hidden and hidden.stored_as
    quantizing = quantizing_constants(stored_as or Format())
    if hidden is None:
        return {"ACTIVATES": False, "GATED": False, "CURVE": "", "LIMIT": 0.0, "ALPHA": 0.0, **quantizing}
    constants = activation_constants(hidden.activation, interleaved=False)
    del constants["INTERLEAVED"]
    return {"ACTIVATES": True, **constants, **quantizing}
