"""One kernel launch as data, TMA descriptors included."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jgg.core.gpu_target import Target
from jgg.core.problem import GroupedGemmProblem
from jgg.core.schedule import GroupBounds, TileSchedule
from jgg.launching.kernel_configs import KernelConfig

PRECISIONS = {  # of float32 products, with Triton's names for them
    jax.lax.Precision.DEFAULT: "tf32",
    jax.lax.Precision.HIGH: "tf32x3",
    jax.lax.Precision.HIGHEST: "ieee",
}

MAX_EXPERTS = 1024  # a program of the router's kernels holds a token's scores of all experts at once

_AXIS_LIMIT, _ROW_LIMIT, _WRAP_STRIDE = 0x7FFF0000, 2**30, 2**34

type Constant = int | float | bool | str | None


class Kernel(Protocol):
    """A kernel of `jgg.kernels`, as `triton.jit` or Gluon makes it."""

    __name__: str
    __module__: str

    @property
    def arg_names(self) -> Sequence[str]:
        """The names of its parameters."""
        ...

    def __hash__(self) -> int: ...

    def is_gluon(self) -> bool:
        """Whether it is in Gluon."""
        ...


@dataclasses.dataclass(frozen=True)
class Tma:
    """A TMA descriptor, made on the host: shape and strides in elements, and the block of an access.

    In a kernel that runs in clusters, the two CTAs of a cluster split the block along cta_axis; with None each has the
    whole block.
    (Descriptors made inside a kernel need scratch memory, whose allocation XLA cannot record into a CUDA graph.)
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    cta_axis: int | None = None


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch; the dictionaries' keys are the kernel's parameters.

    Attributes:
      operands: arrays and ints; None for an optional input or output array that this launch lacks.
      outputs: what the kernel writes: shape and dtype of a new array, or an array that it writes over. (XLA first
        copies such an array if it is needed later.)
      constants: compile-time parameters.
      grid: number of programs, along up to three axes.
      descriptors: the operands and outputs that the kernel takes as TMA descriptors rather than pointers.
      num_warps, num_stages: warps of each program, and stages of its pipelined loads.
      num_ctas: multiprocessors (CTAs) that run one program as a cluster.
      max_registers: the most registers per thread, so that a multiprocessor runs more programs; None for no limit.
      flops, bytes_accessed: the cost to report to XLA and its profiler.
    """

    operands: Mapping[str, jax.Array | int | None]
    outputs: Mapping[str, jax.ShapeDtypeStruct | jax.Array]
    constants: Mapping[str, Constant]
    grid: tuple[int, ...]
    descriptors: dict[str, Tma] = dataclasses.field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    max_registers: int | None = None
    flops: int = 0
    bytes_accessed: int = 0

    @property
    def updated(self) -> dict[str, jax.Array]:
        """The outputs that are existing arrays, which the kernel writes over."""
        return {key: output for key, output in self.outputs.items() if isinstance(output, jax.Array)}

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """All arrays that the kernel is given: its operands and the outputs that it writes over."""
        return {key: value for key, value in self.operands.items() if isinstance(value, jax.Array)} | self.updated

    @property
    def result_types(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each output."""
        return {key: jax.ShapeDtypeStruct(output.shape, output.dtype) for key, output in self.outputs.items()}


def tile_operands(bounds: GroupBounds, schedule: TileSchedule | None = None) -> dict[str, jax.Array | int | None]:
    """The operands that tell a kernel the rows of each group and, with a schedule, the tiles of those rows."""
    group, start, end, tiles_through = schedule or (None,) * 4
    return {
        "group_starts": bounds.starts,
        "group_ends": bounds.ends,
        "tile_group": group,
        "tile_start": start,
        "tile_end": end,
        "tiles_through": tiles_through,
        "num_groups": len(bounds.starts),
    }


def matrix(shape: tuple[int, ...], block: tuple[int, int], cta_axis: int | None = None) -> Tma:
    """Descriptor of a row-major matrix."""
    return Tma(shape, (shape[1], 1), block, cta_axis)


def matrices(shape: tuple[int, ...], block: tuple[int, int]) -> Tma:
    """Descriptor of consecutive row-major matrices, accessed one at a time."""
    _, rows, columns = shape
    return Tma(shape, (rows * columns, columns, 1), (1, *block))


def halves(shape: tuple[int, ...], block: tuple[int, int], axis: int) -> Tma:
    """Descriptor of row-major matrices; an access takes the same place in both halves of one matrix.

    Args:
      axis: what is halved, rows (1) or columns (2).
    """
    count, rows, columns = shape
    half = (rows // 2, columns) if axis == 1 else (rows, columns // 2)
    between = rows // 2 * columns if axis == 1 else columns // 2  # the elements from a place to that in the other half
    return Tma((count, 2, *half), (rows * columns, between, columns, 1), (1, 2, *block))


def bounded_rows(columns: int, block: tuple[int, ...], cta_axis: int | None = None) -> Tma:
    """Descriptor of rows, where each access has its own last row: nothing past that row is read or written.

    `kernels.tiles` explains the two leading axes.

    Args:
      block: [rows, columns] or, for the same place in both halves of each row, [rows, 2, columns].
    """
    row_shape = (columns,) if len(block) == 2 else (2, columns // 2)
    shape = _AXIS_LIMIT, _AXIS_LIMIT, _ROW_LIMIT, *row_shape
    strides = _WRAP_STRIDE - columns, columns, columns, *((columns // 2,) if len(block) == 3 else ()), 1
    return Tma(shape, strides, (1, 1, *block), cta_axis)


def launch_options(target: Target, problem: GroupedGemmProblem, config: KernelConfig, tiles: int) -> dict[str, Any]:
    """The fields of a `Launch` whose persistent programs share `tiles` tiles: grid, warps, stages and cost."""
    return {
        "grid": (max(1, min(tiles, target.num_sms * config.programs_per_sm)),),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "flops": problem.flops,
        "bytes_accessed": problem.bytes_accessed(),
    }


def _tma_can(target: Target, dtype: np.dtype, row_length: int) -> bool:
    """Whether TMA can access rows of `row_length` elements: their stride must be a multiple of 16 bytes."""
    return target.has_tma and row_length * dtype.itemsize % 16 == 0


def x_by_tma(target: Target, problem: GroupedGemmProblem, dtype: np.dtype | None = None) -> bool:
    """Whether TMA can load x, which may have another dtype than the problem."""
    return not problem.permute_x and _tma_can(target, dtype or problem.dtype, problem.in_features)


def dy_by_tma(target: Target, problem: GroupedGemmProblem) -> bool:
    """Whether TMA can load dy."""
    return not problem.permute_y and _tma_can(target, problem.dtype, problem.out_features)


def w_by_tma(target: Target, w: jax.Array) -> bool:
    """Whether TMA can load w."""
    return _tma_can(target, w.dtype, w.shape[2])


def flat(topk_weights: jax.Array | None) -> jax.Array | None:
    """topk_weights as [M]."""
    return None if topk_weights is None else topk_weights.reshape(-1)
