"""Tokenizes texts as a Hugging Face folder says, and finds the tokens that end them.

transformers tokenizes and decodes, using tokenizer.json and tokenizer_config.json. It needs no PyTorch for that.
"""

import functools
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from jgg.hf.files import read_object
from jgg.hf.settings import language_model
from jgg.models import ModelConfig

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

type Tokenizer = PreTrainedTokenizerFast  # what `load_tokenizer` returns

_BYTE = re.compile("<0x[0-9A-F]{2}>")


class Continuation(str):
    """A text that may still change when more tokens come, except its first `settled` characters."""

    settled: int

    def __new__(cls, text: str, settled: int) -> Self:
        """The text with the number of characters that no longer change."""
        new = super().__new__(cls, text)
        new.settled = settled
        return new


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer of a folder's tokenizer.json, as a `PreTrainedTokenizerFast` of transformers.

    Raises:
      ImportError: transformers is not installed.
      ValueError: the folder has no tokenizer.json, or transformers cannot read it.
    """
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} must be a folder with tokenizer.json, got none")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no PyTorch
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise ImportError("tokenizers need transformers: pip install transformers jinja2") from error
    try:
        # AutoTokenizer would replace tokenizer.json's rules with those of the model_type's class
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of any type, for files that are damaged
        raise ValueError(f"transformers cannot read the tokenizer of {folder}: {kind_and_text(error)}") from error


def encode(tokenizer: Tokenizer, text: str, *, is_rendered: bool = False) -> tuple[list[int], list[int]]:
    """Tokenizes the beginning of a text that continues.

    The special tokens that the tokenizer puts before a text, such as "<s>", are added unless the text begins with them.
    Special tokens that it puts after a text are never added.

    Args:
      tokenizer: what `load_tokenizer` returned.
      text: the text.
      is_rendered: whether the chat template wrote the text. Such a text already has all special tokens, so none are
        added.

    Returns: the tokens, and for each token the number of characters of the text up to its end.
    Raises: ValueError: the text has an unpaired surrogate, which is not a character.
    """
    text.encode()
    found = tokenizer(
        text,
        add_special_tokens=not is_rendered,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        verbose=False,
    )
    ids, is_added = found["input_ids"], found["special_tokens_mask"]
    before = ids[: len(list(itertools.takewhile(bool, is_added)))]
    own = [
        (token, end) for token, (_, end), added in zip(ids, found["offset_mapping"], is_added, strict=True) if not added
    ]
    if [token for token, _ in own[: len(before)]] == before:
        before = []
    return before + [token for token, _ in own], [0] * len(before) + [end for _, end in own]


def bytes_of_tokens(tokenizer: Tokenizer, text: str, ids: Sequence[int], ends: Sequence[int]) -> np.ndarray:
    """How many of a text's UTF-8 bytes each of its tokens stands for, int [size].

    They add up to the bytes of the text without its special tokens, whatever the tokens decode to: a tokenizer may put
    a space before a text, or normalize it. Tokens that share a character share its bytes.

    Args:
      tokenizer: what `load_tokenizer` returned.
      text: the text.
      ids, ends: the tokens and where they end, as `encode` returns them; more tokens, not from the text, may follow.
    """
    own = np.zeros(len(ids), np.int64)
    if not ends:
        return own
    characters = np.frombuffer(text.encode("utf-32-le"), "<u4")
    widths = 1 + sum((characters >= least).astype(np.int64) for least in (0x80, 0x800, 0x10000))
    # what follows the last token, such as white space that a normalizer strips, counts for it
    past = np.concatenate([[0], np.cumsum(widths)])[np.maximum.accumulate([*ends[:-1], len(text)])]
    _, first, count = np.unique(past, return_index=True, return_counts=True)
    sharing, place = np.repeat(count, count), np.arange(len(past)) - np.repeat(first, count)
    whole = np.repeat(np.diff(past[first], prepend=0), count)
    own[: len(ends)] = whole * (place + 1) // sharing - whole * place // sharing
    special = _special_tokens(tokenizer)
    for number, (token, end) in enumerate(zip(ids, ends, strict=False)):
        if token not in special:
            continue
        # some, such as Phi's, take the white space behind them too
        while special[token].rstrip and text[end - 1 : end].isspace():
            end -= 1
        if text.endswith(special[token].content, 0, end):  # unknown text does not contain its token
            own[number] -= len(special[token].content.encode())
    return own


@functools.lru_cache(maxsize=1)
def _special_tokens(tokenizer: Tokenizer) -> dict[int, "AddedToken"]:
    return {token: added for token, added in tokenizer.added_tokens_decoder.items() if added.special}


def special_token(tokenizer: Tokenizer, name: str) -> int | None:
    """A token that texts begin or end with, such as "eos_token_id"; None if there is none."""
    return getattr(tokenizer, name)


def text_of(tokenizer: Tokenizer, tokens: Sequence[int], **options: bool) -> str:
    """The text of tokens."""
    text = tokenizer.decode(list(tokens), **options)
    assert isinstance(text, str)  # not one of several lists of tokens
    return text


def continuation(tokenizer: Tokenizer, prompt: list[int], new: list[int]) -> Continuation:
    """Returns the text that new tokens add to the text of a prompt's tokens; both without special tokens.

    Tokenizers such as Mixtral's decode consecutive byte tokens together: one byte that completes no character turns all
    of them into U+FFFD. So the characters of bytes at the end are not `settled` until another token follows.

    Returns: a str with the attribute `settled`, for `jgg.models.stream_text`.
    """

    def decode(tokens: list[int]) -> str:
        return text_of(tokenizer, tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    before, whole = decode(prompt), decode(prompt + new)
    start = len(before) if whole.startswith(before) else shared_length(before, whole)
    num_bytes = _bytes_at_end(tokenizer, new)
    certain = shared_length(decode(prompt + new[: len(new) - num_bytes]), whole) if num_bytes else len(whole)
    return Continuation(whole[start:], max(certain - start, 0))


def _bytes_at_end(tokenizer: Tokenizer, tokens: list[int]) -> int:
    """The number of byte tokens at the end, including tokens without text between them."""
    count = 0
    for number, token in enumerate(reversed(tokens), 1):
        if _BYTE.fullmatch(str(tokenizer.convert_ids_to_tokens(token))):
            count = number
        elif text_of(tokenizer, [token], skip_special_tokens=True):
            break
    return count


def stop_tokens(folder: str | os.PathLike[str], adapter: str | os.PathLike[str] | None = None) -> list[int]:
    """Returns the tokens that end a text: the model folder's, then the adapter folder's.

    They come from `eos_token_id` in generation_config.json, which `jgg finetune` also writes for an adapter. If the
    model's folder has none there, they come from `eos_token_id` in config.json or in its "text_config".

    Raises: ValueError: a file is not a JSON object, or eos_token_id is not a token, a list of tokens or null.
    """
    own = _eos_tokens(Path(folder) / "generation_config.json") or _eos_tokens(Path(folder) / "config.json")
    noted = [] if adapter is None else _eos_tokens(Path(adapter) / "generation_config.json")
    return list(dict.fromkeys([*own, *noted]))


def end_of(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> int | None:
    """Returns the special token at the end of a text, or None; white space after it does not count.

    A token such as "</tool_call>" that was added to the vocabulary is special only if the tokenizer says so.
    """
    token = last_token(tokenizer, ids)
    return token if token is not None and is_special(tokenizer, token) else None


def last_token(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> int | None:
    """The last token of a text that is not only white space."""
    return next((token for token in map(int, reversed(ids)) if text_of(tokenizer, [token]).strip()), None)


def is_special(tokenizer: Tokenizer, token: int) -> bool:
    """Whether a token is left out of texts and does not stand for unknown text.

    This is faster than the tokenizer's table of all added tokens.
    """
    if token == tokenizer.unk_token_id != tokenizer.eos_token_id:
        return False
    return not text_of(tokenizer, [token], skip_special_tokens=True) and bool(text_of(tokenizer, [token]))


def check_vocabulary(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray, config: ModelConfig, where: object) -> None:
    """Raises ValueError, with a message that begins with `where`, if the model has no embedding for a token."""
    largest = int(np.max(ids, initial=0))
    if largest >= config.vocabulary:
        raise ValueError(
            f"{where} must have tokens below the model's vocab_size, {config.vocabulary}, got {largest}, "
            f"{tokenizer.convert_ids_to_tokens(largest)!r}: the tokenizer has tokens that the model has not"
        )


def shared_length(*texts: str) -> int:
    """The number of leading characters that all texts share."""
    pairs = zip(min(texts), max(texts), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def kind_and_text(error: BaseException) -> str:
    """An error on one line that begins with the name of its type."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _eos_tokens(path: Path) -> list[int]:
    """eos_token_id of a file, which may be missing, or otherwise of its "text_config"."""
    content = read_object(path) if path.is_file() else {}
    found = content.get("eos_token_id")
    if found is None:
        found = language_model(content).get("eos_token_id")
    tokens = found if isinstance(found, list) else [] if found is None else [found]
    known = [token for token in tokens if type(token) is int and token >= 0]
    if len(known) < len(tokens):
        raise ValueError(f"eos_token_id of {path} must be a token, a list of tokens or null, got {found!r}")
    return known
