"""Where an assistant's turn begins and ends: what is learned of it, and at which tokens generation stops then."""

import functools
import itertools

import pytest

import jgg.data
from tests.support import tokenizers
from tests.support.texts import ASSISTANT, USER, folder_of, jsonl, spans

SPECIAL = "<|user|>", "<|assistant|>", "<|tool|>", "<|call|>", "<|end|>", "<|return|>", "<|response|>"
PLAIN = "<tool_call>", "</tool_call>", "<think>", "</think>"
MAKE = functools.partial(tokenizers.byte_level, SPECIAL, PLAIN)
CALLS = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("one", "two")]
CALL = {"role": "assistant", "tool_calls": CALLS[:1]}
TOOL = {"role": "tool", "content": "three"}
TALK = [USER, CALL, TOOL, ASSISTANT, USER, {"role": "assistant", "content": "three"}]


def chat(answer, other="<|{{ m.role }}|>{{ m.content }}", asks="<|assistant|>"):
    """A template by what it writes of an assistant's message, of another one, and to ask for an answer."""
    body = f"{{% if m.role == 'assistant' %}}{answer}{{% else %}}{other}{{% endif %}}"
    return f"{{% for m in messages %}}{body}{{% endfor %}}{{% if add_generation_prompt %}}{asks}{{% endif %}}"


SAID = "{{ m.content or '' }}"
TAGS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
# as Gemma 4's, whose calls end where the response begins
CALLED = (
    "{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}<|end|>{% endfor %}"
    "{% if m.tool_calls %}<|response|>{% else %}<|return|>\n{% endif %}"
)
RESPONDS = chat("<|assistant|>" + SAID + CALLED, "{% if m.role == 'user' %}<|user|>{% endif %}{{ m.content }}")
# as gpt-oss's: the first call alone, an end for calls, one for answers, and another one once messages follow
HARMONY = chat(
    "<|assistant|>{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}<|call|>{% else %}{{ m.content }}"
    "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endif %}",
    "<|{{ m.role }}|>{{ m.content }}<|end|>",
)
MARKED = "{% generation %}" + SAID + TAGS
MARKED += "{% if m.tool_calls %}<|tool|>{% else %}<|user|>{% endif %}{% endgeneration %}"

# name: the template ("no end" as GLM-4.5's), what is learned of `TALK` in each text, and the tokens that end it
LEARNED = {
    "no end": (
        chat("<|assistant|>" + SAID + TAGS),
        [["<tool_call>one</tool_call><|tool|>", "two<|user|>", "three</s>"]],
        {"<|tool|>", "<|user|>", "</s>"},
    ),
    "no end, behind a break": (
        chat("{{ '\n' }}<|assistant|>" + SAID + TAGS, "{{ '\n' }}<|{{ m.role }}|>{{ m.content }}", "\n\n<|assistant|>"),
        [["<tool_call>one</tool_call>\n<|tool|>", "two\n<|user|>", "three</s>"]],
        {"<|tool|>", "<|user|>", "</s>"},
    ),
    "no end, and no token between messages": (
        chat("A:" + SAID + TAGS + "{{ '\n' }}", "U:{{ m.content }}\n", "A:"),
        [["<tool_call>one</tool_call>\n</s>"], ["two\n</s>"], ["three\n</s>"]],
        {"</s>"},
    ),
    "an end that is text": (
        chat("A:" + SAID + TAGS + "##\n", "U:{{ m.content }}\n", "A:"),
        [["<tool_call>one</tool_call>##\n</s>"], ["two##\n</s>"], ["three##\n</s>"]],
        {"</s>"},
    ),
    "an end": (
        chat("<|assistant|>" + SAID + TAGS + "<|im_end|>\n"),
        [["<tool_call>one</tool_call><|im_end|>\n", "two<|im_end|>\n", "three<|im_end|>\n"]],
        {"<|im_end|>"},
    ),
    "an end that is no special token": (
        chat("<|assistant|>" + SAID + TAGS + "</think>"),
        [["<tool_call>one</tool_call></think>", "two</think>", "three</think>"]],
        {"</think>"},
    ),
    "an end of calls": (
        RESPONDS,
        [["<|call|>one<|end|><|response|>", "two<|return|>\n", "three<|return|>\n"]],
        {"<|response|>", "<|return|>"},
    ),
    "an end of the last": (
        HARMONY,
        [["two<|return|>"], ["one<|call|>", "three<|return|>"]],
        {"<|call|>", "<|return|>"},
    ),
    "marked": (
        chat("<|assistant|>" + MARKED, "{{ m.content }}"),
        [["<tool_call>one</tool_call><|tool|>", "two<|user|>", "three<|user|>"]],
        {"<|tool|>", "<|user|>"},
    ),
    "marked, of which the last has an end": (
        chat("<|assistant|>{% generation %}" + SAID + "<|{{ 'return' if loop.last else 'end' }}|>{% endgeneration %}"),
        [["<|end|>", "two<|end|>", "three<|return|>"]],
        {"<|return|>"},
    ),
}


def batches(folder, *rows, **options):
    data, tokenizer = jsonl(folder, *rows), jgg.data.load_tokenizer(folder)
    return jgg.data.batches(data, tokenizer, **{"length": 256, "batch_size": 1, "seed": None} | options)


@pytest.mark.parametrize("name", LEARNED)
def test_a_turn_is_learned_with_its_end_at_which_generation_stops(name, tmp_path):
    template, learned, ends = LEARNED[name]
    folder = folder_of(tmp_path, MAKE, template)
    assert [list(found[1::2]) for found in spans(folder, {"messages": TALK})] == learned
    found, tokenizer = batches(folder, {"messages": TALK}), jgg.data.load_tokenizer(folder)
    assert set(tokenizer.convert_ids_to_tokens(found.end_tokens)) == ends
    # no answer is cut off: within what is learned, a token that stops generation is the last
    for text in itertools.chain.from_iterable(learned):
        assert not any(end in text.rstrip().removesuffix(end) for end in ends)


SAYS = {
    "a call": CALL,
    "two calls": CALL | {"tool_calls": CALLS},
    "a call behind words": CALL | {"content": "two"},
    "thoughts alone": {"role": "assistant", "content": "<think>two</think>"},
    "parts": {"role": "assistant", "content": [{"type": "text", "text": "</think>"}]},
}


@pytest.mark.parametrize("name", SAYS)
def test_an_added_token_that_the_assistant_says_last_is_no_end(name, tmp_path):
    parts = (
        "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | map(attribute='text') | join }}{% endif %}"
    )
    answer = "<|assistant|>{% if m.content %}" + parts + "{% endif %}" + TAGS
    # whether the tokenizer calls it special or not
    for make in (MAKE, functools.partial(tokenizers.byte_level, (*SPECIAL, *PLAIN))):
        folder = folder_of(tmp_path, make, chat(answer))
        ((_, learned),) = spans(folder, {"messages": [USER, SAYS[name]]})
        assert learned.endswith((">two</think></s>", "</tool_call></s>", "</think></s>")) and learned.count("</s>") == 1
        assert batches(folder, {"messages": [USER, SAYS[name]]}).end_tokens == [2]
    tokenizer = jgg.data.load_tokenizer(folder_of(tmp_path, MAKE))
    ids = tokenizer.convert_tokens_to_ids
    assert jgg.data.end_of(tokenizer, [ids("</s>"), ids("</think>")]) is None
    assert jgg.data.end_of(tokenizer, [ids("</think>"), ids("<|end|>")]) == ids("<|end|>")


def test_unknown_text_is_no_end(tmp_path):
    folder = folder_of(tmp_path, tokenizers.words, chat("<|im_start|>" + SAID, asks="<|im_start|>"), unk_token="<unk>")
    said = {"role": "assistant", "content": "two four"}
    ((_, learned),) = spans(folder, {"messages": [USER, said]})
    assert learned == "two <unk> </s>" and batches(folder, {"messages": [USER, said]}).end_tokens == [2]
    assert jgg.data.end_of(jgg.data.load_tokenizer(folder), [2, 0]) is None


def test_a_turn_that_no_token_ends_has_none_where_none_is_given(tmp_path):
    template = LEARNED["no end, and no token between messages"][0]
    tokenizer = jgg.data.load_tokenizer(folder_of(tmp_path, MAKE, template))
    (example,) = jgg.data.examples_of({"messages": TALK}, tokenizer)
    assert tokenizer.decode(example.tokens[example.learned]) == "<tool_call>one</tool_call>\ntwo\nthree\n"


# an answer, and what asks for one with the beginning of thoughts
BEGINNINGS = {
    "<table>b": "<|assistant|>\n<think>\n",
    "thin": "<|assistant|>\nthinking: ",
    "": "<|assistant|>\n<think>\n",
    "\none": "<|assistant|>\n",
}


@pytest.mark.parametrize("said", BEGINNINGS)
@pytest.mark.parametrize("plain", [PLAIN, ()], ids=["tokens", "text"])
def test_an_answer_that_begins_as_what_asks_for_thoughts_is_learned_whole(said, plain, tmp_path):
    make = functools.partial(tokenizers.byte_level, SPECIAL, plain)
    folder = folder_of(tmp_path, make, chat("<|assistant|>\n" + SAID + "<|end|>", asks=BEGINNINGS[said]))
    answer = {"role": "assistant", "content": said}
    ((before, learned, between, *_),) = spans(folder, {"messages": [USER, answer, USER, ASSISTANT]})
    # of what the template and the answer share a token, it is learned
    assert before + learned == f"<|user|>one<|assistant|>\n{said}<|end|>" and between.startswith("<|user|>")
    assert learned.endswith(f"{said}<|end|>") and len(learned) <= len(f"\n{said}<|end|>")


@pytest.mark.parametrize(
    "make", [MAKE, tokenizers.byte_level_with_bos, tokenizers.llama], ids=["bytes", "bos", "llama"]
)
@pytest.mark.parametrize(
    "answer", [SAID, "{% generation %}" + SAID + "{% endgeneration %}"], ids=["compared", "marked"]
)
def test_an_answer_is_learned_to_the_last_byte_of_its_last_character(answer, make, tmp_path):
    """Of several tokens of a character, the first already has the character's end."""
    folder = folder_of(tmp_path, make, chat("<s>" + answer, "<|im_start|>{{ m.content }}", "<s>"))
    tokenizer, said = jgg.data.load_tokenizer(folder), {"role": "assistant", "content": "two\N{EURO SIGN}"}
    (example,) = jgg.data.examples_of({"messages": [USER, said, USER, ASSISTANT]}, tokenizer)
    learned = tokenizer.convert_ids_to_tokens(example.tokens[example.learned])
    assert tokenizer.convert_tokens_to_string(learned).strip().startswith("two\N{EURO SIGN}")
