"""Tokenizes conversations as the chat template of a Hugging Face folder writes them; transformers renders.

What is learned is what assistants said. A template that marks it by `{% generation %}` blocks says so itself. For
others, the text of the messages before a turn, asking for an answer, is compared with the text that has the turn.
"""

import datetime
import functools
import itertools
import json
import re
import threading
from collections.abc import Sequence
from typing import Any

from jgg.data.tokenizers import encode, kind_and_text

Tokens = tuple[list[int], list[bool]]  # the tokens of a text, and which of them are learned

_NO_TEMPLATE = "a conversation needs chat_template.jinja in the model's folder, or one in tokenizer_config.json"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # by which transformers knows such templates
_ONE_AT_A_TIME = threading.Lock()  # transformers 5.0 keeps what a template marks in one place for all threads
_SAID = "content", "tool_calls", "reasoning_content", "thinking"  # the keys for what a message says
_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


def encode_conversation(
    tokenizer: Any, messages: Sequence[Any], tools: Any = None, date: datetime.date | None = None
) -> list[Tokens]:
    """Tokenizes a conversation by the chat template, and marks what the assistant says as learned.

    Some templates write a turn differently once other messages follow it, for example without its thoughts. Such a
    turn is learned in the form that it has as the last one: the conversation up to this turn becomes a text of its own.

    Args:
      tokenizer: what `load_tokenizer` returned.
      messages: the conversation, as `apply_chat_template` takes it. Messages after the assistant's last are left out,
        and an assistant's message that comes first is not learned.
      tools: the tools that the assistant may use, as `apply_chat_template` takes them.
      date: the date for templates that write today's, such as gpt-oss's; None for today.

    Returns:
      The texts, each with its tokens and, for each of these, whether it is learned.

    Raises:
      ValueError: a message says nothing, no message of the assistant follows another message, the folder has no chat
        template, the template fails, or it changes the messages before a turn of the assistant once that turn is added.
    """
    for number, message in enumerate(messages, 1):
        if not any(key in message for key in _SAID):
            got = ", ".join(map(str, message))
            raise ValueError(f'messages must have "content" or "tool_calls", got one with {got} as message {number}')
    turns = [n for n, message in enumerate(messages) if n and message["role"] == "assistant"]
    if not turns:
        raise ValueError("messages must have one before the assistant's, got it alone")
    if tokenizer.chat_template is None:
        raise ValueError(_NO_TEMPLATE)
    try:
        template = _dated(tokenizer.get_chat_template(tools=tools), date)
        conversation = _Conversation(tokenizer, template, messages, tools)
        if _GENERATION.search(template):
            return [conversation.marked(turns[-1] + 1)]
        texts = conversation.texts(turns)
    except _WrittenAnewError as error:
        raise ValueError("the chat template writes the messages before the assistant's anew") from error
    except Exception as error:  # of any type: a template is a program
        raise ValueError(f"the chat template fails: {kind_and_text(error)}") from error
    return [_encode_spans(tokenizer, text, spans) for text, spans in texts]


def prompt_of(tokenizer: Any, messages: Sequence[Any], tools: Any = None) -> str:
    """Writes a conversation by the chat template, up to where the assistant's next answer begins.

    Raises: ValueError: the folder has no chat template, or the template fails.
    """
    if tokenizer.chat_template is None:
        raise ValueError(_NO_TEMPLATE)
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # of any type: a template is a program
        raise ValueError(f"the chat template fails: {kind_and_text(error)}") from error


class _WrittenAnewError(Exception):
    pass


class _Conversation:
    """The messages of a conversation, and how a template writes the first of them."""

    def __init__(self, tokenizer: Any, template: str, messages: Sequence[Any], tools: Any) -> None:
        self.tokenizer, self.messages = tokenizer, messages
        self.apply = functools.partial(tokenizer.apply_chat_template, chat_template=template, tools=tools)
        self.text = functools.cache(self._text)

    def marked(self, count: int) -> Tokens:
        """The tokens of the first messages, and which of them the template marks."""
        with _ONE_AT_A_TIME:
            found = self.apply(
                self.messages[:count],
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"verbose": False},
            )
        return found["input_ids"], [mask == 1 for mask in found["assistant_masks"]]

    def _text(self, count: int, asks_for_more: bool = False) -> str:
        """The text of the first messages."""
        return self.apply(self.messages[:count], add_generation_prompt=asks_for_more, tokenize=False)

    def texts(self, turns: list[int]) -> list[tuple[str, list[tuple[int, int]]]]:
        """The texts that have all turns, and in each the spans of characters of the turns that are learned in it."""
        texts, waiting = [], dict.fromkeys(turns)
        while waiting:
            last, _ = waiting.popitem()
            whole = self.text(last + 1)
            start = self._start(last, whole)
            if start is None:
                raise _WrittenAnewError
            spans = [(start, len(whole))]
            for turn in list(waiting):
                span = self._span(turn, whole)
                if span is not None:
                    spans.append(span)
                    del waiting[turn]
            texts.append((whole, sorted(spans)))
        return texts[::-1]

    def _start(self, turn: int, whole: str) -> int | None:
        """Where a turn begins in a text, behind what asks for it; None if the text writes what is before it anew."""
        prompt = self.text(turn, True)
        # templates may ask for an answer with what the answer has not, such as <think>
        if whole.startswith(prompt) or whole.startswith(self.text(turn)):
            return _shared(whole, prompt)
        return None

    def _span(self, turn: int, whole: str) -> tuple[int, int] | None:
        """Where a turn is in a text that goes on; None if it is not there as it is when it is the last."""
        start, alone = self._start(turn, whole), self.text(turn + 1)
        # templates may put the token that ends a text behind the last message alone
        kept = (text for text in (alone, alone.removesuffix(self.tokenizer.eos_token or "")) if whole.startswith(text))
        end = next(map(len, kept), None)
        return None if start is None or end is None else (start, end)


def _dated(template: str, date: datetime.date | None) -> str:
    """The template with a date in the place of today's; transformers lets no other function take strftime_now's."""
    return template if date is None else _TODAY.sub(lambda call: json.dumps(date.strftime(call[2])), template)


def _shared(whole: str, part: str) -> int:
    """The number of characters with which both begin."""
    if whole.startswith(part):
        return len(part)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(whole, part, strict=False)))


def _encode_spans(tokenizer: Any, text: str, spans: list[tuple[int, int]]) -> Tokens:
    """The tokens of a rendered text, and whether the characters with which they end are in one of the spans."""
    ids, ends = encode(tokenizer, text, is_rendered=True)
    learned = [False] * len(ids)
    for start, end in spans:
        # a token may go on beyond the end of a span: its first characters are learned
        past = [0, *ends[:-1]]
        learned = [own or (last > start and first < end) for own, first, last in zip(learned, past, ends, strict=True)]
    return ids, learned
