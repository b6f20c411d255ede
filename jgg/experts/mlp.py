"""The parts of an expert MLP: the problems of its products, its operands, and the steps of the computation."""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax

from jgg.activations import Activation
from jgg.core.problem import GroupedGemmProblem, check_num_rows
from jgg.core.quantized import WeightForms
from jgg.core.schedule import GroupBounds, group_bounds
from jgg.experts.arguments import ExpertWeights, MlpOptions, ResidualNames
from jgg.launching.choice import How
from jgg.products.activate import Activated, ActivationGradients
from jgg.products.low_rank import Factors, LowRankTerm
from jgg.products.plain import grouped_gemm as plain
from jgg.router.routing import Routing


def problems(
    x: jax.Array, weights: ExpertWeights, routing: Routing, options: MlpOptions
) -> tuple[GroupedGemmProblem, GroupedGemmProblem]:
    """The problems of the two products: x to pre-activation, and hidden features to y."""
    in_axis, out_axis = (2, 1) if options.w_layout == "enk" else (1, 2)
    num_tokens, topk = routing.topk_weights.shape
    indices = routing.gather_indices
    check_num_rows("x", num_tokens * topk)
    num_rows = num_tokens if indices is None else indices.shape[0]
    up = GroupedGemmProblem(
        num_rows=num_rows,
        num_experts=weights.w_gate_up.shape[0],
        in_features=weights.w_gate_up.shape[in_axis],
        out_features=weights.w_gate_up.shape[out_axis],
        topk=topk,
        dtype=x.dtype,
        out_dtype=x.dtype,
        w_layout=options.w_layout,
        permute_x=indices is not None,
        permute_y=False,
        has_topk_weights=False,
        has_bias=weights.b_gate_up is not None,
        precision=options.precision,
        num_tokens=None if num_rows == num_tokens * topk else num_tokens,
        expected_rows=options.expected_rows,
        dw_dtype=weights.w_gate_up.dtype,
    )
    down = dataclasses.replace(
        up,
        in_features=weights.w_down.shape[in_axis],
        out_features=up.in_features,
        permute_x=False,
        has_bias=weights.b_down is not None,
        num_tokens=None,
        dw_dtype=weights.w_down.dtype,
    )
    return up, down


@dataclasses.dataclass(frozen=True)
class Mlp(abc.ABC):
    """The static argument of `moe_mlp`'s custom_vjp: its problems, its options and the four steps of the computation.

    Each way to compute the steps is a subclass in a file of its own: `InDtype` and `InFp8`.

    Each step takes the term of low rank that is added to its product (`jgg.experts.low_rank`), or None.

    Attributes:
      of_up: the product from x, in token order (without gather_indices in expert order), to the pre-activation in
        expert order.
      of_down: the product of hidden features and w_down, both sides in expert order.
      spare_sms: multiprocessors that the last product does not use.
      names: the names by which policies of `jax.checkpoint` know what the backward pass reads.
    """

    of_up: GroupedGemmProblem
    of_down: GroupedGemmProblem
    how: How
    activation: Activation
    interleaved: bool
    spare_sms: int
    names: ResidualNames

    @abc.abstractmethod
    def prepared(self, operands: "Operands", keeps: bool) -> "Operands":
        """The operands with the weights as products take them; with `keeps`, for the backward pass too."""

    @abc.abstractmethod
    def up(self, operands: "Operands", keeps: bool, term: LowRankTerm | None) -> Activated:
        """The hidden features and, if `keeps` is True, the pre-activation."""

    @abc.abstractmethod
    def down(self, operands: "Operands", hidden: Any, term: LowRankTerm | None) -> jax.Array:
        """y [T, H]."""

    @abc.abstractmethod
    def activation_backward(
        self, operands: "Operands", kept: Any, dy: jax.Array, term: LowRankTerm | None
    ) -> ActivationGradients:
        """The gradient of the pre-activation, hidden features, and the sums that the router's gradient is made of.

        With weights p and z = dy @ down^T: d hidden = p * z and dp = hidden . z, so that no product need be kept.
        """

    @abc.abstractmethod
    def dx(self, operands: "Operands", d_pre_activation: Any, term: LowRankTerm | None) -> jax.Array:
        """The gradient of x [T, H], computed from `ActivationGradients.rows_of_dx`."""

    def kept_for_backward(self, operands: "Operands") -> "Operands":
        """The operands without what the backward pass does not read, and without weights that are quantized too."""
        return operands._replace(
            w_gate_up=operands.w_gate_up if operands.quantized_gate_up is None else None,
            w_down=operands.w_down if operands.quantized_down is None else None,
        )

    def restored(self, kept: "Operands", dy: jax.Array) -> tuple["Operands", jax.Array]:
        """What the backward pass reads: the operands that were kept, and dy, which orders what is computed again."""
        return kept, dy

    @property
    def is_plain(self) -> bool:
        """Whether everything is computed in plain JAX, which needs no custom_vjp."""
        return self.of_up.is_empty or self.of_down.is_empty

    @property
    def combined_down(self) -> GroupedGemmProblem:
        """The product from hidden features in expert order to y: `of_down` with a token's rows scaled and added up."""
        return dataclasses.replace(self.weighted_down, combine_y=self.of_up.permute_x, num_tokens=self.of_up.num_tokens)

    @property
    def transposed_down(self) -> GroupedGemmProblem:
        """The product from dy, in the order of x, to z = dy @ down^T in expert order; it computes dX of `of_down`."""
        return dataclasses.replace(
            self.of_up,
            in_features=self.of_down.out_features,
            out_features=self.of_down.in_features,
            w_layout="ekn" if self.of_down.w_layout == "enk" else "enk",
            has_bias=False,
            dw_dtype=self.of_down.dw_dtype,
        )

    @property
    def transposed_up(self) -> GroupedGemmProblem:
        """The product from d pre-activation in expert order to dx: dX of `of_up`, with each token's rows added up."""
        return dataclasses.replace(
            self.of_up,
            in_features=self.of_up.out_features,
            out_features=self.of_up.in_features,
            permute_x=False,
            has_bias=False,
            combine_y=self.of_up.permute_x,
        )

    @property
    def weighted_down(self) -> GroupedGemmProblem:
        """`of_down` for a dW whose rows are scaled."""
        return dataclasses.replace(self.of_down, has_topk_weights=True)

    @property
    def how_sparing(self) -> How:
        """How to compute while `spare_sms` multiprocessors stay idle."""
        target = self.how.target
        return self.how._replace(target=dataclasses.replace(target, num_sms=max(1, target.num_sms - self.spare_sms)))

    def bounds(self, group_sizes: jax.Array) -> GroupBounds:
        """The rows of each expert."""
        return group_bounds(group_sizes, self.of_up.num_rows)

    def row_weights(self, operands: "Operands") -> jax.Array:
        """The routing's weight of each row, float32 [M]."""
        return plain.row_scales(
            self.of_up, self.bounds(operands.group_sizes), operands.gather_indices, operands.topk_weights
        )


class Operands(NamedTuple):
    """The arrays that `moe_mlp`'s custom_vjp takes."""

    x: jax.Array
    w_gate_up: jax.Array | Any
    w_down: jax.Array | Any
    b_gate_up: jax.Array | None
    b_down: jax.Array | None
    topk_weights: jax.Array
    group_sizes: jax.Array | Any
    gather_indices: jax.Array | None
    quantized_gate_up: WeightForms | None = None
    quantized_down: WeightForms | None = None
    low_rank_gate_up: Factors | None = None
    low_rank_down: Factors | None = None

    @property
    def scales_hidden(self) -> bool:
        """Whether dW of w_down takes scaled hidden features; with a b_down it takes scaled rows of dy, like db_down."""
        return self.b_down is None
