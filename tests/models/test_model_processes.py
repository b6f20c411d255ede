"""The program of docs/scaling.md trains a whole model in two processes, stops and goes on."""

import re
import shutil
import socket

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgg.models
from jgg.train import Trainer
from tests.models.test_model_training import loss_of
from tests.support import processes
from tests.support.closeness import distance
from tests.support.documents import code_of
from tests.support.models import DATA

STEPS = 4
ROWS = np.random.default_rng(0).integers(0, 64, (16, 8))


def losses_of_two_processes(folder, steps):
    """What both processes print of each step."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = processes.with_devices(2) | {
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONPATH": str(processes.ROOT),
    }
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


def batch(step):
    """The rows that both processes draw."""
    return np.concatenate(
        [
            ROWS[process::2][np.random.default_rng((step, process)).integers(0, len(ROWS) // 2, 2)]
            for process in range(2)
        ]
    )


def trainer_on_one_device():
    return Trainer(
        jgg.models.load(DATA / "qwen3_moe", param_dtype=jnp.float32),
        optax.adamw(1e-3),
        lambda model, tokens: (loss_of(model, tokens),) * 2,
    )


@pytest.mark.sweep
def test_a_program_of_two_processes_goes_on_from_its_checkpoint(tmp_path):
    (program,) = code_of("scaling.md", "A whole program")
    (tmp_path / "train.py").write_text(program)
    shutil.copytree(DATA / "qwen3_moe", tmp_path / "model")
    np.save(tmp_path / "tokens.npy", ROWS)
    losses = losses_of_two_processes(tmp_path, STEPS // 2)
    assert list(losses) == list(range(1, STEPS // 2 + 1))
    losses |= losses_of_two_processes(tmp_path, STEPS)
    assert list(losses) == list(range(1, STEPS + 1))

    whole, resumed = trainer_on_one_device(), trainer_on_one_device()
    with jax.numpy_dtype_promotion("standard"):  # of optax, and of the gradients of jnp.einsum in bfloat16
        ((_, expected, _),) = whole.fit(batch, STEPS, every=())
    assert list(resumed.fit(batch, STEPS, checkpoints=tmp_path / "checkpoints")) == []
    np.testing.assert_allclose(list(losses.values()), expected, rtol=0.003)  # products are in bfloat16
    # without its first steps, the mean of gradients would be 0.4 off, and the counts 2 of 4
    worst = max(jax.tree.leaves(jax.tree.map(distance, resumed._arrays(), whole._arrays())))
    assert worst < 0.1

    jgg.models.save(resumed.model, tmp_path / "one")
    two = tmp_path / f"tuned-{STEPS}"
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes(), file.name
