"""Text that comes in chunks of any size equals the text of all tokens at once, for all kinds of tokenizers."""

import functools

import numpy as np
import pytest
from tokenizers import decoders

import jgg.data
import jgg.models
from tests.support import tokenizers
from tests.support.texts import folder_of


class Given:
    """A stream of tokens that are known, some at a time, as far as `stream_text` looks at one."""

    def __init__(self, tokens, chunk, stops=()):
        is_stop = np.isin(tokens, stops)
        self._all, self._chunk, self.max_new_tokens = np.array([tokens]), chunk, len(tokens)
        self._length = int(np.argmax(is_stop)) + 1 if is_stop.any() else len(tokens) + 1
        self.tokens, self.is_done = self._all[:, :0], np.array([False])

    @property
    def lengths(self):
        return np.array([min(self._length, self.tokens.shape[1])])

    def __iter__(self):
        for end in range(self._chunk, len(self._all[0]) + self._chunk, self._chunk):
            self.tokens = self._all[:, :end]
            self.is_done = self.is_done | (self.tokens.shape[1] >= self._length)
            yield
            if self.is_done.all():
                return

    def end(self, rows):
        self.is_done = self.is_done | rows


def gemma():
    """Bytes for what is unknown, and the space at the beginning stays."""
    tokenizer = tokenizers.llama()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def cleaned():
    """BERT's kind, whose decoder removes the spaces before punctuation."""
    tokenizer = tokenizers.word_pieces()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return tokenizer


KINDS = (
    *(tokenizers.byte_level, tokenizers.llama, gemma, tokenizers.unigram),
    *(tokenizers.words, tokenizers.word_pieces, cleaned),
)
# bytes of characters, line feeds and spaces, in either form
HOT = {"<0xC3>", "<0xA9>", "<0xE2>", "<0x82>", "<0xAC>", "<0x0A>", *"Ã©âĤ¬ĊĠ", "\u2581"}


def streamed(decode, tokens, chunk, stop=(), stops=()):
    """The pieces of the text, and whether it was stopped."""
    stream = Given(tokens, chunk, stops)
    return [
        piece for (piece,) in jgg.models.stream_text(stream, [decode], stop=stop, stop_tokens=stops)
    ], stream.is_done[0]


@pytest.mark.parametrize("clean", [False, True], ids=["", "clean_up_tokenization_spaces"])
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_the_text_does_not_depend_on_chunks(make, clean, tmp_path):
    tokenizer = jgg.data.load_tokenizer(folder_of(tmp_path, make, clean_up_tokenization_spaces=clean))
    pieces = [tokenizer.convert_ids_to_tokens(token) for token in range(len(tokenizer))]
    hot, rng = [n for n, piece in enumerate(pieces) if piece in HOT] or [0], np.random.default_rng(0)
    for prompt in ("", "one", "one\n", "one \N{LATIN SMALL LETTER E WITH ACUTE}"):
        ids, _ = jgg.data.encode(tokenizer, prompt)
        decode = functools.partial(jgg.data.continuation, tokenizer, ids)
        for _ in range(5):
            tokens = np.where(rng.random(9) < 0.7, rng.choice(hot, 9), rng.integers(0, len(tokenizer), 9)).tolist()
            for options in ({}, {"stop": ["\n", "\ufffdo"]}, {"stops": [tokens[6]]}):
                whole, is_stopped = streamed(decode, tokens, 9, **options)
                if not options:
                    assert whole == [decode(tokens)]
                for chunk in (1, 4):
                    got, is_done = streamed(decode, tokens, chunk, **options)
                    assert ("".join(got), is_done) == ("".join(whole), is_stopped), [pieces[n] for n in tokens]


LLAMA = {
    "a character": (["<0xE2>", "<0x82>", "<0xAC>", "one"], ["", "", "", "\N{EURO SIGN}one"]),
    "a byte too few behind a character": (["<0xC3>", "<0xA9>", "<0xE2>", "one"], ["", "", "", "\ufffd\ufffd\ufffdone"]),
    "a byte too few behind a line feed": (["one", "<0x0A>", "<0xE2>", "one"], ["one", "", "", "\ufffd\ufffdone"]),
    "the last of all": (["<0xC3>", "<0xA9>", "<0x0A>", "<0xE2>"], ["", "", "", "\ufffd\ufffd\ufffd\ufffd"]),
    "a special token between": (
        ["<0xC3>", "<s>", "<0xA9>", "two"],
        ["", "", "", "\N{LATIN SMALL LETTER E WITH ACUTE}two"],
    ),
}


@pytest.mark.parametrize("name", LLAMA)
def test_bytes_come_with_the_token_that_ends_them(name, tmp_path):
    tokenizer = jgg.data.load_tokenizer(folder_of(tmp_path, tokenizers.llama))
    new, wanted = LLAMA[name]
    prompt, tokens = jgg.data.encode(tokenizer, "two")[0], tokenizer.convert_tokens_to_ids(new)
    decode = functools.partial(jgg.data.continuation, tokenizer, prompt)
    assert streamed(decode, tokens, 1)[0] == wanted
    assert "".join(wanted) == tokenizer.decode(prompt + tokens, skip_special_tokens=True).removeprefix("two")


def test_a_stop_string_of_bytes_counts_once_they_are_certain(tmp_path):
    tokenizer = jgg.data.load_tokenizer(folder_of(tmp_path, tokenizers.llama))
    decode, ids = functools.partial(jgg.data.continuation, tokenizer, []), tokenizer.convert_tokens_to_ids
    for new, text in ((["one", "<0x0A>", "two"], "one"), (["one", "<0x0A>", "<0xE2>", "two"], "one\ufffd\ufffdtwo")):
        for chunk in (1, 2, 9):
            assert "".join(streamed(decode, ids(new), chunk, stop=["\n"])[0]) == text
