"""What commands print where: JSON for programs, scripts for shells, one line for a mistake."""

import json
import shutil
import subprocess
import sys

import pytest

from jgg.cli import main, scale
from jgg.cli.console import progress
from jgg.measuring.strategies import Strategy
from jgg.measuring.workloads import Layer
from tests.support import processes
from tests.support.processes import ROOT

SIZES = ["--m", "32", "--k", "16", "--n", "16", "--experts", "2"]


def run(*arguments, prelude="", **options):
    """The command as installed, in a process of its own."""
    program = f"import sys; {prelude}; import _jgg_command; sys.exit(_jgg_command.main())"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, **options)


def test_bench_prints_json_as_it_writes_it(tmp_path, capsys):
    out = tmp_path / "bench"
    options = ["--op", "forward", "--peers", "none", "--json", "--quiet"]
    assert main(["bench", *SIZES, *options, "--out", str(out)]) == 0
    output = capsys.readouterr().out
    assert output == out.with_suffix(".json").read_text()
    assert json.loads(output)["rows"][0]["op"] == "forward"


def test_scale_prints_json_as_it_writes_it(tmp_path, monkeypatch, capsys):
    row = scale.StrategyRow(Strategy(), 0.5, 8, 0.0, 0, 1.0, 0.0)
    monkeypatch.setattr(scale, "measure", lambda *_: row)
    layer, path = Layer("small", 8, 16, 16, 4, 2), tmp_path / "scale.json"
    assert scale.run_all(layer, [Strategy()], "float32", 1, path, as_json=True) == 0
    output = capsys.readouterr().out
    assert output == path.read_text()
    assert json.loads(output)["measurements"][0]["seconds"] == 0.5


@pytest.mark.interpret
def test_tune_prints_json(tmp_path, capsys):
    out = tmp_path / "tuned.json"
    options = ["--op", "forward", "--w-layout", "enk", "--dtype", "float32", "--interpret", "--workers", "1", "--json"]
    assert main(["tune", *SIZES, *options, "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    (search,), (entry,) = found["searches"], json.loads(out.read_text())["entries"]
    assert found["file"] == str(out)
    assert search["name"] == "32x16x16 forward enk" and search["trials"] > 1
    assert {name: search[name] for name in entry} == entry


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_options_and_layers(shell, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("bench", "--w-layout" if shell != "fish" else "w-layout", "mixtral-8x7b"))
    program = shutil.which(shell)
    if program:
        subprocess.run([program, "-n"], input=script, text=True, check=True)


def test_without_shtab_completion_says_what_installs_it():
    done = run("completion", "bash", prelude="sys.modules['shtab'] = None")
    assert done.returncode == 1
    assert done.stderr.endswith("jgg: shtab is not installed: pip install 'jgg[completion]'\n")


def test_progress_shows_its_counts_beside_a_long_text(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with progress(600) as tell:
        tell("word " * 30, 600)
    assert "600/600 0:00:00" in capsys.readouterr().err


MISTAKES = {
    "folder": (["scale", "--out", "/proc/scale"], "--out: /proc/scale is in /proc, which takes no files"),
    "word": (["scale", "--steps", "many"], "--steps: must be a whole number, got 'many'"),
    "fraction": (["scale", "--buffer-factor", "big"], "--buffer-factor: must be a number, got 'big'"),
    "file": (["tune", *SIZES, "--interpret", "--out", "pyproject.toml"], "--out: pyproject.toml is no file of tuned"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_in_a_line(arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_platform_that_there_is_not_is_named_in_a_line(monkeypatch, capsys):
    def devices(*_):
        raise RuntimeError("Unable to initialize backend 'foo': it is not known")

    monkeypatch.setattr("jax.device_count", devices)
    assert main(["scale"]) == 1
    assert capsys.readouterr().err.startswith("jgg: Unable to initialize backend 'foo': it is not known\nSee jgg info")


def test_a_platform_that_is_not_installed_is_named_in_a_line(monkeypatch, capsys):
    def devices(*_):
        raise AssertionError  # as JAX does where JAX_PLATFORMS is cuda and there is no plugin

    monkeypatch.setattr("jax.device_count", devices)
    with pytest.raises(AssertionError):  # not for want of a device
        main(["scale"])
    monkeypatch.setattr("jax.devices", devices)
    assert main(["scale"]) == 1
    assert capsys.readouterr().err == "jgg: JAX has no device.\nSee jgg info for what to mend.\n"


def test_other_errors_keep_their_traceback(monkeypatch):
    def devices(*_):
        raise RuntimeError("Something else")

    monkeypatch.setattr("jax.device_count", devices)
    with pytest.raises(RuntimeError, match="Something else"):
        main(["scale"])


def test_a_reader_may_stop_early():
    with processes.start("-m", "jgg", "completion", "bash") as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert "Traceback" not in errors and "BrokenPipeError" not in errors
