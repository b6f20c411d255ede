"""Tokenizes conversations as the chat template of a Hugging Face folder writes them.

Only what assistants said is learned. Some templates mark it with `{% generation %}` blocks. For the others, the text of
the messages before a turn, with the prompt for an answer, is compared with the text that includes the turn.
"""

import bisect
import datetime
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jgg.data.rendering import NO_TEMPLATE, Conversation, Message, Tools, UnmarkedError
from jgg.data.tokenizers import (
    Tokenizer,
    bytes_of_tokens,
    encode,
    is_special,
    last_token,
    special_token,
    text_of,
)

_SAID = "content", "tool_calls", "reasoning_content", "thinking"  # the keys for what a message says
_SWITCHES = {"weight": ((0, 1), "0 or 1"), "train": ((False, True), "true or false")}  # whether a message is learned


class Text(NamedTuple):
    """A text to learn from.

    Attributes:
      tokens: the text's tokens.
      learned: which tokens are learned.
      ends: the tokens that end the text or an assistant's message.
      num_bytes: the bytes of each token's text, from `bytes_of_tokens`; int [size].
    """

    tokens: list[int]
    learned: list[bool]
    ends: set[int]
    num_bytes: np.ndarray


def encode_conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools = None, date: datetime.date | None = None
) -> list[tuple[list[int], list[bool]]]:
    """Tokenizes a conversation with the chat template and marks what the assistant says as learned.

    Some templates write a turn differently once other messages follow it, for example without its thoughts. Such a
    turn is learned as it reads when it comes last: the conversation up to this turn becomes a text of its own.

    A turn is learned with the token that ends it. If the template writes none, as GLM-4.5's does not, the special
    token that begins the next message serves as its end.

    Args:
      tokenizer: what `load_tokenizer` returned.
      messages: the conversation, as `apply_chat_template` takes it. Messages after the last learned one are left
        out. An assistant's message is not learned if it is the first message or has "weight" 0 or "train" false; the
        template does not get these two keys.
      tools: the tools that the assistant may use, as `apply_chat_template` takes them.
      date: the date for templates that write today's, such as gpt-oss's; None for today.

    Returns:
      The texts, each with its tokens and a mask of the learned ones; no texts if no message is learned.

    Raises:
      UnmarkedError, a ValueError: the template fails, or it changes the messages before a turn of the assistant once
        that turn is added.
      ValueError: a message says nothing or has a wrong "weight" or "train", no message of the assistant follows another
        message, or the folder has no chat template.
    """
    return [(text.tokens, text.learned) for text in texts_of(tokenizer, messages, tools, date)]


def texts_of(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Tools = None,
    date: datetime.date | None = None,
    end_token: int | None = None,
) -> list[Text]:
    """The texts of `encode_conversation`; `end_token` is added to texts that the template leaves without an end."""
    for number, message in enumerate(messages, 1):
        _check(number, message)
    said = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    if not any(said):
        raise ValueError("messages must have one before the assistant's, got it alone")
    if tokenizer.chat_template is None:
        raise ValueError(NO_TEMPLATE)
    turns = [n for n in said if n and _is_learned(messages[n])]
    if not turns:
        return []
    plain = [{key: value for key, value in message.items() if key not in _SWITCHES} for message in messages]
    conversation = Conversation(tokenizer, plain, tools, date, end_token)
    if conversation.is_marked:
        unlearned = [n for n in said if n < turns[-1] and not _is_learned(messages[n])]
        return [_marked(conversation, turns, unlearned)]
    return _compared(conversation, turns)


def prompt_of(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools = None, date: datetime.date | None = None
) -> str:
    """Writes a conversation with the chat template, up to the start of the assistant's next answer.

    Args:
      tokenizer, messages, tools, date: as in `encode_conversation`.

    Raises: ValueError: the folder has no chat template, or the template fails.
    """
    if tokenizer.chat_template is None:
        raise ValueError(NO_TEMPLATE)
    return Conversation(tokenizer, messages, tools, date, None).text(len(messages), True)


def _check(number: int, message: Message) -> None:
    if not any(key in message for key in _SAID):
        got = ", ".join(map(str, message))
        raise ValueError(f'messages must have "content" or "tool_calls", got one with {got} as message {number}')
    for key, (values, expected) in _SWITCHES.items():
        value = message.get(key)
        is_bool = isinstance(value, bool)
        if value is not None and (is_bool != isinstance(values[0], bool) or value not in values):
            raise ValueError(f'"{key}" of message {number} must be {expected}, got {repr(value)[:80]}')


def _is_learned(message: Message) -> bool:
    """Whether a message is learned: neither of its keys says otherwise."""
    return all(message.get(key) is None or message[key] for key in _SWITCHES)


class _Marking:
    """A text with its tokens, while its learned parts are being marked."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.text, self._tokenizer = text, tokenizer
        self.tokens, self._past = encode(tokenizer, text, is_rendered=True)
        self.learned, self.ends = [False] * len(self.tokens), set[int]()

    def up_to(self, end: int) -> int:
        """The number of tokens that begin before this character."""
        whole = bisect.bisect_right(self._past, end)
        begins = self._past[whole - 1] if whole else 0
        return whole + (begins < end and whole < len(self._past))

    def learn(self, start: int, end: int) -> None:
        """Marks the tokens that overlap a span of characters; the first and the last may extend beyond it."""
        if start < end:
            first, last = bisect.bisect_right(self._past, start), self.up_to(end)
            self.learned[first:last] = [True] * (last - first)

    def next_message(self, end: int) -> int | None:
        """The number of the special token right after this character, with at most white space between."""
        for number in range(self.up_to(end), len(self.tokens)):
            if is_special(self._tokenizer, self.tokens[number]):
                return number
            if text_of(self._tokenizer, [self.tokens[number]]).strip():
                return None
        return None

    def learn_through(self, number: int) -> None:
        """Marks the tokens after the learned ones, up to this token, as the end of a message."""
        first = number
        while first and not self.learned[first - 1]:
            first -= 1
        self.learned[first : number + 1] = [True] * (number + 1 - first)
        self.ends.add(self.tokens[number])

    def finished(self, end: int | None, end_token: int | None) -> Text:
        """The text, with `end` as the end of its last message, or `end_token` if `end` is None."""
        if end is None and end_token is not None:
            self.tokens, self.learned, end = [*self.tokens, end_token], [*self.learned, True], end_token
        if end is not None:
            self.ends.add(end)
        num_bytes = bytes_of_tokens(self._tokenizer, self.text, self.tokens, self._past)
        return Text(self.tokens, self.learned, self.ends, num_bytes)


def _compared(conversation: Conversation, turns: list[int]) -> list[Text]:
    """The texts that together contain all turns."""
    texts, waiting = [], list(turns)
    while waiting:
        last = waiting.pop()
        marking = _Marking(conversation.tokenizer, conversation.text(last + 1))
        start = conversation.start(last, marking.text)
        if start is None:
            raise UnmarkedError("the chat template rewrites the messages before the assistant's")
        marking.learn(start, len(marking.text))
        waiting = [turn for turn in waiting if not _learn_turn(conversation, marking, turn)]
        texts.append(marking.finished(conversation.end(last, marking.tokens), conversation.end_token))
    return texts[::-1]


def _learn_turn(conversation: Conversation, marking: _Marking, turn: int) -> bool:
    """Marks a turn in a text that goes on; False if the turn reads differently as the last one."""
    start, alone = conversation.start(turn, marking.text), conversation.text(turn + 1)
    if start is None:
        return False
    if not marking.text.startswith(alone):
        # templates may put the token that ends a text behind the last message alone
        alone = alone.removesuffix(str(conversation.tokenizer.eos_token or ""))
        if not marking.text.startswith(alone):
            return False
        marking.learn(start, len(alone))
        return True
    end = conversation.end(turn, marking.tokens[: marking.up_to(len(alone))])
    opened = marking.next_message(len(alone)) if end is None else None
    if end is None and opened is None and conversation.end_token is not None:
        return False  # it has an end as the last one alone
    marking.learn(start, len(alone))
    if opened is not None:
        marking.learn_through(opened)
    elif end is not None:
        marking.ends.add(end)
    return True


def _marked(conversation: Conversation, turns: list[int], unlearned: list[int]) -> Text:
    """The text in which the template itself marks what is learned."""
    tokenizer, written = conversation.tokenizer, conversation.written(turns[-1] + 1)
    marking, left_out = _Marking(tokenizer, written.text), set[int]()
    for turn in unlearned:
        # with the message behind it, as a template may mark the last turn alone
        after = turn + 1 if turn + 1 in (*turns, *unlearned) else turn + 2
        left_out.update(range(_count(conversation, turn), _count(conversation, after)))
    own = [block for number, block in enumerate(written.blocks) if number not in left_out]
    for start, end in own:
        marking.learn(start, end)
    last = conversation.end(turns[-1], marking.tokens)
    closing = {last_token(tokenizer, marking.tokens[: marking.up_to(end)]) for _, end in own}
    if closing - {last, special_token(tokenizer, "eos_token_id"), conversation.end_token}:
        alone = ((turn, encode(tokenizer, conversation.text(turn + 1), is_rendered=True)[0]) for turn in turns[:-1])
        ends = {conversation.end(turn, tokens) for turn, tokens in alone}
        marking.ends |= {token for token in closing & ends if token is not None}
    return marking.finished(last, conversation.end_token)


def _count(conversation: Conversation, count: int) -> int:
    """The number of blocks that the template marks in the first `count` messages."""
    return len(conversation.written(count).blocks) if count else 0
