"""The forward product of FP8 operands with block scales; dX is the same with turned weights."""

import dataclasses
import math
from typing import NamedTuple

import jax

from jgg.backends.choice import How, Launcher
from jgg.backends.xla import plain
from jgg.configs.requirements import why_no_fp8
from jgg.problem import GroupedGemmProblem
from jgg.products.combine import sum_by_token, token_order
from jgg.products.forward import FORWARD, Forward
from jgg.products.launch import Launch, bounded_rows, flat, matrices, matrix, tile_operands
from jgg.products.product import Product
from jgg.quantized import BLOCK, QuantizedArray
from jgg.schedule import GroupBounds, tile_schedule

_CTAS = 2  # of a cluster
_TILE_ROWS, _TILE_COLUMNS = 128, 256  # of a CTA's output tile
_STAGES = 4
_BAND = 8


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
        return [_multiply_rows(launcher, operands, problem)]
    x, w, bounds, gather_indices, topk_weights, bias = operands
    product = dataclasses.replace(problem, combine_y=False, has_topk_weights=False)
    read_at = gather_indices if product.permute_x else None

    def multiply(x, columns):
        part = dataclasses.replace(product, out_features=len(columns))
        own_bias = None if bias is None else bias[:, columns.start : columns.stop]
        return _multiply_rows(launcher, ForwardFp8(x, w, bounds, read_at, None, own_bias), part, columns.start)

    return [sum_by_token(launcher, problem, multiply, x, problem.out_features, bounds, gather_indices, topk_weights)]


def _multiply_rows(launcher: Launcher, operands: ForwardFp8, problem: GroupedGemmProblem, first_column: int = 0):
    """y [M, N], of w's columns from the first on."""
    from jgg.kernels.hopper_fp8 import hopper_fp8_kernel

    x, w, bounds, gather_indices, topk_weights, bias = operands
    schedule = tile_schedule(bounds, problem.num_rows, _TILE_ROWS)
    columns = problem.out_features
    tiles = math.ceil(len(schedule.group) / _CTAS) * math.ceil(columns / _TILE_COLUMNS)
    gathers = problem.permute_x
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
        },
        descriptors={
            **({} if gathers else {"left": matrix(x.shape, (_TILE_ROWS, BLOCK), cta_axis=0)}),
            "right": matrices(w.shape, (_TILE_COLUMNS, BLOCK)),
            "y": bounded_rows(columns, (_TILE_ROWS, BLOCK), cta_axis=2),
        },
        outputs={"y": jax.ShapeDtypeStruct((problem.num_rows, columns), problem.out_dtype)},
        constants={
            "REDUCED": problem.in_features,
            "COLUMNS": columns,
            "RIGHT_SCALES": w.scales.shape[1],
            "GATHERS": gathers,
            "TOPK": problem.topk if gathers else 1,
            "BAND": _BAND,
            "BLOCK_COLUMNS": _TILE_COLUMNS,
            "STAGES": _STAGES,
        },
        grid=(max(1, min(tiles, launcher.target.num_sms // _CTAS)),),
        num_warps=4,  # of the partition that Triton starts with; there are two more
        num_ctas=_CTAS,
        flops=problem.flops,
        bytes_accessed=problem.bytes_accessed,
    )
    y = launcher.run(hopper_fp8_kernel, launch)["y"]
    return token_order(launcher, y, gather_indices) if problem.permute_y else y


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
