"""The low-rank term of a product: rows of few features times a matrix, added before the bias and the weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_ALIGNED = 8  # features of 16 bits whose rows are multiples of 16 bytes, as TMA needs


class LowRankTerm(NamedTuple):
    """rows @ matrices[e], for the rows of each expert e, added to a product before the bias and the weights.

    Attributes:
      rows: [M, r], in expert order, in the dtype of the product's operands.
      matrices: as w, with r in place of the reduced axis: of forward [E, N, r] or, with w_layout "ekn", [E, r, N]; of
        dX [E, r, K] or [E, K, r].
    """

    rows: jax.Array
    matrices: jax.Array

    @property
    def rank(self) -> int:
        """r."""
        return self.rows.shape[1]

    def aligned(self, reduced_is_minor: bool) -> "LowRankTerm":
        """The same with zeros up to a rank that TMA can load."""
        missing = -self.rank % _ALIGNED
        if not missing:
            return self
        axis = 2 if reduced_is_minor else 1
        pads = [(0, missing if each == axis else 0) for each in range(3)]
        return LowRankTerm(jnp.pad(self.rows, ((0, 0), (0, missing))), jnp.pad(self.matrices, pads))
