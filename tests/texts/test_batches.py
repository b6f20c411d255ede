"""Batches: what they have of examples, how these are packed and mixed, and that they depend on their number alone."""

import functools
import hashlib
import itertools
import json
import sys
import tempfile

import numpy as np
import pytest

import jgg.data
from tests.support import processes, tokenizers
from tests.support.texts import LOOP, folder_of, jsonl

WORDS = "one", "two", "three"  # a token each, and one for the space before


@pytest.fixture
def tokenizer(tmp_path):
    return jgg.data.load_tokenizer(folder_of(tmp_path))


def pairs(count, seed=0, longest=9):
    """Rows whose prompts and completions have from 1 to `longest` words."""
    rng = np.random.default_rng(seed)

    def text():
        return " ".join(rng.choice(WORDS, rng.integers(1, longest + 1)))

    return [{"prompt": text(), "completion": f" {text()}"} for _ in range(count)]


def parts(batch):
    """The examples of a batch: (tokens, weights of their targets), the tokens with the last target."""
    rows = [batch[name].reshape(-1, batch[name].shape[-1]) for name in ("tokens", "targets", "segments", "weights")]
    for tokens, targets, segments, weights in zip(*rows, strict=True):
        for segment in range(1, segments.max(initial=0) + 1):
            own = segments == segment
            assert np.array_equal(tokens[own][1:], targets[own][:-1])
            yield (int(tokens[own][0]), *targets[own].tolist()), tuple(weights[own].tolist())


def expected(tokenizer, rows, length):
    """The same for rows, each with the end token behind."""
    for row in rows:
        (example,) = jgg.data.examples_of(row, tokenizer, tokenizer.eos_token_id)
        tokens, learned = example.tokens[: length + 1].tolist(), example.learned[1 : length + 1]
        if learned.any():
            yield tuple(tokens), tuple((learned * np.float32(example.weight)).tolist())


@pytest.mark.parametrize("packing", [True, False])
def test_one_pass_has_every_example_once(packing, tokenizer, tmp_path):
    rows = pairs(60)
    rows[7]["weight"], rows[9]["weight"] = 0.25, 0
    found = jgg.data.batches(
        jsonl(tmp_path, *rows),
        tokenizer,
        length=17,
        batch_size=3,
        accumulate=2,
        packing=packing,
        seed=None,
        normalize=False,
    )
    own = list(found)
    assert len(own) == len(found) == -(-found.num_sequences // 6)
    for batch in own:
        assert {name: (array.dtype, array.shape) for name, array in batch.items()} == {
            "tokens": (np.int32, (2, 3, 17)),
            "targets": (np.int32, (2, 3, 17)),
            "segments": (np.int32, (2, 3, 17)),
            "weights": (np.float32, (2, 3, 17)),
        }
    got = sorted(itertools.chain.from_iterable(map(parts, own)))
    wanted = sorted(each for each in expected(tokenizer, rows, 17) if any(each[1]))
    assert got == wanted and len(wanted) == found.num_examples
    assert sum(np.count_nonzero(batch["weights"]) for batch in own) == found.num_learned
    lengths = np.concatenate(list(map(jgg.data.lengths_of, own)))
    assert sorted(lengths) == sorted(len(tokens) - 1 for tokens, _ in wanted)
    assert found.fill == pytest.approx(lengths.sum() / (found.num_sequences * 17))
    assert found.fill > 0.9 if packing else found.num_sequences == found.num_examples
    assert found.num_cut == sum(
        len(jgg.data.examples_of(row, tokenizer, 2)[0].tokens) > 18 and row.get("weight") != 0 for row in rows
    )
    assert found.num_examples + found.num_left_out == len(rows)
    assert found.end_tokens == [2]
    assert found.largest_token == max(max(tokens) for tokens, _ in wanted)
    with pytest.raises(IndexError, match="index must be at least 0"):
        found[len(own)]


def test_the_weights_of_a_step_make_its_loss_the_mean_over_learned_tokens(tokenizer, tmp_path):
    rows = pairs(9)
    rows[0]["weight"], rows[4]["weight"] = 3.0, 0.5
    options = {"length": 24, "batch_size": 2, "accumulate": 3}
    path = jsonl(tmp_path, *rows)
    raw = jgg.data.batches(path, tokenizer, **options, normalize=False)
    for n, batch in zip(range(5), jgg.data.batches(path, tokenizer, **options), strict=False):
        own = raw[n]["weights"].astype(np.float64)
        assert {0.5, 1, 3} >= set(np.unique(own)) - {0}
        np.testing.assert_allclose(batch["weights"], own * 3 / own.sum(), rtol=1e-6)
        assert np.array_equal(batch["tokens"], raw[n]["tokens"])


def test_each_epoch_has_all_sequences_in_an_order_of_its_own(tokenizer, tmp_path):
    found = jgg.data.batches(jsonl(tmp_path, *pairs(40)), tokenizer, length=20, batch_size=1, seed=3, normalize=False)
    count = found.num_sequences
    assert count == len(found) > 20
    names = [found[n]["tokens"].tobytes() + found[n]["segments"].tobytes() for n in range(3 * count)]
    epochs = [names[n * count : (n + 1) * count] for n in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1
    assert all(np.array_equal(found.of_step(n + 1)[name], found[n][name]) for n in (0, 5) for name in found[n])
    with pytest.raises(IndexError):
        found.of_step(0)


PROGRAM = """
import hashlib, json, sys
import jgg.data
arguments, numbers = json.loads(sys.argv[1])
tokenizer = jgg.data.load_tokenizer(arguments.pop("folder"))
found = jgg.data.batches(arguments.pop("data"), tokenizer, **arguments)
bits = [hashlib.sha256(b"".join(array.tobytes() for array in found[n].values())).hexdigest() for n in numbers]
print(json.dumps([found.digest, bits]))
"""


def run(**arguments):
    numbers = arguments.pop("numbers")
    printed = processes.run("-c", PROGRAM, json.dumps([arguments, numbers]), JAX_PLATFORMS="cpu")
    return json.loads(printed.splitlines()[-1])


def test_a_run_that_goes_on_gets_the_batches_that_it_would_have_got(tokenizer, tmp_path):
    """In another process, which asks for none of the batches before."""
    one, two = jsonl(tmp_path, *pairs(30)), jsonl(tmp_path, *pairs(9, 1), name="two.jsonl")
    options = {"length": 18, "batch_size": 2, "seed": 5, "data": {str(one): 2.0, str(two): 1.0}}
    digest, later = run(folder=str(tmp_path), **options, numbers=[40, 41, 1_000_000])
    found = jgg.data.batches(options.pop("data"), tokenizer, **options)
    assert found.digest == digest
    for n, bits in zip((40, 41, 1_000_000), later, strict=True):
        assert hashlib.sha256(b"".join(array.tobytes() for array in found[n].values())).hexdigest() == bits


def test_the_digest_says_what_is_learned_and_how_much(tokenizer, tmp_path):
    def digest(*rows, **options):
        path = jsonl(tmp_path, *rows)
        return jgg.data.batches(path, tokenizer, **({"length": 16, "batch_size": 1} | options)).digest

    row = {"prompt": "one", "completion": " two"}
    same = digest(row), digest(row, seed=4), digest(row | {"id": 1})
    others = digest({"text": "one two"}), digest(row | {"weight": 2}), digest(row, row), digest(row, end_token=3)
    assert len(set(same)) == 1 and len({*same, *others}) == 5


def test_files_are_mixed_by_the_weights_of_learned_tokens(tokenizer, tmp_path):
    """However long their examples are, and however large the files."""
    long = [{"text": " ".join(["one"] * 12)}] * 50
    short = [{"prompt": " ".join(["two"] * 9), "completion": " two", "weight": 0.5}] * 500
    data = {jsonl(tmp_path, *long, name="long.jsonl"): 3, jsonl(tmp_path, *short, name="short.jsonl"): 1.0}
    found = jgg.data.batches(data, tokenizer, length=25, batch_size=4, normalize=False, end_token=-1)
    totals = {"long": 0.0, "short": 0.0}
    one = tokenizer.convert_tokens_to_ids("one")
    for n in range(200):
        for tokens, weights in parts(found[n]):
            totals["long" if one in tokens else "short"] += sum(weights)
    assert totals["long"] / totals["short"] == pytest.approx(3, rel=0.02)
    # an epoch has as many weights of learned tokens as the data: 50 * 11 and 500 * 0.5
    in_epoch = sum(found[n]["weights"].sum() for n in range(len(found)))
    assert in_epoch == pytest.approx(50 * 11 + 500 * 0.5, rel=0.1)
    with pytest.raises(ValueError, match="seed must be an int where data are mixed"):
        jgg.data.batches(data, tokenizer, length=25, batch_size=4, seed=None)


def test_files_of_a_list_are_read_as_one(tokenizer, tmp_path):
    rows = pairs(21)
    whole = jsonl(tmp_path, *rows)
    files = [jsonl(tmp_path, *rows[:4], name="a"), jsonl(tmp_path, *rows[4:], name="b")]
    both = [jgg.data.batches(data, tokenizer, length=19, batch_size=2) for data in (whole, files)]
    assert both[0].digest == both[1].digest
    assert all(np.array_equal(both[0][n][name], both[1][n][name]) for n in range(9) for name in both[0][n])


def test_threads_tokenize_in_order_whatever_tokenizer_json_keeps_of_padding(tokenizer, tmp_path):
    data = jsonl(tmp_path, *pairs(700))
    wanted = jgg.data.batches(data, tokenizer, length=24, batch_size=1, packing=False, seed=None)
    examples = [jgg.data.examples_of(row, tokenizer, 2)[0] for _, row in jgg.data.rows(data)]
    assert [len(example.tokens) - 1 for example in examples] == [int(jgg.data.lengths_of(own)[0]) for own in wanted]
    path, padding = tmp_path / "tokenizer.json", {"strategy": {"Fixed": 12}, "direction": "Right"}
    padding |= {"pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"padding": padding}))
    found = jgg.data.batches(data, jgg.data.load_tokenizer(tmp_path), length=24, batch_size=1)
    assert found.digest == wanted.digest


def test_a_long_text_is_divided_and_each_of_its_tokens_learned_once(tokenizer, tmp_path):
    words = [WORDS[n % 3] for n in range(50)]
    path = jsonl(tmp_path, {"text": " ".join(words)}, {"prompt": " ".join(words), "completion": " one"})
    options = {"length": 8, "batch_size": 2, "seed": None, "normalize": False}
    cut = list(itertools.chain.from_iterable(map(parts, jgg.data.batches(path, tokenizer, **options))))
    assert len(cut) == 1  # the completion is behind what is kept
    found = jgg.data.batches(path, tokenizer, splits=True, **options)
    assert (found.num_cut, found.num_left_out) == (0, 0)
    own = list(itertools.chain.from_iterable(map(parts, found)))
    (text,), (pair,) = (jgg.data.examples_of(row, tokenizer, 2) for _, row in jgg.data.rows(path))
    whole = text.tokens.tolist()
    wanted = [tuple(whole[start : start + 9]) for start in range(0, 50, 8)]
    # "one" and the end come behind 50 tokens: the last part of the other row has them
    wanted += [tuple(pair.tokens[48:].tolist())]
    assert sorted(tokens for tokens, _ in own) == sorted(wanted)
    assert found.num_learned == 50 + 2 == sum(sum(weights) for _, weights in own)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("make", [tokenizers.byte_level, tokenizers.llama], ids=lambda make: make.__name__)
def test_the_bytes_of_a_text_are_the_same_however_it_is_divided(make, packing, tmp_path):
    """A division inside a character, too."""
    tokenizer = jgg.data.load_tokenizer(folder_of(tmp_path, make))
    rows = (
        {"text": "\u4e2d\u6587 one \U0001f600" * 20},
        {"prompt": "one \u4e2d", "completion": "\u6587" * 9, "weight": 0.5},
    )
    path, counts = jsonl(tmp_path, *rows), []
    for length in (400, 16, 7):
        options = {"length": length, "batch_size": 2, "seed": None, "normalize": False, "packing": packing}
        found = jgg.data.batches(path, tokenizer, splits=True, **options)
        counts.append(sum(found.num_bytes(number).sum() for number in range(len(found))))
        assert found.num_bytes(0).shape == (1, 2)
    begins = make is tokenizers.llama  # with "<s>"; else the first token, a byte, is no target
    assert counts == [len(rows[0]["text"].encode()) - (not begins) + 0.5 * 27] * 3


def test_the_bytes_of_a_conversation_are_what_the_assistant_says(tmp_path):
    answer = "{{ m.content }}<|im_end|>"
    marked = LOOP.replace(answer, "{% generation %}" + answer + "{% endgeneration %}")
    conversation = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two \u4e2d"}]
    path, options = jsonl(tmp_path, {"messages": conversation}), {"length": 64, "batch_size": 1, "seed": None}
    for template, messages in ((LOOP, ["two \u4e2d\n"]), (marked, ["one", "two \u4e2d"])):
        tokenizer = jgg.data.load_tokenizer(folder_of(tmp_path, template=template))
        found = jgg.data.batches(path, tokenizer, **options)
        assert found.num_bytes(0).tolist() == [[sum(len(text.encode()) for text in messages)]]


def test_packing_leaves_little_and_no_example_out():
    rng = np.random.default_rng(0)
    sizes = np.minimum(rng.geometric(1 / 300, 20_000), 2048)
    order, bounds = jgg.data.packing.pack(sizes, 2048)
    assert np.array_equal(np.sort(order), np.arange(20_000)) and bounds[0] == 0 and bounds[-1] == 20_000
    totals = np.add.reduceat(sizes[order], bounds[:-1])
    assert totals.max() <= 2048 and totals.mean() > 0.999 * 2048
    alone, bounds = jgg.data.packing.pack(sizes, 2048, False)
    assert np.array_equal(alone, np.arange(20_000)) and np.array_equal(bounds, np.arange(20_001))


WRONG = [
    ({"length": 0}, "length must be a positive int, got 0"),
    ({"batch_size": 0}, "batch_size must be a positive int, got 0"),
    ({"accumulate": 0}, "accumulate must be a positive int, got 0"),
    ({"seed": -1}, "seed must be an int of at least 0, got -1"),
    ({"seed": 2**32}, "seed must be at least 0 and below 4294967296"),
    ({"data": []}, "data must have a file, got none"),
    ({"data": {}}, "data must have a file, got none"),
    ({"data": {"x": 0}}, "data must have a finite share above 0 for each file, got 0 for x"),
    ({"data": {"x": float("inf")}}, "data must have a finite share above 0"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_what_batches_refuse(wrong, message, tokenizer, tmp_path):
    options = {"data": tmp_path / "none", "length": 8, "batch_size": 1} | wrong
    with pytest.raises(ValueError, match=message):
        jgg.data.batches(options.pop("data"), tokenizer, **options)


def test_grain_is_asked_for_by_name(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ImportError, match="need grain: pip install grain"):
        jgg.data.batches(tmp_path / "not read", tokenizer, length=8, batch_size=1)
    one_pass = jgg.data.batches(jsonl(tmp_path, *pairs(3)), tokenizer, length=8, batch_size=1, seed=None)
    assert len(list(one_pass)) == one_pass.num_sequences


@pytest.mark.skipif(sys.platform != "linux", reason="writes to /dev/full")
def test_a_full_folder_for_temporary_files_is_named(tokenizer, tmp_path, monkeypatch):
    # whose buffer is written when the file is closed
    monkeypatch.setattr(tempfile, "TemporaryFile", functools.partial(open, "/dev/full", "wb"))
    monkeypatch.setattr(tempfile, "tempdir", "/somewhere")
    expected = "the tokens of the data must have room in /somewhere, the folder of TMPDIR: No space left on device"
    with pytest.raises(OSError, match=expected):
        jgg.data.batches(jsonl(tmp_path, *pairs(3)), tokenizer, length=8, batch_size=1)


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_of_100_megabytes_is_not_copied_into_memory(tmp_path):
    """Neither its text nor its tokens."""
    folder_of(tmp_path, tokenizers.words)
    line = (json.dumps({"text": " ".join(["two", "threefold"] * 100)}) + "\n").encode()
    path = tmp_path / "data.jsonl"
    with path.open("wb") as file:
        while file.tell() < 100e6:
            file.write(line * 1000)
    grown, count, tokens = map(int, processes.run_program("read_data", tmp_path, path, JAX_PLATFORMS="cpu").split())
    assert count == path.stat().st_size // len(line) and tokens > 50e6
    assert grown < 25e6
