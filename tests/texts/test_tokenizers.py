"""Texts are tokenized and decoded as the folder's tokenizer does it, and end where the folder says."""

import json

import pytest
from tokenizers import AddedToken

import jgg.data
from jgg.data.tokenizers import bytes_of_tokens
from tests.support import tokenizers
from tests.support.texts import LOOP, WHOLE, examples, folder_of


def halves(folder, *rows):
    """For each example, the pieces before the learned ones, and the learned pieces."""
    found = []
    for pieces, learned in examples(folder, *rows):
        first = learned.index(True)
        assert all(learned[first:])
        found.append((pieces[:first], pieces[first:]))
    return found


# the rows; for each kind of tokenizer their pieces, the learned ones after the bar
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
    got = halves(folder_of(tmp_path, make), *ROWS)
    assert got == [([piece for piece in before if piece], [*learned, "</s>"]) for before, learned in wanted]


@pytest.mark.parametrize("make", PIECES, ids=lambda make: make.__name__)
def test_a_text_and_its_continuation_are_decoded_as_one(make, tmp_path):
    tokenizer = jgg.data.load_tokenizer(folder_of(tmp_path, make))
    prompt, ends = jgg.data.encode(tokenizer, "one")
    whole, _ = jgg.data.encode(tokenizer, "one two")
    assert jgg.data.continuation(tokenizer, prompt, [*whole[len(prompt) :], 2]) == " two"
    assert ends[-1] == 3 and "</s>" not in tokenizer.convert_ids_to_tokens(prompt)
    rendered, _ = jgg.data.encode(tokenizer, "<s>one")
    assert rendered == jgg.data.encode(tokenizer, "<s>one", is_rendered=True)[0]
    assert tokenizer.convert_ids_to_tokens(rendered).count("<s>") == 1


TEXTS = [
    "",
    " ",
    "one two",
    " one",
    "one  two ",
    "\u4e2d\u6587 one",
    "one\U0001f600\u00e9two",
    "e\u0301\n\none: \ufffd",
]


@pytest.mark.parametrize("make", PIECES, ids=lambda make: make.__name__)
def test_the_bytes_of_tokens_are_those_of_the_text(make, tmp_path):
    """Whatever its tokens are: bytes of a character, a space before it, or unknown."""
    tokenizer = jgg.data.load_tokenizer(folder_of(tmp_path, make))
    for text in TEXTS:
        ids, ends = jgg.data.encode(tokenizer, text)
        found = bytes_of_tokens(tokenizer, text, [*ids, 2], ends)
        assert len(found) == len(ids) + 1 and found[-1] == 0 and min(found) >= 0
        assert sum(found) == (len(text.encode()) if ids else 0)
        special, ends = jgg.data.encode(tokenizer, f"{text}</s>one")
        assert sum(bytes_of_tokens(tokenizer, f"{text}</s>one", special, ends)) == len(text.encode()) + 3


def test_the_bytes_of_special_tokens_that_take_white_space_beside_them_are_left_out(tmp_path):
    """As Phi's <|end|> takes the line break behind it."""

    def make():
        tokenizer, kinds = tokenizers.llama(), {"<|end|>": {"rstrip": True}, "<|mask|>": {"lstrip": True}}
        tokenizer.add_special_tokens([AddedToken(text, **options) for text, options in kinds.items()])
        return tokenizer

    tokenizer = jgg.data.load_tokenizer(folder_of(tmp_path, make))
    for text in ("two<|end|>\n one", "two \n<|mask|> one", "two<|end|> ", "<|end|>  <|end|>"):
        ids, ends = jgg.data.encode(tokenizer, text)
        found = bytes_of_tokens(tokenizer, text, ids, ends)
        plain = text.replace("<|end|>", "").replace("<|mask|>", "")
        assert found.min() >= 0 and found.sum() == len(plain.encode())


def test_tokens_share_the_bytes_of_a_character(tmp_path):
    tokenizer = jgg.data.load_tokenizer(folder_of(tmp_path, tokenizers.llama))
    text = "one\u4e2d one\u00e9"
    ids, ends = jgg.data.encode(tokenizer, text)
    wanted = [("<s>", 0), ("\u2581one", 3), *[(f"<0x{byte:02X}>", 1) for byte in "\u4e2d".encode()]]
    wanted += [("\u2581one", 4), *[(f"<0x{byte:02X}>", 1) for byte in "\u00e9".encode()]]
    found = bytes_of_tokens(tokenizer, text, ids, ends).tolist()
    assert list(zip(tokenizer.convert_ids_to_tokens(ids), found, strict=True)) == wanted


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
    wanted = halves(folder_of(tmp_path), row)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | kept))
    assert halves(tmp_path, row) == wanted
    assert len(jgg.data.encode(jgg.data.load_tokenizer(tmp_path), "one one one one")[0]) == 4


def test_the_token_that_ends_what_was_learned_ends_what_is_generated(tmp_path):
    folder = folder_of(tmp_path, template=LOOP)
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 3]}')
    ((_, learned),) = halves(folder, {"prompt": "one", "completion": "two"})
    assert learned[-1] == tokenizers.SPECIAL[4] and jgg.data.stop_tokens(folder) == [4, 3]
    tokenizer = jgg.data.load_tokenizer(folder)
    # white space may follow
    assert jgg.data.end_of(tokenizer, jgg.data.encode(tokenizer, "".join(WHOLE))[0]) == 4
    assert jgg.data.end_of(tokenizer, jgg.data.encode(tokenizer, "<s>one two\n")[0]) is None
    (folder / "adapter").mkdir()
    (folder / "adapter/generation_config.json").write_text('{"eos_token_id": [3, 1]}')
    assert jgg.data.stop_tokens(folder, folder / "adapter") == [4, 3, 1]
    for wrong in (-1, 2.5, [2, "</s>"], True):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(ValueError, match=r"eos_token_id of .*generation_config\.json must be a token"):
            jgg.data.stop_tokens(folder)


def test_the_language_model_beside_towers_says_what_ends_a_text(tmp_path):
    for config, ends in (
        ({"text_config": {"eos_token_id": [2, 4]}}, [2, 4]),
        ({"text_config": {"eos_token_id": 2}, "eos_token_id": [4, 3]}, [4, 3]),
        ({"text_config": {}}, []),
        ({"text_config": None}, []),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert jgg.data.stop_tokens(tmp_path) == ends
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": "t"}}')
    with pytest.raises(ValueError, match=r"eos_token_id of .*config\.json must be a token"):
        jgg.data.stop_tokens(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {}}', '{"added_tokens": [], "model": {"type": "Other"}}'])
def test_a_damaged_tokenizer_is_named(content, tmp_path):
    (folder_of(tmp_path) / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="transformers cannot read the tokenizer of") as raised:
        jgg.data.load_tokenizer(tmp_path)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=r"must be a folder with tokenizer\.json, got none"):
        jgg.data.load_tokenizer(tmp_path / "tokenizer.json")
