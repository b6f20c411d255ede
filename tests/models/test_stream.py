"""Tokens and texts as they come: those of `generate`, by its very programs, and texts up to a stop string."""

import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest

import jgg.models
from jgg.models import decoding
from jgg.models.text_stream import cut
from tests.support.models import FAMILIES, FEW_FAMILIES, loaded, reference

LENGTHS = np.array([1, 5, 9])  # of the prompts in the reference data
ROWS = {"temperature": [1.5, 0.0, 0.8], "top_p": [0.9, 0.5, 1.0], "repetition_penalty": [1.0, 1.7, 0.9]}
generate, stream = jgg.models.generate, jgg.models.stream


def programs():
    """How many programs have been compiled."""
    return decoding.start.num_compiled(), decoding.advance.num_compiled()


def assert_equal(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_a_stream_gives_what_generate_does_by_its_programs(family):
    model, prompts = loaded(family), reference(family)["prompts"]
    options = {"lengths": LENGTHS, "seeds": [5, 6, 7], "num_samples": 2, "details": True, "prefill_chunk": 4} | ROWS
    wanted = generate(model, prompts, 11, **options, stop_tokens=[64, [1, 2]])
    number = programs()
    got = stream(model, prompts, 11, **options, stop_tokens=[64, [3, 4]], chunk=4)
    pieces = [next(got)]
    first = got.result()
    pieces += got
    assert_equal(first, generate(model, prompts, 1, **options, stop_tokens=[64, [3, 4]]))
    assert [piece.shape[1] for piece in pieces] == [1, 4, 4, 2]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), wanted.tokens)
    np.testing.assert_array_equal(got.tokens, wanted.tokens)
    assert_equal(got.result(), wanted)
    assert programs() == number
    assert list(got) == []


@functools.cache
def model():
    return loaded("qwen3_moe")


def likeliest(number, **options):
    """The likeliest tokens of the prompts as they come, which are those of `reference`."""
    return stream(model(), reference("qwen3_moe")["prompts"], number, lengths=LENGTHS, stop_tokens=[52], **options)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_has_the_bits_of_generate_on_a_gpu(family):
    for options in ({}, {"batch_invariant": True}):
        model, prompts = loaded(family, dtype=jnp.bfloat16, **options), reference(family)["prompts"]
        options = {"lengths": LENGTHS, "seeds": [5, 6, 7], "num_samples": 2, "details": True} | ROWS
        got = stream(model, prompts, 20, **options, chunk=3)
        assert [piece.shape[1] for piece in got] == [1, 3, 3, 3, 3, 3, 3, 1]
        assert_equal(got.result(), generate(model, prompts, 20, **options))


def test_a_stream_ends_where_its_rows_do():
    got, known = likeliest(12, chunk=1, details=True), reference("qwen3_moe")["greedy"]
    assert got.tokens.shape == (3, 0) and not got.is_done.any()
    for count, new in enumerate(got, 1):
        assert new.shape == (3, 1)
        np.testing.assert_array_equal(got.is_done, [count > 2, count > 3, False])
        if count in (2, 5):
            got.end(np.arange(3) == {2: 0, 5: 2}[count])
            assert got.is_done[0]
    np.testing.assert_array_equal(got.lengths, [2, 4, 5])
    wanted = known[:, :5].copy()
    wanted[0, 2:], wanted[1, 4:] = wanted[0, 1], 52
    np.testing.assert_array_equal(got.tokens, wanted)
    result = got.result()
    np.testing.assert_array_equal(result.lengths, got.lengths)
    np.testing.assert_array_equal(result.log_probabilities == 0, np.arange(5) >= got.lengths[:, None])


def test_no_prompts_have_no_stream():
    assert list(stream(model(), np.zeros((0, 3), int), 6)) == []


PIECES = {25: b"A\xc3", 23: b"\xa9b", 31: b"\xe2\x82", 18: b"\xac.", 32: b"one ", 52: b"</s>", 12: b"t"}


def decode(tokens):
    """The text of tokens; some tokens end inside a character."""
    return b"".join(PIECES.get(token, b"%d " % token) for token in tokens).decode(errors="replace")


@pytest.mark.parametrize("chunk", [1, 2, 20])
def test_texts_come_in_whole_characters_up_to_what_stops_them(chunk):
    # the tokens of the rows: 25 23 31 31 31 18 ..., 32 32 32 52, and 32 32 32 ...
    stop = ["b\ufffd\ufffd\u20ac", "ne one o", "one one one one"]
    got = likeliest(11, chunk=chunk)
    pieces = list(jgg.models.stream_text(got, [decode] * 3, stop=stop, stop_tokens=[52]))
    assert ["".join(row) for row in zip(*pieces, strict=True)] == ["A\u00e9", "o", "o"]
    np.testing.assert_array_equal(got.is_done, [True, True, True])
    if chunk == 1:
        assert [row for row, *_ in pieces[:2]] == ["A", "\u00e9"]
    got = likeliest(5, chunk=chunk)
    pieces = list(jgg.models.stream_text(got, [decode] * 3, stop=["none"], stop_tokens=[52]))
    texts = ["A\u00e9b\ufffd\ufffd\ufffd", "one one one ", "one " * 5]
    assert ["".join(row) for row in zip(*pieces, strict=True)] == texts
    np.testing.assert_array_equal(got.is_done, [False, True, False])


def test_what_is_cut_does_not_depend_on_how_texts_come():
    rng = np.random.default_rng(0)
    for _ in range(500):
        text = "".join(rng.choice(list("ab"), 12))
        stop = ["".join(rng.choice(list("ab"), size)) for size in rng.integers(2, 6, 2)]
        whole = cut(text, stop)
        for end in range(1, len(text) + 1):
            known = cut(text[:end], stop, is_last=end == len(text))
            assert whole.text.startswith(known.text), (text, stop)
            if known.is_stopped:
                break
        assert known == whole, (text, stop)
        assert whole.is_stopped == any(each in text for each in stop)


def test_logits_that_are_nan_end_a_text():
    damaged = loaded("qwen3_moe")
    damaged.w_embedding[...] = damaged.w_embedding[...].at[23].set(np.nan)
    texts = jgg.models.stream_text(stream(damaged, [[16]], 6), [decode])
    with pytest.raises(ValueError, match="the model's logits are NaN after 2 new tokens"):
        list(texts)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="chunk must be a positive int, got 0"):
        likeliest(5, chunk=0)
    with pytest.raises(ValueError, match="max_new_tokens must be a positive int, got 0"):
        likeliest(0)
    got = likeliest(5)
    with pytest.raises(ValueError, match="result must be called after the first tokens have come"):
        got.result()
    for rows in ([True], [0, 0, 1]):
        with pytest.raises(ValueError, match=re.escape("rows must be bool [R], [3], got ")):
            got.end(rows)
    with pytest.raises(ValueError, match="decoders must be of 3 rows, got 1"):
        jgg.models.stream_text(got, [decode])
    with pytest.raises(ValueError, match=re.escape("stop must have strings that are not empty, got ['']")):
        jgg.models.stream_text(got, [decode] * 3, stop=[""])
