"""`generate`: continues prompts. What is wrong with an argument is found here, before the program runs."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import ArrayLike

from jgg.core.arguments import as_array, as_finite, as_flag, as_int, check, check_instance, check_reals
from jgg.core.schedule import saturated_int32
from jgg.models import decoding
from jgg.models.decoder import Decoder
from jgg.models.generated import Generated
from jgg.models.placement import on_host
from jgg.models.sampling import Sampling, normal_temperatures
from jgg.models.tokens import as_integers, check_ids

_INT32, _LARGEST = jnp.iinfo(jnp.int32), jnp.finfo(jnp.float32).max


_LEAST_BOUND, _BOUNDS = 16, 16  # the least bound of new tokens, and how many bounds are between powers of two


class _Options(TypedDict, total=False):
    """The keyword arguments of `generate`, but for `details`."""

    lengths: ArrayLike | None
    temperature: ArrayLike
    top_p: float
    top_k: int | None
    key: jax.Array | None
    seeds: ArrayLike | None
    num_samples: int
    stop_tokens: Iterable[int | Sequence[int]]
    prefill_chunk: int | None


@overload
def generate(
    model: Decoder,
    tokens: ArrayLike,
    max_new_tokens: int,
    *,
    details: Literal[False] = False,
    **options: Unpack[_Options],
) -> jax.Array: ...


@overload
def generate(
    model: Decoder, tokens: ArrayLike, max_new_tokens: int, *, details: Literal[True], **options: Unpack[_Options]
) -> Generated: ...


def generate(
    model: Decoder,
    tokens: ArrayLike,
    max_new_tokens: int,
    *,
    lengths: ArrayLike | None = None,
    temperature: ArrayLike = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    key: jax.Array | None = None,
    seeds: ArrayLike | None = None,
    num_samples: int = 1,
    stop_tokens: Iterable[int | Sequence[int]] = (),
    details: bool = False,
    prefill_chunk: int | None = None,
) -> jax.Array | Generated:
    """Continues prompts.

    Compiled once for the shapes of its arguments and a bound of max_new_tokens, which is rounded up to 16, 32, 48, ...,
    512, 544, ...: 16 bounds between two powers of two. The loop over new tokens is part of the compiled program. If
    devices split a model's sequences, the last prompt is repeated up to a multiple of their number, and its copies are
    left out of the result.

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
      max_new_tokens: N, how many tokens to add to each, at least 1.
      lengths: integer [B], the lengths of the prompts, from 1 to S; what a row holds past its length is not read. None
        if all have S tokens.
      temperature: what logits are divided by before tokens are drawn, a number for all or numbers [B]; 0 takes the
        likeliest token.
      top_p: draws only among the likeliest tokens that together have at least this probability, of those that top_k
        leaves.
      top_k: draws only among so many of the likeliest tokens, and those that are as likely as the last of them; None
        for all.
      key: one random key for all prompts; this or seeds are needed unless all temperatures are 0.
      seeds: integer [B], by default 0 to B - 1. What is drawn for a prompt depends on the key, its seed and the number
        of the sample, not on its row or on the other prompts, as far as the logits do not.
      num_samples: how many times to continue each prompt, which runs through the model once.
      stop_tokens: tokens that end a row, and sequences of tokens that do; the row repeats its last token up to its N
        tokens. Generation ends when all rows have. Numbers that are no ids of the model's vocabulary end nothing. A
        sequence may not begin in the prompt.
      details: whether to return a `Generated`.
      prefill_chunk: how many tokens of each prompt run through the model at once, which takes less memory for long
        prompts. None for all.

    Returns: the new tokens, int32 [B * num_samples, N], the rows of a prompt side by side. A row goes on with -1 from
      where the model's logits are NaN. With details a `Generated`, which has them as `tokens`.

    Raises:
      ValueError: a shape or a number is wrong, a prompt has an id that the model's vocabulary lacks, or key and seeds
        are missing.
        Inside a transformation such as `jax.jit`, traced arrays are not checked: an unknown id makes the logits NaN,
        and lengths are clipped to their range.
      TypeError: an argument has the wrong type.
    """
    check_instance("model", model, Decoder, "a jgg.models.Decoder")
    tokens, sizes = _prompts(tokens, lengths, model.config.vocabulary)
    batch, longest = tokens.shape
    new_tokens = as_int("max_new_tokens", max_new_tokens, 1)
    most = 2**31 - 1 - longest
    check(new_tokens <= most, f"max_new_tokens must be at most 2**31 - 1 - S, {most}, got {new_tokens}.")
    plan = decoding.Plan(
        most=min(most, _bound(new_tokens)),
        num_samples=as_int("num_samples", num_samples, 1),
        is_padded=lengths is not None,
        prefill_chunk=None if prefill_chunk is None else as_int("prefill_chunk", prefill_chunk, 1),
        details=as_flag("details", details),
    )
    stops = _stops(stop_tokens, model.config.vocabulary)
    sampling = _sampling(temperature, seeds, key, top_k, top_p, batch)
    arguments = _with_copies(model, batch, (tokens, sizes, sampling))
    result, generated = decoding.run(*nnx.split(model), *arguments, stops, jnp.int32(new_tokens), plan=plan)
    rows = batch * plan.num_samples
    if generated is None:
        return result[:rows, :new_tokens]
    return Generated(
        result[:rows, :new_tokens],
        generated.lengths[:rows],
        generated.log_probabilities[:rows, :new_tokens],
        generated.sampled_log_probabilities[:rows, :new_tokens],
        generated.topk_indices[:, :rows, : longest + new_tokens],
    )


def _bound(new_tokens: int) -> int:
    """The least bound of so many new tokens: a multiple of a power of two, by which it is hardly more."""
    step = max(_LEAST_BOUND, 2 ** (new_tokens - 1).bit_length() // (2 * _BOUNDS))
    return -(-new_tokens // step) * step


def _with_copies(model: Decoder, batch: int, arrays: Any) -> Any:
    """Arrays [B, ...] with copies of the last prompt for devices that would have none."""
    sharding = model.options.sharding
    copies = 0 if sharding is None else -batch % sharding.size(*sharding.token_axes)
    each = jnp.minimum(jnp.arange(batch + copies), batch - 1)
    return jax.tree.map(lambda array: array[each] if array.ndim else array, arrays)


def _sampling(
    temperature: ArrayLike, seeds: ArrayLike | None, key: Any, top_k: int | None, top_p: float, batch: int
) -> Sampling | None:
    """How tokens of the prompts are drawn; None for the likeliest of all."""
    temperatures = _temperatures(temperature, batch)
    top_p = as_finite("top_p", top_p)
    check(0 < top_p <= 1, f"top_p must be more than 0 and at most 1, got {top_p}.")
    top_k = None if top_k is None else as_int("top_k", top_k, 1)
    is_greedy = temperatures is None or (not isinstance(temperatures, Tracer) and not on_host(temperatures).any())
    is_random = key is not None or seeds is not None or is_greedy
    check(is_random, f"key must be a random key with temperature {temperature}, got None.")
    key, seeds = _key(jax.random.key(0) if key is None else key), _seeds(seeds, batch)
    if temperatures is None:
        return None
    return Sampling(
        temperatures=normal_temperatures(temperatures),
        keys=jax.vmap(jax.random.fold_in, (None, 0))(key, seeds),
        top_k=None if top_k is None else jnp.int32(min(top_k, _INT32.max)),
        top_p=None if top_p == 1 else jnp.float32(max(top_p, float(jnp.finfo(jnp.float32).tiny))),
    )


def _temperatures(temperature: ArrayLike, batch: int) -> jax.Array | None:
    """The temperatures [B]; None for the number 0."""
    if not isinstance(temperature, Tracer) and np.ndim(temperature) == 0:
        number = as_finite("temperature", temperature)
        check(number >= 0, f"temperature must be 0 or more, got {number}.")
        return jnp.full(batch, min(number, float(_LARGEST)), jnp.float32) if number else None
    array = as_array("temperature", temperature)
    check_reals("temperature", array)
    check(array.shape in ((), (batch,)), f"temperature must be a number or [B], [{batch}], got {list(array.shape)}.")
    if not isinstance(array, Tracer):
        known = on_host(array)
        is_right = np.isfinite(known).all() and (known >= 0).all()
        check(is_right, f"temperature must have finite numbers of 0 or more, got {known.tolist()}.")
    return jnp.broadcast_to(array, (batch,))


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
    """The sequences of tokens that end a row, int32 [sequences, W], with -1 before those that are not the longest."""
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
