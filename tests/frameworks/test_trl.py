"""Messages are read by all chat templates of TRL as transformers does it, with six tokenizers."""

import importlib.util
from pathlib import Path

import pytest

import jgg.data
from tests.support import tokenizers
from tests.support.frameworks import framework

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
