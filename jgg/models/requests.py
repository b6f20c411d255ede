"""The arguments of `generate` and `stream`. What is wrong with one is found here, before a program runs."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from jgg.core.arguments import as_array, as_finite, as_flag, as_int, check, check_instance, check_reals
from jgg.core.schedule import saturated_int32
from jgg.models.decoder import Decoder
from jgg.models.decoder_stacks import as_cache_dtype
from jgg.models.penalties import Penalties
from jgg.models.placement import on_host
from jgg.models.prefill import Plan
from jgg.models.rows import Request, Rows
from jgg.models.sampling import Sampling, normal_temperatures
from jgg.models.token_arrays import as_integers, check_ids

_INT32, _FLOAT32 = jnp.iinfo(jnp.int32), jnp.finfo(jnp.float32)
_PARTS = 16  # of the rows that run at once; one part is replaced together
_LAST, _LEAST_ROWS = 4, 64  # when this part of as many rows is left, it runs alone: a token of few rows is faster
_LEAST_BOUND, _BOUNDS = 16, 16  # the least bound of new tokens, and how many bounds are between powers of two


class Options(TypedDict, total=False):
    """The keyword arguments that `generate` and `stream` share, but for `details`."""

    lengths: ArrayLike | None
    temperature: ArrayLike
    top_p: ArrayLike
    top_k: ArrayLike | None
    min_p: ArrayLike
    repetition_penalty: ArrayLike
    presence_penalty: ArrayLike
    frequency_penalty: ArrayLike
    key: jax.Array | None
    seeds: ArrayLike | None
    num_samples: int
    stop_tokens: Iterable[int | Sequence[int]]
    prefill_chunk: int | None
    cache_dtype: DTypeLike | None


class OfGenerate(Options, total=False):
    """The keyword arguments of `generate`, but for `details`."""

    rows: int | None


class _Range(NamedTuple):
    """Which numbers an argument may have, as a function and in words, which are empty for all finite numbers."""

    has: Callable[[np.ndarray | float], np.ndarray | bool]
    text: str = ""


_FINITE = _Range(np.isfinite)
_NOT_NEGATIVE = _Range(lambda each: each >= 0, "0 or more")
_POSITIVE = _Range(lambda each: each > 0, "more than 0")
_PART = _Range(lambda each: (each >= 0) & (each <= 1), "at least 0 and at most 1")
_POSITIVE_PART = _Range(lambda each: (each > 0) & (each <= 1), "more than 0 and at most 1")


class Asked(NamedTuple):
    """What is asked of a model.

    Attributes:
      prompts: int32 [B, S], with copies of the last prompt for devices that would have none.
      rows: how many rows are asked for, without those of the copies.
      new_tokens: N, at most `plan.most`.
    """

    prompts: jax.Array
    request: Request
    plan: Plan
    rows: int
    new_tokens: int


def asked(
    model: Decoder,
    tokens: ArrayLike,
    max_new_tokens: ArrayLike,
    *,
    lengths: ArrayLike | None,
    temperature: ArrayLike,
    top_p: ArrayLike,
    top_k: ArrayLike | None,
    min_p: ArrayLike,
    repetition_penalty: ArrayLike,
    presence_penalty: ArrayLike,
    frequency_penalty: ArrayLike,
    key: jax.Array | None,
    seeds: ArrayLike | None,
    num_samples: int,
    stop_tokens: Iterable[int | Sequence[int]],
    details: bool,
    prefill_chunk: int | None,
    cache_dtype: DTypeLike | None = None,
    rows: int | None = None,
) -> Asked:
    """What the arguments of `generate` ask for; raises if one is wrong."""
    check_instance("model", model, Decoder, "a jgg.models.Decoder")
    prompts, sizes = _prompts(tokens, lengths, model.config.vocabulary)
    batch, longest = prompts.shape
    num_samples = as_int("num_samples", num_samples, 1)
    new_tokens, limits = _limits(max_new_tokens, batch, num_samples)
    most = 2**31 - 1 - longest
    check(new_tokens <= most, f"max_new_tokens must be at most 2**31 - 1 - S, {most}, got {new_tokens}.")
    plan = Plan(
        most=min(most, bound(new_tokens)),
        num_samples=num_samples,
        is_padded=lengths is not None,
        prefill_chunk=None if prefill_chunk is None else as_int("prefill_chunk", prefill_chunk, 1),
        details=as_flag("details", details),
        cache_dtype=None if cache_dtype is None else as_cache_dtype(cache_dtype, model.config, model.options),
    )
    plan = plan if rows is None else _with_rows(plan, as_int("rows", rows, 1), model, batch)
    stops = _stops(stop_tokens, model.config.vocabulary)
    penalties = _penalties(repetition_penalty, presence_penalty, frequency_penalty, batch)
    sampling = _sampling(temperature, seeds, key, top_k, top_p, min_p, batch)
    if plan.rows is not None and limits is None:  # rows end at different times
        limits = jnp.full((batch, num_samples), new_tokens, jnp.int32)
    copies = _num_copies(model, batch, plan)
    prompts, sizes, sampling, penalties, limits = _with_copies((prompts, sizes, sampling, penalties, limits), copies)
    request = Request(Rows(sizes, sampling, penalties, limits), stops)
    return Asked(prompts, request, plan, batch * num_samples, new_tokens)


def _limits(max_new_tokens: ArrayLike, batch: int, num_samples: int) -> tuple[int, jax.Array | None]:
    """The most new tokens of a row, and those of each, int32 [B, num_samples]; None if all have as many."""
    try:
        rank = np.ndim(max_new_tokens)
    except ValueError:  # of lists of different lengths, which `as_integers` tells by name
        rank = 2
    if rank == 0:
        return as_int("max_new_tokens", max_new_tokens, 1), None
    shape = (batch,) if rank == 1 else (batch, num_samples)
    axes = "[B]" if len(shape) == 1 else "[B, num_samples]"
    array, known = as_integers("max_new_tokens", max_new_tokens, axes)
    expected = f"a number, [B] or [B, num_samples], {[batch, num_samples]}"
    check(array.shape == shape, f"max_new_tokens must be {expected}, got {list(array.shape)}.")
    check(known is not None, "max_new_tokens must be known outside of jax.jit, got a traced array.")
    assert known is not None
    check((known >= 1).all(), f"max_new_tokens must have numbers of 1 or more, got {known.tolist()}.")
    each = saturated_int32(array)
    limits = jnp.broadcast_to(each[:, None] if each.ndim == 1 else each, (batch, num_samples))
    return int(known.max(initial=1)), limits


def _with_rows(plan: Plan, rows: int, model: Decoder, batch: int) -> Plan:
    """The plan of this many rows at once: about a sixteenth of them wait until they are replaced together.

    The last quarter of the rows runs alone, as the longest answers are often much longer than others. It does not with
    layers that have a window, nor where devices split rows.

    Devices that split rows have as many of them each, and so do the prompts that run at once.
    """
    samples, sharding = plan.num_samples, model.options.sharding
    check(rows >= samples, f"rows must be at least num_samples, {samples}, got {rows}.")
    devices = 1 if sharding is None else sharding.size(*sharding.token_axes)
    at_once = max(1, rows // (_PARTS * samples * devices)) * devices
    rows = max(-(-rows // devices) * devices, at_once * samples)
    if rows >= -(-batch // devices) * devices * samples:
        return plan
    has_windows = any(own.window is not None for own in model.config.plan)
    has_last = sharding is None and not has_windows and rows >= _LEAST_ROWS and rows % _LAST == 0
    return dataclasses.replace(plan, rows=rows, last_rows=rows // _LAST if has_last else 0, prompts_at_once=at_once)


def bound(number: int) -> int:
    """The least bound for this many new tokens, or groups: hardly more, and a multiple of a power of two."""
    step = max(_LEAST_BOUND, 2 ** (number - 1).bit_length() // (2 * _BOUNDS))
    return -(-number // step) * step


def _num_copies(model: Decoder, batch: int, plan: Plan) -> int:
    """How many copies of the last prompt there must be: for devices that would have none, or for the last group.

    The number of groups is bound as the number of new tokens is, so that programs are compiled for few of them.
    """
    if plan.rows is not None:
        groups = -(-batch // plan.prompts_at_once)
        return bound(groups) * plan.prompts_at_once - batch
    sharding = model.options.sharding
    return 0 if sharding is None else -batch % sharding.size(*sharding.token_axes)


def _with_copies[Arrays](arrays: Arrays, copies: int) -> Arrays:
    """Arrays [B, ...] with copies of what the last prompt has."""

    def copied(array: jax.Array) -> jax.Array:
        return array[jnp.minimum(jnp.arange(len(array) + copies), len(array) - 1)]

    return jax.tree.map(copied, arrays) if copies else arrays


def _penalties(repetition: ArrayLike, presence: ArrayLike, frequency: ArrayLike, batch: int) -> Penalties | None:
    """The penalties of the prompts; None if all are neutral."""
    found = (
        _numbers("repetition_penalty", repetition, batch, _POSITIVE, 1.0),
        _numbers("presence_penalty", presence, batch, _FINITE, 0.0),
        _numbers("frequency_penalty", frequency, batch, _FINITE, 0.0),
    )
    if all(each is None for each in found):
        return None
    neutral = (1.0, 0.0, 0.0)
    return Penalties(
        *(jnp.full(batch, own, jnp.float32) if each is None else each for own, each in zip(neutral, found, strict=True))
    )


def _sampling(
    temperature: ArrayLike,
    seeds: ArrayLike | None,
    key: jax.Array | np.ndarray | None,
    top_k: ArrayLike | None,
    top_p: ArrayLike,
    min_p: ArrayLike,
    batch: int,
) -> Sampling | None:
    """How tokens of the prompts are drawn; None for the likeliest of all."""
    temperatures = _numbers("temperature", temperature, batch, _NOT_NEGATIVE, 0.0)
    part = _numbers("top_p", top_p, batch, _POSITIVE_PART, 1.0)
    least = _numbers("min_p", min_p, batch, _PART, 0.0)
    most = _top_k(top_k, batch)
    is_greedy = temperatures is None or (not isinstance(temperatures, Tracer) and not on_host(temperatures).any())
    is_random = key is not None or seeds is not None or is_greedy
    check(is_random, f"key must be a random key with temperature {temperature}, got None.")
    key, seeds = _key(jax.random.key(0) if key is None else key), _seeds(seeds, batch)
    if temperatures is None:
        return None
    return Sampling(
        temperatures=normal_temperatures(temperatures),
        keys=jax.vmap(jax.random.fold_in, (None, 0))(key, seeds),
        top_k=most,
        top_p=None if part is None else jnp.clip(part, _FLOAT32.tiny, 1.0),
        min_p=least,
    )


def _numbers(name: str, value: ArrayLike, batch: int, within: _Range, neutral: float) -> jax.Array | None:
    """Finite numbers float32 [B] of one for all or of [B]; None for the one number that changes nothing."""
    if not isinstance(value, Tracer) and np.ndim(value) == 0:
        number = as_finite(name, value)
        check(within.has(number), f"{name} must be {within.text}, got {number}.")
        bounded = min(max(number, float(_FLOAT32.min)), float(_FLOAT32.max))
        return None if number == neutral else jnp.full(batch, bounded, jnp.float32)
    array = as_array(name, value)
    check_reals(name, array)
    check(array.shape in ((), (batch,)), f"{name} must be a number or [B], [{batch}], got {list(array.shape)}.")
    if not isinstance(array, Tracer):
        known = on_host(array)
        expected = f"finite numbers of {within.text}" if within.text else "finite numbers"
        all_right = np.isfinite(known).all() and np.all(within.has(known))
        check(all_right, f"{name} must have {expected}, got {known.tolist()}.")
    return jnp.broadcast_to(array, (batch,)).astype(jnp.float32)


def _top_k(top_k: ArrayLike | None, batch: int) -> jax.Array | None:
    """The numbers of tokens int32 [B] that are drawn among, from 1 on."""
    if top_k is None:
        return None
    if np.ndim(top_k) == 0:
        return jnp.full(batch, min(as_int("top_k", top_k, 1), _INT32.max), jnp.int32)
    array, known = as_integers("top_k", top_k, "[B]")
    check(array.shape == (batch,), f"top_k must be a number or [B], [{batch}], got {list(array.shape)}.")
    if known is not None:
        check((known >= 1).all(), f"top_k must have numbers of 1 or more, got {known.tolist()}.")
    return jnp.maximum(saturated_int32(array), 1)


def _seeds(seeds: ArrayLike | None, batch: int) -> jax.Array:
    if seeds is None:
        return jnp.arange(batch, dtype=jnp.int32)
    array, known = as_integers("seeds", seeds, "[B]")
    check(array.shape == (batch,), f"seeds must be [B], [{batch}], got {list(array.shape)}.")
    if known is not None:
        is_known = (known >= _INT32.min) & (known <= _INT32.max)
        check(is_known.all(), f"seeds must be within int32, got {known.tolist()}.")
    return array.astype(jnp.int32)


def _key(key: Any) -> jax.Array:
    check_instance("key", key, jax.Array | np.ndarray, "a random key, as jax.random.key returns it")
    try:
        key = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(jnp.asarray(key))
    except (TypeError, ValueError):
        got = f"{key.dtype} {list(key.shape)}"
        raise TypeError(f"key must be a random key, as jax.random.key returns it, got {got}.") from None
    check(not key.shape, f"key must be one random key, for all prompts, got keys {list(key.shape)}.")
    return key


def _stops(stop_tokens: Iterable[int | Sequence[int]], vocabulary: int) -> jax.Array:
    """The sequences of tokens that end a row, int32 [sequences, W]; shorter ones have -1 in front."""
    expected = "a collection of ints, or of sequences of them"
    try:
        given = list(stop_tokens)
    except TypeError:
        raise TypeError(f"stop_tokens must be {expected}, got {stop_tokens!r}.") from None
    sequences = []
    for stop in given:
        is_single = isinstance(stop, str | bytes) or getattr(stop, "ndim", 1) == 0
        tokens = list(stop) if isinstance(stop, Sequence | np.ndarray | jax.Array) and not is_single else [stop]
        check(tokens, f"stop_tokens must be {expected}, at least one in each, got {stop!r}.")
        ids = [as_int("stop_tokens", token, expected=expected) for token in tokens]
        if all(0 <= token < vocabulary for token in ids):
            sequences.append(ids)
    width = max(map(len, sequences), default=1)
    padded = [[-1] * (width - len(ids)) + ids for ids in sequences]
    return jnp.asarray(padded, jnp.int32).reshape(len(padded), width)


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
