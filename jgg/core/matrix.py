"""The weights of a linear layer, in all their forms, as one value."""

import dataclasses
from typing import Any, NamedTuple, Self

import jax

from jgg.core.quantized import QuantizedArray, WeightForms


class Factors(NamedTuple):
    """The factors of a low-rank term added to weights: a and b of a `jgg.LowRank`, b times its scale.

    Attributes:
      a: [E, r, K] for w [E, N, K], [E, K, r] for w [E, K, N].
      b: [E, N, r] or [E, r, N].
    """

    a: jax.Array
    b: jax.Array


class Matrix(NamedTuple):
    """The matrices of E groups, each a dense or quantized matrix plus a low-rank term.

    At least one of `dense` and the two quantized forms is there. If there are several, they stand for the same numbers,
    and a product reads the one that it can multiply by. The gradient of a Matrix has `dense` and `factors`.

    Attributes:
      dense: float [E, N, K] or [E, K, N], by the layer's `w_layout`; its dtype may be wider than the rows' dtype.
      straight: quantized, in the same layout.
      transposed: quantized, with rows and columns exchanged. Kernels read both operands of a quantized product along
        the reduced axis, so the forward product multiplies by one form and dX by the other.
      factors: the low-rank term, in the same layout.
    """

    dense: jax.Array | Any = None
    straight: QuantizedArray | Any = None
    transposed: QuantizedArray | Any = None
    factors: Factors | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether there is a quantized form."""
        return self.straight is not None or self.transposed is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights, in the layout of `dense`."""
        if self.dense is not None:
            return self.dense.shape
        return (self.transposed.mT if self.straight is None else self.straight).shape

    @property
    def is_trained(self) -> bool:
        """Whether there are dense weights and no low-rank term, which would freeze them."""
        return self.dense is not None and self.factors is None

    def beside(self, factors: Factors) -> Self:
        """The same with a low-rank term, which freezes the weights."""
        return jax.lax.stop_gradient(self._replace(factors=None))._replace(factors=factors)

    def with_forms(self, forms: WeightForms) -> Self:
        """The same with these quantized forms."""
        return self._replace(straight=forms.straight, transposed=forms.transposed)

    def with_scales(self, scales: jax.Array | Any) -> Self:
        """The same with these scales of its straight form, if it has one."""
        if self.straight is None:
            return self
        return self._replace(straight=dataclasses.replace(self.straight, scales=scales))

    @property
    def of_transposed_layer(self) -> Self:
        """The matrix as the layer for x @ w^T reads it, which has the other `w_layout`: a and b change places."""
        return self if self.factors is None else self._replace(factors=Factors(self.factors.b, self.factors.a))
