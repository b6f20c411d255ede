"""Shared parts of the launches of forward and dX, by the kernels for every GPU and by the kernels for Hopper."""

import math
from typing import Any, NamedTuple

import jax

from jgg.configs.kernel_configs import KernelConfigForward
from jgg.core.problem import GroupedGemmProblem
from jgg.core.schedule import GroupBounds, tile_schedule
from jgg.launching.choice import Launcher
from jgg.launching.launch import PRECISIONS, Launch, launch_options, matrices, matrix, tile_operands, w_by_tma
from jgg.products.low_rank import LowRankTerm


class Part(NamedTuple):
    """The part of a product's columns and rows that a launch writes.

    Attributes:
      first_column: the column of w at which the problem's columns begin.
      zeroes: whether zeros are written to rows of no group; otherwise those rows are not written.
    """

    first_column: int = 0
    zeroes: bool = True


WHOLE_PRODUCT = Part()


def row_operands(problem: GroupedGemmProblem, part: Part, bounds: GroupBounds, schedule=None) -> dict[str, Any]:
    """The operands that tell a kernel its tiles and which rows and columns to write."""
    return {
        **tile_operands(bounds, schedule),
        "zeros_end": problem.num_rows if part.zeroes else 0,
        "num_rows": problem.num_rows,
        "num_positions": problem.num_positions,
        "first_column": part.first_column,
    }


class Rows(NamedTuple):
    """The rows that a kernel multiplies by w.

    Attributes:
      name: the name of the kernel's parameter.
      array: [any, reduced axis].
      by_tma: whether TMA loads them.
    """

    name: str
    array: jax.Array
    by_tma: bool


def multiply(
    launcher: Launcher,
    kernel,
    problem: GroupedGemmProblem,
    part: Part,
    rows: Rows,
    w: jax.Array,
    bounds: GroupBounds,
    operands: dict[str, Any],
    outputs: dict[str, jax.ShapeDtypeStruct],
    low_rank: LowRankTerm | None = None,
    **constants: int,
) -> dict[str, jax.Array]:
    """Launches `forward_kernel` or `dx_kernel`, which run on every GPU; returns its outputs by name.

    Args:
      operands: the operands that only this kernel has; rows, w and `row_operands` are added.
      constants: the constants that only this kernel has; the constants of both kernels are added.
    """
    config, target = launcher.config, launcher.target
    block_rows, block_columns, step = config.tile(problem.w_layout)
    _, columns, reduced = config.sizes(problem)
    reduced_is_minor = isinstance(config, KernelConfigForward) == (problem.w_layout == "enk")
    schedule = tile_schedule(bounds, problem.num_rows, block_rows)
    tma_w = config.use_tma_load_w and w_by_tma(target, w)
    w_block = (block_columns, step) if reduced_is_minor else (step, block_columns)
    launch = Launch(
        operands={
            rows.name: rows.array,
            "w": w,
            "low_rows": low_rank and low_rank.rows,
            "low_matrices": low_rank and low_rank.matrices,
            **operands,
            **row_operands(problem, part, bounds, schedule),
        },
        descriptors={
            **({rows.name: matrix(rows.array.shape, (block_rows, step))} if rows.by_tma else {}),
            **({"w": matrices(w.shape, w_block)} if tma_w else {}),
        },
        outputs=outputs,
        constants={
            "REDUCED": reduced,
            "COLUMNS": columns,
            "W_COLUMNS": w.shape[1 if reduced_is_minor else 2],
            "RANK": low_rank.rank if low_rank else 0,
            "TOPK": problem.topk,
            "REDUCED_IS_MINOR": reduced_is_minor,
            "PRECISION": PRECISIONS[problem.precision],
            f"TMA_{rows.name.upper()}": rows.by_tma,
            "TMA_W": tma_w,
            "BAND": config.band,
            "BLOCK_ROWS": block_rows,
            "BLOCK_REDUCED": step,
            "BLOCK_COLUMNS": block_columns,
            **constants,
        },
        **launch_options(target, problem, config, len(schedule.group) * math.ceil(columns / block_columns)),
    )
    return launcher.run(kernel, launch)


CTAS = 2  # CTAs of a cluster in the kernels for Hopper
TILE_ROWS = 128  # rows of the output tile of one CTA in these kernels


def hopper_constants(problem: GroupedGemmProblem, config, block_columns: int, gathers: bool) -> dict[str, Any]:
    """The constants that both kernels for Hopper are compiled for when they multiply rows."""
    _, columns, reduced = config.sizes(problem)
    is_forward = isinstance(config, KernelConfigForward)
    return {
        "REDUCED": reduced,
        "COLUMNS": columns,
        "GATHERS": gathers,
        "TOPK": problem.topk if gathers and is_forward else 1,
        **ring_constants(config, block_columns),
    }


def ring_constants(config, block_columns: int) -> dict[str, int]:
    """The constants of the ring of blocks and of the order of tiles in the kernels for Hopper."""
    return {"BAND": config.band, "BLOCK_COLUMNS": block_columns, "STAGES": config.num_stages}


def cluster_options(target, problem: GroupedGemmProblem, tiles: int) -> dict[str, Any]:
    """The options of a launch whose persistent clusters share `tiles` tiles."""
    return {
        "grid": (max(1, min(tiles, target.num_sms // CTAS)),),
        "num_warps": 4,  # warps of the partition that Triton starts with; there are two more partitions
        "num_ctas": CTAS,
        "flops": problem.flops,
        "bytes_accessed": problem.bytes_accessed(),
    }
