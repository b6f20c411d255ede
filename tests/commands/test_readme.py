"""The commands in README and the pages are accepted, and README's run unchanged."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from jgg.cli.parsing import make_parser
from tests.support.processes import ROOT

PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


def blocks(path):
    """The shell's blocks of a page, with lines that go on joined."""
    found = re.findall(r"^```sh\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    return [block.replace("\\\n", " ") for block in found]


def commands(path):
    """The arguments of each call of jgg on a page."""
    for line in "".join(blocks(path)).splitlines():
        if line.startswith("jgg "):
            words = shlex.split(re.split(" [|>]", line)[0], comments=True)
            yield [word for word in words[1:] if word != "..."]


def test_commands_of_pages_are_taken(capsys):
    shown = [(path.name, words) for path in PAGES for words in commands(path)]
    assert {words[0] for _, words in shown} >= {"demo", "finetune", "generate", "info", "train", "tune"}
    parser = make_parser()
    for page, words in shown:
        try:
            parser.parse_args(words)
        except SystemExit as error:
            assert error.code == 0, f"{page}: jgg {shlex.join(words)}: {capsys.readouterr().err}"


@pytest.mark.sweep
def test_lines_of_readme_run_in_a_checkout(tmp_path):
    (lines,) = [block for block in blocks(ROOT / "README.md") if "jgg finetune" in block]
    command = tmp_path / "bin" / "jgg"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m jgg "$@"\n')
    command.chmod(0o755)
    environment = os.environ | {"PATH": f"{command.parent}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(["sh", "-e"], input=lines, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "hello"
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.sweep
@pytest.mark.xdist_group("packaging")
def test_lines_of_readme_run_with_pips_package_in_an_empty_environment(tmp_path):
    """It installs the packages that jgg needs from where pip finds them: that takes minutes, and gigabytes on disk."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "site", "*.egg-info")
    source = shutil.copytree(ROOT, tmp_path / "source", symlinks=True, ignore=ignored)
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path / "dist"]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    environment = os.environ | {"PYTHON": sys.executable}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        ["sh", source / "tools/try_package.sh", wheel], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"README.md's commands run with {wheel.name}" in done.stdout
