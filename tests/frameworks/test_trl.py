"""Messages are read by all chat templates of TRL as transformers does it, and turns end as the templates end them."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

import jgg.data
from tests.support import tokenizers
from tests.support.frameworks import framework
from tests.support.texts import jsonl

pytestmark = framework("trl")

KINDS = (
    tokenizers.byte_level,
    tokenizers.byte_level_with_bos,
    tokenizers.llama,
    tokenizers.unigram,
    tokenizers.words,
    tokenizers.word_pieces,
)
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}, "required": []}},
}
TURN = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two three"}]
PARTS = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in TURN]
ROWS = [
    {"messages": TURN},
    {"messages": [{"role": "system", "content": "three"}, *TURN, *TURN]},
    {"messages": PARTS},
    {"messages": TURN, "tools": [TOOL]},
    {"messages": [TURN[0], TURN[1] | {"content": "<think>\none\n</think>\n\ntwo three"}]},
]


def templates():
    """The files; none if TRL is not installed, which importing it would need PyTorch for."""
    found = importlib.util.find_spec("trl")
    return sorted(Path(found.origin).parent.glob("chat_templates/*.jinja")) if found else []


@pytest.mark.parametrize("template", templates(), ids=lambda path: path.stem)
def test_messages_by_the_templates_of_trl(template, tmp_path):
    num_read = 0
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (tmp_path / "chat_template.jinja").write_text(template.read_text())
    for make in KINDS:
        make().save(str(tmp_path / "tokenizer.json"))
        tokenizer = jgg.data.load_tokenizer(tmp_path)
        for row in ROWS:
            try:
                wanted = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=False)
            except Exception:  # the template does not take such messages
                with pytest.raises(ValueError, match="the chat template fails"):
                    jgg.data.examples_of(row, tokenizer)
                continue
            examples = jgg.data.examples_of(row, tokenizer)
            assert examples[-1].tokens.tolist() == wanted
            for ids, learned, _ in examples:
                answer, rest = tokenizer.decode(ids[learned]), tokenizer.decode(ids[~learned])
                if "two three" in tokenizer.decode(ids):  # some leave out a string, others a list of parts
                    assert "two three" in answer
                    # what a turn becomes when others follow it may be before the last one
                    assert len(examples) > 1 or "two three" not in rest
                    num_read += 1
    assert num_read >= len(KINDS)


# what a template writes as a token: special ones, and those that may be in a text
SPECIAL = re.compile(
    r"<\|[^|<>\s]+\|?>|<[a-z_]+\|>|<\uff5c[^\uff5c<>]+\uff5c>|<(?:start|end)_of_[a-z]+>|\[/?[A-Z_a-z]+\]"
)
PLAIN = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")


def called(number):
    """An assistant's message with calls."""
    function = {"name": "f", "arguments": {"x": 1}}
    calls = [{"type": "function", "id": f"abcdefgh{n}", "function": function} for n in range(number)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


RESULT = {"role": "tool", "content": "res", "name": "f", "tool_call_id": "abcdefgh0"}
THOUGHT = TURN[1] | {"reasoning_content": "hm"}
TALKS = [
    [*TURN, *TURN],
    [TURN[0], called(1)],
    [TURN[0], called(2)],
    [TURN[0], called(1), RESULT, TURN[1], *TURN],
    [TURN[0], THOUGHT, TURN[0], THOUGHT],
    [TURN[0], called(1) | {"reasoning_content": "hm"}, RESULT, THOUGHT],
    PARTS,
    [TURN[0], TURN[1] | {"content": "<table>three"}],
]


@pytest.mark.parametrize("template", templates(), ids=lambda path: path.stem)
def test_turns_end_where_the_templates_of_trl_end_them(template, tmp_path):
    text, num_read = template.read_text(), 0
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (tmp_path / "chat_template.jinja").write_text(text)
    special, plain = (list(dict.fromkeys(kind.findall(text))) for kind in (SPECIAL, PLAIN))
    tokenizers.byte_level(special, plain).save(str(tmp_path / "tokenizer.json"))
    tokenizer = jgg.data.load_tokenizer(tmp_path)
    for messages in TALKS:
        try:
            found = jgg.data.batches(jsonl(tmp_path, {"messages": messages}), tokenizer, length=9999, batch_size=1)
        except ValueError as error:
            assert re.search("template fails|rewrites the messages", str(error))
            continue
        ends, num_read = set(found.end_tokens), num_read + 1
        assert not ends & set(tokenizer.convert_tokens_to_ids(plain))
        for ids, learned, _ in jgg.data.examples_of({"messages": messages}, tokenizer, tokenizer.eos_token_id):
            runs = np.split(ids, np.flatnonzero(np.diff(learned)) + 1)[int(not learned[0]) :: 2]
            said = [[token for token in run.tolist() if tokenizer.decode([token]).strip()] for run in runs]
            assert jgg.data.end_of(tokenizer, ids) in ends
            assert said[-1][-1] in ends or "{%- generation" in text  # blocks may mark less
            assert not any(ends & set(own[:-1]) for own in said)  # generation stops nowhere before
            if messages == TALKS[-1] and "three" in tokenizer.decode(ids):
                assert "<table>three" in tokenizer.decode(runs[-1])
    assert num_read
