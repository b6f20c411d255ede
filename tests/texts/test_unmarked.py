"""Conversations that a chat template rejects or cannot mark stop the reading, or are skipped and counted."""

import re

import pytest

import jgg.data
from tests.support.texts import ASSISTANT, LOOP, USER, folder_of, jsonl

SYSTEM = {"role": "system", "content": "three"}
# as Mistral's: a question has the system's message while it is the last
MOVES = (
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}<|im_start|>"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}{{ m.content }}"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
# as gpt-oss's: thoughts before a call are dropped once there is an answer
DROPS = (
    "{% for m in messages %}{% if m.thinking and not (messages[-1].role == 'assistant' and messages[-1].content) %}"
    "<|im_start|>{{ m.thinking }}{% endif %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)
# as Gemma's
REJECTS = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + LOOP
CALL = {"role": "assistant", "thinking": "two", "content": ""}
REWRITES = "the chat template rewrites the messages before the assistant's"
# name: the template, a row that it cannot mark, and the error
KINDS = {
    "moves": (MOVES, [SYSTEM, USER, ASSISTANT], REWRITES),
    "drops": (DROPS, [USER, CALL, {"role": "tool", "content": "one"}, ASSISTANT], REWRITES),
    "rejects": (
        REJECTS,
        [SYSTEM, USER, ASSISTANT],
        "the chat template fails: TemplateError: System role not supported",
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_row_that_cannot_be_marked_is_an_error_or_skipped(name, tmp_path):
    template, wrong, message = KINDS[name]
    folder = folder_of(tmp_path, template=template)
    tokenizer, options = jgg.data.load_tokenizer(folder), {"length": 64, "batch_size": 1}
    rows = {"messages": [USER, ASSISTANT]}, {"messages": wrong}, {"text": "one"}, {"messages": wrong, "weight": 2}
    hint = "skip_unmarked=True, or the option --skip-unmarked, skips such rows"
    with pytest.raises(ValueError, match=re.escape(f"data.jsonl:2: {message}; {hint}")):
        jgg.data.batches(jsonl(folder, *rows), tokenizer, **options)
    with pytest.raises(jgg.data.UnmarkedError, match=re.escape(message)):
        jgg.data.examples_of(rows[1], tokenizer)
    found = jgg.data.batches(jsonl(folder, *rows), tokenizer, skip_unmarked=True, **options)
    assert (found.num_skipped, found.num_examples, found.num_left_out) == (2, 2, 0)
    without = jgg.data.batches(jsonl(folder, *rows[::2], name="without.jsonl"), tokenizer, **options)
    assert without.digest == found.digest and without.num_skipped == 0
    alone = jsonl(folder, rows[1], name="alone.jsonl")
    with pytest.raises(ValueError, match=r"to learn, got none; rows that the chat template cannot mark: 1$"):
        jgg.data.batches(alone, tokenizer, skip_unmarked=True, **options)


def test_other_errors_of_rows_are_not_skipped(tmp_path):
    tokenizer, options = jgg.data.load_tokenizer(folder_of(tmp_path, template=LOOP)), {"length": 64, "batch_size": 1}
    for wrong in ({"messages": [ASSISTANT]}, {"messages": [USER, ASSISTANT | {"weight": 3}]}, {"txt": "one"}):
        with pytest.raises(ValueError, match=r"data\.jsonl:2: ") as raised:
            jgg.data.batches(jsonl(tmp_path, {"text": "one"}, wrong), tokenizer, skip_unmarked=True, **options)
        assert "skip" not in str(raised.value)
