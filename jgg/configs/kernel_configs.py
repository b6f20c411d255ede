"""Kernel configurations: tile sizes and TMA switches, and a heuristic that chooses them for any problem."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jgg.arguments import as_flag, as_int
from jgg.configs.shared_memory import shared_memory
from jgg.configs.warp_specialization import max_columns, why_not
from jgg.gpu_target import Target
from jgg.problem import GroupedGemmProblem

_BLOCK = "a power of two of at least 16"


@dataclasses.dataclass(frozen=True)
class _KernelConfig:
    """What the three kernels' configurations share.

    Attributes:
      block_m, block_n, block_k: tile sizes along M, N and K, powers of two of at least 16. The kernel's output tile
        has two of them, its main loop steps by the third.
      num_warps: warps of a program, 4 or 8.
      num_stages: blocks of each operand in flight in shared memory.
      band: row tiles that one column of tiles runs over before the next column; larger bands reuse weights more.
      programs_per_sm: persistent programs for each multiprocessor.
      warp_specialized: run the kernel of `jgg.kernels.hopper`, with output tiles of [256, 128] or [256, 256] and
        steps of 64, where `jgg.configs.requirements` says that it can; elsewhere the heuristic chooses. It loads by
        TMA what it does not gather, leaves scatter to a copy, and uses neither num_warps nor programs_per_sm.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 4
    band: int = 8
    programs_per_sm: int = 1
    warp_specialized: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if field.type is bool:
                value = as_flag(name, value)
            elif name.startswith("block_"):
                value = as_int(name, value, least=16, expected=_BLOCK)
                if value & (value - 1):
                    raise ValueError(f"{name} must be {_BLOCK}, got {value}.")
            else:
                value = as_int(name, value, least=1)
            object.__setattr__(self, name, value)
        if self.num_warps not in (4, 8):
            raise ValueError(f"num_warps must be 4 or 8, got {self.num_warps}.")


@dataclasses.dataclass(frozen=True)
class KernelConfigForward(_KernelConfig):
    """Configuration of the forward kernel: output tiles [block_m, block_n], steps of block_k.

    A TMA switch takes effect where the device has TMA, the rows are contiguous (no gather) and their length
    is a multiple of 16 bytes; elsewhere that operand goes through pointers.

    Attributes:
      use_tma_load_x, use_tma_load_w: load x, load w by TMA.
      fuse_gather: read x through gather_indices inside the kernel, by pointers, rather than from a copy in expert order
        that a small kernel makes first.
      fuse_scatter: write y in token order inside the kernel, by pointers, rather than have a small kernel reorder it.
    """

    use_tma_load_x: bool = True
    use_tma_load_w: bool = True
    fuse_gather: bool = True
    fuse_scatter: bool = True


@dataclasses.dataclass(frozen=True)
class KernelConfigDX(_KernelConfig):
    """Configuration of the dX kernel: output tiles [block_m, block_k], steps of block_n.

    Attributes:
      use_tma_load_dy, use_tma_load_w: load dy, load w by TMA, as in KernelConfigForward.
      fuse_gather: read dy through gather_indices inside the kernel, as in KernelConfigForward.
    """

    block_n: int = 64
    block_k: int = 128
    use_tma_load_dy: bool = True
    use_tma_load_w: bool = True
    fuse_gather: bool = True


@dataclasses.dataclass(frozen=True)
class KernelConfigDW(_KernelConfig):
    """Configuration of the dW kernel: output tiles [block_n, block_k], steps of block_m rows.

    Attributes:
      use_tma_load_x, use_tma_load_dy: load x, load dy by TMA, as in KernelConfigForward.
      fuse_gather: read x and dy through gather_indices inside the kernel, as in KernelConfigForward; dy that is scaled
        by topk_weights is copied all the same, and so is dy in the warp-specialised kernel if x is gathered.
    """

    block_m: int = 64
    block_k: int = 128
    use_tma_load_x: bool = True
    use_tma_load_dy: bool = True
    fuse_gather: bool = True


KernelConfig = KernelConfigForward | KernelConfigDX | KernelConfigDW
CONFIG_TYPES: dict[str, type[KernelConfig]] = {
    "forward": KernelConfigForward,
    "dx": KernelConfigDX,
    "dw": KernelConfigDW,
}


def heuristic_config(
    op: str, problem: GroupedGemmProblem, target: Target, may_specialize: bool = True
) -> KernelConfig:  # fmt: skip
    """A configuration for the product `op`, "forward", "dx" or "dw", of a problem on a device.

    Its reasons, tile by tile, each so that nothing spills:

    - The warp-specialised kernel is the fastest for most, where it can run and groups are large enough to fill its
      tiles. `may_specialize=False` leaves it out. It gathers rows as it loads them where each of its tiles takes many
      steps and there are few columns of tiles, and for dW where rows of the other operand are short; elsewhere a
      copy first is faster. Rows that forward and dX gather they had better gather again for the next column soon: in a
      narrow band.
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
    if may_specialize and _fills_specialized_tiles(op, problem):
        gathers = _gathers_in_specialized(op, problem)
        tile = (256, 4) if max_columns(op, problem) == 256 else (128, 6)
        specialized = dataclasses.replace(
            specialized_config(op, problem.w_layout, *tile),
            fuse_gather=gathers,
            band=2 if gathers and op != "dw" else 8,
        )
        if can_run(op, problem, target, specialized):
            return specialized
    if _is_ieee_float32(problem):
        config = _choose_ieee_float32(op, problem, target)
    else:
        config = _choose_dw(problem, target) if op == "dw" else _choose_by_rows(op, problem, target)
    return _fitted(op, problem, target, config)


def can_run(op: str, problem: GroupedGemmProblem, target: Target, config: KernelConfig) -> bool:
    """Whether a device has the instructions, registers and shared memory for a product's kernel of a configuration."""
    if config.warp_specialized:
        columns = getattr(config, f"block_{output_axes(op, problem.w_layout)[1]}")
        if why_not(op, problem, target) is not None or columns > max_columns(op, problem):
            return False
    return shared_memory(op, problem, target, config) <= target.shared_memory


def _fitted(op: str, problem: GroupedGemmProblem, target: Target, config: KernelConfig) -> KernelConfig:
    """The configuration with tiles half as wide, and only then with fewer stages, while it takes too much memory."""
    rows, columns, _ = (f"block_{axis}" for axis in output_axes(op, problem.w_layout))
    while not can_run(op, problem, target, config) and config.num_stages > 1:
        widest = max(columns, rows, key=lambda block: getattr(config, block))
        shrunk: dict[str, Any] = {widest: getattr(config, widest) // 2}
        if getattr(config, widest) <= 64:
            shrunk = {"num_stages": config.num_stages - 1}
        config = dataclasses.replace(config, **shrunk)
    return config


def _choose_by_rows(op: str, problem: GroupedGemmProblem, target: Target) -> KernelConfig:
    """Of the forward or the dX kernel."""
    if op == "forward":
        features, columns, reduced = problem.out_features, "n", "k"
        fusing: dict[str, Any] = {
            "fuse_gather": not target.has_tma or _is_narrow(features),
            "fuse_scatter": not target.has_tma,
        }
        has_heavy_epilogue = problem.permute_x and (problem.has_topk_weights or problem.has_bias)
    else:
        features, columns, reduced = problem.in_features, "k", "n"
        fusing = {"fuse_gather": not target.has_tma}
        has_heavy_epilogue = problem.has_topk_weights
    block_rows = _block_rows(problem, 128)
    has_epilogue = has_heavy_epilogue or problem.has_topk_weights or problem.has_bias
    block_columns = 128
    if not problem.rows_are_aligned:
        block_columns = 32 if has_epilogue else 64
        block_rows = min(block_rows, block_columns)
    elif has_heavy_epilogue and not _has_wide_tiles(problem, target):
        block_columns = 64
    elif _has_wide_tiles(problem, target) and features > 128 and block_rows == 128 and not has_heavy_epilogue:
        block_columns = 256
    step = _step(problem)
    if block_rows == 16 and block_columns == 128 and _has_wide_tiles(problem, target):
        step = 128
    blocks: dict[str, Any] = {f"block_{columns}": block_columns, f"block_{reduced}": step}
    return CONFIG_TYPES[op](
        block_m=block_rows,
        num_warps=8 if block_rows == 128 else 4,
        num_stages=_stages(problem, target),
        **blocks,
        **fusing,
    )


def _fills_specialized_tiles(op: str, problem: GroupedGemmProblem) -> bool:
    axes = {
        "forward": (problem.out_features,),
        "dx": (problem.in_features,),
        "dw": (problem.in_features, problem.out_features),
    }
    return has_rows_for_specialized(problem) and min(axes[op]) > 128


def _gathers_in_specialized(op: str, problem: GroupedGemmProblem) -> bool:
    if op == "dw":  # a copy takes long beside the product of each row with one of few features
        other = problem.out_features if problem.permute_x else problem.in_features
        return (problem.permute_x or problem.permute_y) and other <= 2048
    if op == "forward":
        permuted, reduced, columns = problem.permute_x, problem.in_features, problem.out_features
    else:
        permuted, reduced, columns = problem.permute_y, problem.out_features, problem.in_features
    return permuted and reduced >= 1024 and _is_narrow(columns)


def has_rows_for_specialized(problem: GroupedGemmProblem) -> bool:
    """Whether groups have more rows, on average, than one warpgroup multiplies."""
    return problem.rows_of_groups > 64 * problem.num_experts


def specialized_config(op: str, w_layout: str, columns: int = 256, num_stages: int = 4) -> KernelConfig:
    """A configuration of the warp-specialised kernel, with output tiles of that many columns."""
    axes = output_axes(op, w_layout)
    blocks: dict[str, Any] = {f"block_{axis}": size for axis, size in zip(axes, (256, columns, 64), strict=True)}
    return CONFIG_TYPES[op](warp_specialized=True, num_stages=num_stages, **blocks)


def output_axes(op: str, w_layout: str) -> tuple[str, str, str]:
    """Which of "m", "n" and "k" are the rows and the columns of a product's output tiles, and which is reduced.

    dW is stored as w is, [N, K] for "enk" and [K, N] for "ekn".
    """
    if op == "dw":
        return ("n", "k", "m") if w_layout == "enk" else ("k", "n", "m")
    return ("m", "n", "k") if op == "forward" else ("m", "k", "n")


def _is_narrow(columns: int) -> bool:
    """Whether rows are loaded for so few columns of tiles that gathering them each time costs less than a copy."""
    return columns < 8192


def _choose_dw(problem: GroupedGemmProblem, target: Target) -> KernelConfigDW:
    left, right, _ = output_axes("dw", problem.w_layout)
    features = {"k": problem.in_features, "n": problem.out_features}
    block_left = block_right = 128
    if not problem.rows_are_aligned:
        block_left = block_right = 64
    elif not target.has_tma:
        block_left = 64
        block_right = 64 if problem.dtype.itemsize == 4 else 128  # TF32 products in three passes hold more at once
    elif _has_wide_tiles(problem, target) and features[right] > 128 and features[left] > 64:
        block_right = 256
    blocks: dict[str, Any] = {f"block_{left}": block_left, f"block_{right}": block_right}
    return KernelConfigDW(
        block_m=_step(problem),
        num_warps=8 if block_left == 128 else 4,
        num_stages=_stages(problem, target),
        fuse_gather=not target.has_tma,
        **blocks,
    )


def _choose_ieee_float32(op: str, problem: GroupedGemmProblem, target: Target) -> KernelConfig:
    size = 64 if problem.rows_are_aligned else 32
    blocks: dict[str, Any] = {"block_m": _block_rows(problem, size), "block_n": size, "block_k": size}
    blocks[{"forward": "block_k", "dx": "block_n", "dw": "block_m"}[op]] = 16
    return CONFIG_TYPES[op](num_warps=8 if size == 64 else 4, num_stages=_stages(problem, target), **blocks)


def _block_rows(problem: GroupedGemmProblem, largest: int) -> int:
    """Rows of a tile: no more than the next power of two of an even share."""
    share = -(-problem.rows_of_groups // problem.num_experts)
    return min(largest, max(16, 1 << (share - 1).bit_length()))


def _is_ieee_float32(problem: GroupedGemmProblem) -> bool:
    return problem.dtype == jnp.float32 and problem.precision == jax.lax.Precision.HIGHEST


def _has_wide_tiles(problem: GroupedGemmProblem, target: Target) -> bool:
    return target.has_tma and problem.dtype.itemsize == 2


def _step(problem: GroupedGemmProblem) -> int:
    step = 64 if problem.dtype.itemsize == 2 else 32
    return step if problem.rows_are_aligned else 32


def _stages(problem: GroupedGemmProblem, target: Target) -> int:
    if target.compute_capability >= 100:
        return 3  # the epilogue needs shared memory of its own there
    # a fourth block of float32 spills in dX tiles of 32 rows
    return 4 if target.shared_memory > 110_000 and problem.dtype.itemsize == 2 else 3
