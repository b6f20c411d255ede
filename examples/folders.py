"""Reads texts as a Hugging Face folder says, for finetune.py and generate.py: tokenizer, chat template, stop tokens.

Transformers tokenizes, renders and decodes, by tokenizer.json, tokenizer_config.json and the chat template of the
folder. It needs no PyTorch for that.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import jgg.hf
import jgg.models


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Ends the program by the message of an error, in one line, in the place of a traceback."""
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        raise SystemExit(" ".join(str(error).split())) from error


def read_config(folder: Path) -> jgg.models.ModelConfig:
    """What config.json says of the model."""
    if folder.exists() and not folder.is_dir():
        raise SystemExit(f"{folder} must be a model's folder, got a file")
    with one_line():
        return jgg.models.model_config(jgg.hf.read_config(folder))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SystemExit(f"{path} must be a JSON file: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise SystemExit(f"{path} must hold a JSON object, got a {type(content).__name__}")
    return content


def parts_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The content of config.json, and its "text_config" where the language model is beside towers."""
    return [part for part in (config, config.get("text_config")) if isinstance(part, dict)]


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of transformers for a folder's tokenizer.json."""
    if not (folder / "tokenizer.json").is_file():
        raise SystemExit(f"{folder} must be a folder with tokenizer.json, got none")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no PyTorch
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise SystemExit("finetune.py and generate.py need transformers: pip install transformers jinja2") from error
    try:
        # AutoTokenizer would put the rules of the model_type's class in the place of those of tokenizer.json
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of any type, for files that are damaged
        raise SystemExit(f"transformers cannot read the tokenizer of {folder}: {_kind_and_text(error)}") from error


def encode(tokenizer: Any, text: str, *, is_rendered: bool = False) -> tuple[list[int], list[int]]:
    """The tokens of a text, and for each the number of characters up to its end.

    What the tokenizer puts before a text, such as "<s>", is left out where the text begins with it already. What it
    puts behind a text is left out: the text goes on.

    Args:
      is_rendered: whether the chat template wrote the text, which has all special tokens then.

    Raises: ValueError: the text has half of a pair of surrogates, which is no character.
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


def render(tokenizer: Any, messages: Sequence[Any], tools: Any = None) -> tuple[str, int]:
    """The text of messages by the chat template, and the number of characters before what the last message adds.

    Raises: ValueError: there is one message alone, or the template fails or writes the messages before the last anew.
    """

    def text_of(messages: Sequence[Any], asks_for_more: bool) -> str:
        return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=asks_for_more, tokenize=False)

    if len(messages) < 2:
        raise ValueError("messages must have one before the assistant's, got it alone")
    if tokenizer.chat_template is None:
        raise ValueError("messages need chat_template.jinja in the model's folder, or one in tokenizer_config.json")
    try:
        whole, prompt = text_of(messages, False), text_of(messages[:-1], True)
        # templates may ask for an answer with what the answer has not, such as <think>
        is_kept = whole.startswith(prompt) or whole.startswith(text_of(messages[:-1], False))
    except Exception as error:  # of any type: a template is a program
        raise ValueError(f"the chat template fails: {_kind_and_text(error)}") from error
    if not is_kept:
        raise ValueError("the chat template writes the messages before the last anew")
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(whole, prompt, strict=False))
    return whole, len(list(shared))


def continuation(tokenizer: Any, prompt: list[int], new: list[int]) -> str:
    """The text that new tokens add to the text of a prompt's tokens."""
    texts = (
        tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for tokens in (prompt, prompt + new)
    )
    before, whole = texts
    return whole[len(before) :]


def stop_tokens(folder: Path, adapter: Path | None = None) -> list[int]:
    """The tokens that end a text: of a model's folder, then those that finetune.py noted in the adapter's folder."""
    own = _eos_tokens(folder / "generation_config.json") or _eos_tokens(folder / "config.json")
    noted = [] if adapter is None else _eos_tokens(adapter / "generation_config.json")
    return list(dict.fromkeys([*own, *noted]))


def end_of(tokenizer: Any, ids: Sequence[int]) -> int | None:
    """The special token at the end of a text, before white space that a chat template puts behind it, or None."""
    for token in map(int, reversed(ids)):
        if token in tokenizer.added_tokens_decoder:
            return token
        if tokenizer.decode([token]).strip():
            return None
    return None


def check_vocabulary(tokenizer: Any, ids: Sequence[int], config: jgg.models.ModelConfig, where: object) -> None:
    """Ends the program if the model has no embedding for a token."""
    largest = int(np.max(ids, initial=0))
    if largest >= config.vocabulary:
        raise SystemExit(
            f"{where} must have tokens below the model's vocab_size, {config.vocabulary}, got {largest}, "
            f"{tokenizer.convert_ids_to_tokens(largest)!r}: the tokenizer has tokens that the model has not"
        )


def _eos_tokens(path: Path) -> list[int]:
    """eos_token_id of a file, which may be missing, or else of the language model that its text_config describes."""
    content = read_json(path) if path.is_file() else {}
    found = next((part["eos_token_id"] for part in parts_of(content) if part.get("eos_token_id") is not None), None)
    tokens = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise SystemExit(f"eos_token_id of {path} must be a token, a list of tokens or null, got {found!r}")
    return tokens


def _kind_and_text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
