"""`generate` and `stream` continue prompts: `generate` returns all new tokens at once, `stream` as they come."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jgg.core.arguments import as_int
from jgg.models import continuous, decoding
from jgg.models.decoder import Decoder
from jgg.models.requests import OfGenerate, Options, asked
from jgg.models.rollouts import Generated
from jgg.models.streaming import Stream, result_of


@overload
def generate(
    model: Decoder,
    tokens: ArrayLike,
    max_new_tokens: ArrayLike,
    *,
    details: Literal[False] = False,
    **options: Unpack[OfGenerate],
) -> jax.Array: ...


@overload
def generate(
    model: Decoder,
    tokens: ArrayLike,
    max_new_tokens: ArrayLike,
    *,
    details: Literal[True],
    **options: Unpack[OfGenerate],
) -> Generated: ...


def generate(
    model: Decoder,
    tokens: ArrayLike,
    max_new_tokens: ArrayLike,
    *,
    lengths: ArrayLike | None = None,
    temperature: ArrayLike = 0.0,
    top_p: ArrayLike = 1.0,
    top_k: ArrayLike | None = None,
    min_p: ArrayLike = 0.0,
    repetition_penalty: ArrayLike = 1.0,
    presence_penalty: ArrayLike = 0.0,
    frequency_penalty: ArrayLike = 0.0,
    key: jax.Array | None = None,
    seeds: ArrayLike | None = None,
    num_samples: int = 1,
    stop_tokens: Iterable[int | Sequence[int]] = (),
    details: bool = False,
    prefill_chunk: int | None = None,
    cache_dtype: DTypeLike | None = None,
    rows: int | None = None,
) -> jax.Array | Generated:
    """Continues prompts.

    Compiles once for the shapes of its arguments and a bound on max_new_tokens. The bound is max_new_tokens rounded up
    to 16, 32, 48, ..., 512, 544, ...: 16 bounds between two powers of two. The loop over new tokens is part of the
    compiled program. If devices split a model's sequences, the last prompt is repeated up to a multiple of
    their number, and the copies are left out of the result.

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
      tokens: integer [B, S], one prompt per row, S at least 1. Pad shorter prompts at the end, with any number.
      max_new_tokens: how many tokens to add to each prompt, at least 1; a number for all prompts, integers [B], or
        integers [B, num_samples], which must be known inside `jax.jit`. N is the largest.
      lengths: integer [B], the lengths of the prompts, from 1 to S; the rest of a row is not read. None if all prompts
        have S tokens.
      temperature: sampling temperature, a number for all prompts, or numbers [B]; 0 decodes greedily.
      top_p: samples only from the likeliest tokens that together have at least this share of the probability that top_k
        leaves; a number for all prompts, or numbers [B]; 1 keeps all tokens.
      top_k: samples only from the k likeliest tokens, ties included; an int for all prompts, or integers [B]. None
        keeps all tokens, and so does a k of at least the vocabulary's size.
      min_p: samples only from tokens with at least this fraction of the likeliest token's probability; a number for all
        prompts, or numbers [B]; 0 keeps all tokens.
      repetition_penalty: penalizes tokens that already occur in the prompt or the new tokens: divides their logits
        above 0 and multiplies those below; a number for all prompts, or numbers [B]. Penalties are applied before the
        temperature, even if it is 0.
      presence_penalty: is subtracted from the logits of tokens that occur in the new tokens; a number for all prompts,
        or numbers [B].
      frequency_penalty: is subtracted from a token's logit once per occurrence in the new tokens; a number for all
        prompts, or numbers [B].
      key: one random key for all prompts; required, unless seeds are given or all temperatures are 0.
      seeds: integer [B], by default 0 to B - 1. A prompt's samples depend on the key, its seed and the sample's number.
        They do not depend on its row or on other prompts, except where these change its logits.
      num_samples: how many continuations to sample per prompt; the prompt runs through the model once.
      stop_tokens: tokens, or sequences of tokens, that end a row; the row then repeats its last token up to its N
        tokens. Generation ends when all rows have ended. Numbers outside the model's vocabulary have no effect. A
        sequence that begins in the prompt does not count.
      details: whether to return a `Generated`.
      prefill_chunk: how many tokens of each prompt run through the model at once; fewer take less memory for long
        prompts. None for all.
      cache_dtype: float8_e4m3fn keeps keys and values in FP8, as `Decoder.empty_caches` says, in about half the memory;
        None in the dtype of the computation. All tokens, also those of prompts, then attend to rounded keys and values:
        with random ones, a result of attention is off by 3% (in bfloat16 by 0.2%). With `batch_invariant`, a token
        still has the same bits in any batch, but no longer those of the trainer, which rounds none.
      rows: how many rows run at once, at least num_samples: as rows end, the next prompts take their place
        (continuous batching), and only this many rows take memory for keys and values. None for all B * num_samples.
        Results do not depend on it, except for rounding; with `batch_invariant`, all bits are the same.

    Returns: the new tokens, int32 [B * num_samples, N], with the rows of a prompt next to each other. Once the model's
      logits are NaN, the rest of a row is -1. With details, a `Generated` that has them as `tokens`.

    Raises:
      ValueError: a shape or a number is wrong, a prompt has an id that the model's vocabulary lacks, or key and seeds
        are missing. Inside a transformation such as `jax.jit`, traced arrays are not checked: an unknown id makes the
        logits NaN, and lengths are clipped to their range.
      TypeError: an argument has the wrong type.
    """
    wanted = asked(
        model,
        tokens,
        max_new_tokens,
        lengths=lengths,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        key=key,
        seeds=seeds,
        num_samples=num_samples,
        stop_tokens=stop_tokens,
        details=details,
        prefill_chunk=prefill_chunk,
        cache_dtype=cache_dtype,
        rows=rows,
    )
    split = decoding.split_model(model)
    if wanted.plan.rows is not None:
        new = continuous.run(*split, wanted.prompts, wanted.request, np.int32(wanted.rows), plan=wanted.plan)
        return result_of(new, wanted, wanted.new_tokens)
    state = decoding.start(*split, wanted.prompts, wanted.request, plan=wanted.plan)
    if wanted.new_tokens > 1:
        none = np.zeros(state.is_done.shape, bool)
        limit = jnp.int32(wanted.new_tokens)
        state = decoding.advance(*split, state, wanted.request.stops, none, limit, plan=wanted.plan)
    return result_of(state.new, wanted, wanted.new_tokens)


def stream(
    model: Decoder,
    tokens: ArrayLike,
    max_new_tokens: ArrayLike,
    *,
    chunk: int = 8,
    details: bool = False,
    **options: Unpack[Options],
) -> Stream:
    """Continues prompts and streams the new tokens, the same tokens that `generate` returns.

    Both run the same compiled programs. `stream` does not work inside `jax.jit`, because the host reads each chunk.

    Examples:
      >>> import jgg.models
      >>> from flax import nnx
      >>> config = jgg.models.model_config({
      ...     "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 16,
      ...     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
      ...     "num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
      ... })
      >>> model = jgg.models.Decoder(config, rngs=nnx.Rngs(0))
      >>> [new.shape for new in jgg.models.stream(model, [[1, 2, 3]], 20)]
      [(1, 1), (1, 8), (1, 8), (1, 3)]

    Args:
      model, tokens, max_new_tokens, details, options: as in `generate`.
      chunk: how many tokens of each row arrive at once; the first token arrives alone. The host waits for each chunk,
        so larger chunks are faster.

    Returns: a `Stream`, an iterator of new tokens, int32 [B * num_samples, n]. It ends when all rows have, or after
      max_new_tokens.

    Raises: ValueError, TypeError: as in `generate`, immediately.
    """
    size = as_int("chunk", chunk, 1)
    given: dict[str, Any] = {**(generate.__kwdefaults__ or {}), **options, "details": details}
    if given["rows"] is not None:
        raise TypeError(f"rows must be given to generate alone, got {given['rows']} in stream.")
    return Stream(model, asked(model, tokens, max_new_tokens, **given), size)
