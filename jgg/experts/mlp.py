"""What an expert MLP is computed from: the problems of its products, its operands, and the steps that are computed."""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax

from jgg.activations import Activation
from jgg.core.problem import GroupedGemmProblem, check_choices, check_mlp, check_problem
from jgg.core.quantized import WeightForms
from jgg.core.schedule import GroupBounds, group_bounds
from jgg.launching.choice import How
from jgg.products.activate import Activated, ActivationGradients
from jgg.products.plain import grouped_gemm as plain
from jgg.router.routing import Routing

RESIDUAL_NAMES = {"x": "jgg_x", "pre_activation": "jgg_pre_activation"}


def problems(
    arrays: dict[str, Any], routing: Routing, activation: Activation, w_layout: str, precision: jax.lax.PrecisionLike,
    expected_rows: int | None,
) -> tuple[GroupedGemmProblem, GroupedGemmProblem]:  # fmt: skip
    """The problems of the two products; raises where the arguments disagree, as `check_problem` does."""
    hidden = check_mlp(arrays, activation, w_layout)
    check_choices(arrays["x"], routing.topk_weights, routing.topk_indices, "routing.")
    num_experts, num_choices = arrays["w_gate_up"].shape[0], routing.topk_weights.size
    sizes, indices = routing.group_sizes, routing.gather_indices
    if sizes.shape != (num_experts,):
        raise ValueError(f"routing.group_sizes must be [E] = [{num_experts}], got {list(sizes.shape)}.")
    if indices is None:
        if routing.topk_weights.shape[1] != 1:
            raise ValueError(
                "routing.gather_indices must be given unless k is 1 and the tokens are in expert order, "
                f"got None for topk_weights {list(routing.topk_weights.shape)}."
            )
    elif len(indices.shape) != 1 or indices.shape[0] > num_choices:
        raise ValueError(
            f"routing.gather_indices must be [M] with M at most T * k = {num_choices}, got {list(indices.shape)}."
        )
    up = check_problem(
        x=arrays["x"], w=arrays["w_gate_up"], bias=arrays["b_gate_up"], group_sizes=sizes, gather_indices=indices,
        topk=routing.topk_weights.shape[1], permute_x=indices is not None,
        some_choices=indices is not None and indices.shape[0] < num_choices,
        w_layout=w_layout, precision=precision,
    )  # fmt: skip
    up = dataclasses.replace(up, expected_rows=expected_rows)
    down = dataclasses.replace(
        up, in_features=hidden, out_features=up.in_features, permute_x=False, has_bias=arrays["b_down"] is not None,
        num_tokens=None,
    )  # fmt: skip
    return up, down


@dataclasses.dataclass(frozen=True)
class Mlp(abc.ABC):
    """The static argument of the custom_vjp: the problems, and the four steps that an arithmetic computes its own way.

    Each arithmetic is a subclass, in a file of its own.

    Attributes:
      of_up: x in token order (or in expert order, without gather_indices) to the pre-activation in expert order.
      of_down: hidden features to their product, both in expert order.
      spare_sms: multiprocessors that the last product does not use.
      x_name, pre_activation_name: of what is kept for the backward pass, as policies of `jax.checkpoint` know it.
    """

    of_up: GroupedGemmProblem
    of_down: GroupedGemmProblem
    how: How
    activation: Activation
    interleaved: bool
    spare_sms: int
    x_name: str
    pre_activation_name: str

    @abc.abstractmethod
    def up(self, operands: "Operands", keeps: bool) -> Activated:
        """The hidden features and, if it `keeps` that, the pre-activation."""

    @abc.abstractmethod
    def down(self, operands: "Operands", hidden: Any) -> jax.Array:
        """y [T, H]."""

    @abc.abstractmethod
    def activation_backward(self, operands: "Operands", kept: Any, dy: jax.Array) -> ActivationGradients:
        """The gradient of the pre-activation, hidden features, and the sums that the router's gradient is made of.

        With weights p and z = dy @ down^T: d hidden = p * z and dp = hidden . z, so that no product need be kept.
        """

    @abc.abstractmethod
    def dx(self, operands: "Operands", d_pre_activation: Any) -> jax.Array:
        """The gradient of x [T, H], of what `ActivationGradients.rows_of_dx` gives."""

    def kept_for_backward(self, operands: "Operands") -> "Operands":
        """The operands without what the backward pass does not read."""
        return operands

    @property
    def is_plain(self) -> bool:
        """Whether all is computed in plain JAX, which differentiates itself."""
        return self.of_up.is_empty or self.of_down.is_empty

    @property
    def combined_down(self) -> GroupedGemmProblem:
        """From hidden features in expert order to y: `of_down` with each token's rows scaled and added up."""
        return dataclasses.replace(
            self.weighted_down, combine_y=self.of_up.permute_x, num_tokens=self.of_up.num_tokens
        )  # fmt: skip

    @property
    def transposed_down(self) -> GroupedGemmProblem:
        """From dy, in the order of x, to z = dy @ down^T in expert order: dX of `of_down` as a product that gathers."""
        return dataclasses.replace(
            self.of_up,
            in_features=self.of_down.out_features,
            out_features=self.of_down.in_features,
            w_layout="ekn" if self.of_down.w_layout == "enk" else "enk",
            has_bias=False,
        )

    @property
    def transposed_up(self) -> GroupedGemmProblem:
        """From d pre-activation in expert order to dx: dX of `of_up` as a product, each token's rows added up."""
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
        """The way to compute on fewer multiprocessors."""
        target = self.how.target
        return self.how._replace(target=dataclasses.replace(target, num_sms=max(1, target.num_sms - self.spare_sms)))

    def bounds(self, group_sizes: jax.Array) -> GroupBounds:
        """The rows of each expert."""
        return group_bounds(group_sizes, self.of_up.num_rows)

    def row_weights(self, operands: "Operands") -> jax.Array:
        """The routing's weight of each row, float32 [M]."""
        return plain.row_scales(
            self.of_up, self.bounds(operands.group_sizes), operands.gather_indices, operands.topk_weights
        )  # fmt: skip


class Operands(NamedTuple):
    """The arrays that the custom_vjp takes."""

    x: jax.Array
    w_gate_up: jax.Array
    w_down: jax.Array
    b_gate_up: jax.Array | None
    b_down: jax.Array | None
    topk_weights: jax.Array
    group_sizes: jax.Array | Any
    gather_indices: jax.Array | None
    quantized_gate_up: WeightForms | None = None
    quantized_down: WeightForms | None = None

    @property
    def scales_hidden(self) -> bool:
        """Whether dW of down takes scaled hidden features; else, for the gradient of b_down, scaled rows of dy."""
        return self.b_down is None
