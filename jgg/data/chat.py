"""Writes conversations as the chat template of a Hugging Face folder does; transformers renders."""

import itertools
from collections.abc import Sequence
from typing import Any

from jgg.data.tokenizers import kind_and_text


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
        raise ValueError(f"the chat template fails: {kind_and_text(error)}") from error
    if not is_kept:
        raise ValueError("the chat template writes the messages before the last anew")
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(whole, prompt, strict=False))
    return whole, len(list(shared))


def rendered_prompt(tokenizer: Any, messages: Sequence[Any], tools: Any = None) -> str:
    """The text of messages by the chat template, up to where it asks for the assistant's answer.

    Raises: ValueError: the tokenizer has no template, or the template fails.
    """
    if tokenizer.chat_template is None:
        raise ValueError("messages need chat_template.jinja in the model's folder, or one in tokenizer_config.json")
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # of any type: a template is a program
        raise ValueError(f"the chat template fails: {kind_and_text(error)}") from error
