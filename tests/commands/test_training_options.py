"""`jgg finetune` and `jgg train` say in one line what is wrong with options, folders and data, before any model."""

import json
import os
import shutil
import sys

import jax
import pytest
from flax import nnx

import jgg.hf
import jgg.models
import jgg.train
from jgg.cli import main
from jgg.cli.errors import writes
from jgg.cli.parsing import parse
from jgg.cli.training import folders, loop
from jgg.cli.training.data import data_of
from jgg.core.quantized import count_numbers
from tests.support.models import config_of, folder_with_tokenizer, with_mxfp4

NEEDED = "--data", "data.jsonl", "--output", "out"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model's folder, in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"prompt": "t1 t2", "completion": " t3"}\n' * 4)
    (tmp_path / "file").write_text("x")
    return folder_with_tokenizer("qwen3_moe", tmp_path / "model")


@pytest.fixture
def error(folder, monkeypatch, capsys):
    """Runs a command until it ends, before there is a model; its one line."""

    def make(*_, **__):
        raise AssertionError("the model is made")

    def run(command, *arguments):
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as raised:
            patch.setattr(jgg.models, "load", make)
            patch.setattr(jgg.models, "Decoder", make)
            main([command, *map(str, arguments)])
        printed = capsys.readouterr().err.rstrip()
        lines = raised.value.code if isinstance(raised.value.code, str) else printed
        assert lines.startswith("jgg") and "\n" not in lines
        return lines

    return run


COUNTS = ["0", "-1", "1.5", "2147483648"]
OPTIONS = {
    "--steps": COUNTS,
    "--epochs": ["0", "-1", "nan", "inf", "1e300"],
    "--batch-size": ["0", "1000000000"],
    "--accumulate": ["0", "1000000"],
    "--sequence-length": ["0", "1000000000"],
    "--save-every": ["0"],
    "--log-every": ["0"],
    "--eval-every": ["0"],
    "--warmup": ["0"],
    "--learning-rate": ["0", "-1", "inf"],
    "--weight-decay": ["-1", "nan"],
    "--seed": ["-1", "4294967296"],
    "--mix": ["0", "-1"],
    "--log-to": ["mlflow"],
    "--output": ["file", "file/adapter", "model", "/dev/null", "/proc/adapter", "x" * 300],
    "--checkpoints": ["file", "model", "out", "/proc/run"],
    "--data": ["missing.jsonl"],
    "--eval-data": ["missing.jsonl"],
    "--fsdp": ["0", "7"],
    "--expert": ["0", "7"],
    "--process": ["0", "-1"],
    "--processes": ["2", "0"],
    "--coordinator": ["localhost:1"],
}
OF_FINETUNE = {
    "--lora-rank": ["0", "x", "1000000"],
    "--lora-alpha": ["0", "nan"],
    "--targets": ["w_x"],
    "--experts": ["int4"],
}
CASES = [(command, option) for command in ("finetune", "train") for option in OPTIONS]


@pytest.mark.parametrize(("command", "option"), [*CASES, *(("finetune", option) for option in OF_FINETUNE)])
def test_a_wrong_option_is_named(command, option, error):
    for value in (OPTIONS | OF_FINETUNE)[option]:
        values = [value] if option != "--mix" else [value, "1"]
        message = error(command, "model", *NEEDED, option, *values)
        assert option in message or value in message
    assert not os.path.lexists("out")


def test_data_that_cannot_be_read_is_named(error):
    os.mkfifo("pipe")
    for name in ("pipe", "/dev/zero", "model", "missing.parquet"):
        assert f"{name} must be" in error("finetune", "model", "--data", name, "--output", "out")
        assert f"{name} must be" in error("finetune", "model", *NEEDED, "--eval-data", "data.jsonl", name)


WRONG_TOGETHER = {
    "--batch-size times --accumulate times --sequence-length must be at most 67108864 tokens, got 2097152000": [
        *("--batch-size", "1000", "--accumulate", "1024")
    ],
    "--mix must have a share for each of 1 files, got 2": ["--mix", "1", "2"],
    "--mix needs each file of --data once, got data.jsonl, data.jsonl": [
        *("--data", "data.jsonl", "data.jsonl", "--mix", "1", "2")
    ],
    "--process needs --coordinator HOST:PORT, got none": ["--process", "0"],
    "--coordinator HOST:PORT needs --processes and --process": ["--coordinator", "localhost:1", "--process", "0"],
    "--process must be less than --processes 2, got 2": [
        *("--coordinator", "localhost:1", "--processes", "2", "--process", "2")
    ],
    "--fsdp-splits features needs several devices along --fsdp, got 1": ["--fsdp", "1", "--fsdp-splits", "features"],
    "--full needs --experts bfloat16, got fp8": ["--full", "--experts", "fp8"],
    "--optimizer muon needs --full": ["--optimizer", "muon"],
    "--optimizer-in-backward needs --full": ["--optimizer-in-backward"],
    "--optimizer-in-backward needs --remat all or offload, got names": ["--full", "--optimizer-in-backward"],
    "--optimizer-in-backward needs --accumulate 1, got 2": [
        *("--full", "--optimizer-in-backward", "--remat", "all", "--accumulate", "2")
    ],
}


@pytest.mark.parametrize("message", WRONG_TOGETHER)
def test_options_that_do_not_fit_together_are_named(message, error):
    assert message in error("finetune", "model", *NEEDED, *WRONG_TOGETHER[message])


@pytest.mark.parametrize(("options", "got"), [([], "1 times 2"), (["--fsdp", "3"], "3 times 2")])
def test_devices_that_are_not_there_are_named(options, got, error):
    count = jax.device_count()
    if count == 1:
        message = f"--fsdp times --expert must be 1, the number of devices, got {got}"
        assert message in error("train", "model", *NEEDED, "--expert", "2", *options)


def test_a_whole_model_goes_into_a_new_folder(error, folder):
    (folder.parent / "out").mkdir()
    (folder.parent / "out" / "config.json").write_text("{}")
    for arguments in (["finetune", "--full"], ["train"]):
        command, *options = arguments
        message = "--output must be new or an empty folder, got out"
        assert message in error(command, "model", *NEEDED, *options)


def test_an_adapter_replaces_no_model_and_no_other_adapter(error, folder):
    out = folder.parent / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    message = "--output must be a folder without a model, got out, which has config.json"
    assert error("finetune", "model", *NEEDED) == f"jgg finetune: error: {message}"
    (out / "config.json").rename(out / "adapter_config.json")
    message = "--output must be a folder without an adapter, unless a run goes on, got out, which has an adapter"
    for options in ([], ["--checkpoints", "run"]):
        assert error("finetune", "model", *NEEDED, *options) == f"jgg finetune: error: {message}"


def test_targets_that_a_model_lacks_are_named(folder, capsys):
    with pytest.raises(SystemExit):
        main(["finetune", "model", *NEEDED, "--targets", "w_kv_a", "w_qkv"])
    message = "--targets must name a matrix that the model has, got w_kv_a, w_qkv"
    assert capsys.readouterr().err == f"jgg finetune: error: {message}\n"


FOLDERS = {
    "missing": ("config.json", None, "model must have config.json, got none"),
    "damaged": ("config.json", "{", "config.json must be"),
    "another family": ("config.json", '{"model_type": "bert"}', "model_type must be one of"),
    "no tokenizer": ("tokenizer.json", None, "must be a folder with tokenizer.json, got"),
    "ends": ("generation_config.json", '{"eos_token_id": "t1"}', "eos_token_id of model/generation_config.json"),
    "not JSON": ("generation_config.json", "{", "model/generation_config.json must be a JSON file"),
    "a list": ("generation_config.json", "[2]", "model/generation_config.json must hold a JSON object, got a list"),
    "balance": ("config.json", {"router_aux_loss_coef": "much"}, "router_aux_loss_coef must be a number of at least 0"),
    "vocabulary": ("config.json", {"vocab_size": 3}, "data.jsonl must have tokens below the model's vocab_size, 3"),
    "end": ("generation_config.json", '{"eos_token_id": 64}', "below the model's vocab_size, 64, got 64"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wrong_folder_is_named(name, folder, error):
    file, content, message = FOLDERS[name]
    if content is None:
        (folder / file).unlink()
    else:
        content = content if isinstance(content, str) else json.dumps(config_of("qwen3_moe") | content)
        (folder / file).write_text(content)
    for command in ("finetune", "train"):
        assert message in error(command, "model", *NEEDED)


def test_no_folder_is_named(error):
    for command in ("finetune", "train"):
        for name in ("missing", "file", "."):
            assert name in error(command, name, *NEEDED)
    wanted = "CONFIG must be a folder with config.json, or that file, got config.json"
    assert wanted in error("train", "config.json", *NEEDED)
    assert "--tokenizer must be a folder with tokenizer.json, got ." in error(
        "train", "model/config.json", *NEEDED, "--tokenizer", "."
    )


@pytest.mark.parametrize(
    ("ends", "want"),
    [
        ({"config": 5, "tokenizer": 6}, [6]),
        ({"config": 5}, [5]),
        ({"config": 64}, []),  # which the tokenizer does not have
        ({"config": 5, "special": "t4"}, [4]),
    ],
)
def test_a_new_model_learns_the_end_that_it_is_saved_with(ends, want, folder):
    tokenizer = folder.parent / "tokenizer"
    tokenizer.mkdir()
    shutil.copy(folder / "tokenizer.json", tokenizer)
    (folder / "config.json").write_text(json.dumps(config_of("qwen3_moe") | {"eos_token_id": ends["config"]}))
    if "tokenizer" in ends:
        (tokenizer / "generation_config.json").write_text(json.dumps({"eos_token_id": ends["tokenizer"]}))
    if "special" in ends:
        (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": ends["special"]}))
    options = ["--data", "data.jsonl", "--output", "out", "--batch-size", "1", "--sequence-length", "8"]
    args = parse(["train", "model", *options])
    args.data = [folder.parent / "data.jsonl"]
    found = data_of(args, tokenizer, folder, jgg.models.model_config(jgg.hf.read_config(folder)))
    assert found.end_tokens == want
    batch = found.batches.of_step(1)
    assert batch["targets"][batch["segments"] == 1].tolist() == [2, 3, *want]
    assert (batch["weights"][batch["segments"] == 1] > 0).tolist() == [False, True, *[True for _ in want]]


REJECTED = {"messages": [{"role": role, "content": "t3"} for role in ("system", "user", "assistant")]}
REJECTS = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}t1{{ messages[-1].content }}"
)


@pytest.mark.parametrize("command", ["finetune", "train", "evaluate"])
def test_an_option_skips_conversations_that_cannot_be_marked(command, folder, error):
    (folder / "chat_template.jinja").write_text(REJECTS)
    (folder.parent / "chats.jsonl").write_text(f"{json.dumps(REJECTED)}\n" * 2)
    output = () if command == "evaluate" else ("--output", "out")
    message = error(command, "model", "--data", "data.jsonl", "chats.jsonl", *output)
    assert "chats.jsonl:1: the chat template fails: TemplateError: no system" in message
    assert message.endswith("the option --skip-unmarked, skips such rows")
    message = error(command, "model", "--data", "chats.jsonl", "--skip-unmarked", *output)
    assert message.endswith("got none; rows that the chat template cannot mark: 2")
    if command == "evaluate":
        return
    options = ["--output", "out", "--skip-unmarked", "--data", "data.jsonl", "chats.jsonl"]
    args = parse([command, "model", *options, "--eval-data", "chats.jsonl", "data.jsonl"])
    args.batch_size = 1
    found = data_of(args, folder, folder, jgg.models.model_config(jgg.hf.read_config(folder)))
    assert found.skipped == {"skipped_rows": 2, "eval_skipped_rows": 2}
    told = "4 examples, 2 rows of --data skipped that the chat template cannot mark, 2 rows of --eval-data skipped that"
    assert found.in_words().startswith(told)


def test_held_out_tokens_beyond_the_vocabulary_are_named(folder, error):
    (folder / "config.json").write_text(json.dumps(config_of("qwen3_moe") | {"vocab_size": 9}))
    (folder.parent / "held.jsonl").write_text('{"text": "t1 t11"}')
    message = error("finetune", "model", *NEEDED, "--eval-data", "held.jsonl")
    assert "--eval-data held.jsonl must have tokens below the model's vocab_size, 9, got 11, 't11'" in message


def test_parameters_in_mxfp4_count_as_numbers(tmp_path):
    folder = with_mxfp4(tmp_path / "model")
    dense, stored = (nnx.state(jgg.models.load(folder, experts=experts)) for experts in ("dense", "as stored"))
    assert count_numbers(stored) == count_numbers(dense) == sum(a.size for a in jax.tree.leaves(dense))


def test_what_cannot_be_written_is_one_line(tmp_path):
    path = tmp_path / "none" / "x"
    with pytest.raises(SystemExit, match=r"^jgg: could not write .*/none/x: No such file or directory$"), writes(path):
        path.write_text("x")


def test_training_that_cannot_go_on_writes_no_adapter(error, monkeypatch):
    def fail(*_, **__):
        raise jgg.train.TrainingError("step 3: the loss is nan")

    monkeypatch.setattr(loop, "trainer_of", lambda *_: None)
    monkeypatch.setattr(loop, "records", fail)
    monkeypatch.setattr("jgg.cli.training.finetune._load", lambda *_: None)
    assert error("finetune", "model", *NEEDED) == "jgg: step 3: the loss is nan"
    assert not os.path.lexists("out")


def test_a_package_that_is_missing_is_named(error, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    message = error("finetune", "model", *NEEDED, "--log-to", "wandb")
    assert message == "jgg: the tracker wandb needs a package: pip install wandb"


def test_other_options_are_named_where_a_run_goes_on(folder, error, monkeypatch):
    class Ended(Exception):
        pass

    def end(run, *_):
        folders.note(run.args, run.noted)
        raise Ended

    arguments = "model", *NEEDED, "--checkpoints", "run", "--steps", "3"
    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr(loop, "fit", end)
        main(["finetune", *arguments])
    (folder.parent / "run" / "2").mkdir()
    changes = {
        "--lora-rank": 4,
        "--lora-alpha": 1.5,
        "--targets": "w_q",
        "--experts": "fp8",
        "--sequence-length": 9,
        "--batch-size": 2,
        "--accumulate": 3,
        "--steps": 7,
        "--learning-rate": 1e-3,
        "--warmup": 2,
        "--weight-decay": 0.5,
        "--seed": 1,
    }
    for option, value in changes.items():
        name = option.strip("-").replace("-", "_")
        message = error("finetune", *arguments, option, value)
        assert f"--checkpoints run has a run with other options: {name} is " in message, message
    assert "packing is False, was True" in error("finetune", *arguments, "--no-packing")
    assert "full is True, was False" in error("finetune", *arguments, "--full")
    assert "optimizer is muon, was adamw" in error("finetune", *arguments, "--full", "--optimizer", "muon")
    shutil.copytree("model", "other")
    assert "model is " in error("finetune", "other", *arguments[1:])
    (folder.parent / "data.jsonl").write_text('{"text": "t1 t2"}')
    assert "data is " in error("finetune", *arguments)
    (folder.parent / "run" / "run.toml").write_text("{")
    assert "run/run.toml must be a TOML file" in error("finetune", *arguments)
