"""The steps of an expert MLP in the dtype of x."""

import dataclasses
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jgg.core.quantized import WeightForms
from jgg.core.schedule import between_groups
from jgg.experts.mlp import Mlp, Operands
from jgg.launching.choice import is_plain_jax
from jgg.primitives.barrier import barrier
from jgg.products.activate import ACTIVATE_BACKWARD, ActivateBackward, Activated, ActivationGradients
from jgg.products.dx import DX, Dx
from jgg.products.forward import FORWARD, Forward
from jgg.products.low_rank import LowRankTerm
from jgg.products.up import UP


@dataclasses.dataclass(frozen=True)
class InDtype(Mlp):
    """Everything is multiplied and kept in the dtype of x; the gradients of weights are in the dtype of the weights."""

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to compute, or nothing but plain JAX can compute it."""
        return super().is_plain or is_plain_jax(self.how.implementation)

    def prepared(self, operands: Operands, keeps: bool) -> Operands:
        """The operands with the weights in the dtype of x."""
        dtype = operands.x.dtype

        def cast(w: jax.Array) -> jax.Array:
            return w if w.dtype == dtype else checkpoint_name(w.astype(dtype), self.names.weights)

        return operands._replace(w_gate_up=cast(operands.w_gate_up), w_down=cast(operands.w_down))

    def restored(self, kept: Operands, dy: jax.Array) -> tuple[Operands, jax.Array]:
        """The operands with quantized weights dequantized again, so that a model's are not all dense at once.

        The barrier keeps XLA from computing them once for both passes.
        """
        gate_up, down, dy = barrier((kept.quantized_gate_up, kept.quantized_down, dy))

        def dense(w: jax.Array, forms: WeightForms | None) -> jax.Array:
            return w if forms is None or forms.straight is None else forms.straight.dequantize(kept.x.dtype)

        return kept._replace(w_gate_up=dense(kept.w_gate_up, gate_up), w_down=dense(kept.w_down, down)), dy

    def up(self, operands: Operands, keeps: bool, term: LowRankTerm | None) -> Activated:
        """The hidden features [M, I] and, if `keeps` is True, the pre-activation [M, 2 * I], in expert order."""
        x, bounds = operands.x, self.bounds(operands.group_sizes)
        w = _weights(operands.w_gate_up, operands.quantized_gate_up)
        return UP(
            self.how,
            Forward(x, w, bounds, operands.gather_indices, bias=operands.b_gate_up, low_rank=term),
            problem=self.of_up,
            activation=self.activation,
            interleaved=self.interleaved,
            keeps=keeps,
        )

    def down(self, operands: Operands, hidden: Any, term: LowRankTerm | None) -> jax.Array:
        """y [T, H]."""
        w, bounds = _weights(operands.w_down, operands.quantized_down), self.bounds(operands.group_sizes)
        weights = operands.topk_weights
        of_down = Forward(hidden, w, bounds, operands.gather_indices, weights, operands.b_down, term)
        return FORWARD(self.how, of_down, problem=self.combined_down)

    def activation_backward(
        self, operands: Operands, kept: Any, dy: jax.Array, term: LowRankTerm | None
    ) -> ActivationGradients:
        """The gradient of the pre-activation, hidden features, and the sums of `Mlp.activation_backward`."""
        bounds = self.bounds(operands.group_sizes)
        weights = self.row_weights(operands)
        of_z = Forward(dy, operands.w_down, bounds, operands.gather_indices, low_rank=term)
        z = FORWARD(self.how, of_z, problem=self.transposed_down)
        in_group = between_groups(bounds, self.of_up.num_rows)
        return ACTIVATE_BACKWARD(
            self.how,
            ActivateBackward(kept, z, weights, in_group),
            activation=self.activation,
            interleaved=self.interleaved,
            scale_hidden=operands.scales_hidden,
        )

    def dx(self, operands: Operands, d_pre_activation: Any, term: LowRankTerm | None) -> jax.Array:
        """The gradient of x [T, H]."""
        bounds = self.bounds(operands.group_sizes)
        indices = operands.gather_indices
        of_dx = Dx(d_pre_activation, operands.w_gate_up, bounds, gather_indices=indices, low_rank=term)
        return DX(self.how, of_dx, problem=self.of_up).dx


def _weights(dense: jax.Array, forms: WeightForms | None) -> Any:
    """Weights for the forward pass: quantized if they are stored so, since the product may read them as they are."""
    return dense if forms is None else forms.straight
