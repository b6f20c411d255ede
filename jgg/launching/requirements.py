"""What each kernel requires of a problem, a GPU and the installed packages, checked before it is compiled.

`KERNEL_REQUIREMENTS` is the table, with a row for each kernel. The functions below it look up a kernel's row.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax

from jgg.core.files import warn_once
from jgg.core.gpu_target import FP8_COMPUTE_CAPABILITY, Target
from jgg.core.problem import GroupedGemmProblem
from jgg.core.versions import WARP_SPECIALIZED, unlike
from jgg.launching.kernel_configs import KernelConfig, KernelConfigDW, KernelConfigDX, KernelConfigForward, Tile

ROWS_OF_WARPGROUP = 64  # the least of a tile whose operands tensor cores read from shared memory
_BARRIERS = 256  # bytes, more than the barriers of any kernel take
_HANDED_OVER = 256  # bytes of arguments, more than the hopper kernel's warps get
_PART = 128  # bytes of each thread, at most, that go through shared memory at once where a tile is stored in parts


@dataclasses.dataclass(frozen=True)
class Requirements:
    """What a kernel requires.

    Attributes:
      compute_capabilities: the GPUs that have its instructions; None for every GPU that jgg supports.
      versions: by package, the beginnings of the versions that compile the kernel; {} if all supported versions do.
      conditions: functions of (kind, problem, target) that must be true; the key says what is wrong if one is not.
      tiles: function of (kind, problem) that gives the output tiles that the kernel has, the widest first; () if it
        has tiles of any size.
      shared_memory: function of (problem, target, config) that gives a program's bytes of it, at most.
    """

    compute_capabilities: tuple[int, ...] | None
    versions: Mapping[str, tuple[str, ...]]
    conditions: Mapping[str, Callable[[type[KernelConfig], GroupedGemmProblem, Target], bool]]
    tiles: Callable[[type[KernelConfig], GroupedGemmProblem], tuple[Tile, ...]]
    shared_memory: Callable[[GroupedGemmProblem, Target, KernelConfig], int]


def _hopper_tiles(kind: type[KernelConfig], problem: GroupedGemmProblem) -> tuple[Tile, ...]:
    """Tiles of 256 rows, which two multiprocessors share, in steps of 128 bytes; for dW, steps of 32 rows too."""
    widths: tuple[int, ...] = (256, 128)
    if problem.is_quantized:
        widths = (256,)
    elif kind is KernelConfigForward and problem.out_dtype.itemsize == 4:
        widths = (128,)  # a warpgroup holds a finished tile and the next one
    tiles = [Tile(256, columns, 128 // problem.dtype.itemsize) for columns in widths]
    if kind is KernelConfigDW:
        tiles.insert(1, Tile(256, 256, 32))  # the widest come first
    return tuple(tiles)


def _hopper_shared_memory(problem: GroupedGemmProblem, target: Target, config: KernelConfig) -> int:
    """Bytes of the ring of blocks and of the part of a tile that is being stored; a multiprocessor has half a tile."""
    rows, columns, step = config.tile(problem.w_layout)
    ring = config.num_stages * (rows // 2 + columns) * step * problem.dtype.itemsize
    size = config.result_dtype(problem).itemsize
    stored = columns // 2 if problem.is_quantized else stored_columns(columns, size) * max(1, columns * size // 512)
    return _BARRIERS + _HANDED_OVER + ring + rows // 2 * stored * size


def stored_columns(columns: int, size: int) -> int:
    """How many columns of a tile the hopper kernel stores at once, of results of `size` bytes."""
    return min(columns // 4, 128 // size)


def _plain_shared_memory(problem: GroupedGemmProblem, target: Target, config: KernelConfig) -> int:
    """An upper bound on the bytes of shared memory that the kernel takes as Triton 3.9 compiles it.

    The kernel takes less where few steps make a tile, where rows cannot be loaded ahead, or where Triton finds a better
    way to transpose a tile for its store.
    """
    rows, columns, step = config.tile(problem.w_layout)
    stage = (rows + columns) * step * problem.dtype.itemsize
    return _BARRIERS + _num_stages(problem, target, config) * stage + _store(problem, target, config, rows * columns)


def _num_stages(problem: GroupedGemmProblem, target: Target, config: KernelConfig) -> int:
    """Blocks of each operand that are in shared memory at once."""
    if not multiplies_from_shared_memory(target):
        return max(config.num_stages - 1, 1)  # the blocks of the current step are in registers
    if problem.dtype.itemsize <= 2:
        return config.num_stages
    # TF32 operands must lie along the reduced axis, so other blocks are transposed first, on 10.0 ahead of their step
    return config.num_stages + (2 if target.compute_capability >= 100 else 1)


def _store(problem: GroupedGemmProblem, target: Target, config: KernelConfig, elements: int) -> int:
    """Bytes of the buffer in which a tile is transposed, so that neighbouring threads store neighbouring elements."""
    size = config.result_dtype(problem).itemsize
    is_summed = isinstance(config, KernelConfigDX) and problem.has_topk_weights  # with x, in float32
    if is_summed and not multiplies_from_shared_memory(target):
        size = 4
    is_in_three_passes = problem.dtype.itemsize == 4 and problem.precision == jax.lax.Precision.HIGH
    is_whole = size == 4 and (target.compute_capability // 10 == 9 or is_in_three_passes)
    tile = elements * size
    return tile if is_whole or not problem.rows_are_aligned else min(tile, _PART * 32 * config.num_warps)


def multiplies_from_shared_memory(target: Target, rows: int = ROWS_OF_WARPGROUP) -> bool:
    """Whether tensor cores read the operands of tiles with `rows` rows from shared memory rather than registers."""
    return 90 <= target.compute_capability < 120 and rows >= ROWS_OF_WARPGROUP


def multiplies_from_left(problem: GroupedGemmProblem, target: Target, tile: Tile) -> bool:
    """Whether the plain kernel multiplies by quantized weights from the left, dequantized in registers.

    Hopper's tensor cores (wgmma) take the left operand from there, 64 rows of it, which are columns of the tile. Tiles
    of 16 rows are as fast from the right.
    """
    has_wgmma = target.compute_capability == 90 and not target.is_interpreted and problem.dtype.itemsize == 2
    return has_wgmma and tile.rows >= 32 and tile.columns >= 64


def least_rows(problem: GroupedGemmProblem, target: Target) -> int:
    """The fewest rows that a tile may have.

    In FP8, instructions that read operands from registers give other bits than those that read shared memory, which
    keep fewer bits of a sum. So all tiles use the same kind.
    """
    return ROWS_OF_WARPGROUP if problem.is_quantized and multiplies_from_shared_memory(target) else 16


KERNEL_REQUIREMENTS = {
    "plain": Requirements(
        compute_capabilities=None,
        versions={},
        conditions={
            "kernels multiply in FP8 from compute capability 8.9 on": lambda kind, problem, target: (
                not problem.is_quantized or target.compute_capability >= FP8_COMPUTE_CAPABILITY
            ),
            "rows of K elements must be multiples of 16 bytes": lambda kind, problem, target: (
                not problem.is_quantized or problem.in_features % 16 == 0
            ),
        },
        tiles=lambda kind, problem: (),
        shared_memory=_plain_shared_memory,
    ),
    "hopper": Requirements(
        compute_capabilities=(90,),  # the only one with wgmma instructions
        versions=WARP_SPECIALIZED,
        conditions={
            "Triton's interpreter does not run Gluon": lambda kind, problem, target: not target.is_interpreted,
            "they multiply floats of 16 and 8 bits": lambda kind, problem, target: problem.dtype.itemsize <= 2,
            "they store products of 8-bit floats in 16 bits": lambda kind, problem, target: (
                not problem.is_quantized or problem.out_dtype.itemsize == 2
            ),
            "rows of K and of N elements must be multiples of 16 bytes": lambda kind, problem, target: (
                problem.rows_are_aligned
            ),
            "the gradient of topk_weights is another kernel's epilogue": lambda kind, problem, target: (
                kind is not KernelConfigDX or not problem.has_topk_weights
            ),
        },
        tiles=_hopper_tiles,
        shared_memory=_hopper_shared_memory,
    ),
}


def why_not(kernel: str, kind: type[KernelConfig], problem: GroupedGemmProblem, target: Target) -> str | None:
    """Why a kernel cannot compute the product that a type of configuration is for, or None if it can."""
    asked = KERNEL_REQUIREMENTS[kernel]
    if asked.compute_capabilities is not None and target.compute_capability not in asked.compute_capabilities:
        return f"they are for compute capability {' and '.join(str(each / 10) for each in asked.compute_capabilities)}"
    for reason, is_met in asked.conditions.items():
        if not is_met(kind, problem, target):
            return reason
    other = unlike(asked.versions)
    if other:
        warn_once(f"The warp-specialized kernels are not used, others are: {other}")
    return other


def why_not_quantized(problem: GroupedGemmProblem, target: Target) -> str | None:
    """Why no kernel multiplies x and w of a forward product in FP8, or None if one can."""
    # the plain kernel asks for least
    return why_not("plain", KernelConfigForward, problem, target)


def can_run(problem: GroupedGemmProblem, target: Target, config: KernelConfig) -> bool:
    """Whether the kernel of a configuration can compute a problem, has its tile, and fits into shared memory."""
    kind = type(config)
    if why_not(config.kernel, kind, problem, target) is not None:
        return False
    tiles, tile = tiles_of(config.kernel, kind, problem), config.tile(problem.w_layout)
    if (tiles and tile not in tiles) or tile.rows < least_rows(problem, target):
        return False
    return shared_memory(problem, target, config) <= target.shared_memory


def tiles_of(kernel: str, kind: type[KernelConfig], problem: GroupedGemmProblem) -> tuple[Tile, ...]:
    """The output tiles that a kernel has for a problem, the widest first; () if it has tiles of any size."""
    return KERNEL_REQUIREMENTS[kernel].tiles(kind, problem)


def checked_tile(problem: GroupedGemmProblem, config: KernelConfig) -> Tile:
    """The tile of a configuration.

    Raises: ValueError: its kernel has no such tile.
    """
    tile, tiles = config.tile(problem.w_layout), tiles_of(config.kernel, type(config), problem)
    if tiles and tile not in tiles:
        names, expected = ", ".join(config.blocks(problem.w_layout)), " or ".join(str(tuple(each)) for each in tiles)
        raise ValueError(
            f"{names} of {config.op} with kernel={config.kernel!r}, x in {problem.dtype} and a result in "
            f"{problem.out_dtype} must be {expected}, got {tuple(tile)}."
        )
    return tile


def shared_memory(problem: GroupedGemmProblem, target: Target, config: KernelConfig) -> int:
    """Bytes of shared memory that a configuration's kernel takes, at most, as Triton 3.9 compiles it."""
    return KERNEL_REQUIREMENTS[config.kernel].shared_memory(problem, target, config)
