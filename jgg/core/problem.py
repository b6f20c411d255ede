"""The description of one grouped GEMM, its shapes, dtypes and options."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self, cast

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jgg.core.choices import DTYPE_NAMES
from jgg.core.gpu_target import Target
from jgg.core.quantized import BLOCK, QUANTIZED_DTYPE

DTYPES = tuple(getattr(jnp, name) for name in DTYPE_NAMES)
# Row numbers are int32 and a TMA coordinate's limit is 2**30.
MAX_ROWS = 2**30 - 1
FEW_ROWS = 32  # of a group, on average
ROWS_OF_STORED = 192  # the same on Hopper, whose tiles for weights in their stored form have more rows


@dataclasses.dataclass(frozen=True)
class GroupedGemmProblem:
    """A grouped GEMM without its data: y [M, N] from x [M or T, K] and w of E experts.

    Attributes:
      num_rows: M, routed rows.
      num_experts: E.
      in_features: K.
      out_features: N.
      topk: k, rows of each token in token order.
      dtype: the dtype of x, w and dy; QUANTIZED_DTYPE if `is_quantized`.
      out_dtype: the dtype of y.
      w_layout: "enk" for w [E, N, K], "ekn" for w [E, K, N].
      permute_x: x is [T, K] in token order.
      permute_y: y is in token order.
      has_topk_weights: rows are scaled by topk_weights.
      has_bias: a bias is added.
      precision: how float32 operands are multiplied.
      num_tokens: T, if only some of the T * k choices have a row; None if every choice has one.
      combine_y: y is [T, N], the sum of each token's rows, scaled.
      expected_rows: about how many of the M rows will belong to a group, used to choose kernels; None for all.
      dw_dtype: the dtype of dW; None for `dtype`.
      is_dense: there is one group, and every row belongs to it, so plain JAX need not check bounds.
      is_quantized: x and w are in FP8, with scales for blocks of BLOCK features.
    """

    num_rows: int
    num_experts: int
    in_features: int
    out_features: int
    topk: int
    dtype: np.dtype
    out_dtype: np.dtype
    w_layout: str = "enk"
    permute_x: bool = False
    permute_y: bool = False
    has_topk_weights: bool = False
    has_bias: bool = False
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT
    num_tokens: int | None = None
    combine_y: bool = False
    expected_rows: int | None = None
    dw_dtype: np.dtype | None = None
    is_dense: bool = False
    is_quantized: bool = False

    @property
    def rows_of_groups(self) -> int:
        """The rows that kernels are chosen for."""
        return self.num_rows if self.expected_rows is None else min(self.num_rows, self.expected_rows)

    @property
    def num_positions(self) -> int:
        """T * k, the number of positions in token order, which gather_indices name."""
        return self.num_rows if self.num_tokens is None else self.num_tokens * self.topk

    @property
    def x_shape(self) -> tuple[int, int]:
        """[M, K], or [T, K] with permute_x."""
        return (self.num_positions // self.topk if self.permute_x else self.num_rows, self.in_features)

    @property
    def y_shape(self) -> tuple[int, int]:
        """[M, N], or [T, N] with combine_y."""
        return (self.num_positions // self.topk if self.combine_y else self.num_rows, self.out_features)

    @property
    def w_shape(self) -> tuple[int, int, int]:
        """[E, N, K] or [E, K, N], by w_layout."""
        if self.w_layout == "enk":
            return self.num_experts, self.out_features, self.in_features
        return self.num_experts, self.in_features, self.out_features

    @property
    def is_empty(self) -> bool:
        """Whether some array has no element, so that there is nothing to launch a kernel for."""
        return 0 in (self.num_rows, self.num_experts, self.in_features, self.out_features)

    @property
    def is_symbolic(self) -> bool:
        """Whether some shape is known only when a program that `jax.export` made is run."""
        sizes = (self.num_rows, self.num_positions, self.num_experts, self.in_features, self.out_features)
        return any(map(jax.export.is_symbolic_dim, sizes))

    @property
    def quantized(self) -> Self:
        """The same problem with x and w quantized; w is then [E, N, K], so that the reduced axis is its last."""
        return dataclasses.replace(self, dtype=QUANTIZED_DTYPE, w_layout="enk", is_quantized=True)

    @property
    def dequantized(self) -> Self:
        """The same problem with x and w in the dtype of y."""
        return dataclasses.replace(self, dtype=self.out_dtype, is_quantized=False)

    @property
    def transposed(self) -> Self:
        """The problem of y @ w^T, without a bias: K and N change places."""
        return dataclasses.replace(
            self,
            in_features=self.out_features,
            out_features=self.in_features,
            w_layout="ekn" if self.w_layout == "enk" else "enk",
            has_bias=False,
        )

    @property
    def weighted(self) -> Self:
        """The same problem with rows that are scaled by topk_weights."""
        return dataclasses.replace(self, has_topk_weights=True)

    @property
    def unweighted(self) -> Self:
        """The same problem with rows that are not scaled."""
        return dataclasses.replace(self, has_topk_weights=False)

    def read_as(self, other: Self) -> Self:
        """The same problem, with the order and the tokens of x taken from the other problem."""
        return dataclasses.replace(self, permute_x=other.permute_x, num_tokens=other.num_tokens)

    def combined_as(self, other: Self) -> Self:
        """The same problem, with y in the form of the other's x: if x is [T, K], each token's rows are added up."""
        return dataclasses.replace(self, combine_y=other.permute_x, num_tokens=other.num_tokens)

    def repeated(self, count: int, groups: int = 1) -> Self:
        """`count` problems like this as one, in which each expert becomes `groups` groups."""
        expected = None if self.expected_rows is None else count * self.expected_rows
        rows, experts = count * self.num_rows, groups * self.num_experts
        return dataclasses.replace(self, num_rows=rows, num_experts=experts, expected_rows=expected, is_dense=False)

    @property
    def rows_are_aligned(self) -> bool:
        """Whether rows of K and of N elements are multiples of 16 bytes, as TMA and wide loads need."""
        return all(size * self.dtype.itemsize % 16 == 0 for size in (self.in_features, self.out_features))

    @property
    def label(self) -> str:
        """The sizes and the dtype as a profiler shows them."""
        sizes = {"M": self.num_rows, "K": self.in_features, "N": self.out_features, "E": self.num_experts}
        return ",".join(f"{letter}={size}" for letter, size in sizes.items()) + f",{self.dtype}"

    def of_a_device(self, devices: dict[str, int]) -> Self:
        """One device's part; `devices` says how many split e, the experts, k, the in-features, n, the out-features."""
        names = {"num_experts": "e", "in_features": "k", "out_features": "n"}
        return self.with_sizes({name: getattr(self, name) // devices.get(letter, 1) for name, letter in names.items()})

    def with_sizes(self, sizes: Mapping[str, int]) -> Self:
        """The same problem with other sizes, by the names of the attributes."""
        return dataclasses.replace(self, **cast(dict[str, Any], sizes))

    @property
    def flops(self) -> int:
        """Floating-point operations of each of forward, dX and dW when every row belongs to a group."""
        return 2 * self.num_rows * self.in_features * self.out_features

    def bytes_accessed(self, op: str = "forward", experts: int | None = None) -> int:
        """Bytes of x, y and w that "forward", "dx" or "dw" must read and write, once each; w of `experts` with rows."""
        read = min(self.num_experts, self.num_rows) if experts is None else experts
        x, y, matrix = math.prod(self.x_shape), math.prod(self.y_shape), self.in_features * self.out_features
        if op == "dw":  # all of dW is written
            dw_dtype = self.dtype if self.dw_dtype is None else self.dw_dtype
            return (x + y) * self.dtype.itemsize + self.num_experts * matrix * dw_dtype.itemsize
        y_dtype = self.out_dtype if op == "forward" else self.dtype
        total = (x + read * matrix) * self.dtype.itemsize + y * y_dtype.itemsize
        if self.is_quantized:  # scales
            total += 4 * -(-self.in_features // BLOCK) * (self.x_shape[0] + read * -(-self.out_features // BLOCK))
        return total


def has_few_rows(num_rows: int, num_groups: int, target: Target) -> bool:
    """Whether groups have so few rows, on average, that quantized weights are best read in their stored form.

    They are then converted to the dtype of x on the way. A symbolic number of rows counts as many.
    """
    most = ROWS_OF_STORED if target.compute_capability == 90 else FEW_ROWS
    return not jax.export.is_symbolic_dim(num_rows) and num_rows <= most * num_groups
