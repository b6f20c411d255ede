"""The static part of an expert MLP: its two linear layers and the products made from them."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from jgg.core.activations import Activation
from jgg.core.matrix import Matrix
from jgg.core.problem import GroupedGemmProblem
from jgg.core.problem_checks import check_num_rows
from jgg.core.schedule import group_bounds
from jgg.experts.arguments import ExpertWeights, MlpOptions, ResidualNames
from jgg.experts.exchange import Exchange
from jgg.experts.router.routing import Routing
from jgg.launching.choice import How, how_of
from jgg.linear.linear import Linear, Routes, Rows


class Operands(NamedTuple):
    """The arrays that `moe_mlp`'s custom_vjp takes.

    Attributes:
      exchange: how x and dy go to the experts' devices in FP8, and y and dx back; None without an exchange. On arrival,
        x and dy are QuantizedArrays.
    """

    x: Rows
    gate_up: Matrix
    down: Matrix
    b_gate_up: jax.Array | None
    b_down: jax.Array | None
    topk_weights: jax.Array
    group_sizes: jax.Array
    gather_indices: jax.Array | None
    exchange: Exchange | None = None

    @property
    def scales_hidden(self) -> bool:
        """Whether dW of w_down takes scaled hidden features. With a b_down it takes scaled rows of dy, like db_down."""
        return self.b_down is None


@dataclasses.dataclass(frozen=True)
class MoeMlp:
    """The static argument of `moe_mlp`'s custom_vjp.

    Attributes:
      up: the layer from x, in token order (without gather_indices in expert order), to the pre-activation in expert
        order.
      down: the layer from hidden features to y, both in expert order.
      spare_sms: multiprocessors that the last product leaves idle.
      names: the names that `jax.checkpoint` policies use for what the backward pass reads.
    """

    up: Linear
    down: Linear
    activation: Activation
    interleaved: bool
    spare_sms: int
    names: ResidualNames

    @classmethod
    def of(cls, x: jax.Array, weights: ExpertWeights, routing: Routing, options: MlpOptions) -> "MoeMlp":
        """The MLP for these checked arrays and options."""
        up, down = _problems(x, weights, routing, options)
        how, recipe = how_of(up, options.implementation).sparing(options.spare_sms_always), options.quantization
        return cls(
            Linear(up, how, recipe=recipe, trains=weights.gate_up.is_trained),
            Linear(down, how, recipe=recipe, trains=weights.down.is_trained),
            options.activation,
            options.interleaved,
            options.spare_sms,
            options.names,
        )

    @property
    def how(self) -> How:
        """How every product is computed."""
        return self.up.how

    @property
    def is_plain(self) -> bool:
        """Whether everything is computed in plain JAX, which needs no custom_vjp."""
        return self.up.is_plain or self.down.is_plain

    @property
    def combined_down(self) -> Linear:
        """The layer from hidden features to y [T, H]: `down`, with each token's rows scaled and added up."""
        return dataclasses.replace(self.down, problem=self.down.problem.weighted.combined_as(self.up.problem))

    @property
    def weighted_down(self) -> Linear:
        """`down` for a dW whose rows are scaled."""
        return dataclasses.replace(self.down, problem=self.down.problem.weighted)

    @property
    def transposed_down(self) -> Linear:
        """The layer from dy, in the order of x, to z = dy @ down^T in expert order: it computes dX of `down`."""
        problem = self.down.problem.transposed.read_as(self.up.problem)
        return dataclasses.replace(self.down, problem=problem, rows_are_gradients=True)

    @property
    def sparing_up(self) -> Linear:
        """`up`, leaving `spare_sms` multiprocessors idle."""
        return dataclasses.replace(self.up, how=self.how.sparing(self.spare_sms))

    def routes(self, operands: Operands) -> Routes:
        """The routes for rows that are not scaled."""
        return Routes(group_bounds(operands.group_sizes, self.up.problem.num_rows), operands.gather_indices)


def _problems(
    x: jax.Array, weights: ExpertWeights, routing: Routing, options: MlpOptions
) -> tuple[GroupedGemmProblem, GroupedGemmProblem]:
    """The problems of the two layers: x to pre-activation, and hidden features to y."""
    in_axis, out_axis = (2, 1) if options.w_layout == "enk" else (1, 2)
    num_tokens, topk = routing.topk_weights.shape
    indices = routing.gather_indices
    check_num_rows("x", num_tokens * topk)
    num_rows = num_tokens if indices is None else indices.shape[0]
    num_experts, *features = weights.gate_up.shape
    up = GroupedGemmProblem(
        num_rows=num_rows,
        num_experts=num_experts,
        in_features=features[in_axis - 1],
        out_features=features[out_axis - 1],
        topk=topk,
        dtype=x.dtype,
        out_dtype=x.dtype,
        w_layout=options.w_layout,
        permute_x=indices is not None,
        has_bias=weights.b_gate_up is not None,
        precision=options.precision,
        num_tokens=None if num_rows == num_tokens * topk else num_tokens,
        expected_rows=options.expected_rows,
        dw_dtype=_dtype_of_gradient(weights.gate_up, x),
    )
    down = dataclasses.replace(
        up,
        in_features=weights.down.shape[in_axis],
        out_features=up.in_features,
        permute_x=False,
        has_bias=weights.b_down is not None,
        num_tokens=None,
        dw_dtype=_dtype_of_gradient(weights.down, x),
    )
    return up, down


def _dtype_of_gradient(matrix: Matrix, x: jax.Array) -> np.dtype:
    return x.dtype if matrix.dense is None else matrix.dense.dtype
