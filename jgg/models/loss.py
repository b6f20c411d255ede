"""The loss of each next token, a part of the logits at a time: a large vocabulary's are most of a step's memory."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.core.manual_axes import alike, vary_over, varying_axes
from jgg.experts.sharding import MoESharding
from jgg.extend import barrier
from jgg.models.head import Head, dw_of, dx_of, logits_of
from jgg.models.norms import how_of_rows
from jgg.models.operations.losses import LOSSES, Losses, Scored
from jgg.models.shard_map import map_sequences

_LOGITS_BYTES = 2**29  # of float32 logits that exist at once, on each device


class Found(NamedTuple):
    """Losses and, if they are asked for, entropies, float32 [B, S] each."""

    losses: jax.Array
    entropies: jax.Array | None


def losses_of(
    x: jax.Array,
    w: jax.Array,
    targets: jax.Array,
    head: Head,
    sharding: MoESharding | None,
    entropies: bool = False,
) -> Found:
    """The negative logarithm of each target's probability, and the entropies, which have no gradient.

    The backward pass computes the logits again, part by part.

    Args:
      x: [B, S, H], split over devices along B as sequences are.
      w: [H, V] or [V, H], in the dtype of x, whole on each device.
      targets: int32 [B, S]; the loss of one that is not from 0 to V - 1 is NaN, and so is its gradient unless it has
        the weight 0.
      head: how logits are computed.
      sharding: how devices split sequences, or None.
      entropies: whether to compute the entropy of the distribution that each target is of.
    """
    if sharding is None:
        return _losses(*alike((x, w, targets)), head, entropies)
    own = functools.partial(_losses, head=head, entropies=entropies)
    tokens = sharding.token_spec
    return jax.shard_map(
        own, mesh=sharding.mesh, in_specs=(tokens, jax.P(), tokens), out_specs=tokens, check_vma=False
    )(x, w, targets)


@functools.partial(jax.custom_vjp, nondiff_argnames=("head", "entropies"))
def _losses(x: jax.Array, w: jax.Array, targets: jax.Array, head: Head, entropies: bool = False) -> Found:
    return _losses_fwd(x, w, targets, head, entropies)[0]


def _losses_fwd(
    x: jax.Array, w: jax.Array, targets: jax.Array, head: Head, entropies: bool
) -> tuple[Found, tuple[jax.Array, ...]]:
    def of_part(part: tuple[jax.Array, jax.Array]) -> tuple[Losses, jax.Array | None]:
        x, targets = part
        logits = logits_of(x, w, head)
        found = losses_by(logits, targets, head)
        return found, _entropies(head.tempered(head.final(logits)), found.log_sums) if entropies else None

    num_parts = _num_parts(x, head.vocabulary(w))
    parts = jax.lax.map(of_part, (_parts(x, num_parts), _parts(targets, num_parts)))
    results, found = jax.tree.map(lambda each: _whole(each, targets.shape), parts)
    return Found(results.losses, found), (x, w, targets, *results)


def _losses_bwd(
    head: Head, entropies: bool, residuals: tuple[jax.Array, ...], d: Found
) -> tuple[jax.Array, jax.Array, None]:
    x, w, targets, *known = residuals
    own = _differentiated(x, w, targets, d.losses, Losses(*known), head)
    return own.dx, own.dw.astype(w.dtype), None


_losses.defvjp(_losses_fwd, _losses_bwd)


class Scores(NamedTuple):
    """How likely targets [B, S, C] are.

    Attributes:
      log_probabilities: float32 [B, S, C], the logarithms of the targets' probabilities, which are `-Decoder.losses`;
        NaN for a target outside the vocabulary.
      is_greedy: bool [B, S, C], whether greedy decoding picks the target, the first of the likeliest tokens.
    """

    log_probabilities: jax.Array
    is_greedy: jax.Array


def scores_of(x: jax.Array, w: jax.Array, targets: jax.Array, head: Head, sharding: MoESharding | None) -> Scores:
    """The scores of targets int32 [B, S, C], alternatives of one another, by x and w as in `losses_of`."""

    def of_part(w: jax.Array, x: jax.Array, targets: jax.Array) -> Scores:
        raw = logits_of(x, w, head)
        logits, log_sums = head.final(raw), losses_by(raw, targets[..., 0], head).log_sums
        targets = jnp.where(targets < 0, logits.shape[-1], targets)  # else JAX would count from the last logit
        of_targets = jnp.take_along_axis(logits, targets, axis=-1, mode="fill")
        is_greedy = (targets == jnp.argmax(logits, axis=-1)[..., None]) & ~jnp.isnan(of_targets)
        return Scores(of_targets - log_sums[..., None], is_greedy)

    def own(w: jax.Array, x: jax.Array, targets: jax.Array) -> Scores:
        num_parts = _num_parts(x, head.vocabulary(w))
        parts = jax.lax.map(lambda part: of_part(w, *part), (_parts(x, num_parts), _parts(targets, num_parts)))
        return jax.tree.map(lambda each: _whole(each, targets.shape), parts)

    if sharding is None:
        return own(w, x, targets)
    tokens = sharding.token_spec
    of_devices = jax.shard_map(
        own, mesh=sharding.mesh, in_specs=(jax.P(), tokens, tokens), out_specs=tokens, check_vma=False
    )
    return Scores(*of_devices(w, x, targets))


def loss_of(
    x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array, head: Head, sharding: MoESharding | None
) -> jax.Array:
    """The sum of weights [B, S] times the losses of `losses_of`, float32 []; the weight 0 leaves a loss out, also NaN.

    Where it is differentiated, the forward pass computes the gradients of x and w too, so that logits are computed
    once. The backward pass multiplies them by the gradient of the sum.

    Source: the fused linear cross entropy of Liger Kernel, https://arxiv.org/abs/2410.10989.
    """
    if sharding is None:
        return _loss(*alike((x, w, targets, weights)), head)
    tokens = sharding.token_spec
    of_devices = jax.shard_map(
        lambda *own: _loss(*own, head)[None],
        mesh=sharding.mesh,
        in_specs=(tokens, jax.P(), tokens, tokens),
        out_specs=tokens,
        check_vma=False,
    )
    return jnp.sum(of_devices(x, w, targets, weights))


@functools.partial(jax.custom_vjp, nondiff_argnames=("head",))
def _loss(x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array, head: Head) -> jax.Array:
    return _weighted_sum(_losses(x, w, targets, head).losses, weights)


def _loss_fwd(
    x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array, head: Head
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    unit = jnp.ones((), jnp.float32)
    if x.dtype == jnp.float16:  # the mean's weights times probabilities would be too small for it
        unit = jnp.ldexp(unit, jnp.frexp(jnp.max(jnp.abs(weights), initial=0.0))[1])  # exact: a power of 2
    losses, dx, dw = _differentiated(x, w, targets, weights / unit, None, head)
    d_weights = jnp.where((weights == 0) & jnp.isnan(losses), 0.0, losses)  # what is left out has no gradient either
    return _weighted_sum(losses, weights), (d_weights, dx, dw, unit)


def _loss_bwd(
    head: Head, residuals: tuple[jax.Array, ...], d_loss: jax.Array
) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    d_weights, dx, dw, unit = residuals
    dx, dw = ((each.astype(jnp.float32) * (d_loss * unit)).astype(dx.dtype) for each in (dx, dw))
    return dx, dw, None, d_weights * d_loss


_loss.defvjp(_loss_fwd, _loss_bwd)


def _weighted_sum(losses: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(weights == 0, 0.0, losses * weights))


class _Differentiated(NamedTuple):
    """Losses [B, S], the gradient of x, in its dtype, and the gradient of w, in its dtype or float32."""

    losses: jax.Array
    dx: jax.Array
    dw: jax.Array


def _differentiated(
    x: jax.Array, w: jax.Array, targets: jax.Array, d_losses: jax.Array, known: Losses | None, head: Head
) -> _Differentiated:
    """Computes losses and gradients, by the gradient of the losses, from logits that are computed once.

    Each part of the tokens has its logits, their gradients and dx. The gradients of the logits of a block of parts are
    kept, in the dtype of x, so that one product gives dw: to add up a float32 dw for each part would take longer than
    the products. If nobody uses dw, JAX drops its product and what is kept for it.

    Args:
      known: the losses [B, S] and their log sums, or None.
    """

    def of_part(part: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, targets, d_losses, *known = part
        logits = logits_of(x, w, head)
        losses, log_sums = known or losses_by(logits, targets, head)
        d_logits = _d_logits(head.final(logits), log_sums, targets, d_losses, head).astype(x.dtype)
        return losses, dx_of(head, x, w, d_logits), d_logits

    def of_block(block: tuple[jax.Array, ...]) -> _Differentiated:
        losses, dx, d_logits = jax.lax.map(of_part, block)
        dx, dw = barrier((dx, dw_of(head, block[0], w, d_logits, dw_dtype)))  # first dw, after which d_logits are free
        return _Differentiated(losses, dx, dw)

    def add_block(dw: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        own = of_block(block)
        return dw + own.dw, (own.losses, own.dx)

    num_parts, num_blocks = _num_parts(x, head.vocabulary(w)), _num_blocks(x, w, head)
    dw_dtype = jnp.float32 if num_blocks > 1 or x.dtype == jnp.float16 else w.dtype
    arrays = (x, targets, d_losses, *(() if known is None else known))
    parts = tuple(_parts(array, num_parts) for array in arrays)
    if num_blocks == 1:
        losses, dx, dw = of_block(parts)
    else:
        blocks = tuple(each.reshape(num_blocks, -1, *each.shape[1:]) for each in parts)
        none = vary_over(varying_axes(w), jnp.zeros(w.shape, jnp.float32))
        dw, results = jax.lax.scan(add_block, none, blocks)
        losses, dx = (each.reshape(num_parts, *each.shape[2:]) for each in results)
    return _Differentiated(_whole(losses, targets.shape), _whole(dx, x.shape), dw)


def losses_by(logits: jax.Array, targets: jax.Array, head: Head) -> Losses:
    """The losses of targets [...] by the logits [..., V] that `logits_of` gives, and the log sums of the final ones.

    On a GPU the bits of a token's loss do not depend on the other tokens. Logits that are scaled already, with a head
    whose scale is 1, give the same bits. So do logits at a temperature.
    """
    if head.temperature != 1:
        logits, head = head.tempered(head.final(logits)), head.of_final

    def of_rows(_: None, logits: jax.Array, targets: jax.Array) -> Losses:
        targets = barrier(targets)  # else the kernel might get a slice of tokens, which begins between 16 bytes
        rows = Scored(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        capped = {} if head.softcap is None else {"softcap": head.softcap}
        results = LOSSES(how_of_rows(head.implementation), alike(rows), scale=head.scale, **capped)
        return jax.tree.map(lambda result: result.reshape(targets.shape), results)

    return map_sequences(of_rows, head.mapped, None, logits, targets)


def _entropies(logits: jax.Array, log_sums: jax.Array) -> jax.Array:
    """The entropies of the distributions of logits [..., V], whose log sums are [...]."""
    log_probabilities = logits - log_sums[..., None]
    probabilities = jnp.exp(log_probabilities)
    return -jnp.sum(jnp.where(probabilities > 0, probabilities * log_probabilities, 0.0), axis=-1)


def _d_logits(logits: jax.Array, log_sums: jax.Array, targets: jax.Array, d_losses: jax.Array, head: Head) -> jax.Array:
    """The gradient of the result of `logits_of`, from the losses' gradient and the final logits."""
    vocabulary = logits.shape[-1]
    is_known = (targets >= 0) & (targets < vocabulary)
    d_losses = jnp.where(is_known | (d_losses == 0), d_losses, jnp.nan)
    is_target = targets[..., None] == jnp.arange(vocabulary, dtype=jnp.int32)[None, None]
    factors = (d_losses * (head.scale / head.temperature))[..., None]
    if head.softcap is not None:
        factors *= 1 - jnp.square(logits / head.softcap)  # the derivative of tanh
    return (jnp.exp(head.tempered(logits) - log_sums[..., None]) - is_target.astype(jnp.float32)) * factors


def _num_parts(x: jax.Array, vocabulary: int) -> int:
    batch, length, _ = x.shape
    least = max(1, math.ceil(batch * length * vocabulary * 4 / _LOGITS_BYTES))
    return max(1, min(length, 1 << (least - 1).bit_length()))  # a power of two divides most lengths


def _num_blocks(x: jax.Array, w: jax.Array, head: Head) -> int:
    """In how many blocks of parts dw is computed: the gradients of a block's logits may take two float32 w's bytes."""
    vocabulary, most = head.vocabulary(w), max(_LOGITS_BYTES, 2 * 4 * w.size)
    num_parts = _num_parts(x, vocabulary)
    least = math.ceil(x.shape[0] * x.shape[1] * vocabulary * x.dtype.itemsize / most)
    return next((number for number in range(max(1, least), num_parts) if num_parts % number == 0), num_parts)


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
