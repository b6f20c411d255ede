"""Turns a row of data into examples: its tokens, and which of them are learned."""

import datetime
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jgg.data.chat import Text, texts_of
from jgg.data.rendering import Tools
from jgg.data.tokenizers import Tokenizer, bytes_of_tokens, encode, end_of

WEIGHTS = 1e-30, 1e30  # within float32's range, and so are their products and sums


class Example(NamedTuple):
    """A text to learn from.

    Attributes:
      tokens: the tokens of the text, int32 [size].
      learned: which tokens are learned, bool [size]. The first token follows nothing, so it is never learned.
      weight: what the loss of each learned token is multiplied by.
    """

    tokens: np.ndarray
    learned: np.ndarray
    weight: float


def examples_of(
    row: object, tokenizer: Tokenizer, end_token: int | None = None, date: datetime.date | None = None
) -> list[Example]:
    """Tokenizes a row, and marks the tokens that are learned.

    A row is a dict with one of these:

    - "prompt" and "completion", tokenized as one text; the completion is learned.
    - "text"; the whole text is learned.
    - "messages", and maybe "tools", a list or the JSON of one; the messages of the assistant are learned, except those
      with "weight" 0 or "train" false.

    Any row may have a "weight", 0 or from 1e-30 to 1e30; it is 1 by default. Other keys are ignored.

    Args:
      row: a row of a file, as `rows` returns it.
      tokenizer: what `load_tokenizer` returned.
      end_token: the token that ends a text. It is added, and learned, after texts and completions that do not end with
        it, and after conversations whose last message the chat template does not end, as with GLM-4.5. None adds no
        token.
      date: as in `encode_conversation`.

    Returns: one example; several for some conversations, see `encode_conversation`, and none if no message is learned.
    Raises: ValueError: the row has none of these, its text has an unpaired surrogate, or the template fails.
    """
    return [example for example, _ in examples_with_texts(row, tokenizer, end_token, date)]


def examples_with_texts(
    row: object, tokenizer: Tokenizer, end_token: int | None = None, date: datetime.date | None = None
) -> list[tuple[Example, Text]]:
    """The examples of `examples_of`, each with its text."""
    weight = _weight_of(row)
    match row:
        case {"prompt": str(prompt), "completion": str(completion)}:
            found = [_encode_text(tokenizer, prompt + completion, len(prompt), end_token)]
        case {"text": str(text)}:
            found = [_encode_text(tokenizer, text, 0, end_token)]
        case {"messages": [*messages], **others} if _has_answer(messages):
            found = texts_of(tokenizer, messages, _tools_of(others.get("tools")), date, end_token)
        case _:
            keys = '"prompt" and "completion", or "text", or "messages" with roles, one of them "assistant"'
            raise ValueError(f"a row must have {keys}, got {json.dumps(row, default=str)[:80]}")
    return [(Example(np.array(own.tokens, np.int32), np.array(own.learned, bool), weight), own) for own in found]


def _encode_text(tokenizer: Tokenizer, text: str, start: int, end_token: int | None) -> Text:
    """The tokens of a text, learned from the character `start` on."""
    ids, ends = encode(tokenizer, text)
    learned = [past > start for past in ends]
    if end_token is not None and ids[-1:] != [end_token]:
        ids, learned = [*ids, end_token], [*learned, True]
    end = end_of(tokenizer, ids)
    return Text(ids, learned, set() if end is None else {end}, bytes_of_tokens(tokenizer, text, ids, ends))


def _has_answer(messages: list[object]) -> bool:
    """Whether all messages are objects with a role, and one is an assistant's."""
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    return all(isinstance(role, str) for role in roles) and "assistant" in roles


def _weight_of(row: object) -> float:
    weight = row.get("weight") if isinstance(row, Mapping) else None
    if weight is None:
        return 1.0
    least, most = WEIGHTS
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not (weight == 0 or least <= weight <= most):
        raise ValueError(f"weight must be 0 or from {least} to {most}, got {json.dumps(weight, default=str)[:80]}")
    return float(weight)


def _tools_of(tools: Any) -> Tools:
    """The tools of a row; in tables they are JSON, since each tool may have keys of its own."""
    if not isinstance(tools, str):
        return tools or None
    try:
        return json.loads(tools) or None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tools must be a list or the JSON of one, got {tools[:80]}: {error}") from error
