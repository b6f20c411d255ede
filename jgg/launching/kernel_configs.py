"""Configurations of the three products: which kernel runs, its tile sizes and its TMA switches."""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from jgg.core.arguments import as_flag, as_int, check_one_of
from jgg.core.problem import GroupedGemmProblem

KERNELS = ("plain", "hopper")
_BLOCK = "a power of two of at least 16"


class Tile(NamedTuple):
    """Rows and columns of a kernel's output tile, and the step along the reduced axis; or the sizes of those axes."""

    rows: int
    columns: int
    step: int


@dataclasses.dataclass(frozen=True)
class _KernelConfig:
    """The fields that the configurations of the three products share.

    Args:
      block_m, block_n, block_k: tile sizes along M, N and K, powers of two of at least 16. The kernel's output tile
        has two of them; its main loop steps by the third.
      num_warps: warps of a program, 4 or 8.
      num_stages: blocks per operand in shared memory at once.
      band: row tiles processed for one column of tiles before the next column (L2 swizzle); a larger band reuses
        weights more.
      programs_per_sm: persistent programs per multiprocessor.
      kernel: "plain", the Triton kernel of every GPU, or "hopper", the warp-specialized kernel of H100 and H200
        (`jgg.kernels.hopper`). "hopper" has output tiles of [256, 128] or [256, 256] and steps of 64, or also 32 for
        dW's wide tiles. It loads by TMA what it does not gather, leaves scatter to a copy, and ignores num_warps and
        programs_per_sm. Where it cannot run (`jgg.launching.requirements` says why), the heuristic chooses a
        configuration instead.
    """

    op: ClassVar[str]  # the product's name in files and commands
    _axes: ClassVar[str]  # the axes of tile rows, tile columns and the reduced axis, for w [E, N, K]

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 4
    band: int = 8
    programs_per_sm: int = 1
    kernel: str = "plain"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if field.type is bool:
                value = as_flag(name, value)
            elif name == "kernel":
                check_one_of(name, value, KERNELS)
            elif name.startswith("block_"):
                value = as_int(name, value, least=16, expected=_BLOCK)
                if value & (value - 1):
                    raise ValueError(f"{name} must be {_BLOCK}, got {value}.")
            else:
                value = as_int(name, value, least=1)
            object.__setattr__(self, name, value)
        if self.num_warps not in (4, 8):
            raise ValueError(f"num_warps must be 4 or 8, got {self.num_warps}.")

    @classmethod
    def blocks(cls, w_layout: str) -> tuple[str, str, str]:
        """The names of the fields that hold a `Tile`'s rows, columns and step."""
        rows, columns, step = (f"block_{axis}" for axis in cls._axes)
        # dw is stored as w is, [N, K] for "enk" and [K, N] for "ekn"
        return (columns, rows, step) if cls.op == "dw" and w_layout == "ekn" else (rows, columns, step)

    @classmethod
    def sizes(cls, problem: GroupedGemmProblem) -> Tile:
        """M, N and K of a problem, as rows, columns and reduced axis of the product."""
        sizes = {"block_m": problem.rows_of_groups, "block_n": problem.out_features, "block_k": problem.in_features}
        return Tile(*(sizes[block] for block in cls.blocks(problem.w_layout)))

    @classmethod
    def result_dtype(cls, problem: GroupedGemmProblem) -> np.dtype:
        """The dtype of the product."""
        return {"forward": problem.out_dtype, "dx": problem.dtype, "dw": problem.dw_dtype or problem.dtype}[cls.op]

    @classmethod
    def of_tile(cls, tile: Tile, w_layout: str, **options: object) -> Self:
        """A configuration with the given tile."""
        given: dict[str, Any] = {**dict(zip(cls.blocks(w_layout), tile, strict=True)), **options}
        return cls(**given)

    def tile(self, w_layout: str) -> Tile:
        """The output tile and the step, as the fields block_m, block_n and block_k give them."""
        return Tile(*(getattr(self, block) for block in self.blocks(w_layout)))

    def with_tile(self, tile: Tile, w_layout: str, **changes: object) -> Self:
        """This configuration with another tile, and with the other changes."""
        given: dict[str, Any] = {**dict(zip(self.blocks(w_layout), tile, strict=True)), **changes}
        return dataclasses.replace(self, **given)


@dataclasses.dataclass(frozen=True)
class KernelConfigForward(_KernelConfig):
    """Configuration of the forward kernel: output tiles [block_m, block_n], steps of block_k.

    A TMA switch is ignored if the device has no TMA, if the operand's rows are gathered inside the kernel, or if a
    row's length is not a multiple of 16 bytes. The operand is then loaded through pointers.

    Args:
      use_tma_load_x, use_tma_load_w: load x, load w by TMA.
      fuse_gather: read x through gather_indices inside the kernel, by pointers. Otherwise a small kernel first copies x
        into expert order.
      fuse_scatter: write y in token order inside the kernel, by pointers. Otherwise a small kernel reorders y.
    """

    op = "forward"
    _axes = "mnk"

    use_tma_load_x: bool = True
    use_tma_load_w: bool = True
    fuse_gather: bool = True
    fuse_scatter: bool = True


@dataclasses.dataclass(frozen=True)
class KernelConfigDX(_KernelConfig):
    """Configuration of the dX kernel: output tiles [block_m, block_k], steps of block_n.

    Args:
      use_tma_load_dy, use_tma_load_w: load dy, load w by TMA, as in KernelConfigForward.
      fuse_gather: read dy through gather_indices inside the kernel, as in KernelConfigForward.
    """

    op = "dx"
    _axes = "mkn"

    block_n: int = 64
    block_k: int = 128
    use_tma_load_dy: bool = True
    use_tma_load_w: bool = True
    fuse_gather: bool = True


@dataclasses.dataclass(frozen=True)
class KernelConfigDW(_KernelConfig):
    """Configuration of the dW kernel: output tiles [block_n, block_k], steps of block_m rows.

    Args:
      use_tma_load_x, use_tma_load_dy: load x, load dy by TMA, as in KernelConfigForward.
      fuse_gather: read x and dy through gather_indices inside the kernel, as in KernelConfigForward. dy is still copied
        if topk_weights scale it, or if x is gathered by kernel "hopper".
    """

    op = "dw"
    _axes = "nkm"

    block_m: int = 64
    block_k: int = 128
    use_tma_load_x: bool = True
    use_tma_load_dy: bool = True
    fuse_gather: bool = True


KernelConfig = KernelConfigForward | KernelConfigDX | KernelConfigDW
CONFIG_TYPES: dict[str, type[KernelConfig]] = {
    kind.op: kind for kind in (KernelConfigForward, KernelConfigDX, KernelConfigDW)
}


def power_of_2(count: int, least: int = 16) -> int:
    """The smallest power of two that is at least `count` and `least`."""
    return max(least, 1 << (count - 1).bit_length())
