"""What a kernel's configuration asks of a device: instructions, registers and shared memory, before it is compiled."""

import jax

from jgg.configs.kernel_configs import KernelConfig, KernelConfigDX, KernelConfigForward
from jgg.core.files import warn_once
from jgg.core.gpu_target import Target
from jgg.core.problem import GroupedGemmProblem
from jgg.core.versions import WARP_SPECIALIZED, unlike

SPECIALIZED_COMPUTE_CAPABILITY = 90  # the only one with wgmma instructions
FP8_COMPUTE_CAPABILITY = 89  # the least that multiplies in FP8, and converts to it
_BARRIERS = 256  # bytes, more than any kernel's
_HANDED_OVER = 256  # bytes of arguments, more than the warp-specialized kernel's warps get
_PART = 128  # bytes of each thread, at most, that go through shared memory at once where a tile is stored in parts


def can_run(problem: GroupedGemmProblem, target: Target, config: KernelConfig) -> bool:
    """Whether a device has the instructions, registers and shared memory for the kernel of a configuration."""
    if config.warp_specialized:
        kind = type(config)
        too_wide = config.tile(problem.w_layout).columns > max_columns(kind, problem)
        if too_wide or why_not_specialized(kind, problem, target) is not None:
            return False
    return shared_memory(problem, target, config) <= target.shared_memory


def max_columns(kind: type[KernelConfig], problem: GroupedGemmProblem) -> int:
    """Columns of the warp-specialized kernel's widest tile: a warpgroup holds a finished one beside the next."""
    return 128 if kind is KernelConfigForward and problem.out_dtype.itemsize == 4 else 256


def why_not_specialized(kind: type[KernelConfig], problem: GroupedGemmProblem, target: Target) -> str | None:
    """Why `jgg.kernels.hopper` cannot compute the product that a type of configuration is of, or None if it can."""
    if target.compute_capability != SPECIALIZED_COMPUTE_CAPABILITY:
        return "they are for compute capability 9.0"
    if target.is_interpreted:
        return "Triton's interpreter does not run Gluon"
    if problem.dtype.itemsize > 2:
        return "they multiply floats of 16 and 8 bits"
    if problem.is_quantized and problem.out_dtype.itemsize != 2:
        return "they store products of 8-bit floats in 16 bits"
    if not problem.rows_are_aligned:
        return "rows of K and of N elements must be multiples of 16 bytes"
    if kind is KernelConfigDX and problem.has_topk_weights:
        return "the gradient of topk_weights is another kernel's epilogue"
    other = unlike(WARP_SPECIALIZED)
    if other:
        warn_once(f"The warp-specialized kernels are not used, others are: {other}")
    return other


def specialized_step(problem: GroupedGemmProblem) -> int:
    """The warp-specialized kernel's step along the reduced axis: 128 bytes."""
    return 128 // problem.dtype.itemsize


def why_not_quantized(problem: GroupedGemmProblem, target: Target) -> str | None:
    """Why no kernel multiplies x and w of a forward product in FP8, or None if one can."""
    if target.compute_capability < FP8_COMPUTE_CAPABILITY:
        return "kernels multiply in FP8 from compute capability 8.9 on"
    return "rows of K elements must be multiples of 16 bytes" if problem.in_features % 16 else None


def shared_memory(problem: GroupedGemmProblem, target: Target, config: KernelConfig) -> int:
    """Bytes of shared memory that the kernel of a product takes, at most, as Triton 3.9 compiles it.

    The warp-specialized kernel takes just that. Plain ones take less where few steps make a tile, where rows cannot be
    loaded ahead, or where Triton finds a better way to turn a tile for its store.
    """
    rows, columns, step = config.tile(problem.w_layout)
    if config.warp_specialized:  # a multiprocessor has half a tile: the ring, and a part of the tile to be stored
        ring = config.num_stages * (rows // 2 + columns) * step * problem.dtype.itemsize
        parts = 2 if problem.is_quantized else 4
        return _BARRIERS + _HANDED_OVER + ring + rows // 2 * columns // parts * _result_size(problem, config)
    stage = (rows + columns) * step * problem.dtype.itemsize
    return _BARRIERS + _num_stages(problem, target, config) * stage + _store(problem, target, config, rows * columns)


def _num_stages(problem, target, config):
    """Blocks of each operand that are in shared memory at once."""
    if not _multiplies_from_shared_memory(target):
        return max(config.num_stages - 1, 1)  # those of the step at hand are in registers
    if problem.dtype.itemsize <= 2:
        return config.num_stages
    # TF32 must lie along the reduced axis, so that other blocks are turned first: on 10.0 ahead of their step
    return config.num_stages + (2 if target.compute_capability >= 100 else 1)


def _store(problem, target, config, elements):
    """The buffer in which a tile is turned, so that neighbouring threads store neighbouring elements."""
    size = _result_size(problem, config)
    is_summed = isinstance(config, KernelConfigDX) and problem.has_topk_weights  # with x, in float32
    if is_summed and not _multiplies_from_shared_memory(target):
        size = 4
    is_in_three_passes = problem.dtype.itemsize == 4 and problem.precision == jax.lax.Precision.HIGH
    is_whole = size == 4 and (target.compute_capability // 10 == 9 or is_in_three_passes)
    tile = elements * size
    return tile if is_whole or not problem.rows_are_aligned else min(tile, _PART * 32 * config.num_warps)


def _result_size(problem, config):
    return (problem.out_dtype if isinstance(config, KernelConfigForward) else problem.dtype).itemsize


def _multiplies_from_shared_memory(target):
    """Whether tensor cores read operands there rather than from registers."""
    return 90 <= target.compute_capability < 120
