"""Conversations are written as transformers writes them, and what assistants say in them is learned."""

import datetime
import re
import sys

import numpy as np
import pytest

import jgg.data
from tests.support import tokenizers
from tests.support.texts import ASSISTANT, LOOP, USER, WHOLE, examples, folder_of, jsonl, spans

# name: the template, and the text before and in what is learned of the messages above
TEMPLATES = {
    "plain": (LOOP, *WHOLE),
    "nothing-given": (
        "{% if tools is not none %}TOOLS{% endif %}{% if documents is not none %}DOCUMENTS{% endif %}" + LOOP,
        *WHOLE,
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}:{% else %}"
        "{% generation %}{{ m.content }}</s>{% endgeneration %}{% endif %}{% endfor %}",
        "one:",
        "two</s>",
    ),
    "loops, macros, namespaces": (
        "{% macro turn(m) %}<|im_start|>{{ m.content | trim }}<|im_end|>{% endmacro %}{% set found = namespace(n=0) %}"
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% set found.n = found.n + 1 %}{{ turn(m) }}{% if found.n > 9 %}{% break %}{% endif %}{% endfor %}",
        "<|im_start|>one<|im_end|>",
        "<|im_start|>two<|im_end|>",
    ),
    "special tokens, JSON, dates": (
        "{{ bos_token }}{{ strftime_now('%Y') | length }}{{ messages[0] | tojson }}"
        "{% for m in messages[1:] %}{{ m.content + eos_token }}{% endfor %}",
        '<s>4{"role": "user", "content": "one"}',
        "two</s>",
    ),
    # a prompt that asks for thoughts, which an answer may lack
    "asks for thoughts": (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:<think>{% endif %}",
        "user:one\nassistant:",
        "two\n</s>",  # no special token ends it
    ),
    # as Phi-3's, which ends all but a prompt
    "an end behind all": (
        LOOP.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}"),
        WHOLE[0],
        WHOLE[1] + "</s>",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_are_written_as_transformers_writes_them(name, tmp_path):
    template, before, learned = TEMPLATES[name]
    folder = folder_of(tmp_path, template=template)
    assert spans(folder, {"messages": [USER, ASSISTANT]}) == [(before, learned)]
    text = jgg.data.load_tokenizer(folder).apply_chat_template([USER, ASSISTANT], tokenize=False)
    assert before + learned in (text, f"{text}</s>")


def test_named_templates_and_tools(tmp_path):
    named = [{"name": "default", "template": LOOP}, {"name": "tool_use", "template": "{{ tools[0].name }}" + LOOP}]
    folder = folder_of(tmp_path, chat_template=named)
    rows = [{"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT], "tools": [{"name": "find"}]}]
    assert spans(folder, *rows) == [WHOLE, ("find" + WHOLE[0], WHOLE[1])]
    # the same in files, which come before
    (folder / "chat_template.jinja").write_text("default" + LOOP)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].name }}s" + LOOP)
    assert spans(folder, *rows) == [("default" + WHOLE[0], WHOLE[1]), ("finds" + WHOLE[0], WHOLE[1])]


def test_messages_of_llama_s_kind_are_one_text(tmp_path):
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}one {{ m.content }}:{% else %} {{ m.content }}"
        "{{ eos_token }}{% endif %}{% endfor %}"
    )
    folder = folder_of(tmp_path, tokenizers.llama, template)
    ((pieces, learned),) = examples(folder, {"messages": [USER, ASSISTANT]})
    assert pieces == ["<s>", "▁one", "▁one", "<0x3A>", "▁two", "</s>"]
    assert learned == [False] * 4 + [True] * 2


FAILING = {
    "none": (None, "a conversation needs chat_template.jinja in the model's folder, or one in tokenizer_config.json"),
    "raised": ("{{ raise_exception('no system') }}", "the chat template fails: TemplateError: no system"),
    "syntax": ("{% if %}", "the chat template fails: TemplateSyntaxError"),
    "missing": ("{{ messages[0].parts.text }}", "the chat template fails: UndefinedError"),
    "rewritten": (
        "{% for m in messages %}{{ loop.last }}{{ m.content }}{% endfor %}",
        "the chat template rewrites the messages before the assistant's",
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_template_that_fails_is_named(name, tmp_path):
    template, message = FAILING[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        examples(folder_of(tmp_path, template=template), {"messages": [USER, ASSISTANT]})


OTHER = {"role": "user", "content": "three"}
TALK = [{"role": "system", "content": "be one"}, USER, ASSISTANT, OTHER, {"role": "assistant", "content": "three two"}]


def marked(template):
    """The template with generation blocks around what LOOP has of an assistant's turn."""
    return template.replace(
        "{{ m.content }}<|im_end|>\n",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>\n{% endif %}",
    )


@pytest.mark.parametrize("template", [LOOP, marked(LOOP)], ids=["compared", "marked"])
@pytest.mark.parametrize("further", [[], [OTHER]], ids=["", "unanswered"])
def test_all_turns_of_assistants_are_learned_in_one_text(template, further, tmp_path):
    (found,) = spans(folder_of(tmp_path, template=template), {"messages": TALK + further})
    before = "<|im_start|>system\nbe one<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    between = "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    assert found == (before, "two<|im_end|>\n", between, "three two<|im_end|>\n")


def test_a_template_may_mark_less(tmp_path):
    template = marked(LOOP).replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")
    ((_, first, _, second, _),) = spans(folder_of(tmp_path, template=template), {"messages": TALK})
    assert (first, second) == ("two", "three two")


def test_calls_of_tools_are_learned_and_their_results_are_not(tmp_path):
    template = LOOP.replace(
        "{{ m.content }}", "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ m.content or '' }}"
    )
    call = {"role": "assistant", "tool_calls": [{"name": "find", "arguments": {"x": 1}}]}
    messages = [USER, call, {"role": "tool", "content": "three"}, ASSISTANT]
    (found,) = spans(
        folder_of(tmp_path, template="{{ tools[0].name }}" + template),
        {"messages": messages, "tools": [{"name": "find"}]},
    )
    assert found[0].startswith("find<|im_start|>user")
    assert found[1:] == (
        '[{"name": "find", "arguments": {"x": 1}}]<|im_end|>\n',
        "<|im_start|>tool\nthree<|im_end|>\n<|im_start|>assistant\n",
        "two<|im_end|>\n",
    )


# as Qwen3's and gpt-oss's: what comes before the last question loses its thoughts
FORGETS = (
    "{% set last = messages | map(attribute='role') | list | length - 1 %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_turn_that_later_loses_its_thoughts_is_a_text_of_its_own(tmp_path):
    folder = folder_of(tmp_path, template=FORGETS)
    first, second = spans(folder, {"messages": TALK})
    thought = "<think>\n\n</think>\n\n"
    assert first[1:] == (f"{thought}two<|im_end|>\n",) and second[1:] == (f"{thought}three two<|im_end|>\n",)
    assert second[0].startswith(first[0] + "two<|im_end|>\n")  # and is not learned there
    tokenizer, data = jgg.data.load_tokenizer(folder), jsonl(folder, {"messages": TALK})
    found = jgg.data.batches(data, tokenizer, length=256, batch_size=1, seed=None)
    assert (found.num_examples, found.num_sequences, found.end_tokens) == (2, 1, [4])


def test_an_end_that_only_the_last_turn_has_is_learned_there(tmp_path):
    """As gpt-oss's: "<|return|>" ends the last, "<|end|>" those before."""
    end = "{% if loop.last and m.role == 'assistant' %}</s>{% else %}<|im_end|>{% endif %}"
    folder = folder_of(tmp_path, template=LOOP.replace("<|im_end|>\n", end))
    (found,) = spans(folder, {"messages": TALK})
    assert found[1:] == ("two", "<|im_end|><|im_start|>user\nthree<|im_end|><|im_start|>assistant\n", "three two</s>")


def test_an_end_behind_all_is_learned_behind_the_last_alone(tmp_path):
    """As Phi-3's."""
    folder = folder_of(tmp_path, template=TEMPLATES["an end behind all"][0])
    (found,) = spans(folder, {"messages": TALK})
    assert found[1::2] == ("two<|im_end|>\n", "three two<|im_end|>\n</s>")


def test_what_an_assistant_says_first_is_not_learned(tmp_path):
    folder = folder_of(tmp_path, template=LOOP)
    (found,) = spans(folder, {"messages": [ASSISTANT, *TALK[1:3]]})
    assert found[1:] == ("two<|im_end|>\n",) and "two" in found[0]
    with pytest.raises(ValueError, match="messages must have one before the assistant's, got it alone"):
        spans(folder, {"messages": [ASSISTANT, USER]})


@pytest.mark.parametrize("template", [LOOP, marked(LOOP)], ids=["compared", "marked"])
def test_a_template_that_writes_the_date_writes_that_of_the_run_s_start(template, tmp_path):
    today = (
        "{{ strftime_now('%Y-%m-%d') }} {{ strftime_now( \"%d %b %Y\" ) }}" + "{{ 'on' if strftime_now is defined }}"
    )
    folder = folder_of(tmp_path, template=today + template)
    tokenizer, date = jgg.data.load_tokenizer(folder), datetime.date(2024, 2, 29)
    (found,) = jgg.data.examples_of({"messages": TALK}, tokenizer, date=date)
    assert tokenizer.decode(found.tokens).startswith("2024-02-29 29 Feb 2024on<|im_start|>system")
    data = jsonl(folder, {"messages": TALK})
    options = {"length": 256, "batch_size": 1}
    dates = [date, date, date + datetime.timedelta(1), None, datetime.date.today()]
    first, same, other, *now = [jgg.data.batches(data, tokenizer, **options, date=day).digest for day in dates]
    assert first == same != other and first not in now


def test_marked_turns_are_the_same_by_threads(tmp_path):
    """Transformers 5.0 kept what it marks in one place for all threads."""
    folder = folder_of(tmp_path, template=marked(LOOP))
    rows = [{"messages": TALK[: 3 + 2 * (n % 2)] * (1 + n % 7)} for n in range(400)]
    tokenizer, data = jgg.data.load_tokenizer(folder), jsonl(folder, *rows)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        found = jgg.data.batches(data, tokenizer, length=1024, batch_size=1, packing=False, seed=None, normalize=False)
    finally:
        sys.setswitchinterval(interval)
    for row, batch in zip(rows, found, strict=True):
        (example,) = jgg.data.examples_of(row, tokenizer)
        assert np.array_equal(batch["weights"][0, 0, : len(example.learned) - 1], example.learned[1:])
