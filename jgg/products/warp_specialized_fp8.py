"""The forward product of FP8 operands with block scales; dX is the same with turned weights."""

import dataclasses
import math
from typing import NamedTuple

import jax

from jgg.activations import Activation
from jgg.backends.choice import How, Launcher
from jgg.backends.xla import plain
from jgg.configs.requirements import why_no_fp8
from jgg.problem import GroupedGemmProblem
from jgg.products.activate import activation_constants
from jgg.products.activate_fp8 import activated_types
from jgg.products.combine import sum_by_token, token_order
from jgg.products.forward import FORWARD, Forward
from jgg.products.launch import Launch, bounded_rows, flat, halves, matrices, matrix, tile_operands
from jgg.products.product import Product
from jgg.products.quantize import E4M3, quantizing_constants
from jgg.quantized import BLOCK, QuantizedArray
from jgg.schedule import GroupBounds, between_groups, tile_schedule

_KERNEL_NAMES = {"hidden_values": "hidden", "kept_values": "kept"}
_CTAS = 2  # of a cluster
_TILE_ROWS, _TILE_COLUMNS = 128, 256  # of a CTA's output tile
_STAGES = 4
_BAND = 8


class HiddenFp8(NamedTuple):
    """The activation that the kernel applies to a product, which is the pre-activation.

    Attributes:
      keeps: whether the pre-activation is a result too.
    """

    activation: Activation
    keeps: bool
    power_of_2_scales: bool


class ForwardFp8(NamedTuple):
    """As `Forward`, with scales for 128 features of x and for 128 x 128 of w [E, N, K].

    Where x is a gradient and w turned, this is dX.
    """

    x: QuantizedArray
    w: QuantizedArray
    bounds: GroupBounds
    gather_indices: jax.Array | None = None
    topk_weights: jax.Array | None = None
    bias: jax.Array | None = None


def _dequantized(operands: ForwardFp8, dtype) -> Forward:
    return Forward(operands.x.dequantize(dtype), operands.w.dequantize(dtype), *operands[2:])


def _plain(operands: ForwardFp8, problem: GroupedGemmProblem):
    """In float32, so that only sums are rounded otherwise than the kernel's."""
    in_float32 = dataclasses.replace(problem, dtype=jax.numpy.dtype("float32"), precision=jax.lax.Precision.HIGHEST)
    return [plain.grouped_gemm(in_float32, *_dequantized(operands, "float32"))]


def _launch(launcher: Launcher, operands: ForwardFp8, problem: GroupedGemmProblem):
    if why_no_fp8(problem, launcher.target) is not None:
        return FORWARD.launch(launcher, _dequantized(operands, problem.dtype), problem=problem)
    if not problem.combine_y:
        y = multiply_rows(launcher, operands, problem)["y"]
        return [token_order(launcher, y, operands.gather_indices) if problem.permute_y else y]
    x, w, bounds, gather_indices, topk_weights, bias = operands
    product = dataclasses.replace(problem, combine_y=False, has_topk_weights=False)
    read_at = gather_indices if product.permute_x else None

    def multiply(x, columns):
        part = dataclasses.replace(product, out_features=len(columns))
        own_bias = None if bias is None else bias[:, columns.start : columns.stop]
        return multiply_rows(launcher, ForwardFp8(x, w, bounds, read_at, None, own_bias), part, columns.start)["y"]

    return [sum_by_token(launcher, problem, multiply, x, problem.out_features, bounds, gather_indices, topk_weights)]


def multiply_rows(
    launcher: Launcher, operands: ForwardFp8, problem: GroupedGemmProblem, first_column: int = 0,
    hidden: HiddenFp8 | None = None,
) -> dict[str, jax.Array]:  # fmt: skip
    """{"y": [M, N] in expert order}, of w's columns from the first on; or what ACTIVATE_FP8 results in, by names."""
    from jgg.kernels.hopper_fp8 import hopper_fp8_kernel

    x, w, bounds, gather_indices, topk_weights, bias = operands
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
            "topk_weights": flat(topk_weights),
            "gather_indices": None if topk_weights is None and not gathers else gather_indices,
            **tile_operands(bounds, schedule),
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
            "BAND": _BAND,
            "BLOCK_COLUMNS": _TILE_COLUMNS,
            "STAGES": _STAGES,
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
                results[key] = jax.numpy.where(rows, results[key], 0)
    return results


def _activation(hidden: HiddenFp8 | None):
    quantizing = quantizing_constants(E4M3, hidden is not None and hidden.power_of_2_scales)
    if hidden is None:
        return {"ACTIVATES": False, "GATED": False, "CURVE": "", "LIMIT": 0.0, "ALPHA": 0.0, **quantizing}
    constants = activation_constants(hidden.activation, interleaved=False)
    del constants["INTERLEAVED"]
    return {"ACTIVATES": True, **constants, **quantizing}


def _several(how: How, operands: ForwardFp8, problem: GroupedGemmProblem):
    return FORWARD(how, _dequantized(operands, problem.dtype), problem=problem)


FORWARD_FP8 = Product(
    "forward_fp8",
    ForwardFp8,
    result_types=lambda operands, problem: [(problem.y_shape, problem.out_dtype)],
    plain=_plain,
    launch=_launch,
    several=_several,
)
"""[y of `problem.y_shape`], whose layout of w is "enk"; by FORWARD of what is dequantized where no kernel can."""
