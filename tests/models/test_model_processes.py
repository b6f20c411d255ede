"""The program of docs/scaling.md trains a whole model in two processes, stops and goes on."""

import re
import shutil
import socket

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jgg.models
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
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONPATH": str(processes.ROOT),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
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


def trained_on_one_device():
    """The model, its optimizer and the losses after all steps without a stop."""
    model = jgg.models.load(DATA / "qwen3_moe", param_dtype=jnp.float32)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer, tokens):
        loss, gradients = nnx.value_and_grad(loss_of)(model, tokens)
        optimizer.update(model, gradients)
        return loss

    with jax.numpy_dtype_promotion("standard"):  # of optax, and of the gradients of jnp.einsum in bfloat16
        return model, optimizer, [train(model, optimizer, batch(step)) for step in range(STEPS)]


@pytest.mark.thorough
def test_a_program_of_two_processes_goes_on_from_its_checkpoint(tmp_path):
    (program,) = code_of("scaling.md", "A whole program")
    (tmp_path / "train.py").write_text(program)
    shutil.copytree(DATA / "qwen3_moe", tmp_path / "model")
    np.save(tmp_path / "tokens.npy", ROWS)
    losses = losses_of_two_processes(tmp_path, STEPS // 2)
    assert list(losses) == list(range(STEPS // 2))
    losses |= losses_of_two_processes(tmp_path, STEPS)
    assert list(losses) == list(range(STEPS))

    *whole, expected = trained_on_one_device()
    np.testing.assert_allclose(list(losses.values()), expected, rtol=0.003)  # products are in bfloat16
    state = nnx.state(whole)
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        got = manager.restore(STEPS - 1, args=ocp.args.StandardRestore(nnx.to_pure_dict(state)))
    nnx.replace_by_pure_dict(state, got)
    # without its first steps, the mean of gradients would be 0.4 off, and the counts 2 of 4
    worst = max(jax.tree.leaves(jax.tree.map(distance, state, nnx.state(whole))))
    assert worst < 0.1

    nnx.update(whole, state)
    jgg.models.save(whole[0], tmp_path / "one")
    two = tmp_path / f"tuned-{STEPS}"
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes(), file.name
