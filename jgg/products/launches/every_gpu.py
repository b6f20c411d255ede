"""Launches the kernels of forward, dX and dW that run on every GPU."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.core.gpu_target import Target
from jgg.core.quantized import BLOCK, QuantizedArray, block_of, values_and_scales
from jgg.core.schedule import between_groups, schedule_of_one_group, tile_schedule
from jgg.launching.choice import Launcher
from jgg.launching.kernel_configs import KernelConfigDX, KernelConfigForward
from jgg.launching.launch import (
    PRECISIONS,
    Launch,
    bounded_rows,
    dy_by_tma,
    launch_options,
    matrices,
    matrix,
    w_by_tma,
    x_by_tma,
)
from jgg.launching.requirements import multiplies_from_left, multiplies_from_shared_memory
from jgg.products.launches.operands import OuterProduct, RowProduct, row_operands
from jgg.products.launches.pieces import Pieces

_REGISTERS, _MOST_REGISTERS = 65_536, 255  # of a multiprocessor, and of a thread


def multiply_forward(launcher: Launcher, product: RowProduct) -> jax.Array:
    """Computes y, in expert order or, if the problem says so, in token order."""
    from jgg.kernels.forward import forward_kernel

    problem, config, rows = product.problem, product.config, product.rows
    assert isinstance(config, KernelConfigForward)
    if problem.is_quantized and config.block_k != BLOCK:
        raise ValueError(f"block_k of {config.op} must be {BLOCK} in FP8, got {config.block_k}.")
    x, x_scales = values_and_scales(rows.rows if isinstance(rows, Pieces) else rows)
    w, w_scales = values_and_scales(product.w)
    scaled = block_of(product.w) if isinstance(product.w, QuantizedArray) else (0, 0)
    scaled_columns, scaled_reduced = scaled if problem.w_layout == "enk" else scaled[::-1]
    w_is_left = _w_is_left(launcher.target, product)
    launch = _launch_of_rows(
        launcher.target,
        product,
        _Operand("x", x, config.use_tma_load_x and x_by_tma(launcher.target, problem, x.dtype)),
        _Operand("w", w, config.use_tma_load_w and w_by_tma(launcher.target, w)),
        operands={"x_scales": x_scales, "w_scales": w_scales, "bias": product.bias},
        outputs={"y": jax.ShapeDtypeStruct(problem.y_shape, problem.out_dtype)},
        constants={
            "GATHER": problem.permute_x,
            "SCATTER": problem.permute_y,
            "SCALED_REDUCED": scaled_reduced,
            "SCALED_COLUMNS": scaled_columns,
            "PRODUCTS": 1 if w_is_left else _products(launcher.target, product),
            "W_IS_LEFT": w_is_left,
        },
    )
    if w_is_left:  # as many programs as the configuration asks for must have their registers
        registers = _REGISTERS // (32 * config.num_warps * config.programs_per_sm)
        launch = dataclasses.replace(launch, max_registers=min(_MOST_REGISTERS, registers))
    return launcher.run(forward_kernel, launch)["y"]


def _w_is_left(target: Target, product: RowProduct) -> bool:
    """Whether the kernel multiplies by quantized weights from the left."""
    is_read = isinstance(product.w, QuantizedArray) and not isinstance(product.rows, QuantizedArray)
    return is_read and multiplies_from_left(product.problem, target, product.config.tile(product.problem.w_layout))


def _products(target: Target, product: RowProduct) -> int:
    """The constant PRODUCTS of `kernels.places`: 1 unless one operand is loaded in fewer bits than the other.

    Tensor cores that read w from shared memory add up its features in their order.
    """
    problem, config, w = product.problem, product.config, product.w
    w_is_packed, is_float32 = isinstance(w, QuantizedArray) and w.is_packed, problem.dtype.itemsize == 4
    is_mixed = isinstance(product.rows, QuantizedArray) != isinstance(w, QuantizedArray)
    if not is_mixed or (is_float32 and (w_is_packed or PRECISIONS[problem.precision] == "ieee")):
        return 1
    if multiplies_from_shared_memory(target, config.block_m):
        return 1
    features = 8 if w_is_packed and not product.reduced_is_minor else 4  # that a thread loads at once
    return features * problem.dtype.itemsize // 4


def multiply_dx(launcher: Launcher, product: RowProduct, x: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Computes dx [M, K] in expert order and, with x, the row sums of dX; otherwise None in their place."""
    from jgg.kernels.dx import dx_kernel

    problem, config, pieces, w = product.problem, product.config, product.rows, product.w
    assert isinstance(config, KernelConfigDX) and isinstance(pieces, Pieces) and isinstance(w, jax.Array)
    outputs = {"dx": jax.ShapeDtypeStruct((problem.num_rows, problem.in_features), problem.dtype)}
    absent = {"row_sums": None} if x is None else {}
    if x is not None:
        column_tiles = math.ceil(problem.in_features / config.block_k)
        outputs["row_sums"] = jax.ShapeDtypeStruct((column_tiles, problem.num_rows), jnp.float32)
    launch = _launch_of_rows(
        launcher.target,
        product,
        _Operand("dy", pieces.rows, config.use_tma_load_dy and dy_by_tma(launcher.target, problem)),
        _Operand("w", w, config.use_tma_load_w and w_by_tma(launcher.target, w)),
        operands={"num_pieces": pieces.num_pieces, "scale": pieces.scale, "x": x, **absent},
        outputs=outputs,
        constants={"GATHER_DY": problem.permute_y, "GATHER_X": problem.permute_x},
    )
    results = launcher.run(dx_kernel, launch)
    if x is None:
        return results["dx"], None
    # the kernel leaves the sums of rows outside every group unwritten
    row_sums = jnp.where(between_groups(product.bounds, problem.num_rows), results["row_sums"], 0)
    return results["dx"], jnp.sum(row_sums, axis=0)


class _Operand(NamedTuple):
    """An array that a kernel multiplies: the name of the kernel's parameter, and whether TMA loads it."""

    name: str
    array: jax.Array
    by_tma: bool


def _launch_of_rows(
    target: Target,
    product: RowProduct,
    rows: _Operand,
    w: _Operand,
    *,
    operands: Mapping[str, jax.Array | int | None],
    outputs: dict[str, jax.ShapeDtypeStruct],
    constants: dict[str, int],
) -> Launch:
    """The launch of `forward_kernel` or `dx_kernel`; the keyword arguments are what only one of them has."""
    problem, config, low_rank = product.problem, product.config, product.low_rank
    block_rows, block_columns, step = config.tile(problem.w_layout)
    _, columns, reduced = config.sizes(problem)
    if problem.is_dense:
        schedule = schedule_of_one_group(problem.num_rows, block_rows)
        row_tiles = math.ceil(problem.num_rows / block_rows)
    else:
        schedule = tile_schedule(product.bounds, problem.num_rows, block_rows)
        row_tiles = len(schedule.group)
    w_step = step // 2 if isinstance(product.w, QuantizedArray) and product.w.is_packed else step
    w_block = (block_columns, w_step) if product.reduced_is_minor else (w_step, block_columns)
    return Launch(
        operands={
            rows.name: rows.array,
            w.name: w.array,
            "low_rows": low_rank and low_rank.rows,
            "low_matrices": low_rank and low_rank.matrices,
            "topk_weights": product.topk_weights,
            "gather_indices": product.gather_indices,
            **operands,
            **row_operands(problem, product.part, product.bounds, schedule),
        },
        descriptors={
            **({rows.name: matrix(rows.array.shape, (block_rows, step))} if rows.by_tma else {}),
            **({w.name: matrices(w.array.shape, w_block)} if w.by_tma else {}),
        },
        outputs=outputs,
        constants={
            "REDUCED": reduced,
            "COLUMNS": columns,
            "W_COLUMNS": w.array.shape[1 if product.reduced_is_minor else 2],
            "RANK": low_rank.rank if low_rank else 0,
            "TOPK": problem.topk,
            "REDUCED_IS_MINOR": product.reduced_is_minor,
            "PRECISION": PRECISIONS[problem.precision],
            f"TMA_{rows.name.upper()}": rows.by_tma,
            "TMA_W": w.by_tma,
            "BAND": config.band,
            "BLOCK_ROWS": block_rows,
            "BLOCK_REDUCED": step,
            "BLOCK_COLUMNS": block_columns,
            **constants,
        },
        **launch_options(target, problem, config, row_tiles * math.ceil(columns / block_columns)),
    )


def multiply_dw(launcher: Launcher, product: OuterProduct) -> jax.Array:
    """Computes dw."""
    from jgg.kernels.dw import dw_kernel

    problem, config, dy, bounds = product.problem, product.config, product.dy, product.bounds
    left, right = product.sides
    sides = _constants_of_sides(launcher.target, product)
    tiles = problem.num_experts * math.prod(math.ceil(side[""] / side["BLOCK"]) for side in sides.values())
    launch = Launch(
        operands={
            "left": left,
            "right": right,
            "gather_indices": product.gather_indices,
            "num_pieces": dy.num_pieces,
            "scale": dy.scale,
            "group_starts": bounds.starts,
            "group_ends": bounds.ends,
            "num_rows": problem.num_rows,
            "num_positions": problem.num_positions,
            "num_groups": problem.num_experts,
        },
        descriptors={
            name.lower(): bounded_rows(side[""], (config.block_m, side["BLOCK"]))
            for name, side in sides.items()
            if side["TMA"]
        },
        outputs={"dw": jax.ShapeDtypeStruct(problem.w_shape, config.result_dtype(problem))},
        constants={
            **{f"{key}_{name}".lstrip("_"): value for name, side in sides.items() for key, value in side.items()},
            "LEFT_HAS_PIECES": dy.num_pieces is not None and problem.w_layout == "enk",
            "PRECISION": PRECISIONS[problem.precision],
            "BAND": config.band,
            "BLOCK_ROWS": config.block_m,
        },
        **launch_options(launcher.target, problem, config, tiles),
    )
    return launcher.run(dw_kernel, launch)["dw"]


def _constants_of_sides(target: Target, product: OuterProduct) -> dict[str, dict[str, int]]:
    """The constants for the columns, gathers, TMA and block of each operand, by the kernel's names, LEFT and RIGHT."""
    problem, config = product.problem, product.config
    x_side = {
        "": problem.in_features,
        "GATHER": problem.topk if problem.permute_x else 0,
        "TMA": config.use_tma_load_x and x_by_tma(target, problem),
        "BLOCK": config.block_k,
    }
    dy_side = {
        "": problem.out_features,
        "GATHER": int(problem.permute_y),
        "TMA": config.use_tma_load_dy and dy_by_tma(target, problem),
        "BLOCK": config.block_n,
    }
    left, right = (dy_side, x_side) if problem.w_layout == "enk" else (x_side, dy_side)
    return {"LEFT": left, "RIGHT": right}
