"""The loss of each next token, a part of the logits at a time: a large vocabulary's are most of a step's memory."""

import functools
import math

import jax
import jax.numpy as jnp

from jgg.sharding import MoESharding

_LOGITS_BYTES = 2**29  # of float32 logits that exist at once, on each device


@jax.custom_vjp
def logits_of(x: jax.Array, w: jax.Array) -> jax.Array:
    """Float32 logits [..., V] of x [..., H] and w [H, V]; both gradients multiply in the dtype of x."""
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)


def _logits_of_fwd(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return logits_of(x, w), (x, w)


def _logits_of_bwd(residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    _, pull_back = jax.vjp(jnp.matmul, x, w)
    return pull_back(dy.astype(x.dtype))


logits_of.defvjp(_logits_of_fwd, _logits_of_bwd)


def losses_of(x: jax.Array, w: jax.Array, targets: jax.Array, scale: float, sharding: MoESharding | None) -> jax.Array:
    """The negative logarithm of each target's probability, float32 [B, S].

    The backward pass computes the logits again, part by part.

    Args:
      x: [B, S, H], split over devices along B as sequences are.
      w: [H, V], in the dtype of x, whole on each device.
      targets: int32 [B, S]; the loss of one that is not from 0 to V - 1 is NaN, and so is its gradient unless it has
        the weight 0.
      scale: factor of the logits.
      sharding: how devices split sequences, or None.
    """
    if sharding is None:
        return _losses(x, w, targets, scale)
    own = functools.partial(_losses, scale=scale)
    tokens = sharding.token_spec
    return jax.shard_map(
        own, mesh=sharding.mesh, in_specs=(tokens, jax.P(), tokens), out_specs=tokens, check_vma=False
    )(x, w, targets)


@functools.partial(jax.custom_vjp, nondiff_argnames=("scale",))
def _losses(x: jax.Array, w: jax.Array, targets: jax.Array, scale: float) -> jax.Array:
    return _losses_fwd(x, w, targets, scale)[0]


def _losses_fwd(
    x: jax.Array, w: jax.Array, targets: jax.Array, scale: float
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def of_part(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, targets = part
        logits = logits_of(x, w) * scale
        log_sum = jax.nn.logsumexp(logits, axis=-1)
        targets = jnp.where(targets < 0, w.shape[1], targets)  # else JAX would count from the last logit
        return log_sum - jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="fill")[..., 0], log_sum

    num_parts = _num_parts(x, w)
    losses, log_sums = jax.lax.map(of_part, (_parts(x, num_parts), _parts(targets, num_parts)))
    own, log_sums = (_whole(parts, targets.shape) for parts in (losses, log_sums))
    return own, (x, w, targets, log_sums)


def _losses_bwd(
    scale: float, residuals: tuple[jax.Array, ...], d_losses: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x, w, targets, log_sums = residuals

    def of_part(dw: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, targets, log_sums, d_losses = part
        probabilities = jnp.exp(logits_of(x, w) * scale - log_sums[..., None])
        is_known = (targets >= 0) & (targets < w.shape[1])
        d_losses = jnp.where(is_known | (d_losses == 0), d_losses, jnp.nan)
        is_target = targets[..., None] == jnp.arange(w.shape[1], dtype=jnp.int32)[None, None]
        d_logits = ((probabilities - is_target.astype(jnp.float32)) * (d_losses * scale)[..., None]).astype(x.dtype)
        own = jnp.einsum("bsh,bsv->hv", x, d_logits, preferred_element_type=jnp.float32)
        return dw + own, jnp.einsum("bsv,hv->bsh", d_logits, w)

    num_parts = _num_parts(x, w)
    parts = tuple(_parts(array, num_parts) for array in (x, targets, log_sums, d_losses))
    dw, dx = jax.lax.scan(of_part, jnp.zeros(w.shape, jnp.float32), parts)
    return _whole(dx, x.shape), dw.astype(w.dtype), None


_losses.defvjp(_losses_fwd, _losses_bwd)


def _num_parts(x: jax.Array, w: jax.Array) -> int:
    batch, length, _ = x.shape
    least = max(1, math.ceil(batch * length * w.shape[1] * 4 / _LOGITS_BYTES))
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
