"""`Conversation`: messages as a chat template writes them; transformers renders the template."""

import datetime
import functools
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jgg.data.tokenizers import Tokenizer, is_special, kind_and_text, last_token, shared_length

NO_TEMPLATE = "a conversation needs chat_template.jinja in the model's folder, or one in tokenizer_config.json"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # how transformers recognizes such templates
_ONE_AT_A_TIME = threading.Lock()  # transformers 5.0 keeps what a template marks in one place for all threads
type Message = Mapping[str, object]
type Tools = list[dict[str, object]] | None

_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


class UnmarkedError(ValueError):
    """A conversation that a chat template cannot mark.

    Either the template fails on it, as Gemma's does on a system message; or it rewrites earlier messages once the
    assistant's answer follows, as gpt-oss's does with the thoughts before a call, so the answer cannot be found in the
    text.
    """


class Written(NamedTuple):
    """A text, and the spans of characters that the template's `{% generation %}` blocks mark in it."""

    text: str
    blocks: list[tuple[int, int]]


class Conversation:
    """Renders the first messages of a conversation with the chat template.

    Attributes:
      tokenizer: what `load_tokenizer` returned.
      end_token: the token that ends a text if the template writes no end, or None.
      is_marked: whether the template has `{% generation %}` blocks.

    Raises: UnmarkedError: the template fails. The methods raise it too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Tools,
        date: datetime.date | None,
        end_token: int | None,
    ) -> None:
        self.tokenizer, self.end_token, self._messages = tokenizer, end_token, messages
        try:
            template = _dated(tokenizer.get_chat_template(tools=tools), date)
        except Exception as error:
            raise _failed(error) from error
        self.is_marked = _GENERATION.search(template) is not None
        self._options = {"tools": tools, "chat_template": template, "return_assistant_tokens_mask": self.is_marked}
        self.written = functools.cache(self._written)

    def text(self, count: int, asks_for_more: bool = False) -> str:
        """The text of the first `count` messages; with `asks_for_more`, up to where the assistant's answer begins."""
        return self.written(count, asks_for_more).text

    def start(self, turn: int, whole: str) -> int | None:
        """Where a message begins in a text, after its prompt; None if the messages before it read differently there."""
        before, prompt = self.text(turn), self.text(turn, True)
        if whole.startswith(prompt):
            return len(prompt)
        if not whole.startswith(before):
            return None
        # the template asks for an answer with what this one lacks, such as <think>: it begins where answers differ
        others = filter(None, (self._instead(turn, {"role": "assistant", "content": content}) for content in "ab"))
        return max(len(before), shared_length(whole, prompt, *others))

    def end(self, turn: int, tokens: Sequence[int]) -> int | None:
        """The last token of what the template writes to end an assistant's message; None if the assistant could go on.

        Args:
          turn: the message's number.
          tokens: the tokens of the text up to this message.
        """
        token = last_token(self.tokenizer, tokens)
        if token is None or token in (self.tokenizer.eos_token_id, self.end_token):
            return token
        alone, longer = self.text(turn + 1), self._instead(turn, _longer(self._messages[turn]))
        if longer is None or longer == alone:  # the template takes one call alone
            return token if is_special(self.tokenizer, token) else None
        if longer.startswith(alone.rstrip()):
            return None
        is_added = is_special(self.tokenizer, token) or token in self.tokenizer.added_tokens_decoder
        return token if is_added else None

    def _written(self, count: int, asks_for_more: bool = False) -> Written:
        return self._write(self._messages[:count], asks_for_more)

    def _instead(self, turn: int, message: Message) -> str | None:
        """The text up to a turn, with its message replaced; None if the template rejects the replacement."""
        try:
            return self._write([*self._messages[:turn], message]).text
        except UnmarkedError:
            return None

    def _write(self, messages: Sequence[Message], asks_for_more: bool = False) -> Written:
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Callable[..., Any] = render_jinja_template  # which its annotations say returns a str
        options = self._options | self.tokenizer.special_tokens_map
        try:
            with _ONE_AT_A_TIME:
                (text,), blocks = render([messages], add_generation_prompt=asks_for_more, **options)
        except Exception as error:
            raise _failed(error) from error
        return Written(text, blocks[0] if blocks else [])


def _longer(message: Message) -> Message:
    """The same assistant's message with more text."""
    calls, content = message.get("tool_calls"), message.get("content") or ""
    if isinstance(calls, list) and calls:
        return {**message, "tool_calls": [*calls, calls[-1]]}
    more = [*content, {"type": "text", "text": "x"}] if isinstance(content, list) else f"{content}x"
    return {**message, "content": more}


def _failed(error: Exception) -> UnmarkedError:
    """The error to raise for an error of any type: a template is a program."""
    return UnmarkedError(f"the chat template fails: {kind_and_text(error)}")


def _dated(template: str, date: datetime.date | None) -> str:
    """The template with a fixed date instead of today's: transformers does not let callers replace strftime_now."""
    return template if date is None else _TODAY.sub(lambda call: json.dumps(date.strftime(call[2])), template)
