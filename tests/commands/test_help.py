"""Help, versions and mistakes: shown before JAX is imported, of options that offer what jgg has."""

import importlib
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import jgg
from jgg.cli import arguments as types
from jgg.cli import bench, parsing
from jgg.cli.commands import COMMANDS
from jgg.cli.demo.model import HEAD_DIM
from jgg.core.choices import OPS
from jgg.core.quantized import E4M3
from jgg.tuning import search, workloads
from tests.support.processes import ROOT

# runs the command as installed, and says in the end whether it imported JAX
PROGRAM = """
import sys
import jgg.cli
try:
    jgg.cli.main()
finally:
    print("imported:", *sorted({"jax", "jaxlib", "numpy", "rich"} & set(sys.modules)))
"""


def run(*arguments):
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def option(command, name):
    return COMMANDS[command].declared()[name]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_needs_no_jax(arguments):
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    description = COMMANDS[arguments[0]].__doc__ if len(arguments) > 1 else "Show versions, devices"
    *text, last = done.stdout.splitlines()
    assert description in " ".join(" ".join(text).split())
    assert last == "imported:"
    assert not done.stderr


@pytest.mark.parametrize("command", ["finetune", "train"])
def test_help_shows_of_a_flag_what_changes_something(command, capsys):
    with pytest.raises(SystemExit):
        parsing.parse([command, "--help"])
    text = capsys.readouterr().out
    flags = {name: each for name, each in COMMANDS[command].declared().items() if isinstance(each.default, bool)}
    assert {"split", "packing", "quiet"} <= flags.keys()
    needed = [command, "m", "--data", "d", "--output", "o"]
    for name, each in flags.items():
        on, off = each.flag(name), f"--no-{each.flag(name)[2:]}"
        shown, hidden = (off, on) if each.default else (on, off)
        assert f"  {shown} " in text.replace("\n", " ") and f"[{shown}]" in text
        assert f"  {hidden}" not in text and f"{hidden}]" not in text
        meaning = f"{shown} {'do not ' if each.default else ''}{each.what}"
        assert meaning in " ".join(text.split())
        assert getattr(parsing.parse([*needed, on]), name) is True
        assert getattr(parsing.parse([*needed, off]), name) is False
    assert "default: True" not in text and "default: False" not in text


def test_the_version_needs_no_jax():
    done = run("--version")
    assert done.stdout.splitlines() == [f"jgg {jgg.__version__}", "imported:"]


@pytest.mark.parametrize("arguments", [["frobnicate"], ["bench", "--groups", "odd"]])
def test_mistakes_are_told_without_jax(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == "imported:\n"
    assert re.fullmatch(r"jgg( bench)?: error: argument .*\n", done.stderr)


def test_each_command_has_a_module_and_a_page():
    for name, options in COMMANDS.items():
        assert inspect.isfunction(importlib.import_module(options.module).run)
        assert options.example.startswith(f"jgg {name}")
        page, _, heading = options.page.partition("/")
        text = (ROOT / "docs" / f"{page}.md").read_text()
        assert heading in ("", *(f"#{each.lower().replace(' ', '-')}" for each in re.findall("^#+ (.*)$", text, re.M)))


def test_an_example_is_a_command_line():
    for options in COMMANDS.values():
        assert type(parsing.parse(shlex.split(options.example)[1:])) is options


def test_options_offer_what_jgg_has():
    gemm_in_fp8 = workloads.gemm(num_rows=1, in_features=1, out_features=1, num_experts=1, dtype=E4M3)
    assert all(op in option("bench", "op").what for op in bench.OPS)
    own, in_fp8 = map(",".join, (OPS, search.ops_of(gemm_in_fp8)))
    assert option("tune", "op").shown.startswith(f"{own}; in fp8 only {in_fp8}, ")
    assert option("demo", "hidden").what.endswith(f"a multiple of {HEAD_DIM}")


def options_of(kind):
    """(command, option) of each option of a type."""
    return [
        (command, each.flag(name))
        for command, options in COMMANDS.items()
        for name, each in options.declared().items()
        if each.settings.get("type") is kind
    ]


def refused(capsys, *arguments):
    """The last line that the parser prints as it refuses them."""
    with pytest.raises(SystemExit) as error:
        parsing.parse(arguments)
    assert error.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_every_number_has_a_type_that_says_its_bounds():
    assert not options_of(int) and not options_of(float)
    counts = options_of(types.positive_int)
    assert ("demo", "--steps") in counts and ("tune", "--workers") in counts
    assert options_of(types.seed)[:2] == [("demo", "--seed"), ("bench", "--seed")]


def test_a_value_may_be_two_dashes(capsys):
    args = parsing.parse(["generate", "m", "--prompt=--", "--stop=--", "--stop", "x"])
    assert (args.prompt, args.stop) == ("--", ["--", "x"])
    assert parsing.parse(["evaluate", "m", "--data=--"]).data == [Path("--")]
    with pytest.raises(SystemExit):
        parsing.parse(["generate", "m", "--max-new-tokens=--"])
    assert "--max-new-tokens: must be a whole number, got '--'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        *((types.positive_int, value, "must be 2147483647 or less, got") for value in ("2147483648", "9" * 20)),
        *((types.seed, value, "must be 4294967295 or less, got") for value in ("4294967296", "9" * 20)),
        (types.seed, "-1", "must be 0 or more, got -1"),
        (types.seed, "1.5", "must be a whole number, got '1.5'"),
        *((types.positive_float, value, "must be greater than 0 and finite, got") for value in ("inf", "1e999", "nan")),
    ],
)
def test_numbers_that_nothing_computes_with_are_refused(kind, value, message, capsys):
    assert options_of(kind)
    for command, option in options_of(kind):
        assert f"argument {option}: {message}" in refused(capsys, command, f"{option}={value}")


@pytest.mark.parametrize("name", ["/", ".", "..", "", "{folder}/", "{folder}/.", "{folder}/.."])
def test_out_is_no_folder(name, tmp_path, capsys):
    name = name.format(folder=tmp_path)
    commands = [command for command, options in COMMANDS.items() if "out" in options.declared()]
    assert commands == ["demo", "tune"]
    for command in commands:
        message = f"argument --out: must end in the name of a file, not of a folder, got {name!r}"
        assert message in refused(capsys, command, "--out", name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["run", ".run", "run.1", "..run", "{folder}/run"])
def test_out_is_a_prefix(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = name.format(folder=tmp_path)
    assert parsing.parse(["demo", "--out", name]).out == name
