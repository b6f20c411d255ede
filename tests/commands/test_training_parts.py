"""What `jgg finetune` and `jgg train` make of options: the optimizer, its rates, and how devices split a model."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.cli.errors import UsageError
from jgg.cli.training import devices, loop
from jgg.cli.training.options import OPTIMIZER_STATES, OPTIMIZERS


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize("states", OPTIMIZER_STATES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_matrices_decay_by_either_optimizer(optimizer, states):
    params = {"w_o": jnp.ones((4, 6)), "w_head": jnp.ones((6, 5)), "b_q": jnp.ones(4), "attention_norm": jnp.ones(4)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    args = argparse.Namespace(optimizer=optimizer, optimizer_states=states, weight_decay=0.1)
    made = loop.optimizer_of(args, lambda step: 0.5 - 0.25 * step)
    state = made.init(params)
    for rate in (0.5, 0.25):
        updates, state = made.update(zeros, state, params)
        assert {name: float(update.ravel()[0]) for name, update in updates.items()} == pytest.approx(
            {"w_o": -0.1 * rate, "w_head": -0.1 * rate, "b_q": 0, "attention_norm": 0}
        )
    gradients = {
        name: jnp.asarray(np.random.default_rng(1).normal(size=p.shape), p.dtype) for name, p in params.items()
    }
    updates, _ = made.update(gradients, made.init(params), zeros)
    rms = {name: float(jnp.sqrt(jnp.mean(jnp.square(update)))) / 0.5 for name, update in updates.items()}
    assert rms.pop("w_o") == pytest.approx({"adamw": 1.0, "muon": 0.2}[optimizer], rel=0.2)
    # Nesterov's mean, which AdamW also has when it runs with Muon, is 1 + 0.9 * 0.1 / 0.19 times the first gradient
    of_others = {"adamw": 1.0, "muon": 1 + 0.9 * 0.1 / 0.19}[optimizer]
    assert rms == pytest.approx(dict.fromkeys(rms, of_others), rel=0.01)


def test_the_rate_rises_and_falls():
    """The first step learns too, and a run of a step or two has a rate."""
    for steps, warmup in ((1, None), (2, None), (40, 10), (5, 9)):
        schedule = loop.schedule_of(argparse.Namespace(learning_rate=0.5, warmup=warmup), steps)
        rates = [float(schedule(step)) for step in range(steps)]
        assert rates[0] > 0 and max(rates) == pytest.approx(0.5 if steps > (warmup or 1) else rates[-1])
    assert rates == sorted(rates)


def test_a_batch_is_what_devices_split(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 6)
    monkeypatch.setattr(jax, "make_mesh", lambda *_, **__: None)
    monkeypatch.setattr(devices, "MoESharding", lambda _, **options: options)
    own = {"exchange": "ragged_all_to_all", "buffer_factor": 1.5, "fsdp_splits": "experts"}
    args = argparse.Namespace(fsdp=None, expert=2, batch_size=None, **own)
    assert devices.sharding_of(args, 12) == {"fsdp": "fsdp", "expert": "expert"} | own
    assert (args.fsdp, args.batch_size) == (3, 6)
    wanted = "the model's 8 experts must be a multiple of the number of devices, got 6: .*, or take --fsdp-splits"
    with pytest.raises(UsageError, match=wanted):
        devices.sharding_of(args, 8)
    features = argparse.Namespace(**vars(args) | {"fsdp_splits": "features"})
    assert devices.sharding_of(features, 8)["fsdp_splits"] == "features"
    with pytest.raises(UsageError, match="the model's 9 experts must be a multiple of --expert, got 2"):
        devices.sharding_of(features, 9)
    features.fsdp, features.expert = None, 4
    with pytest.raises(UsageError, match="--fsdp times --expert must be 6, the number of devices, got 1 times 4"):
        devices.sharding_of(features, 8)
    args.batch_size = 4
    with pytest.raises(UsageError, match="--batch-size must be a multiple of 6, the number of devices, got 4"):
        devices.sharding_of(args, 12)
