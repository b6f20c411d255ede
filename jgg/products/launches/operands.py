"""What the launches of the multiplying kernels are given: a product of rows and matrices, or of rows and rows."""

import dataclasses
from typing import NamedTuple

import jax

from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import QuantizedArray
from jgg.core.schedule import GroupBounds, TileSchedule
from jgg.launching.kernel_configs import KernelConfigDW, KernelConfigDX, KernelConfigForward
from jgg.launching.launch import tile_operands
from jgg.products.launches import column_parts
from jgg.products.launches.pieces import Pieces
from jgg.products.low_rank import LowRankTerm


class Part(NamedTuple):
    """The part of a product's columns and rows that a launch writes.

    Attributes:
      first_column: the column of w at which the problem's columns begin.
      zeroes: whether zeros are written to rows of no group; otherwise those rows are not written.
    """

    first_column: int = 0
    zeroes: bool = True


WHOLE = Part()


@dataclasses.dataclass(frozen=True)
class RowProduct:
    """The product (rows[i] @ w[e] + bias[e]) * topk_weights: y [M, N] or dx [M, K].

    Attributes:
      problem: the sizes, and whether the kernel gathers rows from token order or scatters results to it.
      config: the kernel's configuration.
      rows: the pieces of the rows of x or dy, or quantized rows of x.
      topk_weights: [M].
      part: the range of w's columns, if `problem` describes only a range of them.
    """

    problem: GroupedGemmProblem
    config: KernelConfigForward | KernelConfigDX
    rows: Pieces | QuantizedArray
    w: jax.Array | QuantizedArray
    bounds: GroupBounds
    gather_indices: jax.Array | None = None
    topk_weights: jax.Array | None = None
    bias: jax.Array | None = None
    low_rank: LowRankTerm | None = None
    part: Part = WHOLE

    @property
    def is_forward(self) -> bool:
        """Whether the product is y rather than dx."""
        return isinstance(self.config, KernelConfigForward)

    @property
    def gathers(self) -> bool:
        """Whether the kernel gathers the rows from token order."""
        return self.problem.permute_x if self.is_forward else self.problem.permute_y

    @property
    def reduced_is_minor(self) -> bool:
        """Whether the matrices of w are [columns, reduced]; otherwise they are [reduced, columns]."""
        return self.is_forward == (self.problem.w_layout == "enk")

    def of_columns(self, columns: range) -> "RowProduct":
        """The product of a range of w's columns, without the rows of no group."""
        name = "out_features" if self.is_forward else "in_features"
        return dataclasses.replace(
            self,
            problem=self.problem.with_sizes({name: len(columns)}),
            bias=None if self.bias is None else self.bias[:, columns.start : columns.stop],
            part=Part(columns.start, zeroes=False),
        )

    def after[Result](self, result: Result) -> tuple["RowProduct", Result]:
        """The product, whose rows are read after `result` is computed, and the result; see `column_parts.after`."""
        rows, result = column_parts.after(self.rows, result)
        return dataclasses.replace(self, rows=rows), result


@dataclasses.dataclass(frozen=True)
class OuterProduct:
    """The product dw[e] = sum of dy[i]^T x[i] over the rows i of each group, in the shape and layout of w.

    Attributes:
      problem: the sizes, and whether the kernel gathers rows of x or of dy from token order.
      config: the kernel's configuration.
      x: rows; they may have only some of the features, see `first_feature`.
      dy: the pieces of the rows.
      first_feature: the feature of w with which x begins. x ends at a multiple of column_parts.STEP or at the last one.
    """

    problem: GroupedGemmProblem
    config: KernelConfigDW
    x: jax.Array
    dy: Pieces
    bounds: GroupBounds
    gather_indices: jax.Array | None = None
    first_feature: int = 0

    @property
    def sides(self) -> tuple[jax.Array, jax.Array]:
        """The rows whose columns become the rows of dw, and those whose columns become its columns."""
        return (self.dy.rows, self.x) if self.problem.w_layout == "enk" else (self.x, self.dy.rows)


def row_operands(
    problem: GroupedGemmProblem, part: Part, bounds: GroupBounds, schedule: TileSchedule | None = None
) -> dict[str, jax.Array | int | None]:
    """The operands that tell a kernel its tiles and which rows and columns to write."""
    return {
        **tile_operands(bounds, schedule),
        "zeros_end": problem.num_rows if part.zeroes else 0,
        "num_rows": problem.num_rows,
        "num_positions": problem.num_positions,
        "first_column": part.first_column,
    }
