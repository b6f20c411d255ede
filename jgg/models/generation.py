"""Generates tokens: the prompts once through the model, then one token of each sequence at a time, with a cache."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from jgg.core.arguments import as_finite, as_int, check, check_instance
from jgg.core.schedule import saturated_int32
from jgg.models.decoder import Caches, Decoder
from jgg.models.tokens import as_integers, check_ids

# the float32 numbers that are normal, and whose reciprocals are: a smaller one would be taken for 0
_TEMPERATURES = 2.0**-126, 2.0**126


def generate(
    model: Decoder,
    tokens: ArrayLike,
    max_new_tokens: int,
    *,
    lengths: ArrayLike | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    key: jax.Array | None = None,
    stop_tokens: Iterable[int] = (),
) -> jax.Array:
    """Continues prompts.

    Compiled once for the shapes of its arguments; the loop over new tokens is part of the compiled program. If devices
    split a model's sequences, the last prompt is repeated up to a multiple of their number, and its copies are left out
    of the result.

    Examples:
      >>> import jgg.models
      >>> from flax import nnx
      >>> config = jgg.models.model_config({
      ...     "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 16,
      ...     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
      ...     "num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
      ... })
      >>> model = jgg.models.Decoder(config, rngs=nnx.Rngs(0))
      >>> jgg.models.generate(model, [[1, 2, 3], [4, 5, 0]], 7, lengths=[3, 2]).shape
      (2, 7)

    Args:
      model: the model.
      tokens: integer [B, S], a prompt in each row, S at least 1. Rows of a list that are shorter are padded by the
        caller, at their end, with any number.
      max_new_tokens: N, how many tokens to add to each.
      lengths: integer [B], the lengths of the prompts, from 1 to S; what a row holds past its length is not read. None
        if all have S tokens.
      temperature: what logits are divided by before tokens are drawn; 0 takes the likeliest token.
      top_p: draws only among the likeliest tokens that together have at least this probability.
      key: one random key for all prompts, needed unless temperature is 0.
      stop_tokens: tokens that end a sequence, which repeats the one that ended it up to its N tokens. Generation ends
        when all sequences have. A number that is no id of the model's vocabulary ends nothing.

    Returns: the new tokens, int32 [B, N]. A sequence goes on with -1 from where the model's logits are NaN.

    Raises:
      ValueError: a shape or a number is wrong, a prompt has an id that the model's vocabulary lacks, or key is missing.
        Inside a transformation such as `jax.jit`, traced tokens and lengths are not checked: an unknown id makes the
        logits NaN, and lengths are clipped to their range.
      TypeError: an argument has the wrong type.
    """
    check_instance("model", model, Decoder, "a jgg.models.Decoder")
    tokens, lengths = _prompts(tokens, lengths, model.config.vocabulary)
    new_tokens = as_int("max_new_tokens", max_new_tokens, 1)
    longest = 2**31 - 1 - tokens.shape[1]
    check(new_tokens <= longest, f"max_new_tokens must be at most 2**31 - 1 - S, {longest}, got {new_tokens}.")
    temperature, top_p = as_finite("temperature", temperature), as_finite("top_p", top_p)
    check(temperature >= 0, f"temperature must be 0 or more, got {temperature}.")
    check(0 < top_p <= 1, f"top_p must be more than 0 and at most 1, got {top_p}.")
    check(key is not None or not temperature, f"key must be a random key with temperature {temperature}, got None.")
    sampling = _sampling(temperature, top_p, jax.random.key(0) if key is None else key)
    stops = _stops(stop_tokens, model.config.vocabulary)
    graphdef, state = nnx.split(model)
    sharding, batch = model.options.sharding, len(tokens)
    copies = 0 if sharding is None else -batch % sharding.size(*sharding.token_axes)
    each = jnp.minimum(jnp.arange(batch + copies), batch - 1)
    return _generate(
        graphdef,
        state,
        tokens[each],
        lengths[each],
        stops,
        sampling if temperature else None,
        new_tokens=new_tokens,
    )[:batch]


class Sampling(NamedTuple):
    """How tokens are drawn: float32 temperature and top_p, and a random key."""

    temperature: jax.Array
    top_p: jax.Array
    key: jax.Array


def _sampling(temperature: float, top_p: float, key: Any) -> Sampling:
    check_instance("key", key, jax.Array | np.ndarray, "a random key, as jax.random.key returns it")
    try:
        key = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(jnp.asarray(key))
    except (TypeError, ValueError):
        got = f"{key.dtype} {list(key.shape)}"
        raise TypeError(f"key must be a random key, as jax.random.key returns it, got {got}.") from None
    check(not key.shape, f"key must be one random key, for all prompts, got keys {list(key.shape)}.")
    least = float(jnp.finfo(jnp.float32).tiny)
    return Sampling(jnp.float32(np.clip(temperature, *_TEMPERATURES)), jnp.float32(max(top_p, least)), key)


def _stops(stop_tokens: Iterable[int], vocabulary: int) -> jax.Array:
    try:
        given = list(stop_tokens)
    except TypeError:
        raise TypeError(f"stop_tokens must be a collection of ints, got {stop_tokens!r}.") from None
    ids = [as_int("stop_tokens", token, expected="a collection of ints") for token in given]
    return jnp.asarray([token for token in ids if 0 <= token < vocabulary], jnp.int32)


def _prompts(tokens: ArrayLike, lengths: ArrayLike | None, vocabulary: int) -> tuple[jax.Array, jax.Array]:
    """The prompts int32 [B, S] and their lengths int32 [B]; raises if what is known of them is wrong."""
    ids, ids_known = as_integers("tokens", tokens, "[B, S]")
    batch, longest = ids.shape
    check(longest > 0, f"tokens must be [B, S] with S at least 1, got {list(ids.shape)}.")
    given = np.full(batch, longest) if lengths is None else lengths
    sizes, known = as_integers("lengths", given, "[B]")
    check(sizes.shape == (batch,), f"lengths must be [B], [{batch}], got {list(sizes.shape)}.")
    if known is not None:
        within = ((known >= 1) & (known <= longest)).all()
        check(within, f"lengths must be between 1 and the {longest} columns of tokens, got {known.tolist()}.")
        if ids_known is not None:
            check_ids("tokens", ids_known, vocabulary, np.arange(longest) < known[:, None])
    return saturated_int32(ids), jnp.clip(saturated_int32(sizes), 1, longest)


class _Loop(NamedTuple):
    """The state between steps: `filled` of the N new tokens [B, N] of each sequence are there."""

    filled: jax.Array
    new: jax.Array
    is_done: jax.Array
    caches: Caches


@functools.partial(jax.jit, static_argnums=0, static_argnames="new_tokens")
def _generate(
    graphdef: nnx.GraphDef[Decoder],
    state: Any,
    tokens: jax.Array,
    lengths: jax.Array,
    stops: jax.Array,
    sampling: Sampling | None,
    *,
    new_tokens: int,
) -> jax.Array:
    model = nnx.merge(graphdef, state)
    if model.options.batch_invariant:
        model.put_forms()
    batch, longest = tokens.shape
    caches: Caches | None = model.empty_caches(batch, longest + new_tokens)
    x, caches = model.run_layers(tokens, jnp.arange(longest, dtype=jnp.int32)[None], caches, lengths=lengths)
    assert caches is not None
    first = _choose(model.logits(x[jnp.arange(batch), lengths - 1]), sampling, jnp.int32(0))
    new = jnp.zeros((batch, new_tokens), jnp.int32).at[:, 0].set(first)

    def ends(token: jax.Array) -> jax.Array:
        return jnp.isin(token, stops) | (token < 0)

    def goes_on(loop: _Loop) -> jax.Array:
        return (loop.filled < new_tokens) & ~loop.is_done.all()

    def step(loop: _Loop) -> _Loop:
        previous = loop.new[:, loop.filled - 1]
        # the caches have the padding of prompts at these positions, which is overwritten before a token attends to it
        positions = lengths + loop.filled - 1
        x, caches = model.run_layers(previous[:, None], positions[:, None], loop.caches)
        assert caches is not None
        token = jnp.where(loop.is_done, previous, _choose(model.logits(x[:, 0]), sampling, loop.filled))
        is_done = loop.is_done | ends(token)
        return _Loop(loop.filled + 1, loop.new.at[:, loop.filled].set(token), is_done, caches)

    ended = jax.lax.while_loop(goes_on, step, _Loop(jnp.int32(1), new, ends(first), caches))
    return ended.new[:, jnp.minimum(jnp.arange(new_tokens, dtype=jnp.int32), ended.filled - 1)]


def _choose(logits: jax.Array, sampling: Sampling | None, count: jax.Array) -> jax.Array:
    """The next token of each sequence, int32 [B], by its logits [B, V]; -1 if one of them is NaN."""
    highest = jnp.max(logits, axis=-1, keepdims=True)
    chosen = jnp.argmax(logits, axis=-1) if sampling is None else _drawn(logits, highest, sampling, count)
    return jnp.where(jnp.isnan(highest[:, 0]), -1, chosen).astype(jnp.int32)


def _drawn(logits: jax.Array, highest: jax.Array, sampling: Sampling, count: jax.Array) -> jax.Array:
    logits = jnp.where(logits == highest, 0.0, (logits - highest) / sampling.temperature)
    probabilities = jax.nn.softmax(logits, axis=-1)
    descending = jnp.flip(jnp.sort(probabilities, axis=-1), axis=-1)
    # tokens before which the likelier ones already have top_p are left out; the likeliest always stays
    is_kept = jnp.cumsum(descending, axis=-1) - descending < sampling.top_p
    least = jnp.min(jnp.where(is_kept, descending, 1.0), axis=-1, keepdims=True)
    logits = jnp.where(probabilities >= least, logits, -jnp.inf)
    return jax.random.categorical(jax.random.fold_in(sampling.key, count), logits)
