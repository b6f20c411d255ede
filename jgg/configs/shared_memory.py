"""How much shared memory a kernel takes with a configuration, known before it is compiled."""

import math

import jax

from jgg.gpu_target import Target
from jgg.problem import GroupedGemmProblem

_REDUCED_BLOCKS = {"forward": "block_k", "dx": "block_n", "dw": "block_m"}
_BARRIERS = 256  # bytes, more than any kernel's
_PART = 128  # bytes of each thread, at most, that go through shared memory at once where a tile is stored in parts


def shared_memory(op: str, problem: GroupedGemmProblem, target: Target, config) -> int:
    """Bytes of shared memory that the kernel of a product takes, at most, as Triton 3.9 compiles it.

    The warp-specialised kernel takes just that. Plain ones take less where few steps make a tile, where rows cannot be
    loaded ahead, or where Triton finds a better way to turn a tile for its store.

    Args:
      op: "forward", "dx" or "dw".
      config: of the op's type.
    """
    if config.warp_specialized:
        return _BARRIERS + _of_specialized(op, problem, config)
    blocks = {name: getattr(config, name) for name in ("block_m", "block_n", "block_k")}
    step = blocks.pop(_REDUCED_BLOCKS[op])
    stage = sum(blocks.values()) * step * problem.dtype.itemsize
    return _BARRIERS + _num_stages(problem, target, config) * stage + _store(op, problem, target, config, blocks)


def _of_specialized(op, problem, config):
    """Of one multiprocessor of a cluster: the ring of `kernels.hopper`, and a quarter of each warpgroup's rows."""
    step = getattr(config, _REDUCED_BLOCKS[op])
    rows = 128
    columns = math.prod((config.block_m, config.block_n, config.block_k)) // (2 * rows * step)
    ring = config.num_stages * (rows + columns) * step * problem.dtype.itemsize
    return ring + rows * columns // 4 * _result_size(op, problem)


def _num_stages(problem, target, config):
    """Blocks of each operand that are in shared memory at once."""
    if not _multiplies_from_shared_memory(target):
        return max(config.num_stages - 1, 1)  # those of the step at hand are in registers
    if problem.dtype.itemsize == 2:
        return config.num_stages
    # TF32 must lie along the reduced axis, so that other blocks are turned first: on 10.0 ahead of their step
    return config.num_stages + (2 if target.compute_capability >= 100 else 1)


def _store(op, problem, target, config, blocks):
    """The buffer in which a tile is turned, so that neighbouring threads store neighbouring elements."""
    size = _result_size(op, problem)
    is_summed = op == "dx" and problem.has_topk_weights  # with x, in float32
    if is_summed and not _multiplies_from_shared_memory(target):
        size = 4
    is_in_three_passes = problem.dtype.itemsize == 4 and problem.precision == jax.lax.Precision.HIGH
    is_whole = size == 4 and (target.compute_capability // 10 == 9 or is_in_three_passes)
    tile = math.prod(blocks.values()) * size
    return tile if is_whole or not problem.rows_are_aligned else min(tile, _PART * 32 * config.num_warps)


def _result_size(op, problem):
    return (problem.out_dtype if op == "forward" else problem.dtype).itemsize


def _multiplies_from_shared_memory(target):
    """Whether tensor cores read operands there rather than from registers."""
    return 90 <= target.compute_capability < 120
