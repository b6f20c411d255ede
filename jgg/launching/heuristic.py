"""The heuristic: which kernel to run for any problem and device, with which configuration.

The kernels for one generation of GPUs come first, with the tables `_CHOICES` and `_TRIALS`; the plain kernel follows.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jgg.core.gpu_target import Target
from jgg.core.problem import ROWS_OF_STORED, GroupedGemmProblem
from jgg.core.quantized import BLOCK
from jgg.launching.kernel_configs import (
    KernelConfig,
    KernelConfigDW,
    KernelConfigDX,
    KernelConfigForward,
    Tile,
    power_of_2,
)
from jgg.launching.requirements import can_run, least_rows, multiplies_from_left, shared_memory, tiles_of

_SHORT_STEP = 32  # rows of a step of the hopper kernel's dW; 64 is the other choice
_ROWS_FOR_SHORT_STEPS = 224  # of a group, on average
# Tiles of the plain kernel where it dequantizes w in registers and multiplies by it from the left: the most rows of
# a group, on average; the tile; stages; programs per multiprocessor. Measured on an H100: python -m benchmarks.rows.
_TILES_OF_STORED: tuple[tuple[float, Tile, int, int], ...] = (
    (24, Tile(32, 128, 64), 4, 4),
    (64, Tile(64, 128, 64), 3, 4),
    (math.inf, Tile(128, 128, 64), 4, 2),
)
_MOST_ROWS_OF_FP8 = 320  # which takes longer to dequantize before the product than MXFP4 takes to unpack
_LEAST_ROWS_OF_STORED = 12  # with fewer, tiles of 16 rows are as fast
_TILES_AT_ONCE, _TILES_OF_THIRD = 264, 44  # two for each multiprocessor of an H100, and one for each third of them
_ROWS_OF_ONE_GROUP = 128  # up to which one matrix is read by tiles of few columns, so that all multiprocessors read it


def heuristic_config(kind: type[KernelConfig], problem: GroupedGemmProblem, target: Target) -> KernelConfig:
    """A configuration of the type `kind` for a problem on a device.

    It selects the kernel for the device's generation of GPUs, if that can run and is expected to be the fastest, else
    the plain kernel.
    """
    for choose in _CHOICES.values():
        config = choose(kind, problem)
        if config is not None and can_run(problem, target, config):
            return config
    return plain_config(kind, problem, target)


def trial_configs(kind: type[KernelConfig], problem: GroupedGemmProblem, target: Target) -> list[KernelConfig]:
    """The configurations that `jgg tune` tries for the kernel of the device's generation; [] if that cannot run."""
    configs = [config for trials in _TRIALS.values() for config in trials(kind, problem)]
    return [config for config in configs if can_run(problem, target, config)]


def hopper_config(kind: type[KernelConfig], w_layout: str, columns: int = 256, step: int = 64) -> KernelConfig:
    """A configuration of the hopper kernel, with output tiles of `columns` columns."""
    stages = {256: 4, 128: 6}[columns] * (2 if step == _SHORT_STEP else 1)
    return kind.of_tile(Tile(256, columns, step), w_layout, kernel="hopper", num_stages=stages)


def _hopper_configs(kind: type[KernelConfig], problem: GroupedGemmProblem) -> list[KernelConfig]:
    """A configuration for each tile of the hopper kernel, the widest first."""
    tiles = tiles_of("hopper", kind, problem)
    return [hopper_config(kind, problem.w_layout, tile.columns, tile.step) for tile in tiles]


def _choose_hopper(kind: type[KernelConfig], problem: GroupedGemmProblem) -> KernelConfig | None:
    """The hopper kernel's configuration, or None if groups have too few rows or operands too few features for it.

    FP8 products run in this kernel at all sizes.
    """
    rows, columns, _ = kind.sizes(problem)
    fills_tiles = _has_rows_for_hopper(problem) and columns > 128 and (kind is not KernelConfigDW or rows > 128)
    fills_tiles &= kind is not KernelConfigForward or not _has_few_tiles(problem)
    if not (problem.is_quantized or fills_tiles):
        return None
    gathers = _gathers_in_hopper(kind, problem)
    # narrow where rows are gathered: the next column of tiles gathers the same rows soon after
    band = 2 if gathers and not problem.is_quantized and kind is not KernelConfigDW else 8
    config, *_ = _hopper_configs(kind, problem)
    is_one_matrix = kind is KernelConfigForward and problem.is_dense and not problem.is_quantized
    if is_one_matrix and _num_tiles(problem, 256) <= _TILES_OF_THIRD:
        config = hopper_config(kind, problem.w_layout, 128)  # 512 rows, K = 2048, N = 4096: 26 us rather than 34
    # short steps: more are loaded ahead, and less of a group's last is empty; in smaller groups stores take the time
    has_rows = problem.rows_of_groups >= _ROWS_FOR_SHORT_STEPS * problem.num_experts
    if kind is KernelConfigDW and has_rows and not gathers:
        config = hopper_config(kind, problem.w_layout, step=_SHORT_STEP)
    return dataclasses.replace(config, fuse_gather=gathers, band=band)


def _hopper_trials(kind: type[KernelConfig], problem: GroupedGemmProblem) -> list[KernelConfig]:
    """Configurations with the widest tile and, for few columns or a number that 256 does not divide, narrower ones."""
    if not _has_rows_for_hopper(problem):
        return []
    num_columns, configs = kind.sizes(problem).columns, _hopper_configs(kind, problem)
    widest = configs[0].tile(problem.w_layout).columns
    takes_narrow = num_columns % 256 or num_columns <= 512
    return [config for config in configs if takes_narrow or config.tile(problem.w_layout).columns == widest]


def _has_rows_for_hopper(problem: GroupedGemmProblem) -> bool:
    """Whether groups have more rows, on average, than one warpgroup multiplies, or one group than plain tiles serve."""
    return problem.rows_of_groups > (_ROWS_OF_ONE_GROUP if problem.is_dense else 64) * problem.num_experts


def _has_few_tiles(problem: GroupedGemmProblem) -> bool:
    """Whether one matrix takes no more tiles of 64 x 64 than an H100's multiprocessors compute at once, two each.

    Tiles of 256 x 256 would leave most of them idle: 256 rows, K = 2048 and N = 512 take 14 us rather than 35.
    """
    return problem.is_dense and not problem.is_symbolic and _num_tiles(problem, 64) <= _TILES_AT_ONCE


def _row_tiles(problem: GroupedGemmProblem, rows: int) -> int:
    """How many tiles of this many rows an even distribution of the rows over the groups makes."""
    return problem.num_experts * math.ceil(problem.rows_of_groups / problem.num_experts / rows)


def _num_tiles(problem: GroupedGemmProblem, size: int) -> int:
    return math.ceil(problem.num_rows / size) * math.ceil(problem.out_features / size)


def _gathers_in_hopper(kind: type[KernelConfig], problem: GroupedGemmProblem) -> bool:
    """Whether rows are gathered as they are loaded; otherwise it is faster to copy them into expert order first."""
    if kind is KernelConfigDW:  # compared with the product, a copy takes long if rows have few features
        other = problem.out_features if problem.permute_x else problem.in_features
        return (problem.permute_x or problem.permute_y) and other <= 2048
    _, columns, reduced = kind.sizes(problem)
    is_permuted = problem.permute_x if kind is KernelConfigForward else problem.permute_y
    # in a tile of many steps, and for few columns of tiles
    return is_permuted and (problem.is_quantized or reduced >= 1024) and _is_narrow(columns)


# For each kernel of one generation of GPUs, a function of (kind, problem). In _CHOICES it returns the configuration to
# choose, or None; in _TRIALS it returns the list of configurations that `jgg tune` tries.
_CHOICES = {"hopper": _choose_hopper}
_TRIALS = {"hopper": _hopper_trials}


def plain_config(kind: type[KernelConfig], problem: GroupedGemmProblem, target: Target) -> KernelConfig:
    """A configuration of the plain kernel, which runs on every GPU.

    Rules, chosen so that no kernel spills registers:

    - A [128, 256] tile on 8 warps feeds the tensor cores of a GPU with TMA best, given an axis long enough to fill it.
      Elsewhere, and where the epilogue needs registers too, tiles are narrower.
    - In FP8 the products of a step take registers in addition to the tile's sums, so tiles have at most 128 columns. On
      some GPUs they also have at least 64 rows: see `least_rows`.
    - Rows whose size is not a multiple of 16 bytes are loaded element by element, and the pointers fill the registers.
    - float32 takes twice the shared memory, so steps are half as long. Less shared memory means fewer stages.
    - Groups of few rows get tiles of fewer rows, down to 16, since the rest of a tile would be wasted. Tiles of 16
      rows spend their time loading weights. Where TMA loads them, longer steps keep more loads in flight; in the
      forward pass two programs share each multiprocessor, so that all have work when there are few tiles.
    - With TMA, reordering rows in a copy costs less than losing TMA, unless x is gathered and multiplied with few
      columns.
    - With few columns, most of the time goes into loading rows. More programs with smaller tiles keep more loads in
      flight, and rows are gathered while they are loaded, since a copy would read and write all of them once more.
      With few rows too, there are few tiles: they have few rows, and nearly all that a tile reads is in flight at once.
    - Few rows times one matrix get tiles of few columns, so that all multiprocessors read the matrix, and long steps.
    - IEEE float32 has no tensor cores: each thread holds operands in registers, so tiles and steps are small.
    - Where shared memory is too small for this, for example with float32 results of wide tiles, tiles are narrower.
    """
    if problem.dtype == jnp.float32 and problem.precision == jax.lax.Precision.HIGHEST:
        config = _choose_ieee_float32(kind, problem, target)
    else:
        config = _choose_dw(problem, target) if kind is KernelConfigDW else _choose_by_rows(kind, problem, target)
    return _fitted(problem, target, config)


def stored_config(problem: GroupedGemmProblem, target: Target, w_is_packed: bool) -> KernelConfigForward | None:
    """A configuration of the plain kernel that reads weights in their stored form and multiplies by them from the left.

    None if another way is faster, because groups have too few or too many rows or w has too few columns, or if the GPU
    cannot run it.
    """
    rows, columns = problem.rows_of_groups / problem.num_experts, problem.out_features
    is_filled = problem.num_experts * (columns // 128) >= target.num_sms
    most = ROWS_OF_STORED if w_is_packed else _MOST_ROWS_OF_FP8
    if not (problem.rows_are_aligned and is_filled and _LEAST_ROWS_OF_STORED < rows <= most):
        return None
    _, tile, stages, programs = next(row for row in _TILES_OF_STORED if rows <= row[0])
    if not multiplies_from_left(problem, target, tile):
        return None
    options = {"num_warps": 4, "num_stages": stages, "programs_per_sm": programs, "fuse_scatter": False}
    return KernelConfigForward.of_tile(tile, problem.w_layout, **options)


def _is_narrow(columns: int) -> bool:
    """Whether rows are loaded for so few columns of tiles that gathering them each time costs less than a copy."""
    return columns < 8192


def _choose_by_rows(kind: type[KernelConfig], problem: GroupedGemmProblem, target: Target) -> KernelConfig:
    """A configuration of the forward or the dX kernel."""
    _, num_columns, _ = kind.sizes(problem)
    fusing = {"fuse_gather": not target.has_tma}
    has_heavy_epilogue = kind is KernelConfigDX and problem.has_topk_weights
    if kind is KernelConfigForward:
        fusing = {"fuse_gather": not target.has_tma or _is_narrow(num_columns), "fuse_scatter": not target.has_tma}
        has_heavy_epilogue = problem.permute_x and (problem.has_topk_weights or problem.has_bias)
    rows, columns, step = max(_block_rows(problem, 128), least_rows(problem, target)), 128, _step(problem)
    if not problem.rows_are_aligned:
        columns = 32 if has_heavy_epilogue or problem.has_topk_weights or problem.has_bias else 64
        rows = min(rows, columns)
    elif not _has_wide_tiles(problem, target):
        columns = 64 if has_heavy_epilogue else 128
    elif num_columns > 128 and rows == 128 and not has_heavy_epilogue:
        columns = 256
    if _is_slim(problem, target, num_columns) and not has_heavy_epilogue:
        return _choose_slim(kind, problem, target, rows, num_columns, fusing)
    if kind is KernelConfigForward and _reads_one_matrix(problem, target, num_columns):
        tile, stages, programs = (Tile(rows, 32, 256), 4, 1) if rows <= 64 else (Tile(64, 64, 128), 6, 2)
        options = {"num_warps": 4, "num_stages": stages, "programs_per_sm": programs}
        return kind.of_tile(tile, problem.w_layout, **options, **fusing)
    options = {"num_warps": 8 if rows == 128 else 4, "num_stages": _stages(problem, target)}
    if (rows, columns) == (16, 128) and _has_wide_tiles(problem, target):
        step = 128
        if kind is KernelConfigForward:
            options |= {"num_stages": 3, "programs_per_sm": 2}
    return kind.of_tile(Tile(rows, columns, step), problem.w_layout, **options, **fusing)


def _choose_dw(problem: GroupedGemmProblem, target: Target) -> KernelConfig:
    num_rows, num_columns, _ = KernelConfigDW.sizes(problem)
    rows = columns = 128
    if _is_slim(problem, target, min(num_rows, num_columns)):
        tile = Tile(min(rows, power_of_2(num_rows)), min(columns, power_of_2(num_columns)), 128)
        return KernelConfigDW.of_tile(
            tile, problem.w_layout, num_warps=4, num_stages=3, programs_per_sm=2, fuse_gather=True
        )
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


def _is_slim(problem: GroupedGemmProblem, target: Target, columns: int) -> bool:
    """Whether a product has as few columns as an adapter's rank, so that reading the other operand takes the time."""
    return columns <= 64 and problem.rows_are_aligned and _has_wide_tiles(problem, target)


def _reads_one_matrix(problem: GroupedGemmProblem, target: Target, num_columns: int) -> bool:
    """Whether few rows are multiplied by one matrix, of whose usual tiles there are fewer than multiprocessors."""
    is_read = problem.is_dense and problem.num_rows <= _ROWS_OF_ONE_GROUP and num_columns < 128 * target.num_sms
    is_read |= _has_few_tiles(problem)
    return is_read and problem.rows_are_aligned and _has_wide_tiles(problem, target)


def _choose_slim(
    kind: type[KernelConfig],
    problem: GroupedGemmProblem,
    target: Target,
    rows: int,
    num_columns: int,
    fusing: dict[str, bool],
) -> KernelConfig:
    """A configuration of the forward or the dX kernel for few columns: tiles so small that several share an SM."""
    columns, is_permuted = power_of_2(num_columns), problem.permute_x or problem.permute_y
    if kind is KernelConfigForward and not problem.is_symbolic:
        rows = min(rows, 64)
        if _row_tiles(problem, rows) <= target.num_sms:
            while rows > 16 and _row_tiles(problem, rows) < target.num_sms:
                rows //= 2
            # w's rows are so short that TMA would load a few bytes at a time
            options = {"num_warps": 4, "num_stages": 5, "programs_per_sm": 2, "use_tma_load_w": False}
            return kind.of_tile(Tile(rows, columns, 256), problem.w_layout, **options, **fusing)
    few = columns <= 32 or not is_permuted
    return kind.of_tile(
        Tile(min(rows, 64 if few else 128), columns, 128 if few else 64),
        problem.w_layout,
        num_warps=4,
        num_stages=min(3 if few else 4, _stages(problem, target)),
        programs_per_sm=3 if few else 2,
        **fusing,
    )


def _choose_ieee_float32(kind: type[KernelConfig], problem: GroupedGemmProblem, target: Target) -> KernelConfig:
    size = 64 if problem.rows_are_aligned else 32
    rows = size if kind is KernelConfigDW else _block_rows(problem, size)
    return kind.of_tile(
        Tile(rows, size, 16), problem.w_layout, num_warps=8 if size == 64 else 4, num_stages=_stages(problem, target)
    )


def _fitted(problem: GroupedGemmProblem, target: Target, config: KernelConfig) -> KernelConfig:
    """The configuration, made to fit shared memory: its tile's longer side is halved down to 64, then stages go."""
    while shared_memory(problem, target, config) > target.shared_memory and config.num_stages > 1:
        tile = config.tile(problem.w_layout)
        longest = "columns" if tile.columns >= tile.rows else "rows"
        if (length := getattr(tile, longest)) > 64:
            config = config.with_tile(tile._replace(**{longest: length // 2}), problem.w_layout)
        else:
            config = dataclasses.replace(config, num_stages=config.num_stages - 1)
    return config


def _block_rows(problem: GroupedGemmProblem, largest: int) -> int:
    """Rows of a tile: the least power of two, from 16 to `largest`, that holds an expert's even share of the rows."""
    share = -(-problem.rows_of_groups // problem.num_experts)
    return min(largest, power_of_2(share))


def _has_wide_tiles(problem: GroupedGemmProblem, target: Target) -> bool:
    return target.has_tma and problem.dtype.itemsize == 2


def _step(problem: GroupedGemmProblem) -> int:
    if problem.is_quantized:
        return BLOCK
    return 64 if problem.dtype.itemsize == 2 and problem.rows_are_aligned else 32


def _stages(problem: GroupedGemmProblem, target: Target) -> int:
    if target.compute_capability >= 100:
        return 3  # the epilogue needs shared memory of its own there
    # a fourth block of float32 spills in dX tiles of 32 rows
    return 4 if target.shared_memory > 110_000 and problem.dtype.itemsize <= 2 else 3
