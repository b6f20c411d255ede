"""What the launches of the two kernels for Hopper share; each of their programs runs on a cluster of two CTAs."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jgg.core.gpu_target import Target
from jgg.core.problem import GroupedGemmProblem
from jgg.core.schedule import tile_schedule
from jgg.launching.kernel_configs import KernelConfig
from jgg.launching.launch import Constant, Launch, Tma, halves, matrices, matrix
from jgg.products.launches.activations import Hidden, activation_constants
from jgg.products.launches.operands import RowProduct, row_operands

CTAS = 2  # CTAs of a cluster
TILE_ROWS = 128  # rows of the output tile of one CTA


class Blocks(NamedTuple):
    """The blocks of a kernel.

    Attributes:
      columns: of a CTA's output tile.
      step: features of the reduced axis in a block.
      low_step: the same in a block of a term of low rank.
    """

    columns: int
    step: int
    low_step: int


def launch_of_rows(
    target: Target,
    product: RowProduct,
    left: jax.Array,
    right: jax.Array,
    blocks: Blocks,
    hidden: Hidden | None,
    *,
    operands: Mapping[str, jax.Array | int | None],
    results: dict[str, Tma],
    outputs: Mapping[str, jax.ShapeDtypeStruct | jax.Array],
    constants: Mapping[str, Constant],
) -> Launch:
    """The launch of a kernel that multiplies the rows of `left` by the matrices of `right`.

    Args:
      operands, constants: what only one of the kernels has.
      results: how the kernel stores those outputs that it stores by TMA.
    """
    problem, config, low_rank = product.problem, product.config, product.low_rank
    _, columns, reduced = config.sizes(problem)
    schedule = tile_schedule(product.bounds, problem.num_rows, TILE_ROWS)
    tiles = math.ceil(len(schedule.group) / CTAS) * math.ceil(columns / blocks.columns)
    # [columns, reduced] is transposed in shared memory
    axis = 1 if product.reduced_is_minor else 2
    has_halves = hidden is not None and hidden.has_halves
    width = blocks.columns // (1 + has_halves)

    def right_blocks(shape: tuple[int, ...], step: int) -> Tma:
        block = (width, step) if product.reduced_is_minor else (step, width)
        return halves(shape, block, axis) if has_halves else matrices(shape, block)

    descriptors = {"right": right_blocks(right.shape, blocks.step), **results}
    if not product.gathers:
        descriptors["left"] = matrix(left.shape, (TILE_ROWS, blocks.step), cta_axis=0)
    if low_rank is not None:
        low_rank = low_rank.aligned(product.reduced_is_minor)
        descriptors["low_left"] = matrix(low_rank.rows.shape, (TILE_ROWS, blocks.low_step), cta_axis=0)
        descriptors["low_right"] = right_blocks(low_rank.matrices.shape, blocks.low_step)
    reads_indices = product.gathers or product.topk_weights is not None
    return Launch(
        operands={
            "left": left,
            "right": right,
            "low_left": low_rank and low_rank.rows,
            "low_right": low_rank and low_rank.matrices,
            "bias": product.bias,
            "topk_weights": product.topk_weights,
            "gather_indices": product.gather_indices if reads_indices else None,
            **row_operands(problem, product.part, product.bounds, schedule),
            **operands,
        },
        descriptors=descriptors,
        outputs=outputs,
        constants={
            "LOW_STEPS": 0 if low_rank is None else math.ceil(low_rank.rank / blocks.low_step),
            "REDUCED": reduced,
            "COLUMNS": columns,
            "GATHERS": product.gathers,
            "TOPK": problem.topk if product.gathers and product.is_forward else 1,
            **ring_constants(config, blocks.columns),
            **hidden_constants(hidden),
            **constants,
        },
        **cluster_options(target, problem, tiles),
    )


def ring_constants(config: KernelConfig, block_columns: int) -> dict[str, int]:
    """The constants of the ring of blocks and of the order of tiles."""
    return {"BAND": config.band, "BLOCK_COLUMNS": block_columns, "STAGES": config.num_stages}


def hidden_constants(hidden: Hidden | None) -> dict[str, bool | str | float]:
    """The constants of the activation that a kernel applies, if it applies one."""
    if hidden is None:
        return {"ACTIVATES": False, "GATED": False, "CURVE": "", "LIMIT": 0.0, "ALPHA": 0.0}
    return {"ACTIVATES": True, **activation_constants(hidden.activation)}


def cluster_options(target: Target, problem: GroupedGemmProblem, tiles: int) -> dict[str, Any]:
    """The options of a launch whose persistent clusters share `tiles` tiles."""
    return {
        "grid": (max(1, min(tiles, target.num_sms // CTAS)),),
        "num_warps": 4,  # warps of the partition that Triton starts with; there are two more partitions
        "num_ctas": CTAS,
        "flops": problem.flops,
        "bytes_accessed": problem.bytes_accessed(),
    }
