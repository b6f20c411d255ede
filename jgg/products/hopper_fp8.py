"""Launches of the warp-specialized kernel of FP8 operands, `kernels.hopper_fp8`."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.activations import Activation
from jgg.configs.requirements import checked_tile
from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import BLOCK, E4M3, QuantizedArray
from jgg.core.schedule import GroupBounds, between_groups, tile_schedule
from jgg.launching.choice import Launcher
from jgg.launching.launch import Launch, bounded_rows, halves, matrices, matrix, tile_operands
from jgg.products.activate import activation_constants
from jgg.products.activate_fp8 import activated_types
from jgg.products.quantize import quantizing_constants

_KERNEL_NAMES = {"hidden_values": "hidden", "kept_values": "kept"}
_CTAS = 2  # of a cluster
_TILE_ROWS, _TILE_COLUMNS = 128, 256  # of a CTA's output tile


class HiddenFp8(NamedTuple):
    """The activation that the kernel applies to a product, which is the pre-activation.

    Attributes:
      keeps: whether the pre-activation is a result too.
    """

    activation: Activation
    keeps: bool
    power_of_2_scales: bool


def multiply_rows(
    launcher: Launcher, problem: GroupedGemmProblem, x: QuantizedArray, w: QuantizedArray, bounds: GroupBounds,
    gather_indices=None, topk_weights=None, bias=None, *, first_column: int = 0, zeroes: bool = True,
    hidden: HiddenFp8 | None = None,
) -> dict[str, jax.Array]:  # fmt: skip
    """{"y": [M, N] in expert order}, of w's columns from the first on; or what ACTIVATE_FP8 results in, by names.

    Args:
      x: in expert order or, with `problem.permute_x`, in token order, which the kernel gathers.
      zeroes: as in `warp_specialized.multiply_rows`.
    """
    from jgg.kernels.hopper_fp8 import hopper_fp8_kernel

    config = launcher.config
    checked_tile(problem, config)
    schedule = tile_schedule(bounds, problem.num_rows, _TILE_ROWS)
    columns = problem.out_features
    tiles = math.ceil(len(schedule.group) / _CTAS) * math.ceil(columns / _TILE_COLUMNS)
    gathers = problem.permute_x
    outputs = {"y": jax.ShapeDtypeStruct((problem.num_rows, columns), problem.out_dtype)}
    if hidden is not None:
        outputs = activated_types((problem.num_rows, columns), hidden.activation, hidden.keeps)
    has_halves = hidden is not None and hidden.activation.is_gated
    stored = {_KERNEL_NAMES.get(key, key): output for key, output in outputs.items()}
    launch = Launch(
        operands={
            "left": x.values,
            "left_scales": x.scales,
            "right": w.values,
            "right_scales": w.scales,
            "bias": bias,
            "topk_weights": topk_weights,
            "gather_indices": None if topk_weights is None and not gathers else gather_indices,
            **tile_operands(bounds, schedule),
            "zeros_end": problem.num_rows if zeroes else 0,
            "num_rows": problem.num_rows,
            "num_positions": problem.num_positions,
            "first_column": first_column,
            **dict.fromkeys({"y", "hidden", "hidden_scales", "kept", "kept_scales"} - set(stored)),
        },
        descriptors={
            **({} if gathers else {"left": matrix(x.shape, (_TILE_ROWS, BLOCK), cta_axis=0)}),
            "right": (halves(w.shape, (BLOCK, BLOCK)) if has_halves else matrices(w.shape, (_TILE_COLUMNS, BLOCK))),
            **{
                key: bounded_rows(math.prod(output.shape[1:]), (_TILE_ROWS, BLOCK), cta_axis=2)
                for key, output in stored.items()
                if not key.endswith("_scales")
            },
        },
        outputs=stored,
        constants={
            "REDUCED": problem.in_features,
            "COLUMNS": columns,
            "RIGHT_SCALES": w.scales.shape[1],
            "GATHERS": gathers,
            "TOPK": problem.topk if gathers else 1,
            "BAND": config.band,
            "BLOCK_COLUMNS": _TILE_COLUMNS,
            "STAGES": config.num_stages,
            **_activation(hidden),
        },
        grid=(max(1, min(tiles, launcher.target.num_sms // _CTAS)),),
        num_warps=4,  # of the partition that Triton starts with; there are two more
        num_ctas=_CTAS,
        flops=problem.flops,
        bytes_accessed=problem.bytes_accessed,
    )
    results = launcher.run(hopper_fp8_kernel, launch)
    results = {key: results[_KERNEL_NAMES.get(key, key)] for key in outputs}
    if hidden is not None:  # the kernel leaves the scales of rows outside every group unwritten
        exists = between_groups(bounds, problem.num_rows)
        for key in results:
            if key.endswith("_scales"):
                rows = exists.reshape(-1, *[1] * (results[key].ndim - 1))
                results[key] = jnp.where(rows, results[key], 0)
    return results


def _activation(hidden: HiddenFp8 | None):
    quantizing = quantizing_constants(E4M3, hidden is not None and hidden.power_of_2_scales)
    if hidden is None:
        return {"ACTIVATES": False, "GATED": False, "CURVE": "", "LIMIT": 0.0, "ALPHA": 0.0, **quantizing}
    constants = activation_constants(hidden.activation, interleaved=False)
    del constants["INTERLEAVED"]
    return {"ACTIVATES": True, **constants, **quantizing}
