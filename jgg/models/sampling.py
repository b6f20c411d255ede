"""Samples tokens from logits. Each row has its own key, so a sample does not depend on the other rows.

Integer counts and sums decide which tokens are sampled from, and these are the same in any order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.models.head import Head
from jgg.models.loss import losses_by

# the float32 numbers that are normal, and whose reciprocals are: a smaller temperature would be taken for 0
_TEMPERATURES = 2.0**-126, 2.0**126
_UNIT = 2**30  # of probabilities as integers, whose sum int32 has room for
_DIGIT = 2  # bits of a threshold that a pass over the logits finds
_LEAST = float(jnp.finfo(jnp.float32).min)


class Sampling(NamedTuple):
    """How the tokens of R rows are sampled.

    Attributes:
      temperatures: float32 [R], sampling temperatures; 0 decodes greedily.
      keys: random keys [R].
      top_k: int32 [R], samples only from the k likeliest tokens, ties included; None for all.
      top_p: float32 [R], samples from the likeliest of these that together have at least this share of their
        probability; None for all.
      min_p: float32 [R], samples from those with at least this fraction of the likeliest one's probability; None for
        all.
    """

    temperatures: jax.Array
    keys: jax.Array
    top_k: jax.Array | None
    top_p: jax.Array | None
    min_p: jax.Array | None


class Drawn(NamedTuple):
    """Tokens int32 [R], -1 if a logit is NaN, and the log-probabilities float32 [R] that they were drawn with."""

    tokens: jax.Array
    log_probabilities: jax.Array


def of_samples(sampling: Sampling, num_samples: int) -> Sampling:
    """The sampling of `num_samples` rows for each row."""
    of_row = jax.vmap(jax.random.fold_in, (None, 0))
    keys = jax.vmap(of_row, (0, None))(sampling.keys, jnp.arange(num_samples))
    temperatures, _, *bounds = sampling
    repeated = (None if bound is None else jnp.repeat(bound, num_samples) for bound in bounds)
    return Sampling(jnp.repeat(temperatures, num_samples), keys.reshape(-1), *repeated)


def normal_temperatures(temperatures: jax.Array) -> jax.Array:
    """Temperatures in float32 that logits can be divided by, or 0."""
    temperatures = temperatures.astype(jnp.float32)
    return jnp.where(temperatures == 0, 0.0, jnp.clip(temperatures, *_TEMPERATURES))


def draw(logits: jax.Array, sampling: Sampling | None, counts: jax.Array, head: Head) -> Drawn:
    """Draws a token of each row by its logits [R, V], the likeliest if there is no sampling.

    Args:
      counts: int32 [R], the number of the token in each row, from 0.
      head: how `losses_by` is to compute log-probabilities of logits that are scaled already.
    """
    highest = jnp.max(logits, axis=-1, keepdims=True)
    none = jnp.zeros(logits.shape[0], jnp.float32)
    if sampling is None:
        drawn = Drawn(jnp.argmax(logits, axis=-1), none)
    else:
        is_greedy = (sampling.temperatures == 0)[:, None]
        below = jnp.where(logits == highest, 0.0, logits - highest)  # inf less inf would be NaN
        scaled = jnp.maximum(below / jnp.where(is_greedy, 1.0, sampling.temperatures[:, None]), _LEAST)
        scaled = jnp.where(_is_kept(scaled, sampling, head), scaled, _LEAST)
        keys = jax.vmap(jax.random.fold_in)(sampling.keys, counts)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
        tokens = jnp.argmax(jnp.where(is_greedy, below, scaled + noise), axis=-1)
        drawn = Drawn(tokens, jnp.where(is_greedy[:, 0], none, -losses_by(scaled, tokens, head).losses))
    return drawn._replace(tokens=jnp.where(jnp.isnan(highest[:, 0]), -1, drawn.tokens).astype(jnp.int32))


def _is_kept(scaled: jax.Array, sampling: Sampling, head: Head) -> jax.Array:
    """Which tokens are drawn from, bool [R, V]: those before which the likelier ones are not enough yet."""
    distances = jax.lax.bitcast_convert_type(jnp.abs(scaled), jnp.int32)  # bits of floats from 0 on have their order
    is_kept = jnp.ones(scaled.shape, bool)
    if sampling.top_k is not None:
        is_kept = distances <= _threshold(distances, is_kept.astype(jnp.int32), sampling.top_k[:, None])
    if sampling.top_p is not None:
        log_sums = losses_by(scaled, jnp.zeros(scaled.shape[0], jnp.int32), head).log_sums
        probabilities = jnp.exp(scaled - log_sums[:, None])
        parts = jnp.where(is_kept, jnp.round(probabilities * _UNIT).astype(jnp.int32), 0)
        total = jnp.sum(parts, axis=-1, keepdims=True, dtype=jnp.int32)
        top_p = sampling.top_p[:, None]
        enough = jnp.ceil(top_p * total.astype(jnp.float32)).astype(jnp.int32)
        enough = jnp.where(top_p < 1, jnp.maximum(enough, 1), total + 1)  # all of them are never more than all
        is_kept &= distances <= _threshold(distances, parts, enough)
    if sampling.min_p is not None:
        is_kept &= scaled >= jnp.log(sampling.min_p)[:, None]  # the likeliest is at 0
    return is_kept


def _threshold(distances: jax.Array, parts: jax.Array, enough: jax.Array) -> jax.Array:
    """The largest number of each row such that the parts with less distance do not add up to enough, int32 [R, 1].

    It is found digit by digit, the highest first, each by a pass over the distances.

    Args:
      distances: int32 [R, V], from 0 on.
      parts: int32 [R, V], from 0 on, whose sums int32 has room for.
      enough: int32 [R, 1], from 1 on.
    """
    digits = jnp.arange(1, 2**_DIGIT, dtype=jnp.int32)[None]

    def step(number: jax.Array, known: jax.Array) -> jax.Array:
        shift = 32 - _DIGIT * (number + 1)
        larger = known | (digits << shift)  # [R, digits]; negative with the bit of the sign, which no distance has
        is_less = distances[:, None] < larger[:, :, None]
        sums = jnp.sum(jnp.where(is_less, parts[:, None], 0), axis=-1, dtype=jnp.int32)
        digit = jnp.sum((sums < enough) & (larger > 0), axis=-1, keepdims=True, dtype=jnp.int32)
        return known | (digit << shift)

    return jax.lax.fori_loop(0, 32 // _DIGIT, step, jnp.zeros((distances.shape[0], 1), jnp.int32))
