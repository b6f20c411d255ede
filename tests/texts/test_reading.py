"""Rows of files of all kinds, and files that are odd, damaged or of another kind."""

import json
import os
import re

import pytest

import jgg.data
from tests.support.texts import ASSISTANT, LOOP, USER, folder_of, jsonl

TEXTS = [{"text": "one"}, {"text": "two"}, {"text": "three"}]


def read(path):
    return list(jgg.data.rows(path))


def batches(folder, data, **options):
    """Batches by the folder's tokenizer of a file, rows or bytes."""
    data = jsonl(folder, data) if isinstance(data, bytes) else data
    options = {"length": 16, "batch_size": 1} | options
    return jgg.data.batches(data, jgg.data.load_tokenizer(folder), **options)


def test_blank_lines_and_a_mark_of_utf_8_are_taken(tmp_path):
    lines = b'\xef\xbb\xbf\r\n{"text": "one"}\r\n\n   \n{"text": "\\u2028two"}\n\n'
    path = jsonl(tmp_path, lines)
    assert read(path) == [(f"{path}:2", {"text": "one"}), (f"{path}:5", {"text": "\u2028two"})]
    assert read(jsonl(tmp_path, '{"text": "a\u2028b\x85c"}'.encode())) == [(f"{path}:1", {"text": "a\u2028b\x85c"})]
    assert read(jsonl(tmp_path, b"")) == []


def test_a_line_of_megabytes(tmp_path):
    text = "one " * 500_000
    ((_, row), (name, last)) = read(jsonl(tmp_path, {"text": text}, {"text": "two"}))
    assert row == {"text": text} and last == {"text": "two"} and name.endswith("data.jsonl:2")


WRONG = {
    "latin-1": (b'{"text": "one"}\n{"text": "\xe9"}', "data.jsonl:2 must be UTF-8, got the byte 0xe9"),
    "utf-16": ('{"text": "one"}'.encode("utf-16"), "data.jsonl:1 must be UTF-8, got the byte 0xff"),
    "gzip": (b"\x1f\x8b\x08\x00\x00", "data.jsonl:1 must be UTF-8, got the byte 0x8b"),
    "surrogate": (b'\n{"text": "\\ud83d"}', "data.jsonl:2: 'utf-8' codec can't encode"),
    "surrogate-in-messages": (
        json.dumps({"messages": [USER, ASSISTANT | {"content": "\udc80"}]}).encode(),
        "data.jsonl:1: 'utf-8' codec can't encode character '\\udc80'",
    ),
    "array": (b'[\n{"text": "one"}\n]', "data.jsonl:1 must be a JSON object on one line, got [: Expecting value"),
    "half": (b'{"text": ', "data.jsonl:1 must be a JSON object"),
    "deep": (b"[" * 100_000, "data.jsonl:1 must be a JSON object"),
    "digits": (b'{"text": ' + b"1" * 5000 + b"}", "data.jsonl:1 must be a JSON object"),
    "list": (b'["one"]', 'data.jsonl:1: a row must have "prompt" and "completion"'),
    "number": (b"5", 'data.jsonl:1: a row must have "prompt" and "completion"'),
    "role": (
        json.dumps({"messages": [USER, ASSISTANT | {"role": "gpt"}]}).encode(),
        'or "messages" with roles, one of them "assistant", got {"messages": [{"role": "user"',
    ),
    "null": (b"null", 'data.jsonl:1: a row must have "prompt" and "completion"'),
    "numbers": (b'{"text": 5}', 'data.jsonl:1: a row must have "prompt" and "completion"'),
    "user's": (json.dumps({"messages": [USER]}).encode(), 'data.jsonl:1: a row must have "prompt" and "completion"'),
    "no-role": (b'{"messages": [{"content": "one"}, 3]}', 'data.jsonl:1: a row must have "prompt" and "completion"'),
    "no-question": (
        json.dumps({"messages": [ASSISTANT]}).encode(),
        "data.jsonl:1: messages must have one before the assistant's, got it alone",
    ),
    "no-message": (b'{"messages": []}', 'data.jsonl:1: a row must have "prompt" and "completion"'),
    "no-content": (
        json.dumps({"messages": [USER, {"role": "assistant", "contents": "two"}]}).encode(),
        'data.jsonl:1: messages must have "content" or "tool_calls", got one with role, contents as message 2',
    ),
    "tools": (
        json.dumps({"messages": [USER, ASSISTANT], "tools": "[{"}).encode(),
        "data.jsonl:1: tools must be a list or the JSON of one, got [{",
    ),
    "weight": (b'{"text": "one", "weight": -1}', "data.jsonl:1: weight must be 0 or from 1e-30 to 1e+30, got -1"),
    "weight-nan": (b'{"text": "one", "weight": NaN}', "data.jsonl:1: weight must be 0 or from"),
    "weight-large": (b'{"text": "one", "weight": 1e39}', "data.jsonl:1: weight must be 0 or from"),
    "weight-small": (b'{"text": "one", "weight": 1e-39}', "data.jsonl:1: weight must be 0 or from"),
    "weight-text": (b'{"text": "one", "weight": "1"}', "data.jsonl:1: weight must be 0 or from"),
    "weight-bool": (b'{"text": "one", "weight": true}', "data.jsonl:1: weight must be 0 or from"),
    "nothing": (b"\n \n", "data.jsonl must have an example with tokens to learn, got none"),
    "nothing-learned": (b'{"text": "one", "weight": 0}', "data.jsonl must have an example with tokens to learn"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_is_named(name, tmp_path):
    content, message = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        batches(folder_of(tmp_path, template=LOOP), content)
    assert len(str(raised.value)) < 500 and "\n" not in str(raised.value)


def test_a_length_that_cuts_all_that_is_learned_is_named(tmp_path):
    content = b'{"prompt": "one one one one", "completion": " two"}\n{"text": "", "weight": 0}'
    with pytest.raises(ValueError, match=r"tokens to learn, got none; rows that were cut to 2 tokens: 1$"):
        batches(folder_of(tmp_path), content, length=2)


def test_what_is_no_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent must be a file that can be read: No such file or directory"):
        read(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")  # which would never end
    with pytest.raises(ValueError, match=r"pipe must be a regular file, got a pipe or a device"):
        read(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"must be a file, or a folder that datasets' save_to_disk wrote"):
        read(tmp_path)
    (tmp_path / "state.json").write_text('{"_data_files": 3}')
    with pytest.raises(ValueError, match=r'state\.json must list files in "_data_files"'):
        read(tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ValueError, match=r"must be one split of a dataset, got a folder of several: train"):
        read(tmp_path)


def write_table(path, rows, kind, schema=None):
    """Writes rows, or a table, as parquet in small groups, as an Arrow file, or as a stream, as datasets does."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, schema)
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        with pa.OSFile(str(path), "wb") as file:
            new = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}[kind]
            with new(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=2)
    return path


CALL = {"role": "assistant", "tool_calls": [{"name": "find", "arguments": {"x": 1}}]}
KINDS = "parquet", "file", "stream"


@pytest.mark.parametrize("kind", KINDS)
def test_tables_have_the_rows_of_lines(kind, tmp_path):
    rows = [
        {"messages": [USER, ASSISTANT], "weight": 0.5},
        {"messages": [USER, CALL], "tools": '[{"name": "find"}]'},
        {"messages": [USER, ASSISTANT]},
    ]
    wide = [{"id": n, "tools": None, "weight": None} | row for n, row in enumerate(rows)]
    path = write_table(tmp_path / "table", wide, kind)
    assert read(path) == [(f"{path}:{n}", row) for n, row in enumerate(rows, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_tables_that_are_empty_damaged_or_of_other_columns(kind, tmp_path):
    import pyarrow as pa

    empty = write_table(tmp_path / "empty", [], kind, pa.schema({"text": pa.string()}))
    assert read(empty) == []
    with pytest.raises(ValueError, match=r"empty must have an example with tokens to learn, got none"):
        batches(folder_of(tmp_path), empty)
    other = write_table(tmp_path / "other", [{"id": 1, "prompt": "one"}], kind)
    expected = r'other must have the columns "prompt" and "completion", "text" or "messages", got id, prompt'
    with pytest.raises(ValueError, match=expected):
        read(other)
    numbers = write_table(tmp_path / "numbers", [{"text": 1}], kind)
    with pytest.raises(ValueError, match=r"numbers:1: a row must have .*, got {\"text\": 1}"):
        batches(tmp_path, numbers)
    whole = write_table(tmp_path / "whole", TEXTS * 50, kind).read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut must be a whole parquet or Arrow file"):
        read(tmp_path / "cut")


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_row_of_a_table_is_named(kind, tmp_path):
    pa = pytest.importorskip("pyarrow")

    def error(names, *columns):
        write_table(tmp_path / "table", pa.Table.from_arrays(list(columns), names), kind)
        with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/table")) as raised:
            read(tmp_path / "table")
        return str(raised.value).removeprefix(f"{tmp_path}/")

    texts = [b"one"] * 600
    texts[555] = b"caf\xe9"
    latin = pa.array(texts, pa.binary()).view(pa.string())
    assert error(["text"], latin) == "table:556 must be UTF-8, got the byte 0xe9"
    one = pa.array(["one"])
    assert error(["text", "text"], one, one) == "table must have each column once, got several of the name text"
    message = pa.StructArray.from_arrays([one, one, one], names=["role", "content", "content"])
    messages = pa.ListArray.from_arrays([0, 1], message)
    assert error(["messages"], messages).startswith("table:1 must have values that Python can hold, got ValueError: ")
    day = pa.array([2**30], pa.date32())  # in the year 2,942,000
    assert error(["text"], day).startswith("table:1 must have values that Python can hold, got OverflowError: ")


def test_a_folder_of_datasets_has_its_files_in_order(tmp_path):
    for n, rows in enumerate((TEXTS[:2], TEXTS[2:])):
        write_table(tmp_path / f"data-0000{n}-of-00002.arrow", rows, "stream")
    files = [{"filename": f"data-0000{n}-of-00002.arrow"} for n in (1, 0)]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": files}))
    assert [row for _, row in read(tmp_path)] == [TEXTS[2], *TEXTS[:2]]
    (tmp_path / files[0]["filename"]).unlink()
    with pytest.raises(ValueError, match=r"data-00001-of-00002\.arrow must be a whole parquet or Arrow file.*No such"):
        read(tmp_path)
