"""No command replaces a file that it reads or that others wrote, and no result is lost."""

import datetime
import json
import os
import shutil
from pathlib import Path

import pytest

import jgg.models
import jgg.train
from jgg.cli import main
from jgg.cli.files import is_inside, is_same
from jgg.cli.parsing import parse
from jgg.cli.training import folders, loop
from jgg.train.locks import folder_lock
from tests.support.models import folder_with_tokenizer

ROW = '{"step": 1, "text": "t1 t2"}\n'
LOG = '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": NaN, "ep'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return folder_with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("folders") / "model")


@pytest.fixture
def folder(model, tmp_path, monkeypatch):
    """A working folder with a model's, and files of others."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, tmp_path / "model")
    files = {
        "data.jsonl": ROW * 4,
        "held.jsonl": ROW,
        "own.toml": "# mine\nsteps = 2\n",
        "photo.png": "a photo",
        "results.json": '{"tasks": {}}',
        "weights/adapter_model.safetensors": "an adapter's",
        "ends/generation_config.json": "{}",
        "old/run.toml": "# no run's\n",
        "steps/200/state": "a checkpoint",
        "events.tensorboard": "a file",
        "logs.jsonl/x": "a folder",
        "empty/model/config.json": "{}",
        "noted.toml": "# mine\n[noted]\nx = 1\n",
        "cut.jsonl": '{"step": 1, "precious numbers\n',
        "mine/data.jsonl": ROW * 4,
        "digests/adapters.sha256": "mine",
        "run/adapters.sha256": f"{'0' * 64}  adapter.bin\n",
        "run/run.toml": '[noted]\nsteps = 1\ndata = "x"\n',
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "linked.jsonl").symlink_to("data.jsonl")
    os.link("data.jsonl", "same.jsonl")
    for name, link in (("locked", ".lock"), ("of-link", "adapters.sha256")):
        (tmp_path / name).mkdir()
        (tmp_path / name / link).symlink_to("../data.jsonl")
        shutil.copy("run/run.toml", name)
    (tmp_path / "link").symlink_to(tmp_path / "new")
    (tmp_path / "room").mkdir()
    (tmp_path / "room-link").symlink_to("room")
    return tmp_path


def content(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


FINETUNE = "finetune model --data data.jsonl"
NEST = "finetune model --full --data data.jsonl"
TRAIN = "train model --data data.jsonl"
REFUSED = {
    f"{FINETUNE} --output data": "--output must be another, got data: its log is {}/data.jsonl, which --data reads",
    f"{TRAIN} --output ./x/../data": "its log is {}/x/../data.jsonl, which --data reads",
    f"{NEST} --output data": "its log is {}/data.jsonl, which --data reads",
    f"{FINETUNE} --output linked": "its log is {}/linked.jsonl, which --data reads",
    f"{FINETUNE} --output same": "its log is {}/same.jsonl, which --data reads",
    f"{FINETUNE} --eval-data held.jsonl --output held": "which --eval-data reads",
    "finetune model --data held.jsonl data.jsonl --output data": "which --data reads",
    "finetune model --data held.jsonl --output data": "--output: {}/data.jsonl:1 must be a line of a log, got",
    f"{FINETUNE} --output own --config own.toml": "--output: {}/own.toml is there and notes no run",
    f"{TRAIN} --output own": "--output: {}/own.toml is there and notes no run",
    f"{FINETUNE} --output logs": "--output: {}/logs.jsonl must be a file, got a folder",
    f"{FINETUNE} --output events --log-to tensorboard": "--output must be a folder to write into, got {}/events.tens",
    f"{FINETUNE} --output model": "--output must be a folder of its own, got model, which MODEL reads",
    f"{FINETUNE} --output weights": "got weights, which has adapter_model.safetensors",
    f"{FINETUNE} --output ends": "got ends, which has generation_config.json",
    f"{FINETUNE} --output new --checkpoints new": "--checkpoints must be a folder of its own, got new, which --output",
    f"{FINETUNE} --output new --checkpoints new.jsonl": "got new.jsonl, which --output writes",
    f"{FINETUNE} --output new --checkpoints new.toml/x": "got new.toml/x, which is in {}/new.toml, of --output",
    f"{FINETUNE} --output ck/new --checkpoints ck": "got ck/new, which is in ck, of --checkpoints",
    f"{FINETUNE} --output ck/run --checkpoints ck": "got ck/run, which is in ck, of --checkpoints",
    f"{FINETUNE} --output new --checkpoints old": "--checkpoints: old/run.toml is there and notes no run",
    f"{FINETUNE} --output new --checkpoints steps": "--checkpoints must be new or have run.toml next to its steps",
    f"{FINETUNE} --output noted": "--output: {}/noted.toml is there and notes no run",
    f"{FINETUNE} --output cut": "--output: {}/cut.jsonl must be a log, got no line that is whole: choose another name",
    "finetune model --data mine/data.jsonl --output new --checkpoints mine": (
        "--checkpoints must be new, empty or of a run, got mine, which has data.jsonl"
    ),
    f"{TRAIN} --output new --checkpoints digests": "must be new, empty or of a run, got digests, which has adapters",
    f"{TRAIN} --output new --checkpoints run": "must be a folder without adapters.sha256 of another program, got run",
    f"{TRAIN} --output new --checkpoints of-link": "without adapters.sha256 of another program, got of-link",
    f"{TRAIN} --output new --checkpoints locked": "--checkpoints must be a folder whose .lock is no link, got locked",
    f"{NEST} --output new --checkpoints new/checkpoints": "got new/checkpoints, which is in new, of --output",
    f"{TRAIN} --output new --checkpoints new/../new/x/y": "got new/../new/x/y, which is in new, of --output",
    f"{TRAIN} --output new --checkpoints link/x": "got link/x, which is in new, of --output",
    f"{TRAIN} --output room-link --checkpoints room/x": "got room/x, which is in room-link, of --output",
    f"{TRAIN} --output empty": "--output must be new or an empty folder, got empty",
    "grpo model --prompts data.jsonl --reward exact --output data": "{}/data.jsonl, which --prompts reads",
    "evaluate model --data data.jsonl --output data.jsonl": "got data.jsonl, which --data reads",
    "evaluate model --data data.jsonl --output linked.jsonl": "got linked.jsonl, which --data reads",
    "evaluate model --data data.jsonl --output results.json": "results.json is there and holds no results",
    "evaluate model --data data.jsonl --output photo.png": "photo.png is there and holds no results",
    "evaluate model --data data.jsonl --output model/config.json": "model/config.json is there and holds no results",
    "demo --out results": "--out: results.json is there and holds no results of this command",
    "demo --out photo": "--out: photo.png is there without photo.json, so it is not the demo's",
    "demo --save empty": "--save must be new or an empty folder, got empty",
    "demo --out weights/x --save weights/x.json": "--save must be a folder of its own, got weights/x.json, which --out",
    "tune --interpret --m 32 --k 16 --n 16 --experts 2 --out data.jsonl": "data.jsonl is no file of tuned",
}


@pytest.mark.parametrize("command", REFUSED)
def test_a_command_that_would_lose_a_file_does_not_begin(command, folder, monkeypatch, capsys):
    def make(*_, **__):
        raise AssertionError("the model is made")

    monkeypatch.setattr(jgg.models, "load", make)
    monkeypatch.setattr(jgg.models, "Decoder", make)
    before = content(folder)
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert REFUSED[command].format(folder) in line
    assert ended.value.code == 2 and content(folder) == before


@pytest.mark.parametrize("command", ["finetune", "train"])
@pytest.mark.parametrize("name", ["", "/", "..", "room/.."])
def test_what_has_no_name_is_no_output(name, command, folder, capsys):
    before = content(folder.parent)
    for option in ("--output", *(("--checkpoints", "--data", "--eval-data") if name == "" else ())):
        with pytest.raises(SystemExit) as ended:
            main([command, "model", "--data", "data.jsonl", "--output", "new", option, name])
        wanted = f"error: argument {option}: must {'be a path' if name == '' else 'end in the name of a folder'}, got "
        assert capsys.readouterr().err == f"jgg {command}: {wanted}{name!r}\n"
        assert ended.value.code == 2 and content(folder.parent) == before


@pytest.mark.parametrize("key", ["output", "data", "checkpoints", "model"])
def test_a_null_byte_in_a_file_of_options_is_named(key, folder, capsys):
    options = {"model": "model", "data": ["data.jsonl"], "output": "new"} | {key: "a\0b"}
    Path("config.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items()))
    with pytest.raises(SystemExit):
        main(["finetune", "--config", "config.toml"])
    where = f"argument {key if key == 'model' else f'--{key}'}"
    message = f"jgg finetune: error: --config config.toml: {where}: must have no null byte, got 'a\\x00b'\n"
    assert capsys.readouterr().err == message


def test_a_folder_within_one_that_must_be_empty_is_refused(folder, capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--out", "room/demo", "--save", "room"])
    assert "--out must be another, got room/demo: " in capsys.readouterr().err
    assert not any(Path("room").iterdir())


def test_paths_are_compared_by_what_they_lead_to(folder):
    for path in ("linked.jsonl", "same.jsonl", "./model/../data.jsonl", folder / "data.jsonl"):
        assert is_same(Path(path), Path("data.jsonl"))
    assert is_same(Path("link/x/y"), Path("new/x/y")) and not is_same(Path("link/x"), Path("new/y"))
    assert is_inside(Path("link/x/y"), Path("new")) and not is_inside(Path("newer/x"), Path("new"))
    assert not is_inside(Path("new"), Path("new"))


def test_a_log_does_not_replace_data(folder):
    with pytest.raises(FileExistsError, match=r'held\.jsonl:1 must be a line of a log, got \{"step": 1, "text": '):
        jgg.train.Log("held.jsonl")
    log = jgg.train.Log("run.jsonl")
    Path("run.jsonl").write_text(ROW)  # since it was looked at
    with pytest.raises(FileExistsError, match=r"run\.jsonl:1 must be a line of a log"):
        log.write(1, {"loss": 1.0})
    assert Path("run.jsonl").read_text() == ROW and Path("held.jsonl").read_text() == ROW


def test_a_log_with_a_damaged_line_goes_on(folder):
    Path("run.jsonl").write_bytes(LOG.encode() + b"\xff\n")
    with jgg.train.Log("run.jsonl") as log:
        log.write(2, {"loss": 1.5})
    assert Path("run.jsonl").read_text() == '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 1.5}\n'


@pytest.fixture
def untrained(monkeypatch):
    """Models are trained at once; what this is set to runs meanwhile."""
    meanwhile = []

    def fit(run, model, wrt):
        folders.note(run.args, run.noted)
        for other in [meanwhile.pop()] if meanwhile else []:
            other()
        return model, 0

    monkeypatch.setattr(loop, "fit", fit)
    return meanwhile


def finetune(*options):
    return main([*FINETUNE.split(), "--steps", "3", "--batch-size", "1", "--quiet", *options])


@pytest.mark.parametrize("options", [["--output", "new"], ["--output", "new", "--full"], ["--output", "room"]])
def test_of_two_runs_at_once_neither_result_is_lost(options, folder, untrained, capsys):
    name, before = options[1], {}

    def other():
        assert finetune(*options, "--seed", "5") == 0
        before.update(content(folder / name))

    untrained.append(other)
    assert finetune(*options) == 0
    told = f"jgg: {name} was taken while this run went on, so its result is in {folder / name}-2\n"
    assert capsys.readouterr().err == told
    assert before and content(folder / name) == before
    own = content(folder / f"{name}-2")
    assert {path.name for path in own} == {path.name for path in before}
    assert not any(path.name.startswith(".") for path in folder.iterdir())
    if "--full" not in options:
        assert (
            own[folder / f"{name}-2/adapter_model.safetensors"] != before[folder / name / "adapter_model.safetensors"]
        )


def test_only_the_run_of_the_checkpoints_replaces_its_adapter(folder, untrained, capsys):
    """Nor does another run in the same folder of checkpoints."""
    first, other = ("--output", "a", "--checkpoints", "ck"), ("--output", "b", "--seed", "5")
    assert finetune(*first) == finetune(*other) == 0
    (folder / "ck" / "3").mkdir()
    before = content(folder)
    with pytest.raises(SystemExit):
        finetune("--output", "b", "--checkpoints", "ck")
    assert "unless a run goes on, got b, which has an adapter" in capsys.readouterr().err
    assert content(folder) == before
    assert finetune(*first) == 0
    shutil.rmtree("ck/3")
    assert finetune("--output", "c", "--checkpoints", "ck", "--seed", "5") == 0
    (folder / "ck" / "3").mkdir()
    with pytest.raises(SystemExit):
        finetune(*first, "--seed", "5")
    shutil.copy("a/adapter_model.safetensors", "c")
    with pytest.raises(SystemExit):
        finetune("--output", "c", "--checkpoints", "ck", "--seed", "5")


def test_a_run_that_another_keeps_from_its_checkpoints_writes_nothing(folder, capsys):
    """The other has no checkpoint yet, and its own command must still go on."""
    args = parse([*FINETUNE.split(), "--output", "a", "--checkpoints", "ck"])
    folders.note(args, folders.noted_of(3, "abc", datetime.date.today()))
    (folder / "ck/adapters.sha256").write_text(f"{'0' * 64}\n")
    with folder_lock(folder / "ck"):
        before = content(folder)
        with pytest.raises(SystemExit, match="must be a folder that no other run uses"):
            finetune("--output", "b", "--checkpoints", "ck", "--seed", "5")
        assert content(folder) == before


def test_checkpoints_in_the_folder_of_an_adapter_go_on(folder, untrained):
    arguments = "--output", "new", "--checkpoints", "new/checkpoints"
    assert finetune(*arguments) == 0
    (folder / "new/checkpoints/3").mkdir()
    before = content(folder / "new")
    assert finetune(*arguments) == 0
    assert {path.name for path in content(folder / "new")} == {path.name for path in before}


def test_the_file_of_config_stays_as_it_is(folder, untrained, capsys):
    """That of the run that goes on is its own; one with other options is not written over."""
    assert finetune("--output", "a", "--checkpoints", "ck") == 0
    (folder / "ck/3").mkdir()
    for name in ("a.toml", "ck/run.toml"):
        notes = folder / name
        notes.write_text("# mine\n" + notes.read_text())
        before = notes.read_text()
        assert main(["finetune", "--config", name]) == 0
        assert notes.read_text() == before
    shutil.rmtree("a")
    with pytest.raises(SystemExit):
        main(["finetune", "--config", "a.toml", "--seed", "1", "--checkpoints", "new"])
    message = "--config must be another file, got {}/a.toml, where a run with other options would note them: seed is 1"
    assert message.format(folder) in capsys.readouterr().err
    assert (folder / "a.toml").read_text().startswith("# mine\n")


def test_results_of_the_same_command_are_replaced(folder, monkeypatch):
    from jgg.cli.evaluation import run

    own = {"versions": {}, "options": {}, "data": {}, "tasks": None}
    Path("own.json").write_text(json.dumps(own))
    monkeypatch.setattr(run, "_tell", lambda *_: 7)
    monkeypatch.setattr(run, "Texts", lambda file, *_: type("T", (), {"file": file, "measured": lambda *_: None})())
    assert main(["evaluate", "model", "--data", "data.jsonl", "--output", "own.json"]) == 7
