"""What commands print where: JSON for programs, one line for a mistake or for what cannot be written."""

import json
import os
import re
import sys
import tempfile

import pytest

from jgg.cli import info, main
from jgg.cli.console import progress
from tests.support.processes import ROOT

SIZES = ["--m", "32", "--k", "16", "--n", "16", "--experts", "2"]
NO_SPACE = OSError(28, "No space left on device")


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


def test_progress_shows_its_counts_beside_a_long_text(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress(600) as tell:
        tell("word " * 30, 600)
    assert "600/600 0:00:00" in re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", capsys.readouterr().err)


def test_progress_is_shown_on_a_terminal_alone(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as notebooks set it for the commands that they run
    with progress(600) as tell:
        tell("word", 600)
    assert capsys.readouterr().err == ""


MISTAKES = {
    "folder": (["demo", "--out", "/proc/demo"], "--out: /proc/demo is in /proc, which takes no files"),
    "word": (["demo", "--steps", "many"], "--steps: must be a whole number, got 'many'"),
    "fraction": (["demo", "--temperature", "big"], "--temperature: must be a number, got 'big'"),
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


def fail_with(monkeypatch, error):
    """The command `jgg info` raises this error."""

    def gather():
        raise error

    monkeypatch.setattr(info, "gather", gather)


def test_a_platform_that_there_is_not_is_named_in_a_line(monkeypatch, capsys):
    fail_with(monkeypatch, RuntimeError("Unable to initialize backend 'foo': it is not known"))
    assert main(["info"]) == 1
    assert capsys.readouterr().err.startswith("jgg: Unable to initialize backend 'foo': it is not known\nSee jgg info")


def test_a_platform_that_is_not_installed_is_named_in_a_line(monkeypatch, capsys):
    def devices(*_):
        raise AssertionError  # as JAX does where JAX_PLATFORMS is cuda and there is no plugin

    fail_with(monkeypatch, AssertionError())
    with pytest.raises(AssertionError):  # not for want of a device
        main(["info"])
    monkeypatch.setattr("jax.devices", devices)
    assert main(["info"]) == 1
    assert capsys.readouterr().err == "jgg: JAX has no device.\nSee jgg info for what to fix.\n"


@pytest.mark.parametrize("error", [RuntimeError("Something else"), NO_SPACE], ids=["any", "of a file"])
def test_other_errors_keep_their_traceback(error, monkeypatch):
    fail_with(monkeypatch, error)
    with pytest.raises(type(error), match=str(error.args[-1])):
        main(["info"])


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_stdout_that_is_full_is_named_in_a_line(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["info"]) == 1
    assert capsys.readouterr().err == "jgg: could not write stdout: No space left on device\n"


def test_a_reader_may_stop_early(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["info"]) == 1
    assert capsys.readouterr().err == ""


def test_without_room_for_temporary_files_commands_run(monkeypatch, capsys):
    def no_room():
        raise NO_SPACE

    monkeypatch.setattr(tempfile, "TemporaryFile", no_room)
    assert main(["info"]) == 0
    printed = capsys.readouterr()
    assert (printed.out[:9], printed.err) == ("Versions\n", "")
