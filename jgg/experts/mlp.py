"""What an expert MLP is computed from: the problems of its products, and its operands."""

import dataclasses
from typing import Any, NamedTuple

import jax

from jgg.activations import Activation
from jgg.core.problem import GroupedGemmProblem, check_num_rows
from jgg.core.schedule import GroupBounds, group_bounds
from jgg.experts.arguments import ExpertWeights, MlpOptions
from jgg.fp8 import Fp8, WeightForms
from jgg.launching.choice import How
from jgg.router.routing import Routing


def problems(
    x: jax.Array, weights: ExpertWeights, routing: Routing, options: MlpOptions
) -> tuple[GroupedGemmProblem, GroupedGemmProblem]:
    """The problems of the two products."""
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
    )
    down = dataclasses.replace(
        up, in_features=weights.w_down.shape[in_axis], out_features=up.in_features, permute_x=False,
        has_bias=weights.b_down is not None, num_tokens=None,
    )  # fmt: skip
    return up, down


@dataclasses.dataclass(frozen=True)
class Mlp:
    """The static argument of the custom_vjp.

    Attributes:
      up: x in token order (or in expert order, without gather_indices) to the pre-activation in expert order.
      down: hidden features to their product, both in expert order.
      quantization: what products but dW are quantized by.
      spare_sms: multiprocessors that the last product does not use.
      x_name, pre_activation_name: of what is kept for the backward pass, as policies of `jax.checkpoint` know it.
    """

    up: GroupedGemmProblem
    down: GroupedGemmProblem
    how: How
    activation: Activation
    interleaved: bool
    quantization: Fp8 | None
    spare_sms: int
    x_name: str
    pre_activation_name: str

    @property
    def activation_options(self) -> dict[str, Any]:
        """Those of its kernels."""
        return {"activation": self.activation, "interleaved": self.interleaved}

    @property
    def combined_down(self) -> GroupedGemmProblem:
        """From hidden features in expert order to y: `down` with each token's rows scaled and added up."""
        return dataclasses.replace(
            self.weighted_down, combine_y=self.up.permute_x, num_tokens=self.up.num_tokens
        )  # fmt: skip

    @property
    def transposed_down(self) -> GroupedGemmProblem:
        """From dy, in the order of x, to z = dy @ down^T in expert order: dX of `down` as a product that gathers."""
        return dataclasses.replace(
            self.up,
            in_features=self.down.out_features,
            out_features=self.down.in_features,
            w_layout="ekn" if self.down.w_layout == "enk" else "enk",
            has_bias=False,
        )

    @property
    def transposed_up(self) -> GroupedGemmProblem:
        """From d pre-activation in expert order to dx: dX of `up` as a product, each token's rows added up."""
        return dataclasses.replace(
            self.up,
            in_features=self.up.out_features,
            out_features=self.up.in_features,
            permute_x=False,
            has_bias=False,
            combine_y=self.up.permute_x,
        )

    @property
    def weighted_down(self) -> GroupedGemmProblem:
        """`down` for a dW whose rows are scaled."""
        return dataclasses.replace(self.down, has_topk_weights=True)

    @property
    def how_sparing(self) -> How:
        """On fewer multiprocessors."""
        target = self.how.target
        return self.how._replace(target=dataclasses.replace(target, num_sms=max(1, target.num_sms - self.spare_sms)))

    @property
    def recipe(self) -> Fp8:
        """`quantization`, where there is one."""
        assert self.quantization is not None
        return self.quantization

    def bounds(self, group_sizes: jax.Array) -> GroupBounds:
        """The rows of each expert."""
        return group_bounds(group_sizes, self.up.num_rows)


class Operands(NamedTuple):
    """Those of the custom_vjp."""

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
