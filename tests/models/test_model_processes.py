"""The program of docs/scaling.md trains a whole model in two processes, stops and goes on."""

import re
import shutil
import socket

import numpy as np
import pytest

import jgg.models
from tests.support import processes
from tests.support.documents import code_of
from tests.support.models import DATA


def losses(folder, steps):
    """What both processes print of each step."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {
        "JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "PYTHONPATH": str(processes.ROOT),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
    }  # fmt: skip
    both = [processes.start("train.py", address, 2, i, steps, cwd=folder, **environment) for i in range(2)]
    try:
        first, second = (
            dict(re.findall(r"step (\d+), loss (\d+\.\d+)", processes.printed(process, 200))) for process in both
        )
    finally:
        for process in both:
            process.kill()
    assert first == second
    return {int(step): float(loss) for step, loss in first.items()}


@pytest.mark.thorough
def test_a_program_of_two_processes_goes_on_from_its_checkpoint(tmp_path):
    (program,) = code_of("scaling.md", "A whole model in several processes")
    tokens = np.random.default_rng(0).integers(0, 64, (16, 8))
    for name in ("unbroken", "stopped"):
        shutil.copytree(DATA / "qwen3_moe", tmp_path / name / "model")
        np.save(tmp_path / name / "tokens.npy", tokens)
        (tmp_path / name / "train.py").write_text(program)
    whole = losses(tmp_path / "unbroken", 4)
    assert list(losses(tmp_path / "stopped", 2)) == [0, 1]
    rest = losses(tmp_path / "stopped", 4)
    assert list(rest) == [2, 3]
    np.testing.assert_allclose([rest[2], rest[3]], [whole[2], whole[3]], rtol=1e-5)
    for name in ("w_embedding", "w_head"):
        first, second = (
            getattr(jgg.models.load(tmp_path / folder / "tuned-4", dtype="float32"), name)[...]
            for folder in ("unbroken", "stopped")
        )
        np.testing.assert_allclose(first, second, rtol=0, atol=1e-6)
