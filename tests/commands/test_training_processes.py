"""Training in two processes, and when one is killed: started again, the run goes on as one that was not stopped."""

import json
import os
import re
import signal
import socket
import time

import jax
import pytest

from jgg.cli import main
from tests.support import processes
from tests.support.models import folder_with_tokenizer

STEPS = 12


OPTIONS = {"train": ("--dtype", "float32"), "finetune": ("--lora-rank", 2)}
WRITTEN = {
    "train": ("config.json", "model.safetensors", "tokenizer.json"),
    "finetune": ("adapter_config.json", "adapter_model.safetensors"),
}


@pytest.fixture
def folder(tmp_path):
    """With a model and data."""
    folder_with_tokenizer("qwen3_moe", tmp_path / "model")
    rows = [{"text": " ".join(f"t{(start + n) % 40 + 5}" for n in range(7))} for start in range(24)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def arguments_of(command, name):
    arguments = "model", "--data", "data.jsonl", "--output", name, "--learning-rate", "1e-2"
    return *arguments, "--sequence-length", 8, "--batch-size", 4, "--log-every", 1, *OPTIONS[command]


def start(folder, command, name, devices, *options):
    """A process that trains, with this many devices of its own."""
    environment = processes.with_devices(devices) | {
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONPATH": str(processes.ROOT),
    }
    options = *arguments_of(command, name), "--expert", 2, *options
    return processes.start("-m", "jgg", command, *options, cwd=folder, **environment)


def start_both(folder, command, *options):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    options += "--checkpoints", "run", "--save-every", 2, "--coordinator", address, "--processes", 2, "--process"
    return [start(folder, command, "two", 2, *options, process) for process in range(2)]


def kill_one_after_a_checkpoint(folder, both):
    """Kills the second process once a checkpoint is whole; then the first, which waits for the second in vain."""
    try:
        end = time.monotonic() + 500
        while not any(path.name.isdecimal() for path in folder.glob("run/*")):
            assert time.monotonic() < end and both[0].poll() is None, both[0].communicate()[1]
            time.sleep(0.05)
        os.kill(both[1].pid, signal.SIGKILL)
        time.sleep(0.5)
    finally:
        for process in both:
            process.kill()
            process.communicate()


def stop_one_at_its_first_step(both):
    """Sends SIGTERM to the second process alone; what each printed to stdout and stderr."""
    try:
        for line in both[0].stdout:
            if line.startswith("step 1: "):
                break
        os.kill(both[1].pid, signal.SIGTERM)
        printed = [process.communicate(timeout=500) for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [143, 143], printed
    return printed


def printed_by_both(both):
    try:
        return [processes.printed(process, 500) for process in both]
    finally:
        for process in both:
            process.kill()


def losses(folder, name, steps=STEPS):
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    return [line["loss"] for line in lines] + [line["eval_loss"] for line in lines if "eval_loss" in line]


@pytest.mark.sweep
def test_two_processes_train_as_one_device_does(folder, monkeypatch):
    monkeypatch.chdir(folder)
    both = start_both(folder, "train", "--steps", 2)
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            assert main(["train", *map(str, arguments_of("train", "one")), "--steps", "2"]) == 0
    finally:
        printed = printed_by_both(both)
    assert "step 2: " in printed[0] and "step" not in printed[1]  # the first alone tells
    assert losses(folder, "two", 2) == pytest.approx(losses(folder, "one", 2), rel=1e-4)
    assert (folder / "run" / "2").is_dir()
    for name in WRITTEN["train"]:
        assert (folder / "two" / name).stat().st_size == (folder / "one" / name).stat().st_size


@pytest.mark.sweep
@pytest.mark.parametrize("command", OPTIONS)
def test_a_run_of_two_processes_goes_on_when_one_was_killed(command, folder):
    options = "--eval-data", "data.jsonl", "--eval-every", 6, "--steps", STEPS
    kill_one_after_a_checkpoint(folder, start_both(folder, command, *options))
    saved = max(int(path.name) for path in folder.glob("run/*") if path.name.isdecimal())
    assert saved < STEPS
    printed = printed_by_both(start_both(folder, command, *options))
    assert f"goes on from step {saved}, " in printed[0] and f"step {saved + 1}: " in printed[0]
    assert "step" not in printed[1]  # the first alone tells
    processes.printed(start(folder, command, "one", 4, *options), 500)
    tolerance = {"train": 1e-4, "finetune": 2e-2}[command]  # the latter computes in bfloat16
    assert losses(folder, "two") == pytest.approx(losses(folder, "one"), rel=tolerance)
    for name in WRITTEN[command]:
        assert (folder / "two" / name).stat().st_size == (folder / "one" / name).stat().st_size


@pytest.mark.sweep
def test_two_processes_stop_after_the_same_step_when_one_gets_sigterm(folder):
    options = "--steps", 4000  # more than are made until JAX tells the processes, in a second or two
    (told, errors), (_, other_errors) = stop_one_at_its_first_step(start_both(folder, "train", *options))
    (stopped,) = re.findall("^jgg: stopped by SIGTERM after step ([0-9]+); run the same command", errors, re.M)
    assert f"step {stopped}: loss" in told and "jgg: " not in other_errors  # the first alone tells
    assert (folder / "run" / stopped).is_dir()
    both = start_both(folder, "train", *options)
    try:
        line = next(line for line in both[0].stdout if line.startswith("goes on from step"))
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert line.startswith(f"goes on from step {stopped}, ")
