"""Messages that say that they are not learned: OpenAI's "weight" and Axolotl's "train"."""

import itertools
import json
import re

import pytest

import jgg.data
from tests.support.texts import ASSISTANT, LOOP, USER, folder_of, jsonl, spans
from tests.texts.test_chat import FORGETS, marked

LAST = {"role": "assistant", "content": "three"}
TURNS = USER, ASSISTANT, USER, LAST
KINDS = {"compared": LOOP, "marked": marked(LOOP), "forgets": FORGETS}
OFF = {
    "weight": {"weight": 0},
    "float": {"weight": 0.0},
    "train": {"train": False},
    "both": {"weight": 1, "train": False},
}
ON = {"weight": {"weight": 1}, "train": {"train": True}, "null": {"weight": None, "train": None}}


def talk(*flags):
    """The messages, each with what its flags add."""
    return {"messages": [message | own for message, own in zip(TURNS, flags, strict=True)]}


def answers(folder, *rows):
    """What is learned of each text, without thoughts."""
    return [[own.split("\n\n")[-1] for own in found[1::2]] for found in spans(folder, *rows)]


@pytest.mark.parametrize("off", OFF)
@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_that_says_so_is_not_learned(kind, off, tmp_path):
    folder, one, other = folder_of(tmp_path, template=KINDS[kind]), "two<|im_end|>\n", "three<|im_end|>\n"
    for on in ON.values():
        assert answers(folder, talk({}, OFF[off], {}, on)) == [[other]]
        assert answers(folder, talk({}, on, {}, OFF[off])) == [[one]]
        texts = answers(folder, talk(on, on, OFF[off], on))
        assert list(itertools.chain.from_iterable(texts)) == [one, other]
    assert answers(folder, talk({}, OFF[off], {}, OFF[off])) == []
    # the turn is there, as what comes before the other
    assert spans(folder, talk({}, OFF[off], {}, {}))[0][0].count("two") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_template_does_not_get_the_flags(kind, tmp_path):
    template = "{{ messages[0] | tojson | length }}" + KINDS[kind]
    folder = folder_of(tmp_path, template=template)
    tokenizer = jgg.data.load_tokenizer(folder)
    plain, flagged = (
        jgg.data.encode_conversation(tokenizer, row["messages"])
        for row in (talk(*[{}] * 4), talk(*[{"train": True}] * 4))
    )
    assert plain == flagged


def test_a_block_for_each_call_and_one_for_words(tmp_path):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% for c in m.tool_calls or [] %}"
        "{% generation %}{{ c }};{% endgeneration %}{% endfor %}"
        "{% if m.content %}{% generation %}{{ m.content }}</s>{% endgeneration %}{% endif %}"
        "{% else %}{{ m.content }}:{% endif %}{% endfor %}"
    )
    folder = folder_of(tmp_path, template=template)
    calls = {"role": "assistant", "tool_calls": ["one", "two"], "content": "three"}
    messages = [USER, calls | {"train": False}, USER, calls, USER, calls | {"weight": 0}, USER, LAST]
    ((_, first, _, last),) = spans(folder, {"messages": messages})
    assert (first, last) == ("one;two;three</s>", "three</s>")


def test_a_template_that_marks_the_last_turn_alone(tmp_path):
    whole = "{{ m.content }}<|im_end|>\n"
    block = "{% if loop.last %}{% generation %}" + whole + "{% endgeneration %}{% else %}" + whole + "{% endif %}"
    folder = folder_of(tmp_path, template=LOOP.replace(whole, block))
    assert answers(folder, talk({}, {"weight": 0}, {}, {})) == [["three<|im_end|>\n"]]
    assert answers(folder, talk({}, {}, {}, {"weight": 0})) == [["two<|im_end|>\n"]]


WRONG = [
    ({"weight": 0.5}, '"weight" of message 2 must be 0 or 1, got 0.5'),
    ({"weight": 2}, '"weight" of message 2 must be 0 or 1, got 2'),
    ({"weight": -1}, '"weight" of message 2 must be 0 or 1, got -1'),
    ({"weight": "0"}, "\"weight\" of message 2 must be 0 or 1, got '0'"),
    ({"weight": False}, '"weight" of message 2 must be 0 or 1, got False'),
    ({"weight": [0]}, '"weight" of message 2 must be 0 or 1, got [0]'),
    ({"weight": float("nan")}, '"weight" of message 2 must be 0 or 1, got nan'),
    ({"train": 0}, '"train" of message 2 must be true or false, got 0'),
    ({"train": "false"}, "\"train\" of message 2 must be true or false, got 'false'"),
]


@pytest.mark.parametrize(("flag", "message"), WRONG)
def test_a_wrong_flag_is_named_with_its_row(flag, message, tmp_path):
    folder = folder_of(tmp_path, template=LOOP)
    for flags in ([{}, flag, {}, {}], [{}, flag, {}, {"weight": 0}]):
        data = jsonl(folder, talk(*[{}] * 4), talk(*flags))
        with pytest.raises(ValueError, match=re.escape(f"data.jsonl:2: {message}")):
            jgg.data.batches(data, jgg.data.load_tokenizer(folder), length=64, batch_size=1)


def test_tables_have_the_flags_of_lines(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    folder = folder_of(tmp_path, template=LOOP)
    rows = [
        talk({}, {"weight": 0}, {}, {}),
        talk({}, {}, {}, {"train": False}),
        talk({}, {"weight": 1}, {}, {"train": True}),
        talk({}, {"weight": 0}, {}, {"train": False}),
    ]
    lines, tokenizer = jsonl(folder, *rows), jgg.data.load_tokenizer(folder)
    found = [jgg.data.batches(lines, tokenizer, length=64, batch_size=1)]
    for kind in (pa.int64(), pa.float64()):
        message = pa.struct({"role": pa.string(), "content": pa.string(), "weight": kind, "train": pa.bool_()})
        table = pa.Table.from_pylist(rows, pa.schema({"messages": pa.list_(message)}))
        pq.write_table(table, tmp_path / "table")
        found.append(jgg.data.batches(tmp_path / "table", tokenizer, length=64, batch_size=1))
    assert len({each.digest for each in found}) == 1
    assert (found[0].num_examples, found[0].num_left_out) == (3, 1)
    without = jsonl(folder, *json.loads(re.sub(r', "(weight|train)": \w+', "", json.dumps(rows))), name="without")
    assert jgg.data.batches(without, tokenizer, length=64, batch_size=1).num_learned > found[0].num_learned
