"""Options from the file of --config, under those of the command line; what is wrong is one line."""

import argparse
import datetime
import itertools
import tomllib

import pytest

from jgg.cli.commands import COMMANDS
from jgg.cli.declarations import Flag
from jgg.cli.errors import UsageError
from jgg.cli.parsing import parse
from jgg.cli.training import folders
from jgg.train import runs

NEEDED = "--data", "d.jsonl", "--output", "out"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(text, *arguments, command="finetune"):
    with open("run.toml", "w") as file:
        file.write(text)
    return parse([command, *arguments, "--config", "run.toml"])


def test_the_command_line_comes_before_the_file_and_the_file_before_defaults():
    text = 'model = "m"\nsteps = 7\nlora-rank = 4\nlearning_rate = 1e-05\npacking = false\ntargets = ["w_q", "w_k"]\n'
    args = options(text + "[noted]\nsteps = 9\n", "--steps", "8", *NEEDED)
    assert (args.command, args.model, args.steps, args.lora_rank, args.seed) == ("finetune", "m", 8, 4, 0)
    assert (args.learning_rate, args.packing, args.targets) == (1e-5, False, ["w_q", "w_k"])
    args = options(text, "other", "--packing", "--targets", "w_o", *NEEDED)
    assert (args.model, args.steps, args.packing, args.targets) == ("other", 7, True, ["w_o"])


def arguments_of(name, option):
    """A command line with a value of an option that is not its default."""
    flag = option.flag(name)
    if option.action is Flag:
        return [f"--no-{flag.removeprefix('--')}" if option.default else flag]
    if option.action == "store_true":
        return [flag]
    for value in (*reversed(option.settings.get("choices", ())), "3", "0.25", "x"):
        try:
            is_other = option.settings.get("type", str)(value) != option.default
        except argparse.ArgumentTypeError:
            continue
        if is_other:
            return [value] if option.is_place else [flag, value, value][: 3 if option.settings.get("nargs") else 2]
    raise AssertionError(name)


@pytest.mark.parametrize("command", ["finetune", "train", "generate", "evaluate", "grpo"])
def test_each_option_of_a_command_may_stand_in_a_file(command, folder):
    left_out = {"config", "prompt_file"}  # the last is not given with --prompt
    known = {name: each for name, each in COMMANDS[command].declared().items() if name not in left_out}
    wanted = vars(parse([command, *itertools.chain(*(arguments_of(name, each) for name, each in known.items()))]))
    assert all(wanted[name] != each.default for name, each in known.items())
    runs.note_run(folder / "own.toml", {name: wanted[name] for name in known}, {})
    assert known.keys() == tomllib.loads((folder / "own.toml").read_text()).keys() - {"noted"}
    found = vars(parse([command, "--config", "own.toml"]))
    assert {name: found[name] for name in known} == {name: wanted[name] for name in known}


def test_an_option_that_is_not_known_is_told_by_the_command(capsys):
    with pytest.raises(SystemExit) as raised:
        parse(["finetune", "m", *NEEDED, "--learning-rat", "1"])
    told = "jgg finetune: error: unrecognized arguments: --learning-rat 1: jgg finetune --help lists the options\n"
    assert (raised.value.code, capsys.readouterr().err) == (2, told)


def test_an_option_in_the_place_of_another_takes_it_from_the_file_too():
    text = 'model = "m"\nsteps = 7\nepochs = 2.0\n'
    args = options(text, *NEEDED, "--epochs", "1")
    assert (args.steps, args.epochs) == (None, 1.0)  # though 1 is the default
    args = options(text, *NEEDED, "--seed", "3")
    assert (args.steps, args.epochs) == (7, 2.0)
    args = options(text, *NEEDED, "--steps", "8")
    assert (args.steps, args.epochs) == (8, 1.0)
    text = 'model = "m"\nprompt = "a"\nstop = ["b", "c"]\n'
    args = options(text, "--prompt-file", "d", "--stop", "e", command="generate")
    assert (args.prompt, str(args.prompt_file), args.stop) == (None, "d", ["e"])
    args = options(text, command="generate")
    assert (args.prompt, args.prompt_file, args.stop) == ("a", None, ["b", "c"])


def test_what_a_run_writes_is_a_file_of_its_options(folder):
    (folder / "m").mkdir()
    arguments = ["train", "m", "--data", "a b.jsonl", 'c"\n\\é😀\x7f', "--output", "o", "--mix", "1", "0.5"]
    args = parse([*arguments, "--weight-decay", "1e-9", "--no-packing", "--log-to", "tensorboard"])
    settings = args.noted()
    runs.note_run(folder / "out.toml", settings, {"steps": 3, "nothing": None})
    again = parse(["train", "--config", "out.toml"])
    assert again.noted() == settings
    assert settings["data"] == [folder / "a b.jsonl", folder / 'c"\n\\é😀\x7f']
    assert tomllib.loads((folder / "out.toml").read_text())["noted"] == {"steps": 3}


def test_a_run_that_goes_on_keeps_the_day_on_which_it_began(folder):
    """Chat templates such as gpt-oss's write the date: else its data would be others on the next day."""
    (folder / "m").mkdir()
    args = parse(["train", "m", "--data", "d", "--output", "o", "--checkpoints", "c"])
    today, earlier = datetime.date.today(), datetime.date(2024, 2, 29)
    assert folders.first_day(args) == today
    noted = folders.noted_of(9, "abc", earlier)
    folders.note(args, noted)
    assert folders.first_day(args) == today  # nothing is saved yet
    (folder / "c" / "12").mkdir()
    assert folders.first_day(args) == earlier
    folders.note(args, noted)
    with pytest.raises(UsageError, match=r"date is .*, was 2024-02-29"):
        folders.check_same(args, folders.noted_of(9, "abc", today))
    assert folders.first_day(parse(["train", "m", "--data", "d", "--output", "o"])) == today


WRONG = {
    "steps = 0": "argument --steps: must be 1 or more, got 0",
    "steps = 1.5": "argument --steps: must be a whole number, got '1.5'",
    'remat = "some"': "argument --remat: invalid choice: 'some'",
    "packing = 1": "argument --packing: must be true or false, got 1",
    "speed = 1": "speed must be the name of an option, which jgg finetune --help lists",
    'config = "run.toml"': "config must be the name of an option",
    "steps =": "must be a TOML file: Invalid value",
    "targets = []": "argument --targets: expected at least one argument",
    "seed = [1, 2]": "argument --seed: must be one value, got [1, 2]",
    "seed = {a = 1}": "argument --seed: must be one value, got {'a': 1}",
    "model = ['m', 'n']": "argument model: must be one value, got ['m', 'n']",
    "lora-rank = 4\nlora_rank = 8": "lora-rank must be given once, got lora_rank too",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_named(text, capsys):
    with pytest.raises(SystemExit) as ended:
        options(text, "m", *NEEDED)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"jgg finetune: error: --config run.toml: {WRONG[text]}")


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["finetune"], "MODEL, --data, --output"),
        (["train", "--data", "d"], "CONFIG, --output"),
        (["finetune", "m", "--output", "o"], "--data"),
        (["evaluate", "--data", "d"], "MODEL"),
    ],
)
def test_what_is_missing_is_named(arguments, missing, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    message = f"jgg {arguments[0]}: error: the following arguments are required: {missing}\n"
    assert capsys.readouterr().err == message


def test_a_file_that_is_missing_is_named(capsys):
    with pytest.raises(SystemExit):
        parse(["train", "m", *NEEDED, "--config", "missing.toml"])
    assert "--config missing.toml: must be a file that can be read: No such file" in capsys.readouterr().err


def test_changed_options_are_named(folder):
    path, before = folder / "run.toml", {"rank": 4, "targets": ["w_q"], "model": folder / "m", "rate": 0.1, "old": 1}
    runs.note_run(path, before, {"steps": 3})
    assert runs.changes(path, before, {"steps": 3}) == []
    now = {"rank": 5, "targets": ("w_q", "w_k"), "model": folder / "m", "rate": None, "new": True}
    found = runs.changes(path, now, {"steps": 4}, free={"old"})
    wanted = ["rank is 5, was 4", "targets is ['w_q', 'w_k'], was ['w_q']", "new is True, was None"]
    assert found == [*wanted, "rate is None, was 0.1", "steps is 4, was 3"]
    path.write_text("{")
    with pytest.raises(ValueError, match=r"run\.toml must be a TOML file"):
        runs.changes(path, now, {})
