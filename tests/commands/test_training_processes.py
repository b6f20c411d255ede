"""Training in two processes, one of which is killed: started again, the run goes on as one that was not stopped."""

import json
import os
import signal
import socket
import time

import pytest

from tests.support import processes
from tests.support.models import folder_with_tokenizer

STEPS = 12


OPTIONS = {"train": ("--dtype", "float32"), "finetune": ("--lora-rank", 2)}
WRITTEN = {
    "train": ("config.json", "model.safetensors", "tokenizer.json"),
    "finetune": ("adapter_config.json", "adapter_model.safetensors"),
}


def start(folder, command, name, devices, *options):
    """A process that trains, with so many devices of its own."""
    arguments = "model", "--data", "data.jsonl", "--eval-data", "data.jsonl", "--output", name, "--steps", STEPS
    sizes = "--sequence-length", 8, "--batch-size", 4, "--expert", 2, "--log-every", 1, "--eval-every", 6
    environment = processes.with_devices(devices) | {
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONPATH": str(processes.ROOT),
    }
    options = *sizes, "--learning-rate", "1e-2", *OPTIONS[command], *options
    return processes.start("-m", "jgg", command, *arguments, *options, cwd=folder, **environment)


def start_both(folder, command):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    options = "--checkpoints", "run", "--save-every", 2, "--coordinator", address, "--processes", 2, "--process"
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


def losses(folder, name):
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines] + [line["eval_loss"] for line in lines if "eval_loss" in line]


@pytest.mark.sweep
@pytest.mark.parametrize("command", OPTIONS)
def test_a_run_of_two_processes_goes_on_when_one_was_killed(command, tmp_path):
    folder_with_tokenizer("qwen3_moe", tmp_path / "model")
    rows = [{"text": " ".join(f"t{(start + n) % 40 + 5}" for n in range(7))} for start in range(24)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kill_one_after_a_checkpoint(tmp_path, start_both(tmp_path, command))
    saved = max(int(path.name) for path in tmp_path.glob("run/*") if path.name.isdecimal())
    assert saved < STEPS
    both = start_both(tmp_path, command)
    try:
        printed = [processes.printed(process, 500) for process in both]
    finally:
        for process in both:
            process.kill()
    assert f"goes on from step {saved}, " in printed[0] and f"step {saved + 1}: " in printed[0]
    assert "step" not in printed[1]  # the first alone tells
    processes.printed(start(tmp_path, command, "one", 4), 500)
    tolerance = {"train": 1e-4, "finetune": 2e-2}[command]  # the latter computes in bfloat16
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), rel=tolerance)
    for name in WRITTEN[command]:
        assert (tmp_path / "two" / name).stat().st_size == (tmp_path / "one" / name).stat().st_size
