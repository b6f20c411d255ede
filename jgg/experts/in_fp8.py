"""The steps of an expert MLP in FP8, by a recipe; dW and the gradients of biases are computed in the dtype of x."""

import dataclasses
from typing import Any

import jax

from jgg.core.quantized import Format, QuantizedArray, ToQuantize, WeightForms
from jgg.experts.mlp import Mlp, Operands
from jgg.fp8 import Fp8, both_forms
from jgg.products.activate import ACTIVATE_BACKWARD, ActivateBackward, Activated, ActivationGradients
from jgg.products.forward import FORWARD, Forward
from jgg.products.low_rank import LowRankTerm
from jgg.products.quantize import QUANTIZE_ROWS, Quantize
from jgg.products.up import UP


@dataclasses.dataclass(frozen=True)
class InFp8(Mlp):
    """Rows and weights are quantized before they are multiplied; the activation's results are quantized when stored.

    Attributes:
      recipe: how rows, weights and the activation's results are quantized.
    """

    recipe: Fp8

    def prepared(self, operands: Operands, keeps: bool) -> Operands:
        """The operands, with weights quantized if both passes are to use what is quantized once.

        The recipe says so, or weights wider than x, which would take long to read again.
        """
        if not keeps:
            return operands

        def quantized(w: jax.Array, forms: WeightForms | None) -> WeightForms | None:
            is_wider = w.dtype.itemsize > operands.x.dtype.itemsize
            if forms is None and (is_wider or self.recipe.keeps_weights):
                forms = both_forms(self.how, w, self.recipe.format)
            return forms

        return operands._replace(
            quantized_gate_up=quantized(operands.w_gate_up, operands.quantized_gate_up),
            quantized_down=quantized(operands.w_down, operands.quantized_down),
        )

    def up(self, operands: Operands, keeps: bool, term: LowRankTerm | None) -> Activated:
        """The hidden features [M, I] and, if `keeps` is True, the pre-activation [M, 2, I], both quantized."""
        weights = self._gate_up(operands, is_transposed=self.of_up.w_layout == "ekn")
        of_up = self._operands(operands, self._rows(operands.x, self.recipe.format), weights)
        of_up = of_up._replace(bias=operands.b_gate_up, low_rank=_in_enk(term, self.of_up.w_layout))
        return UP(
            self.how,
            of_up,
            problem=self.of_up.quantized,
            keeps=keeps,
            stored_as=self.recipe.format,
            activation=self.activation,
            interleaved=self.interleaved,
        )

    def down(self, operands: Operands, hidden: Any, term: LowRankTerm | None) -> jax.Array:
        """y [T, H]."""
        of_down = self._operands(operands, hidden, self._down(operands, is_transposed=self.of_down.w_layout == "ekn"))
        of_down = of_down._replace(topk_weights=operands.topk_weights, bias=operands.b_down)
        of_down = of_down._replace(low_rank=_in_enk(term, self.of_down.w_layout))
        return FORWARD(self.how, of_down, problem=self.combined_down.quantized)

    def activation_backward(
        self, operands: Operands, kept: Any, dy: jax.Array, term: LowRankTerm | None
    ) -> ActivationGradients:
        """The results of `Mlp.activation_backward`, with the gradient of the pre-activation quantized too."""
        weights = self.row_weights(operands)
        w_down = self._down(operands, is_transposed=self.of_down.w_layout == "enk")
        of_z = self._operands(operands, self._rows(dy, self.recipe.gradient_format), w_down)
        of_z = of_z._replace(low_rank=_in_enk(term, self.transposed_down.w_layout))
        z = FORWARD(self.how, of_z, problem=self.transposed_down.quantized)
        return ACTIVATE_BACKWARD(
            self.how,
            ActivateBackward(kept, z, weights),
            stored_as=self.recipe.gradient_format,
            activation=self.activation,
            interleaved=self.interleaved,
            scale_hidden=operands.scales_hidden,
        )

    def dx(self, operands: Operands, d_pre_activation: Any, term: LowRankTerm | None) -> jax.Array:
        """The gradient of x [T, H]: the forward product with transposed weights."""
        weights = self._gate_up(operands, is_transposed=self.of_up.w_layout == "enk")
        of_dx = self._operands(operands, d_pre_activation, weights)
        layout_of_term = "ekn" if self.of_up.w_layout == "enk" else "enk"
        of_dx = of_dx._replace(low_rank=_in_enk(term, layout_of_term))
        return FORWARD(self.how, of_dx, problem=self.transposed_up.quantized)

    def kept_for_backward(self, operands: Operands) -> Operands:
        """The operands, with only those forms of quantized weights that the products for dX and z read."""
        is_transposed = self.of_up.w_layout == "enk"

        def kept(forms: WeightForms | None) -> WeightForms | None:
            return forms and (forms._replace(straight=None) if is_transposed else forms._replace(transposed=None))

        return (
            super()
            .kept_for_backward(operands)
            ._replace(quantized_gate_up=kept(operands.quantized_gate_up), quantized_down=kept(operands.quantized_down))
        )

    def _operands(self, operands: Operands, rows: QuantizedArray, weights: QuantizedArray | ToQuantize) -> Forward:
        return Forward(rows, weights, self.bounds(operands.group_sizes), operands.gather_indices)

    def _rows(self, rows: jax.Array, stored_as: Format) -> QuantizedArray:
        return QUANTIZE_ROWS(self.how, Quantize(rows), stored_as=stored_as)

    def _gate_up(self, operands: Operands, is_transposed: bool) -> QuantizedArray | ToQuantize:
        return self._weights(operands.w_gate_up, operands.quantized_gate_up, is_transposed)

    def _down(self, operands: Operands, is_transposed: bool) -> QuantizedArray | ToQuantize:
        return self._weights(operands.w_down, operands.quantized_down, is_transposed)

    def _weights(self, w: jax.Array, forms: WeightForms | None, is_transposed: bool) -> QuantizedArray | ToQuantize:
        """Weights as they are or transposed, from their forms if there are some; else the product quantizes them."""
        form = forms and (forms.transposed if is_transposed else forms.straight)
        return ToQuantize(w, is_transposed, self.recipe.format) if form is None else form


def _in_enk(term: LowRankTerm | None, w_layout: str) -> LowRankTerm | None:
    """The term beside weights of a layout as the term beside quantized ones, which are [E, N, K]."""
    return term if term is None or w_layout == "enk" else term._replace(matrices=term.matrices.mT)
