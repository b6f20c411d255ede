"""`jgg evaluate`: loss, perplexity and bits per byte of texts, and lm-eval's tasks."""

import functools
import importlib
import json
import math
import re
import socket

import jax.numpy as jnp
import numpy as np
import pytest

import jgg.models
from jgg.cli import main
from tests.support import processes
from tests.support.frameworks import framework, write_task
from tests.support.models import fill_adapters, folder_with_tokenizer, loaded, logits_of

pytestmark = pytest.mark.xdist_group("cli")  # one worker compiles what they share
ROWS = [
    {"text": "t3 t4 t5 t10 t11"},
    {"prompt": "t7 t8", "completion": " t9 t20", "weight": 2.0},
    {"text": " ".join(f"t{number}" for number in range(20, 50))},
]


@pytest.fixture
def folder(tmp_path):
    """A model's folder whose token 5 is the word "t5", and whose tokenizer has no special token."""
    return folder_with_tokenizer("qwen3_moe", tmp_path / "model")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def run(capsys, *arguments):
    """The JSON that the command prints."""
    assert main(["evaluate", *map(str, arguments), "--dtype", "float32", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def losses_of(tokens, model=None):
    """Of each token of a text behind its first, [S - 1]."""
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = np.asarray(logits_of(model or loaded("qwen3_moe"), jnp.asarray(padded)), np.float64)[0, : len(tokens) - 1]
    return np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(tokens) - 1), tokens[1:]]


def want_of(length=2048, model=None):
    """Loss, bits per byte and tokens of ROWS."""
    losses, weights, num_bytes = [], [], 0.0
    for row in ROWS:
        text = row.get("text") or row["prompt"] + row["completion"]
        tokens, weight = [int(word[1:]) for word in text.split()], row.get("weight", 1.0)
        first = len(row.get("prompt", "t0").split())
        for start in range(0, len(tokens) - 1, length):
            part = tokens[start : start + length + 1]
            learned = slice(max(first - start, 1) - 1, None)
            losses += losses_of(part, model)[learned].tolist()
        weights += [weight] * (len(tokens) - first)
        num_bytes += weight * sum(len(f" t{token}") for token in tokens[first:])
    loss = np.dot(losses, weights) / np.sum(weights)
    return loss, loss * np.sum(weights) / math.log(2) / num_bytes, len(losses)


@pytest.mark.parametrize("length", [64, 10])
def test_loss_perplexity_and_bits_per_byte(length, folder, data, tmp_path, capsys):
    options = ["--sequence-length", length, "--batch-size", 2, "--output", tmp_path / "out.json"]
    found = run(capsys, folder, "--data", data, *options)
    loss, bits, tokens = want_of(length)
    got = found["data"][str(data)]
    assert got["tokens"] == tokens
    np.testing.assert_allclose([got["loss"], got["bits_per_byte"]], [loss, bits], rtol=1e-5)
    np.testing.assert_allclose(got["perplexity"], math.exp(loss), rtol=1e-5)
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["data"] == found["data"] and written["command"][0]
    assert written["tasks"] is None
    assert (written["options"]["data"], written["options"]["sequence_length"]) == ([str(data)], length)


def test_options_of_a_file_and_those_of_the_command_line_over_them(folder, data, tmp_path, capsys):
    lines = f'model = "{folder}"', f'data = ["{data}"]', "sequence-length = 10", "batch_size = 2"
    (tmp_path / "own.toml").write_text("\n".join(lines))
    found = run(capsys, "--config", tmp_path / "own.toml")
    np.testing.assert_allclose(found["data"][str(data)]["loss"], want_of(10)[0], rtol=1e-5)
    assert (found["model"], found["adapter"], found["options"]["batch_size"]) == (str(folder), None, 2)
    found = run(capsys, "--config", tmp_path / "own.toml", "--sequence-length", 64)
    np.testing.assert_allclose(found["data"][str(data)]["loss"], want_of(64)[0], rtol=1e-5)


def test_a_limit_draws_sequences(folder, data, capsys):
    options = ["--data", data, "--sequence-length", 32, "--batch-size", 1]
    whole = run(capsys, folder, *options)["data"][str(data)]
    parts = [run(capsys, folder, *options, "--limit", 1, "--seed", seed)["data"][str(data)] for seed in range(4)]
    assert {part["tokens"] for part in parts} == {31, 4}  # what is learned of two rows, and of one
    assert run(capsys, folder, *options, "--limit", 9)["data"][str(data)]["tokens"] == whole["tokens"] == 35


def test_an_adapter_and_files_in_a_table(folder, data, tmp_path, capsys):
    model = fill_adapters(loaded("qwen3_moe", lora_rank=2), 1.0)
    jgg.models.save_adapter(model, tmp_path / "adapter")
    (tmp_path / "adapter/generation_config.json").write_text('{"eos_token_id": [3]}')  # is not measured
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(ROWS[0]))
    options = ["--sequence-length", "64", "--batch-size", "2", "--dtype", "float32"]
    assert main(["evaluate", str(folder), str(tmp_path / "adapter"), "--data", str(data), str(other), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["data", "tokens", "loss", "perplexity", "bits", "per", "byte"]
    assert [line.split()[:2] for line in lines[1:]] == [[str(data), "35"], [str(other), "4"]]
    assert lines[1].split()[2] == f"{want_of(model=model)[0]:.2f}" != f"{want_of()[0]:.2f}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--data or --tasks must say what to measure, got neither"),
        (["--data", "none.jsonl"], "none.jsonl"),
        (["none", "--data", "{data}"], "ADAPTER must be a folder with adapter_config.json, got none"),
        (["--data", "{data}", "--num-fewshot", "1"], "--num-fewshot must be given with --tasks, got it alone"),
        (["--data", "{data}", "--output", "none/x.json"], "--output: none/x.json is in none, which is no folder"),
        (["--data", "{data}", "--output", "/tmp"], "--output: must be a file, got the folder /tmp"),
        (["--data", "{data}", "--fsdp", "3"], "--fsdp times --expert must be"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message, folder, data, capsys):
    with pytest.raises(SystemExit) as error:
        main(["evaluate", str(folder), *(argument.format(data=data) for argument in arguments)])
    assert error.value.code == 2
    told = capsys.readouterr().err
    assert message in told and len(told.splitlines()) == 1


def test_a_package_that_tasks_lack_is_of_the_extra_for_tasks(folder, monkeypatch):
    class Tasks:
        def results(self, model):
            raise ModuleNotFoundError("No module named 'chardet'")

    monkeypatch.setattr("jgg.cli.evaluation.run._tasks", lambda args: Tasks())
    with pytest.raises(SystemExit, match=r"^jgg: No module named 'chardet': pip install 'jgg\[evaluate\]'$"):
        main(["evaluate", str(folder), "--tasks", "hellaswag"])


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("count", "split"),
    [
        (4, ["--fsdp", 2, "--expert", 2]),
        # by more devices than there are experts
        (8, ["--fsdp-splits", "features"]),
    ],
)
def test_several_devices(count, split, folder, data):
    options = ["--data", data, "--dtype", "float32", "--sequence-length", 64, "--batch-size", count, "--json"]
    printed = processes.run("-m", "jgg", "evaluate", folder, *options, *split, **processes.with_devices(count))
    got, (loss, bits, tokens) = json.loads(printed)["data"][str(data)], want_of()
    assert got["tokens"] == tokens
    np.testing.assert_allclose([got["loss"], got["bits_per_byte"]], [loss, bits], rtol=1e-5)


def printed_by_two(*arguments):
    """What each of two processes prints that run a command together, of two devices each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    together = ["-m", "jgg", *arguments, "--coordinator", address, "--processes", 2]
    started = [processes.start(*together, "--process", number, **processes.with_devices(2)) for number in range(2)]
    return [processes.printed(process) for process in started]


# what the task asks for: behind the token that begins a text
TEXTS = [[62, *(int(word[1:]) for word in ROWS[row]["text"].split())] for row in (0, 2)]
TASK = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}],
}


@pytest.mark.thorough
@pytest.mark.usefixtures("offline")
class TestTasks:
    """With lm-eval installed."""

    pytestmark = framework("lm_eval")

    @pytest.fixture
    def options(self, folder, tmp_path):
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "t62", "eos_token": "t61"}))
        (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps(ROWS[row]) for row in (0, 2)))
        (tmp_path / "tasks").mkdir()
        write_task(tmp_path / "tasks", "jgg_words", tmp_path / "texts.jsonl", **TASK)
        return [folder, "--include-path", tmp_path / "tasks"]

    def test_a_task(self, options, capfd, tmp_path, monkeypatch):
        """Quietly: the table alone is printed."""
        monkeypatch.chdir(tmp_path)  # where git finds no repository
        tasks = importlib.import_module("jgg.cli.evaluation.tasks")
        # lm-eval would read the files of thousands of tasks
        monkeypatch.setattr(tasks, "TaskManager", functools.partial(tasks.TaskManager, include_defaults=False))
        options += ["--tasks", "jgg_words", "--dtype", "float32", "--output", "out.json", "--quiet"]
        assert main(["evaluate", *map(str, options)]) == 0
        told = capfd.readouterr()
        assert "jgg_words" in told.out
        assert "fatal" not in told.err and "%|" not in told.err
        found = json.loads((tmp_path / "out.json").read_text())
        mean = sum(losses_of(text).sum() for text in TEXTS) / 35
        got = found["tasks"]["results"]["jgg_words"]["word_perplexity,none"]
        np.testing.assert_allclose(got, math.exp(mean), rtol=1e-5)
        assert found["data"] == {}

    @pytest.mark.sweep
    def test_unknown_tasks_are_refused(self, options, capsys):
        with pytest.raises(SystemExit):
            main(["evaluate", *map(str, options), "--tasks", "jgg_words,no_task"])
        message = r"--tasks must be of the [0-9]+ that `lm-eval ls tasks` lists, got 'no_task'"
        assert re.search(message, capsys.readouterr().err)

    @pytest.mark.sweep
    def test_two_processes(self, options, data, capsys):
        of_data = ["--data", data, "--sequence-length", 64, "--batch-size", 4]
        both = printed_by_two("evaluate", *options, *of_data, "--tasks", "jgg_words", "--dtype", "float32", "--json")
        found, want = json.loads(both[0].splitlines()[-1]), run(capsys, options[0], *of_data)
        assert found["data"].keys() == want["data"].keys()
        for got, own in zip(found["data"].values(), want["data"].values(), strict=True):
            np.testing.assert_allclose(list(got.values()), list(own.values()), rtol=1e-5)
        mean = sum(losses_of(text).sum() for text in TEXTS) / 35
        got = found["tasks"]["results"]["jgg_words"]["word_perplexity,none"]
        np.testing.assert_allclose(got, math.exp(mean), rtol=1e-5)
        assert "results" not in both[1]
