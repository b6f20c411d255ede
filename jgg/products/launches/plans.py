"""The steps in which kernels compute a product, decided by pure functions before the first kernel is launched.

The kernel that multiplies does not do everything that a problem asks for: other kernels bring rows into another order
before it or after it, and large results that are only added up are computed one range of columns after the other.
"""

import dataclasses
import math
from typing import cast

from jgg.core.gpu_target import FP8_COMPUTE_CAPABILITY, Target
from jgg.core.problem import FEW_ROWS, ROWS_OF_STORED, GroupedGemmProblem
from jgg.core.quantized import BLOCK
from jgg.launching.heuristic import plain_config, stored_config
from jgg.launching.kernel_configs import KernelConfigDW, KernelConfigDX, KernelConfigForward
from jgg.launching.requirements import multiplies_from_left, why_not_quantized
from jgg.launching.tuned_configs import choose_config
from jgg.products.launches import column_parts
from jgg.products.launches.activations import Hidden

_MOST_STAGES = 8
_LEAST_STAGES = 2
_LEAST_STEP = 32  # features that share a scale, at least
_STEP_OF_LEFT = 64  # the same of weights in FP8 that are multiplied from the left
_LEAST_STEPS = 2  # of a part of a group's rows, at least


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """The steps in which kernels compute y.

    Attributes:
      problem: what the multiplying kernel computes.
      config: its configuration.
      dequantizes: whether quantized operands are first dequantized, to the dtype of `problem`.
      copies_x: whether x is first copied to expert order.
      reorders_y: whether y is last brought to token order.
      part_columns: how many columns are multiplied, and then added up by token, at a time; None if rows of y are not
        added up.
    """

    problem: GroupedGemmProblem
    config: KernelConfigForward
    dequantizes: bool = False
    copies_x: bool = False
    reorders_y: bool = False
    part_columns: int | None = None


def plan_forward(
    problem: GroupedGemmProblem,
    target: Target,
    config: KernelConfigForward | None = None,
    w_block: tuple[int, int] | None = None,
    w_is_packed: bool = False,
    x_is_quantized: bool = False,
) -> ForwardPlan:
    """Decides in which steps kernels compute y.

    Args:
      config: the configuration asked for; None to choose one.
      w_block: the rows and columns of a block of w, if w is quantized and x is not.
      w_is_packed: whether w is in MXFP4.
      x_is_quantized: whether x is quantized; w may not be.
    """
    dequantizes, part_columns = False, None
    if w_block is not None:
        reading = _config_for_reading(problem, target, config, w_block, w_is_packed)
        config, dequantizes = reading or config, reading is None
    elif x_is_quantized and not problem.is_quantized:
        reading = _config_for_reading_x(problem, target, config)
        config, dequantizes = reading or config, reading is None
    elif problem.is_quantized and why_not_quantized(problem, target) is not None:
        problem, config, dequantizes = problem.dequantized, None, True
    if problem.combine_y:
        part_columns = column_parts.summed_width(target, problem, problem.out_features)
        problem = dataclasses.replace(problem, combine_y=False, has_topk_weights=False)
    config = choose_config(KernelConfigForward, problem, target, config)
    copies_x = problem.permute_x and not config.fuse_gather
    reorders_y = problem.permute_y and (config.kernel == "hopper" or not config.fuse_scatter)
    problem = dataclasses.replace(
        problem, permute_x=problem.permute_x and not copies_x, permute_y=problem.permute_y and not reorders_y
    )
    return ForwardPlan(problem, config, dequantizes, copies_x, reorders_y, part_columns)


def _config_for_reading_x(
    problem: GroupedGemmProblem, target: Target, config: KernelConfigForward | None
) -> KernelConfigForward | None:
    """A configuration whose kernel converts a quantized x as it reads it; None to dequantize it first.

    Each step has the features that share a scale: sums have the same bits with every configuration.
    """
    if target.compute_capability < FP8_COMPUTE_CAPABILITY:
        return None
    config = choose_config(KernelConfigForward, problem, target, config)
    if config.kernel != "plain":
        config = cast(KernelConfigForward, plain_config(KernelConfigForward, problem, target))
    stages = max(_LEAST_STAGES, min(_MOST_STAGES, config.num_stages * config.block_k // BLOCK))
    return dataclasses.replace(config, block_k=BLOCK, num_stages=stages)


def _config_for_reading(
    problem: GroupedGemmProblem,
    target: Target,
    config: KernelConfigForward | None,
    w_block: tuple[int, int],
    w_is_packed: bool,
) -> KernelConfigForward | None:
    """A configuration whose kernel dequantizes weights as it reads them; None to dequantize them first.

    Either way sums have the same bits.
    """
    scaled_features = w_block[1 if problem.w_layout == "enk" else 0]
    has_scales = scaled_features >= _LEAST_STEP if w_is_packed else scaled_features % _STEP_OF_LEFT == 0
    from_left = stored_config(problem, target, w_is_packed) if config is None and has_scales else None
    if from_left is not None:  # its tiles have all rows of a group
        return from_left
    config = choose_config(KernelConfigForward, problem, target, config)
    is_read = config.kernel == "plain" and (w_is_packed or target.compute_capability >= FP8_COMPUTE_CAPABILITY)
    is_left = multiplies_from_left(problem, target, config.tile(problem.w_layout))
    most = ROWS_OF_STORED if is_left else FEW_ROWS
    # with few rows the product takes the time of reading w; with more, each row tile would dequantize w again
    is_read &= scaled_features >= _LEAST_STEP and problem.num_rows <= most * problem.num_experts
    is_read &= config.block_k >= (2 * _LEAST_STEP if w_is_packed else _LEAST_STEP)
    if not is_read:
        return None
    if is_left:
        return config if w_is_packed else dataclasses.replace(config, block_k=min(config.block_k, scaled_features))
    # tensor cores take w from registers, where features change places (see `kernels.places`)
    config = dataclasses.replace(config, block_m=min(config.block_m, FEW_ROWS))
    if w_is_packed and config.programs_per_sm == 2:
        # one unpacks while others wait: 212 us for gpt-oss's w_gate_up and 128 rows on an H100, by two programs 229
        return dataclasses.replace(config, num_stages=4, programs_per_sm=3)
    if w_is_packed:  # fewer bytes in each stage
        return dataclasses.replace(config, num_stages=min(_MOST_STAGES, 2 * config.num_stages))
    block_k = min(config.block_k, scaled_features)  # features that share a scale
    stages = min(_MOST_STAGES, config.num_stages * config.block_k // block_k)  # as many features on their way
    return dataclasses.replace(config, block_k=block_k, num_stages=stages)


def plan_up(
    problem: GroupedGemmProblem,
    target: Target,
    hidden: Hidden,
    config: KernelConfigForward | None = None,
    w_block: tuple[int, int] | None = None,
    w_is_packed: bool = False,
) -> ForwardPlan | None:
    """Decides in which steps one kernel computes y and its activation; None where two must.

    Only the warp-specialized kernels can, and only where the warps that load do not spill registers.

    Args:
      config, w_block, w_is_packed: as in `plan_forward`.
    """
    plan = plan_forward(problem, target, config, w_block, w_is_packed)
    if plan.config.kernel != "hopper" or hidden.activation.curve is None:
        return None
    if problem.is_quantized != (hidden.stored_as is not None):
        return None  # the kernels quantize results if and only if the operands are quantized
    is_gated = hidden.activation.is_gated
    if not problem.is_quantized:
        # gelu's error function and gathers in one kernel take too many registers
        is_heavy = hidden.activation.curve[0] == "gelu" and plan.problem.permute_x
        is_aligned = not is_gated or problem.out_features % 16 == 0  # rows of hidden are multiples of 16 bytes
        return plan if is_aligned and not is_heavy else None
    # The kernel must gather x, however many columns there are: without gathers it has so few registers that an
    # activation spills. Gate and up of 128 hidden features must be two whole blocks of w's rows.
    is_whole = problem.out_features % (2 * BLOCK if is_gated else BLOCK) == 0 and not (is_gated and hidden.interleaved)
    if plan.dequantizes or not (problem.permute_x and is_whole):
        return None
    return dataclasses.replace(plan, problem=problem, copies_x=False)


@dataclasses.dataclass(frozen=True)
class DxPlan:
    """The steps in which kernels compute dx.

    Attributes:
      problem: what the multiplying kernel computes.
      config: its configuration.
      copies_dy: whether dy is first copied to expert order.
      part_columns: how many columns are multiplied, and then added up by token, at a time; None if all are multiplied
        at once.
      adds_up: whether rows of dx are last added up by token, if all are multiplied at once.
    """

    problem: GroupedGemmProblem
    config: KernelConfigDX
    copies_dy: bool = False
    part_columns: int | None = None
    adds_up: bool = False


def plan_dx(
    problem: GroupedGemmProblem, target: Target, sums_rows: bool, config: KernelConfigDX | None = None
) -> DxPlan:
    """Decides in which steps kernels compute dx and, if it `sums_rows`, row sums; the kernel sums whole rows only."""
    config = choose_config(KernelConfigDX, problem, target, config)
    copies_dy = problem.permute_y and not config.fuse_gather
    problem = dataclasses.replace(problem, permute_y=problem.permute_y and not copies_dy)
    if not problem.permute_x or sums_rows:
        return DxPlan(problem, config, copies_dy, adds_up=problem.permute_x)
    return DxPlan(problem, config, copies_dy, column_parts.summed_width(target, problem, problem.in_features))


@dataclasses.dataclass(frozen=True)
class DwPlan:
    """The steps in which kernels compute dw.

    Attributes:
      problem: what the multiplying kernel computes.
      config: its configuration.
      copies_x: whether x is first copied to expert order.
      copies_dy: whether dy is first copied to expert order, scaled if there are weights.
      part_features: how many features of x are copied, and then multiplied, at a time; None for all.
      row_parts: in how many parts the rows of each group are multiplied; the parts' products are added up in float32.
    """

    problem: GroupedGemmProblem
    config: KernelConfigDW
    copies_x: bool = False
    copies_dy: bool = False
    part_features: int | None = None
    row_parts: int = 1


def plan_dw(
    problem: GroupedGemmProblem, target: Target, scales_dy: bool, config: KernelConfigDW | None = None
) -> DwPlan:
    """Decides in which steps kernels compute dw; `scales_dy` says whether rows of dy are scaled by weights."""
    config = choose_config(KernelConfigDW, problem, target, config)
    is_hopper = config.kernel == "hopper"
    copies_x = problem.permute_x and not config.fuse_gather
    gathers_x = problem.permute_x and not copies_x
    gathers_dy = config.fuse_gather and not (is_hopper and gathers_x)  # that kernel gathers only one operand
    copies_dy = scales_dy or (problem.permute_y and not gathers_dy)
    problem = dataclasses.replace(problem, permute_x=gathers_x, permute_y=problem.permute_y and not copies_dy)
    part_features = column_parts.copied_width(problem) if copies_x and is_hopper else None
    return DwPlan(problem, config, copies_x, copies_dy, part_features, row_parts(problem, target, config))


def row_parts(problem: GroupedGemmProblem, target: Target, config: KernelConfigDW) -> int:
    """The `row_parts` of dW by the plain kernel: enough that every program has one, even with few tiles.

    An adapter's dW, [K, r], has few tiles and reduces over all rows. Each part takes at least _LEAST_STEPS steps.
    """
    rows, columns, step = config.tile(problem.w_layout)
    num_rows, num_columns, reduced = config.sizes(problem)
    tiles = problem.num_experts * math.ceil(num_rows / rows) * math.ceil(num_columns / columns)
    if config.kernel == "hopper" or problem.is_empty:
        return 1
    programs = target.num_sms * config.programs_per_sm
    steps = reduced // (problem.num_experts * step)
    return max(1, min(programs // tiles, steps // _LEAST_STEPS))
