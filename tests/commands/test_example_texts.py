"""examples/finetune.py and generate.py read texts as transformers renders, tokenizes and decodes them."""

import argparse
import json
import re

import finetune
import folders
import pytest

from tests.support import tokenizers

USER, ASSISTANT = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}


def folder_of(tmp_path, make=tokenizers.byte_level, template=None, **settings):
    """A folder with a tokenizer, whose config.json ends texts by "</s>"."""
    make().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    settings = {"bos_token": "<s>", "eos_token": "</s>"} | settings
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


def read(folder, *rows, length=64):
    """What is learned of rows: for each example the pieces before, and those that are learned."""
    data = folder / "data.jsonl"
    data.write_bytes(rows[0] if isinstance(rows[0], bytes) else "\n".join(map(json.dumps, rows)).encode())
    options = argparse.Namespace(folder=folder, data=data, sequence_length=length)
    pieces_of = folders.load_tokenizer(folder).convert_ids_to_tokens
    return [
        (pieces_of(ids[:first].tolist()), pieces_of(ids[first:].tolist()))
        for ids, first in finetune.read_examples(options)
    ]


# the rows; for each kind of tokenizer their pieces, those that are learned after the bar
ROWS = [
    {"prompt": "one:", "completion": " two"},
    {"prompt": "one: ", "completion": "two"},
    {"prompt": "one\n", "completion": "two"},
    {"prompt": "<s>on", "completion": "e two</s>"},
    {"text": "two"},
]
PIECES = {
    tokenizers.byte_level: ["one : | Ġtwo", "one : | Ġtwo", "one Ċ | two", "<s> | one Ġtwo", "| two"],
    tokenizers.byte_level_with_bos: [
        "<s> one : | Ġtwo",
        "<s> one : | Ġtwo",
        "<s> one Ċ | two",
        "<s> | one Ġtwo",
        "<s> | two",
    ],
    tokenizers.llama: [
        "<s> ▁one <0x3A> | ▁two",
        "<s> ▁one <0x3A> | ▁two",
        "<s> ▁one <0x0A> | two",
        "<s> | ▁one ▁two",
        "<s> | ▁two",
    ],
    tokenizers.unigram: [
        "<s> ▁one : | ▁two",
        "<s> ▁one : | ▁two",
        "<s> ▁one \n | two",
        "<s> | ▁one ▁two",
        "<s> | ▁two",
    ],
    tokenizers.words: ["one : | two", "one : | two", "one | two", "<s> | one two", "| two"],
    tokenizers.word_pieces: [
        "<s> on ##e : | two",
        "<s> on ##e : | two",
        "<s> on ##e | two",
        "<s> on | ##e two",
        "<s> | two",
    ],
}


@pytest.mark.parametrize("make", PIECES, ids=lambda make: make.__name__)
def test_a_prompt_and_its_completion_are_one_text(make, tmp_path):
    wanted = [tuple(part.strip(" ").split(" ") for part in pieces.split("|")) for pieces in PIECES[make]]
    got = read(folder_of(tmp_path, make), *ROWS)
    assert got == [([piece for piece in before if piece], [*learned, "</s>"]) for before, learned in wanted]


@pytest.mark.parametrize("make", PIECES, ids=lambda make: make.__name__)
def test_a_text_and_its_continuation_are_decoded_as_one(make, tmp_path):
    tokenizer = folders.load_tokenizer(folder_of(tmp_path, make))
    prompt, ends = folders.encode(tokenizer, "one")
    whole, _ = folders.encode(tokenizer, "one two")
    assert folders.continuation(tokenizer, prompt, [*whole[len(prompt) :], 2]) == " two"
    assert ends[-1] == 3 and "</s>" not in tokenizer.convert_ids_to_tokens(prompt)
    rendered, _ = folders.encode(tokenizer, "<s>one")
    assert rendered == folders.encode(tokenizer, "<s>one", is_rendered=True)[0]
    assert tokenizer.convert_ids_to_tokens(rendered).count("<s>") == 1


PADDING = {
    "strategy": {"Fixed": 12},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<unk>",
}
TRUNCATION = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}


@pytest.mark.parametrize("kept", [{"truncation": TRUNCATION}, {"padding": PADDING}])
def test_what_tokenizer_json_keeps_of_a_training_is_ignored(kept, tmp_path):
    row = {"prompt": "one one one one", "completion": " two two two two"}
    wanted = read(folder_of(tmp_path), row)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | kept))
    assert read(tmp_path, row) == wanted
    assert len(folders.encode(folders.load_tokenizer(tmp_path), "one one one one")[0]) == 4


LOOP = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WHOLE = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n", "two<|im_end|>\n"
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
        "two\n",
    ),
    # as Phi-3's, which ends all but a prompt
    "an end behind all": (
        LOOP.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}"),
        WHOLE[0],
        WHOLE[1] + "</s>",
    ),
}


def texts_of(folder, *rows):
    """The text before and in what is learned of each row."""
    decode = folders.load_tokenizer(folder).convert_tokens_to_string
    return [(decode(before), decode(learned)) for before, learned in read(folder, *rows)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_are_written_as_transformers_writes_them(name, tmp_path):
    template, before, learned = TEMPLATES[name]
    folder = folder_of(tmp_path, template=template)
    assert texts_of(folder, {"messages": [USER, ASSISTANT]}) == [(before, learned)]
    text = folders.load_tokenizer(folder).apply_chat_template([USER, ASSISTANT], tokenize=False)
    assert text == before + learned


def test_named_templates_and_tools(tmp_path):
    named = [{"name": "default", "template": LOOP}, {"name": "tool_use", "template": "{{ tools[0].name }}" + LOOP}]
    folder = folder_of(tmp_path, chat_template=named)
    rows = [{"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT], "tools": [{"name": "find"}]}]
    assert texts_of(folder, *rows) == [WHOLE, ("find" + WHOLE[0], WHOLE[1])]
    # the same in files, which come before
    (folder / "chat_template.jinja").write_text("default" + LOOP)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].name }}s" + LOOP)
    assert texts_of(folder, *rows) == [("default" + WHOLE[0], WHOLE[1]), ("finds" + WHOLE[0], WHOLE[1])]


def test_messages_of_llama_s_kind_are_one_text(tmp_path):
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}one {{ m.content }}:{% else %} {{ m.content }}"
        "{{ eos_token }}{% endif %}{% endfor %}"
    )
    folder = folder_of(tmp_path, tokenizers.llama, template)
    assert read(folder, {"messages": [USER, ASSISTANT]}) == [(["<s>", "▁one", "▁one", "<0x3A>"], ["▁two", "</s>"])]


FAILING = {
    "none": (None, "messages need chat_template.jinja in the model's folder, or one in tokenizer_config.json"),
    "raised": ("{{ raise_exception('no system') }}", "the chat template fails: TemplateError: no system"),
    "syntax": ("{% if %}", "the chat template fails: TemplateSyntaxError"),
    "missing": ("{{ messages[0].parts.text }}", "the chat template fails: UndefinedError"),
    "anew": (
        "{% for m in messages %}{{ loop.last }}{{ m.content }}{% endfor %}",
        "the chat template writes the messages before the last anew",
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_template_that_fails_is_named(name, tmp_path):
    template, message = FAILING[name]
    with pytest.raises(SystemExit, match=rf"data\.jsonl:1: {re.escape(message)}"):
        read(folder_of(tmp_path, template=template), {"messages": [USER, ASSISTANT]})


def test_the_token_that_ends_what_was_learned_ends_what_is_generated(tmp_path):
    folder = folder_of(tmp_path, template=LOOP)
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 3]}')
    ((_, learned),) = read(folder, {"prompt": "one", "completion": "two"})
    assert learned[-1] == tokenizers.SPECIAL[4] and folders.stop_tokens(folder) == [4, 3]
    tokenizer = folders.load_tokenizer(folder)
    # white space may follow
    assert folders.end_of(tokenizer, folders.encode(tokenizer, "".join(WHOLE))[0]) == 4
    assert folders.end_of(tokenizer, folders.encode(tokenizer, "<s>one two\n")[0]) is None
    (folder / "adapter").mkdir()
    (folder / "adapter/generation_config.json").write_text('{"eos_token_id": [3, 1]}')
    assert folders.stop_tokens(folder, folder / "adapter") == [4, 3, 1]
    for wrong in (-1, 2.5, [2, "</s>"], True):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(SystemExit, match=r"eos_token_id of .*generation_config\.json must be a token"):
            folders.stop_tokens(folder)


def test_the_language_model_beside_towers_says_what_ends_a_text(tmp_path):
    for config, ends in (
        ({"text_config": {"eos_token_id": [2, 4]}}, [2, 4]),
        ({"text_config": {"eos_token_id": 2}, "eos_token_id": [4, 3]}, [4, 3]),
        ({"text_config": {}}, []),
        ({"text_config": None}, []),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert folders.stop_tokens(tmp_path) == ends
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": "t"}}')
    with pytest.raises(SystemExit, match=r"eos_token_id of .*config\.json must be a token"):
        folders.stop_tokens(tmp_path)


def test_blank_lines_and_a_mark_of_utf_8_are_taken(tmp_path):
    lines = b'\xef\xbb\xbf\r\n{"text": "one"}\r\n\n   \n{"text": "\\u2028two"}\n\n'
    assert [learned[-2] for _, learned in read(folder_of(tmp_path), lines)] == ["one", "two"]


WRONG_ROWS = {
    "latin-1": (b'{"text": "one"}\n{"text": "\xe9"}', "data.jsonl:2 must be UTF-8, got the byte 0xe9"),
    "utf-16": ('{"text": "one"}'.encode("utf-16"), "data.jsonl:1 must be UTF-8, got the byte 0xff"),
    "surrogate": (b'\n{"text": "\\ud83d"}', "data.jsonl:2: 'utf-8' codec can't encode"),
    "surrogate-in-messages": (
        json.dumps({"messages": [USER, ASSISTANT | {"content": "\udc80"}]}).encode(),
        "data.jsonl:1: 'utf-8' codec can't encode character '\\udc80'",
    ),
    "half": (b'{"text": ', "data.jsonl:1 must be a JSON object"),
    "deep": (b"[" * 100_000, "data.jsonl:1 must be a JSON object"),
    "digits": (b'{"text": ' + b"1" * 5000 + b"}", "data.jsonl:1 must be a JSON object"),
    "list": (b'["one"]', 'data.jsonl:1: a row must have "prompt" and "completion"'),
    "numbers": (b'{"text": 5}', 'data.jsonl:1: a row must have "prompt" and "completion"'),
    "user's": (json.dumps({"messages": [USER]}).encode(), 'data.jsonl:1: a row must have "prompt" and "completion"'),
    "no-question": (
        json.dumps({"messages": [ASSISTANT]}).encode(),
        "data.jsonl:1: messages must have one before the assistant's, got it alone",
    ),
    "no-message": (b'{"messages": []}', 'data.jsonl:1: a row must have "prompt" and "completion"'),
    "nothing": (b"\n \n", "data.jsonl must have an example with tokens to learn, got none"),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_a_wrong_row_is_named(name, tmp_path):
    rows, message = WRONG_ROWS[name]
    with pytest.raises(SystemExit, match=re.escape(message)) as raised:
        read(folder_of(tmp_path, template=LOOP), rows)
    assert len(str(raised.value)) < 500 and "\n" not in str(raised.value)


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {}}', '{"added_tokens": [], "model": {"type": "Other"}}'])
def test_a_damaged_tokenizer_is_named(content, tmp_path):
    (folder_of(tmp_path) / "tokenizer.json").write_text(content)
    with pytest.raises(SystemExit, match="transformers cannot read the tokenizer of") as raised:
        folders.load_tokenizer(tmp_path)
    assert "\n" not in str(raised.value)
    with pytest.raises(SystemExit, match=r"must be a folder with tokenizer\.json, got none"):
        folders.load_tokenizer(tmp_path / "tokenizer.json")
