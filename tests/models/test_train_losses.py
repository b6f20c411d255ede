"""The loss of language models in `jgg.train`: what counts in it, and the loss of what is held out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg.models
from jgg.train import balance_weight, held_out_loss, next_token_loss
from tests.support.models import config_of, loaded

pytestmark = pytest.mark.usefixtures("optax_promotion")


@pytest.mark.parametrize(("coefficient", "weight"), [(None, 0), (0.5, 1.0), (1, 2)])
def test_a_balance_of_null_is_none(coefficient, weight):
    config = jgg.models.model_config(config_of("qwen3_moe") | {"router_aux_loss_coef": coefficient})
    assert balance_weight(config) == weight  # two experts for each token


@pytest.mark.parametrize("coefficient", ["much", True, -1, float("inf")])
def test_a_wrong_balance_is_named(coefficient):
    config = jgg.models.model_config(config_of("qwen3_moe") | {"router_aux_loss_coef": coefficient})
    with pytest.raises(ValueError, match=f"router_aux_loss_coef must be a number of at least 0 .*{coefficient}"):
        balance_weight(config)


def test_the_balance_of_a_folder_with_towers_is_that_of_its_language_model():
    config = config_of("qwen3_vl_moe")
    config["text_config"] |= {"router_aux_loss_coef": 0.5, "num_experts_per_tok": 2}
    assert balance_weight(jgg.models.model_config(config)) == 1.0


class Model(nnx.Module):
    """Its loss is w for each token, its balance w times the number of tokens that count; the first expert gets all."""

    def __init__(self):
        self.w = nnx.LoRAParam(jnp.float32(3))

    def loss(self, tokens, targets, segments, *, weights, mask):
        count = jnp.sum(mask, dtype=jnp.int32)
        self.sow(nnx.Intermediate, "load_balancing_loss", self.w[...] * count.astype(jnp.float32)[None])
        self.sow(nnx.Intermediate, "overflow", count[None])
        self.sow(nnx.Intermediate, "group_sizes", jnp.stack([count, jnp.zeros_like(count)])[None])
        return jnp.sum(self.w[...] * weights)


def test_what_counts_in_the_loss():
    """The weights of targets, and of the balance, in which padding has no part."""
    segments = np.array([[1, 1, 2, 0], [1, 0, 0, 0]], np.int32)
    weights = np.array([[0.25, 0, 0.5, 0], [0.25, 0, 0, 0]], np.float32)
    batch = {"tokens": segments, "targets": segments, "segments": segments, "weights": weights}
    total, metrics = next_token_loss(balance_weight=0.1)(Model(), batch)
    np.testing.assert_allclose(metrics["loss"], 3.0, rtol=1e-6)
    np.testing.assert_allclose(total, 3.0 + 0.1 * 3 * 4, rtol=1e-6)
    np.testing.assert_allclose(metrics["load"], [2.0])
    np.testing.assert_array_equal(metrics["overflow"], [4])


def batches_of(vocabulary):
    """Two batches of packed examples, [2 parts, 2, 8], with weights that differ."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocabulary, (2, 2, 2, 9)).astype(np.int32)
    segments = np.repeat(np.array([1, 1, 1, 2, 2, 2, 2, 0], np.int32)[None], 8, 0).reshape(2, 2, 2, 8)
    weights = (rng.random((2, 2, 2, 8)) * (segments > 0) * (rng.random((2, 2, 2, 8)) < 0.6)).astype(np.float32)
    return [
        {"tokens": t[..., :-1], "targets": t[..., 1:], "segments": s, "weights": w}
        for t, s, w in zip(tokens, segments, weights, strict=True)
    ]


@pytest.mark.parametrize("packed", [True, False])
def test_the_held_out_loss_is_the_mean_over_targets(packed):
    model = loaded("qwen3_moe")
    batches = batches_of(model.config.vocabulary)
    logits_of = jax.jit(lambda tokens, segments: model(tokens, segments if packed else None)[0])
    total, count = 0.0, 0
    for batch in batches:
        for tokens, targets, segments, weights in zip(*(a.reshape(-1, 1, 8) for a in batch.values()), strict=True):
            logits = np.asarray(logits_of(tokens, segments), np.float64)
            losses = np.log(np.sum(np.exp(logits), axis=-1)) - logits[np.arange(8), targets[0]]
            total, count = total + np.dot(losses, weights[0]), count + np.sum(weights, dtype=np.float64)
    assert held_out_loss(model, batches, packed=packed) == pytest.approx(total / count, rel=1e-5)


def test_nothing_held_out_is_named():
    (batch, _) = batches_of(64)
    with pytest.raises(ValueError, match="batches must have targets with a weight above 0"):
        held_out_loss(loaded("qwen3_moe"), [batch | {"weights": np.zeros_like(batch["weights"])}])
