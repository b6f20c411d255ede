"""The Python of docs/data.md runs, and the rows of its table are read as it says."""

import json
import re

import numpy as np
import pytest

import jgg.data
from tests.support.documents import code_of, run_code
from tests.support.processes import ROOT
from tests.support.texts import LOOP, folder_of, jsonl, spans

PAGE = (ROOT / "docs/data.md").read_text()
ROWS = [json.loads(row) for row in re.findall(r"^\| `(\{.*\})` \|", PAGE, re.MULTILINE)]

pytestmark = pytest.mark.usefixtures("as_a_reader_runs_it")


def test_what_is_learned_of_the_rows_of_the_page(tmp_path):
    prompt, messages, text = spans(folder_of(tmp_path, template=LOOP), *ROWS)
    assert prompt == ("Translate: good morning\n", "guten Morgen</s>")
    assert messages[1:] == ("Good day<|im_end|>\n",)
    assert text == ("", "All of it is learned.</s>")


def test_the_programs_of_the_page(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    folder_of(tmp_path / "model", template=LOOP)
    jsonl(tmp_path, *ROWS, *ROWS, name="train.jsonl")
    jsonl(tmp_path, *ROWS, name="test.jsonl")
    jsonl(tmp_path, ROWS[1], name="other.jsonl")
    names = run_code("\n".join([*code_of("data.md", "Batches"), *code_of("data.md", "Mix datasets")]))
    assert capsys.readouterr().out.startswith("6 examples in 1 sequences")
    assert all(array.shape == (1, 4, 2048) for array in names["batch"].values())
    assert names["num_learned"] == names["held_out"].num_learned > 0
    assert isinstance(names["mixed"], jgg.data.Batches)
    np.testing.assert_allclose(names["mixed"][0]["weights"].sum(), 1, rtol=1e-6)
