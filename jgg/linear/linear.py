"""A linear layer without its arrays: what it computes, on which device, and which kernels may compute it."""

import dataclasses
from typing import NamedTuple

import jax

from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import Format, QuantizedArray
from jgg.core.schedule import GroupBounds
from jgg.launching.choice import How, is_plain_jax
from jgg.launching.kernel_configs import KernelConfigDW, KernelConfigDX, KernelConfigForward
from jgg.linear.fp8 import Fp8

Rows = jax.Array | QuantizedArray


class Routes(NamedTuple):
    """Which rows belong to which group, and how they are read, written and scaled, as in `jgg.grouped_gemm`.

    Attributes:
      bounds: the rows of each group.
      gather_indices: int32 [M], or None if all rows are in expert order.
      topk_weights: float [M] or [T, k], or None.
    """

    bounds: GroupBounds
    gather_indices: jax.Array | None = None
    topk_weights: jax.Array | None = None


class Configs(NamedTuple):
    """The configurations of a layer's kernels; None to choose one from the shapes and the device."""

    forward: KernelConfigForward | None = None
    dx: KernelConfigDX | None = None
    dw: KernelConfigDW | None = None


CHOSEN = Configs()


@dataclasses.dataclass(frozen=True)
class Linear:
    """A linear layer without its arrays: y[i] = (x[i] @ (w + a b)[e] + bias[e]) * topk_weights[i].

    Attributes:
      problem: the product for y. Its dtype is the dtype of x and of the factors before anything is quantized.
      how: the implementation and the GPU.
      configs: the configurations of the kernels; products with the factors choose their own.
      recipe: the FP8 recipe that quantizes rows and weights before they are multiplied; None without FP8.
      rows_are_gradients: whether rows are quantized in the recipe's format for gradients, because this layer computes
        another layer's dX.
      trains: whether dense weights get a gradient. Quantized weights get none.
    """

    problem: GroupedGemmProblem
    how: How
    configs: Configs = CHOSEN
    recipe: Fp8 | None = None
    rows_are_gradients: bool = False
    trains: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether the layer is computed in plain JAX, which JAX differentiates to any order."""
        return self.problem.is_empty or (self.recipe is None and is_plain_jax(self.how.implementation))

    @property
    def how_or_plain(self) -> How | None:
        """How the layer's products are computed; None in plain JAX."""
        return None if self.is_plain else self.how

    @property
    def row_format(self) -> Format | None:
        """How rows are quantized, or None."""
        if self.recipe is None or self.is_plain:
            return None
        return self.recipe.gradient_format if self.rows_are_gradients else self.recipe.format

    @property
    def transposed_problem(self) -> GroupedGemmProblem:
        """The product that computes dX as a forward product of dy, in expert order, with w^T."""
        return dataclasses.replace(self.problem.transposed, permute_x=False, combine_y=self.problem.permute_x)

    def problem_of_a(self, a: jax.Array) -> GroupedGemmProblem:
        """The product x @ a, whose rows [M, r] are in expert order."""
        return dataclasses.replace(
            self.problem,
            out_features=a.shape[-2 if self.problem.w_layout == "enk" else -1],
            permute_y=False,
            combine_y=False,
            has_bias=False,
            out_dtype=self.problem.dtype,
            dw_dtype=a.dtype,
            num_tokens=self.problem.num_tokens if self.problem.permute_x else None,
        )

    def problem_of_b(self, b: jax.Array) -> GroupedGemmProblem:
        """The product of rows [M, r] in expert order with b."""
        return dataclasses.replace(
            self.problem,
            in_features=b.shape[-1 if self.problem.w_layout == "enk" else -2],
            permute_x=False,
            has_bias=False,
            dw_dtype=b.dtype,
            num_tokens=None,
        )
