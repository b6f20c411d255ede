"""The loss of each next token, a part of the logits at a time: a large vocabulary's are most of a step's memory."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgg.core.manual_axes import alike, vary_over, varying_axes
from jgg.core.matrix import Matrix
from jgg.linear import layer
from jgg.linear.dense import dense_layer, dense_operands
from jgg.linear.differentiable import Operands
from jgg.linear.linear import Linear
from jgg.sharding import MoESharding

_LOGITS_BYTES = 2**29  # of float32 logits that exist at once, on each device


@dataclasses.dataclass(frozen=True)
class Head:
    """How logits are computed from features x [..., H] and a matrix w.

    Attributes:
      scale: factor of the logits.
      w_layout: "ekn" for w [H, V], "enk" for w [V, H], as an embedding is.
      implementation: of the product, as in `jgg.linear.dense`.
    """

    scale: float = 1.0
    w_layout: str = "ekn"
    implementation: str | None = None

    def vocabulary(self, w: jax.Array) -> int:
        """V."""
        return w.shape[1 if self.w_layout == "ekn" else 0]

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
    return _gradients(head, x, w, dy.astype(x.dtype), w.dtype)


_logits_of.defvjp(_logits_of_fwd, _logits_of_bwd)


def _gradients(
    head: Head, x: jax.Array, w: jax.Array, dy: jax.Array, dw_dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """The gradients of x and w by that of the logits, in the dtype of x."""
    rows, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    linear, (_, matrix, routes, _) = head.layer(rows, w, dw_dtype)
    (dx, _), _ = layer.dx(linear, dy, matrix, routes)
    dw = layer.weight_gradient(linear, rows, dy, routes)
    assert dw is not None  # dense weights have a gradient
    return dx.reshape(x.shape), dw


def losses_of(x: jax.Array, w: jax.Array, targets: jax.Array, head: Head, sharding: MoESharding | None) -> jax.Array:
    """The negative logarithm of each target's probability, float32 [B, S].

    The backward pass computes the logits again, part by part.

    Args:
      x: [B, S, H], split over devices along B as sequences are.
      w: [H, V] or [V, H], in the dtype of x, whole on each device.
      targets: int32 [B, S]; the loss of one that is not from 0 to V - 1 is NaN, and so is its gradient unless it has
        the weight 0.
      head: how logits are computed.
      sharding: how devices split sequences, or None.
    """
    if sharding is None:
        return _losses(*alike((x, w, targets)), head)
    own = functools.partial(_losses, head=head)
    tokens = sharding.token_spec
    return jax.shard_map(
        own, mesh=sharding.mesh, in_specs=(tokens, jax.P(), tokens), out_specs=tokens, check_vma=False
    )(x, w, targets)


@functools.partial(jax.custom_vjp, nondiff_argnames=("head",))
def _losses(x: jax.Array, w: jax.Array, targets: jax.Array, head: Head) -> jax.Array:
    return _losses_fwd(x, w, targets, head)[0]


def _losses_fwd(x: jax.Array, w: jax.Array, targets: jax.Array, head: Head) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def of_part(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, targets = part
        logits = logits_of(x, w, head) * head.scale
        log_sum = jax.nn.logsumexp(logits, axis=-1)
        targets = jnp.where(targets < 0, head.vocabulary(w), targets)  # else JAX would count from the last logit
        return log_sum - jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="fill")[..., 0], log_sum

    num_parts = _num_parts(x, head.vocabulary(w))
    losses, log_sums = jax.lax.map(of_part, (_parts(x, num_parts), _parts(targets, num_parts)))
    own, log_sums = (_whole(parts, targets.shape) for parts in (losses, log_sums))
    return own, (x, w, targets, log_sums)


def _losses_bwd(head: Head, residuals: tuple[jax.Array, ...], d_losses: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, targets, log_sums = residuals

    def of_part(dw: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, targets, log_sums, d_losses = part
        probabilities = jnp.exp(logits_of(x, w, head) * head.scale - log_sums[..., None])
        is_known = (targets >= 0) & (targets < vocabulary)
        d_losses = jnp.where(is_known | (d_losses == 0), d_losses, jnp.nan)
        is_target = targets[..., None] == jnp.arange(vocabulary, dtype=jnp.int32)[None, None]
        d_logits = ((probabilities - is_target.astype(jnp.float32)) * (d_losses * head.scale)[..., None]).astype(
            x.dtype
        )
        dx, own = _gradients(head, x, w, d_logits, jnp.float32)
        return dw + own, dx

    vocabulary = head.vocabulary(w)
    num_parts = _num_parts(x, vocabulary)
    parts = tuple(_parts(array, num_parts) for array in (x, targets, log_sums, d_losses))
    dw, dx = jax.lax.scan(of_part, vary_over(varying_axes(w), jnp.zeros(w.shape, jnp.float32)), parts)
    return _whole(dx, x.shape), dw.astype(w.dtype), None


_losses.defvjp(_losses_fwd, _losses_bwd)


def _num_parts(x: jax.Array, vocabulary: int) -> int:
    batch, length, _ = x.shape
    least = max(1, math.ceil(batch * length * vocabulary * 4 / _LOGITS_BYTES))
    return max(1, min(length, 1 << (least - 1).bit_length()))  # a power of two divides most lengths


def _parts(array: jax.Array, num_parts: int) -> jax.Array:
    """[B, S, ...] -> [parts, B, S / parts rounded up, ...]; what is added is zero."""
    batch, length, *features = array.shape
    own = -(-length // num_parts)
    array = jnp.pad(array, ((0, 0), (0, num_parts * own - length), *((0, 0) for _ in features)))
    return jnp.moveaxis(array.reshape(batch, num_parts, own, *features), 1, 0)


def _whole(parts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array of this shape that `_parts` divided."""
    batch, length, *features = shape
    return jnp.moveaxis(parts, 0, 1).reshape(batch, parts.shape[0] * parts.shape[2], *features)[:, :length]
