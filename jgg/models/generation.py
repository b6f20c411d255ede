"""`generate` and `stream` continue prompts: the one returns all new tokens, the other returns them as they come."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jgg.core.arguments import as_int
from jgg.models import decoding
from jgg.models.decoder import Decoder
from jgg.models.requests import Options, asked
from jgg.models.rollouts import Generated
from jgg.models.streaming import Stream, result_of


@overload
def generate(
    model: Decoder,
    tokens: ArrayLike,
    max_new_tokens: int,
    *,
    details: Literal[False] = False,
    **options: Unpack[Options],
) -> jax.Array: ...


@overload
def generate(
    model: Decoder, tokens: ArrayLike, max_new_tokens: int, *, details: Literal[True], **options: Unpack[Options]
) -> Generated: ...


def generate(
    model: Decoder,
    tokens: ArrayLike,
    max_new_tokens: int,
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
) -> jax.Array | Generated:
    """Continues prompts.

    Compiled once for the shapes of its arguments and a bound of max_new_tokens, which is rounded up to 16, 32, 48, ...,
    512, 544, ...: 16 bounds between two powers of two. The loop over new tokens is part of a compiled program. If
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
        leaves; a number for all or numbers [B], 1 for all tokens.
      top_k: samples only from the k likeliest tokens, ties included; an int for all prompts, or integers [B]. None
        keeps all tokens, and so does a k of at least the vocabulary's size.
      min_p: draws only among tokens with at least this part of the likeliest token's probability; a number for all or
        numbers [B], 0 for all tokens.
      repetition_penalty: divides the logits above 0, and multiplies those below, of all tokens that the prompt or the
        new tokens have; a number for all or numbers [B]. Penalties come before the temperature, also where that is 0.
      presence_penalty: is subtracted from the logits of all new tokens; a number for all prompts, or numbers [B].
      frequency_penalty: is subtracted from the logit of each new token once per occurrence; a number for all prompts,
        or numbers [B].
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
    )
    split = decoding.split_model(model)
    state = decoding.start(*split, wanted.prompts, wanted.request, plan=wanted.plan)
    if wanted.new_tokens > 1:
        none = np.zeros(state.is_done.shape, bool)
        limit = jnp.int32(wanted.new_tokens)
        state = decoding.advance(*split, state, wanted.request, none, limit, plan=wanted.plan)
    return result_of(state, wanted, wanted.new_tokens)


def stream(
    model: Decoder,
    tokens: ArrayLike,
    max_new_tokens: int,
    *,
    chunk: int = 8,
    details: bool = False,
    **options: Unpack[Options],
) -> Stream:
    """Continues prompts, and gives the new tokens as they come: the same tokens that `generate` returns.

    Both run the same compiled programs. It cannot be used inside `jax.jit`, as the host reads each chunk.

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
      chunk: the number of tokens of each row that come at once. The first token comes alone. The host waits for each
        chunk, so larger chunks are faster.

    Returns: a `Stream`, an iterator of new tokens, int32 [B * num_samples, n]. It ends when all rows have, or after
      max_new_tokens.

    Raises: ValueError, TypeError: as `generate`, at once.
    """
    size = as_int("chunk", chunk, 1)
    given: dict[str, Any] = dict(generate.__kwdefaults__ or {}, **options, details=details)
    return Stream(model, asked(model, tokens, max_new_tokens, **given), size)
