"""The head of a model: the product of the last features and a matrix that gives logits, and its gradients."""

import dataclasses
import functools
from typing import Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgg.core.manual_axes import alike
from jgg.core.matrix import Matrix
from jgg.experts.sharding import MoESharding
from jgg.extend import barrier
from jgg.linear import layer
from jgg.linear.dense import dense_layer, dense_operands
from jgg.linear.differentiable import Operands
from jgg.linear.linear import Linear
from jgg.models.operations.losses import final_logits


@dataclasses.dataclass(frozen=True)
class Head:
    """How logits are computed from features x [..., H] and a matrix w.

    Attributes:
      scale: factor of the logits.
      w_layout: "ekn" for w [H, V], "enk" for w [V, H], as an embedding is.
      implementation, batch_invariant: of the product, as in `jgg.linear.dense`.
      mapped: the sharding over whose devices `losses_by` maps the rows of logits that are split so; None for no map.
      softcap: what bounds the magnitude of the scaled logits, by tanh; None for no bound.
      temperature: what losses divide the capped logits by.
    """

    scale: float = 1.0
    w_layout: str = "ekn"
    implementation: str | None = None
    batch_invariant: bool = False
    mapped: MoESharding | None = None
    softcap: float | None = None
    temperature: float = 1.0

    def vocabulary(self, w: jax.Array) -> int:
        """V."""
        return w.shape[1 if self.w_layout == "ekn" else 0]

    def final(self, logits: jax.Array) -> jax.Array:
        """The logits of the model, scaled and capped, of those that `logits_of` gives."""
        return final_logits(logits, self.scale, self.softcap)

    def tempered(self, logits: jax.Array) -> jax.Array:
        """Final logits [..., V] at the temperature, less the largest of them: in bits those that `draw` draws by."""
        if self.temperature == 1:
            return logits
        highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        # no constant, by whose reciprocal XLA would multiply
        divisor = barrier(jnp.full_like(highest, self.temperature))
        return jnp.where(logits == highest, 0.0, logits - highest) / divisor

    @property
    def of_final(self) -> Self:
        """The same for logits that are final already, at their temperature."""
        return dataclasses.replace(self, scale=1.0, softcap=None, temperature=1.0)

    @property
    def of_gradients(self) -> Self:
        """The same for gradients, which may be added up in the order of the faster product."""
        return dataclasses.replace(self, batch_invariant=False)

    def layer(self, x: jax.Array, w: jax.Array, dw_dtype: DTypeLike) -> tuple[Linear, Operands]:
        """The linear layer and its operands: float32 results, and dw in `dw_dtype`."""
        matrix = Matrix(dense=w)
        linear = dense_layer(
            x,
            matrix,
            w_layout=self.w_layout,
            out_dtype=jnp.float32,
            dw_dtype=dw_dtype,
            implementation=self.implementation,
            batch_invariant=self.batch_invariant,
        )
        return linear, dense_operands(linear, x, matrix)


def logits_of(x: jax.Array, w: jax.Array, head: Head) -> jax.Array:
    """Float32 logits [..., V], unscaled, of x [..., H] and w in its dtype, in which gradients multiply too."""
    return _logits_of(*alike((x, w)), head)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _logits_of(x: jax.Array, w: jax.Array, head: Head) -> jax.Array:
    linear, operands = head.layer(x, w, w.dtype)
    return layer.forward(linear, *operands)[0].reshape(*x.shape[:-1], head.vocabulary(w))


def _logits_of_fwd(x: jax.Array, w: jax.Array, head: Head) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _logits_of(x, w, head), (x, w)


def _logits_of_bwd(head: Head, residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    dy = dy.astype(x.dtype)
    return dx_of(head, x, w, dy), dw_of(head, x, w, dy, w.dtype)


_logits_of.defvjp(_logits_of_fwd, _logits_of_bwd)


def dx_of(head: Head, x: jax.Array, w: jax.Array, dy: jax.Array) -> jax.Array:
    """The gradient of x [..., H] from the logits' gradient, in the dtype of x."""
    linear, (_, matrix, routes, _) = head.of_gradients.layer(_rows(x), w, w.dtype)
    return layer.dx(linear, _rows(dy), matrix, routes)[0].dx.reshape(x.shape)


def dw_of(head: Head, x: jax.Array, w: jax.Array, dy: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The gradient of w, in this dtype, from the logits' gradient, which has the dtype of x."""
    rows = _rows(x)
    linear, (_, _, routes, _) = head.of_gradients.layer(rows, w, dtype)
    dw = layer.weight_gradient(linear, rows, _rows(dy), routes)
    assert dw is not None  # dense weights have a gradient
    return dw


def _rows(array: jax.Array) -> jax.Array:
    return array.reshape(-1, array.shape[-1])
