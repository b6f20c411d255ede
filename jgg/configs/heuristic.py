"""The heuristic that chooses a kernel's configuration for any problem and device."""

import dataclasses

import jax
import jax.numpy as jnp

from jgg.configs.kernel_configs import KernelConfig, KernelConfigDW, KernelConfigDX, KernelConfigForward, Tile
from jgg.configs.requirements import can_run, max_columns, specialized_step
from jgg.core.gpu_target import Target
from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import BLOCK


def heuristic_config(
    kind: type[KernelConfig], problem: GroupedGemmProblem, target: Target, may_specialize: bool = True
) -> KernelConfig:
    """A configuration of the type `kind` for a problem on a device.

    Rules, chosen so that no kernel spills registers:

    - The warp-specialized kernel is the fastest for most, where it can run and groups are large enough to fill its
      tiles. `may_specialize=False` leaves it out. It gathers rows as it loads them where each of its tiles takes many
      steps and there are few columns of tiles, and for dW where rows of the other operand are short; elsewhere a
      copy first is faster. Rows that forward and dX gather they had better gather again for the next column soon: in a
      narrow band.
    - In FP8 it is for all where it can run, with a wide band, and gathers as it loads where there are few columns of
      tiles. Elsewhere a tile's products of a step take registers beside its sums, so it is no wider than 128 columns.
    - A [128, 256] tile on 8 warps feeds the tensor cores of a GPU with TMA best, given an axis long enough to fill it.
      Elsewhere, and where the epilogue needs registers too, tiles are narrower.
    - Rows that are no multiple of 16 bytes are loaded element by element, whose pointers fill the registers.
    - float32 takes twice the shared memory, so half the step; a device with less of it gets fewer stages.
    - Groups of few rows get tiles of fewer rows, down to 16, since the rest of a tile is waste. With 16 rows loading
      weights is all that takes time: where TMA does, longer steps keep more of them on their way.
    - With TMA, reordering rows in a copy costs less than losing TMA, except for gathers of an x that is multiplied with
      few columns.
    - IEEE float32 has no tensor cores: each thread holds operands in registers, so tiles and steps are small.
    - Where shared memory is too small for all that, as for float32 results of wide tiles, tiles are narrower.
    """
    if may_specialize and (problem.is_quantized or _fills_specialized_tiles(kind, problem)):
        gathers = _gathers_in_specialized(kind, problem)
        specialized = dataclasses.replace(
            specialized_config(kind, problem.w_layout, max_columns(kind, problem), specialized_step(problem)),
            fuse_gather=gathers,
            band=2 if gathers and not problem.is_quantized and kind is not KernelConfigDW else 8,
        )
        if can_run(problem, target, specialized):
            return specialized
    if problem.dtype == jnp.float32 and problem.precision == jax.lax.Precision.HIGHEST:
        config = _choose_ieee_float32(kind, problem, target)
    else:
        config = _choose_dw(problem, target) if kind is KernelConfigDW else _choose_by_rows(kind, problem, target)
    return _fitted(problem, target, config)


def specialized_config(
    kind: type[KernelConfig], w_layout: str, columns: int = 256, step: int = 64
) -> KernelConfig:  # fmt: skip
    """A configuration of the warp-specialized kernel, with output tiles of that many columns."""
    tile = Tile(256, columns, step)
    return kind.of_tile(tile, w_layout, warp_specialized=True, num_stages={256: 4, 128: 6}[columns])


def has_rows_for_specialized(problem: GroupedGemmProblem) -> bool:
    """Whether groups have more rows, on average, than one warpgroup multiplies."""
    return problem.rows_of_groups > 64 * problem.num_experts


def _fills_specialized_tiles(kind, problem):
    rows, columns, _ = kind.sizes(problem)
    return has_rows_for_specialized(problem) and columns > 128 and (kind is not KernelConfigDW or rows > 128)


def _gathers_in_specialized(kind, problem):
    if kind is KernelConfigDW:  # a copy takes long beside the product of each row with one of few features
        other = problem.out_features if problem.permute_x else problem.in_features
        return (problem.permute_x or problem.permute_y) and other <= 2048
    _, columns, reduced = kind.sizes(problem)
    is_permuted = problem.permute_x if kind is KernelConfigForward else problem.permute_y
    return is_permuted and (problem.is_quantized or reduced >= 1024) and _is_narrow(columns)


def _is_narrow(columns):
    """Whether rows are loaded for so few columns of tiles that gathering them each time costs less than a copy."""
    return columns < 8192


def _choose_by_rows(kind, problem, target):
    """Of the forward or the dX kernel."""
    _, num_columns, _ = kind.sizes(problem)
    fusing = {"fuse_gather": not target.has_tma}
    has_heavy_epilogue = kind is KernelConfigDX and problem.has_topk_weights
    if kind is KernelConfigForward:
        fusing = {"fuse_gather": not target.has_tma or _is_narrow(num_columns), "fuse_scatter": not target.has_tma}
        has_heavy_epilogue = problem.permute_x and (problem.has_topk_weights or problem.has_bias)
    rows, columns, step = _block_rows(problem, 128), 128, _step(problem)
    if not problem.rows_are_aligned:
        columns = 32 if has_heavy_epilogue or problem.has_topk_weights or problem.has_bias else 64
        rows = min(rows, columns)
    elif not _has_wide_tiles(problem, target):
        columns = 64 if has_heavy_epilogue else 128
    elif num_columns > 128 and rows == 128 and not has_heavy_epilogue:
        columns = 256
    if (rows, columns) == (16, 128) and _has_wide_tiles(problem, target):
        step = 128
    num_warps = 8 if rows == 128 else 4
    return kind.of_tile(
        Tile(rows, columns, step), problem.w_layout, num_warps=num_warps, num_stages=_stages(problem, target), **fusing
    )  # fmt: skip


def _choose_dw(problem, target):
    num_rows, num_columns, _ = KernelConfigDW.sizes(problem)
    rows = columns = 128
    if not problem.rows_are_aligned:
        rows = columns = 64
    elif not target.has_tma:
        rows = 64
        columns = 64 if problem.dtype.itemsize == 4 else 128  # TF32 products in three passes hold more at once
    elif _has_wide_tiles(problem, target) and num_columns > 128 and num_rows > 64:
        columns = 256
    return KernelConfigDW.of_tile(
        Tile(rows, columns, _step(problem)),
        problem.w_layout,
        num_warps=8 if rows == 128 else 4,
        num_stages=_stages(problem, target),
        fuse_gather=not target.has_tma,
    )


def _choose_ieee_float32(kind, problem, target):
    size = 64 if problem.rows_are_aligned else 32
    rows = size if kind is KernelConfigDW else _block_rows(problem, size)
    return kind.of_tile(
        Tile(rows, size, 16), problem.w_layout, num_warps=8 if size == 64 else 4, num_stages=_stages(problem, target)
    )  # fmt: skip


def _fitted(problem, target, config):
    """The configuration with tiles half as wide, and only then with fewer stages, while it takes too much memory."""
    while not can_run(problem, target, config) and config.num_stages > 1:
        tile = config.tile(problem.w_layout)
        longest = "columns" if tile.columns >= tile.rows else "rows"
        if (length := getattr(tile, longest)) > 64:
            config = config.with_tile(tile._replace(**{longest: length // 2}), problem.w_layout)
        else:
            config = dataclasses.replace(config, num_stages=config.num_stages - 1)
    return config


def _block_rows(problem, largest):
    """Rows of a tile: no more than the next power of two of an even share."""
    share = -(-problem.rows_of_groups // problem.num_experts)
    return min(largest, max(16, 1 << (share - 1).bit_length()))


def _has_wide_tiles(problem, target):
    return target.has_tma and problem.dtype.itemsize == 2


def _step(problem):
    if problem.is_quantized:
        return BLOCK
    return 64 if problem.dtype.itemsize == 2 and problem.rows_are_aligned else 32


def _stages(problem, target):
    if target.compute_capability >= 100:
        return 3  # the epilogue needs shared memory of its own there
    # a fourth block of float32 spills in dX tiles of 32 rows
    return 4 if target.shared_memory > 110_000 and problem.dtype.itemsize <= 2 else 3
