"""The command line: what it prints, writes and refuses."""

import dataclasses
import json
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers

import jgg.models
from jgg.cli import info, main, options
from jgg.cli.demo import report
from jgg.cli.demo.preset import load_texts
from jgg.cli.info import Device, Facts, TunedEntries, TunedFile, gather
from jgg.cli.training import loop
from jgg.train import TrainingError
from tests.support.processes import ROOT

pytestmark = pytest.mark.xdist_group("cli")  # one worker compiles what they share

VERSIONS = {
    "jgg": jgg.__version__,
    "python": "3.12.1",
    "jax": "0.11.2",
    "jaxlib": "0.11.2",
    "jax-triton": "0.4.1",
    "triton": "3.9.0",
    "jax-cuda12-plugin": "0.11.2",
    "jax-cuda13-plugin": None,
    "jax-cuda12-pjrt": "0.11.2",
    "jax-cuda13-pjrt": None,
    "flax": "0.12.1",
}
CPU = Device("cpu", "cpu")
H100 = Device("cuda", "NVIDIA H100", "9.0", 132, 80 * 2**30)
A100 = Device("cuda", "NVIDIA A100", "8.0", 108, 80 * 2**30)
V100 = Device("cuda", "Tesla V100", "7.0", 80, 16 * 2**30)


def facts(device=CPU, versions=None, **changes):
    """A Linux machine on which every package is as it should be, but for the changes."""
    defaults = {"system": "Linux", "has_nvidia_gpu": device is not CPU}
    return Facts(versions=VERSIONS | (versions or {}), devices=(device,), **(defaults | changes))


NO_TRITON = {"triton": None, "jax-triton": None}
NO_PJRT = {"jax-cuda12-pjrt": None}
INSTALL_TRITON = "pip install 'triton>=3.7.1' 'jax-triton>=0.4.1,<0.5'"
# name: (facts, implementation, part of the reason, commands)
ASSESSMENTS = {
    "GPU": (facts(H100), "triton", "compute capability 9.0", []),
    "CPU": (facts(versions=NO_PJRT), "xla", "no NVIDIA GPU", []),
    "CPU without Triton": (facts(versions=NO_TRITON | NO_PJRT), "xla", "no NVIDIA GPU", []),
    "what looks for a GPU where there is none": (facts(), "xla", "no NVIDIA GPU", ["pip uninstall -y jax-cuda12-pjrt"]),
    "the same for CUDA 13": (
        facts(versions=NO_PJRT | {"jax-cuda13-pjrt": "0.11.2"}),
        "xla",
        "no NVIDIA GPU",
        ["pip uninstall -y jax-cuda13-pjrt"],
    ),
    "the same, told not to look": (facts(jax_platforms="cpu"), "xla", "no NVIDIA GPU", []),
    "old GPU": (facts(V100), "xla", "need 8.0", []),
    "macOS": (facts(versions=NO_PJRT, system="Darwin"), "xla", "Linux only", []),
    "no Triton": (facts(H100, NO_TRITON), "xla", "triton and jax-triton", [INSTALL_TRITON]),
    "old Triton": (
        facts(H100, {"triton": "3.6.1"}),
        "triton",
        "compute capability 9.0",
        ["pip install 'triton>=3.7.1'"],
    ),
    "Triton without the hopper kernels": (
        facts(H100, {"triton": "3.8.0"}),
        "triton",
        "without the hopper kernels, the fastest: triton 3.8.0 was not tested with them, only 3.9",
        [],
    ),
    "the same on a GPU that has none": (facts(A100, {"triton": "3.8.0"}), "triton", "compute capability 8.0", []),
    "new JAX": (
        facts(H100, {"jax": "0.13.0", "jaxlib": "0.13.0", "jax-cuda12-plugin": "0.13.0"}),
        "triton",
        "compute capability 9.0",
        ["pip install 'jax>=0.11.1,<0.13'"],
    ),
    "no plugin": (
        facts(versions={"jax-cuda12-plugin": None}, has_nvidia_gpu=True),
        "xla",
        "plugin is not installed",
        ["pip install 'jgg[cuda12]'"],
    ),
    "a plugin that only compiles": (
        facts(versions=NO_PJRT, has_nvidia_gpu=True),
        "xla",
        "plugin is not installed",
        ["pip install 'jgg[cuda12]'"],
    ),
    "plugin of another version": (
        facts(
            versions=NO_PJRT | {"jax-cuda12-plugin": None, "jax-cuda13-plugin": "0.11.1", "jax-cuda13-pjrt": "0.11.1"},
            has_nvidia_gpu=True,
        ),
        "xla",
        "another version",
        ["pip install 'jgg[cuda13]'"],
    ),
    "GPU hidden": (facts(has_nvidia_gpu=True, jax_platforms="cpu"), "xla", "JAX_PLATFORMS", ["unset JAX_PLATFORMS"]),
    "GPU unusable": (
        facts(has_nvidia_gpu=True),
        "xla",
        "no CUDA device",
        ["python -c 'import jax; jax.devices(\"cuda\")'"],
    ),
    "no backend": (
        dataclasses.replace(facts(versions=NO_PJRT), devices=(), backend_error="Unable to initialize cuda"),
        "xla",
        "no NVIDIA GPU",
        ["unset JAX_PLATFORMS"],
    ),
}


@pytest.mark.parametrize("name", ASSESSMENTS)
def test_info_says_what_runs_and_what_mends(name, monkeypatch, capsys):
    machine, implementation, reason, commands = ASSESSMENTS[name]
    monkeypatch.setattr(info, "gather", lambda: machine)

    assert main(["info", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["implementation"] == implementation
    assert reason in output["reason"]
    assert [problem["command"] for problem in output["problems"]] == commands

    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"  {implementation}: {output['reason']}" in lines
    assert [line.strip() for line in lines if line.startswith("    ")] == commands


def test_info_tells_which_tuned_files_serve_this_device(monkeypatch, capsys):
    files = (
        TunedFile("own.json", entries=(TunedEntries("NVIDIA H100", "9.0", 2), TunedEntries("NVIDIA B200", "10.0", 3))),
        TunedFile("bad.json", damage="bad.json is damaged"),
        TunedFile("shipped.json", entries=(TunedEntries("NVIDIA H200", "9.0", 100),)),
    )
    monkeypatch.setattr(info, "gather", lambda: facts(H100, tuned_files=files))
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  own.json: 2 measured on NVIDIA H100" in lines
    assert "  own.json: 3 measured on NVIDIA B200, not used here" in lines
    assert "  ignored: bad.json is damaged" in lines
    assert (
        "  shipped.json: 100 measured on NVIDIA H200, used here too: NVIDIA H100 has the same multiprocessor" in lines
    )
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tuned_files"]
    assert found[2]["entries"] == [{"device": "NVIDIA H200", "compute_capability": "9.0", "count": 100}]


def test_info_reads_the_tuned_files(monkeypatch, tmp_path):
    path = tmp_path / "tuned.json"
    monkeypatch.setenv("JGG_TUNED", str(path))
    assert path not in [Path(file.path) for file in gather().tuned_files]
    path.write_text("{")
    damaged = gather().tuned_files[0]
    assert (damaged.path, damaged.entries) == (str(path), ())
    assert "tuned.json is no file of tuned configurations" in damaged.damage


def test_info_of_this_machine(capsys):
    assert main(["info", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["versions"]["jax"] == jax.__version__
    assert [device["kind"] for device in output["devices"]] == [device.device_kind for device in jax.local_devices()]


def test_info_knows_the_requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = {text.partition(";")[0] for text in (*project["dependencies"], *extras["triton"])}
    assert {name + specifier for name, specifier in info.REQUIREMENTS.items()} <= requirements
    for extra in info.CUDA_PLUGINS.values():  # a machine without a GPU needs no Triton
        assert extras[extra] == ["jgg[triton]", f"jax[{extra}]"]
    assert "demo" in extras


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["demo", "--steps", "0"], "--steps: must be 1 or more, got 0"),
        (["demo", "--temperature", "0"], "--temperature: must be greater than 0"),
        (["demo", "--topk", "9"], "--topk 9 is more than --experts 8"),
        (["demo", "--hidden", "100"], "--hidden must be a multiple of 64, got 100"),
        (["demo", "--seq", "1000000"], "--seq must be less than"),
        (["demo", "--save", str(ROOT / "tests")], f"--save must be new or an empty folder, got {ROOT / 'tests'}"),
        (["demo", "--out", "nowhere/demo"], "which is no folder"),
        (["demo", "--implementation", "triton"], "needs a GPU that JAX can use"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(options, "device_target", lambda: None)
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_package_the_demo_says_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)  # so that its import fails
    monkeypatch.delitem(sys.modules, "jgg.cli.demo.run", raising=False)
    with pytest.raises(SystemExit) as error:
        main(["demo"])
    assert error.value.code == "jgg: flax is not installed: pip install 'jgg[demo]'"


def test_module_runs_as_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jgg", "--version"])
    with pytest.raises(SystemExit) as error:
        runpy.run_module("jgg", run_name="__main__")
    assert (error.value.code, capsys.readouterr().out) == (0, f"jgg {jgg.__version__}\n")


def test_command_as_installed_starts_quietly():
    """Also where `pip install -e '.[dev]'` left jax-cuda12-pjrt, which has much to say without a GPU."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["jgg"].split(":")
    command = [sys.executable, "-c", f"import sys, {module}; sys.exit({module}.{function}())", "info"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Versions\n")


SMALL = ["--steps=20", "--batch=16", "--seq=64", "--hidden=64", "--layers=1", "--experts=4"]


@pytest.mark.thorough
@pytest.mark.usefixtures("optax_promotion")
def test_demo_learns_and_writes(tmp_path, capsys):
    out, folder = tmp_path / "small", tmp_path / "model"
    assert main(["demo", *SMALL, "--out", str(out), "--save", str(folder)]) == 0
    output = capsys.readouterr().out
    result = json.loads(out.with_suffix(".json").read_text())

    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert set(result) >= {"config", "versions", "device", "history", "final", "sample"}
    assert result["config"]["experts"] == 4
    assert result["implementation"] == "xla"
    assert not result["interrupted"]
    losses = [point["bits_per_byte"] for point in result["history"]["train"]]
    held_out = result["history"]["held_out"]
    assert losses[-1] < losses[0] < 8.1
    assert held_out[-1]["step"] == 20
    assert held_out[-1]["bits_per_byte"] == result["final"]["held_out_bits_per_byte"] < 6
    np.testing.assert_allclose(np.sum(result["expert_load"], axis=1), [1], rtol=1e-6)
    assert result["sample"].startswith("The ")
    assert f"Held out: {result['final']['held_out_bits_per_byte']:.3f} bits per byte" in output
    model = jgg.models.load(folder, dtype="float32", param_dtype="float32")
    prompt = list(b"The ")
    generated = jgg.models.generate(model, [prompt], 396, temperature=0.7, key=jax.random.key(0))
    assert bytes([*prompt, *generated[0].tolist()]).decode(errors="replace") == result["sample"]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "".join(map(chr, range(256))) + " café 语言 \U0001f600\n\n  x"
    tokens = tokenizer.encode(text).ids
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text


@pytest.mark.sweep
@pytest.mark.usefixtures("optax_promotion")
def test_demo_that_is_interrupted_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    def interrupt(result):
        if result.train[-1]["step"] == 10:
            raise KeyboardInterrupt
        return ""

    monkeypatch.setattr(report, "progress_line", interrupt)
    out = tmp_path / "interrupted"
    assert main(["demo", *SMALL, "--quiet", "--out", str(out)]) == 130
    result = json.loads(out.with_suffix(".json").read_text())
    assert result["interrupted"]
    assert result["history"]["train"][-1]["step"] == result["final"]["steps"] == 10
    assert out.with_suffix(".png").exists()
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_demo_whose_loss_is_not_finite_ends_in_one_line(monkeypatch, tmp_path):
    def fail(*_):
        raise TrainingError("step 3: the loss is nan")

    monkeypatch.setattr(loop, "records", fail)
    with pytest.raises(SystemExit, match="jgg: step 3: the loss is nan"):
        main(["demo", *SMALL, "--out", str(tmp_path / "x")])
    assert not list(tmp_path.iterdir())


def test_held_out_text_is_not_in_the_training_text():
    train, held_out = map("\n\n".join, load_texts())
    assert 300_000 < len(train) < 1_000_000
    assert 0.08 < len(held_out) / (len(train) + len(held_out)) < 0.101
    paragraphs = {each for each in held_out.split("\n\n") if each.strip()}
    assert not paragraphs & set(train.split("\n\n"))
