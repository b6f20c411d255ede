"""`jgg.train.grpo`: advantages, weights and losses are those of the papers, and of TRL, verl and tunix, by NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgg.models.rollouts import TrainingRows
from jgg.train import grpo

REWARDS = [[0.0, 1.0, 1.0, 0.0], [0.5, 0.5, 0.5, 0.5], [1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_divided_by_deviations_of_a_sample(scale):
    found, flat = grpo.advantages(REWARDS, scale=scale), np.concatenate(REWARDS)
    of_all = np.sqrt(np.sum((flat - flat.mean()) ** 2) / (len(flat) - 1))
    for own, rewards in zip(found, REWARDS, strict=True):
        mean = sum(rewards) / 4
        of_group = np.sqrt(sum((reward - mean) ** 2 for reward in rewards) / 3)
        divisor = {"group": of_group + 1e-4, "batch": of_all + 1e-4, "none": 1.0}[scale]
        np.testing.assert_allclose(own, [(reward - mean) / divisor for reward in rewards], rtol=1e-6)
    assert found.dtype == np.float32 and not found[1].any()


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"rewards must be \[P, S\] with S at least 2, got \[3, 1\]"):
        grpo.advantages(np.ones((3, 1)))
    with pytest.raises(ValueError, match="scale must be one of group, batch, none, got 'std'"):
        grpo.advantages(REWARDS, scale="std")
    with pytest.raises(ValueError, match="max_length must be given for constant, got None"):
        grpo.token_weights(np.ones((2, 3)), "constant")
    with pytest.raises(ValueError, match=r"delta must be above 1 \+ high, 1.28, got 1.1"):
        grpo.policy_loss(*[jnp.zeros((2, 3))] * 2, jnp.zeros(2), jnp.ones((2, 3)), delta=1.1)


SHAPE = 4, 6


def drawn(seed=0):
    """Log-probabilities of the policy, the sampler and the reference, advantages, and what is learned."""
    rng = np.random.default_rng(seed)
    arrays = [-rng.uniform(0, 2, SHAPE) for _ in range(3)]
    is_new = np.arange(SHAPE[1]) < np.array([6, 1, 3, 0])[:, None]  # the last answer has no token
    return *arrays, rng.standard_normal(SHAPE[0]), is_new


def weight_of(is_new, row, aggregation):
    """Of a token: by the definitions, and the longest answer has 8 tokens."""
    return {
        "token": 1 / is_new.sum(),
        "sequence": 1 / (len(is_new) * is_new[row].sum()),
        "constant": 1 / (len(is_new) * 8),
    }[aggregation]


def by_loops(policy, old, reference, advantages, is_new, *, aggregation, clip, delta, importance, kl, kl_estimator):
    """The loss in float64, the share of clipped tokens, and the mean divergence."""
    total, clipped, divergences = 0.0, [], []
    for row, column in np.argwhere(is_new):
        log_ratio = (policy - old)[row, column]
        if importance == "sequence":
            log_ratio = (policy - old)[row][is_new[row]].mean()
        ratio, advantage = np.exp(log_ratio), advantages[row]
        bounded = min(max(ratio, 1 - clip[0]), 1 + clip[1])
        gain = min((ratio if delta is None else min(ratio, delta)) * advantage, bounded * advantage)
        is_high = ratio > 1 + clip[1] if advantage > 0 else delta is not None and ratio > delta
        clipped.append(is_high or (advantage < 0 and ratio < 1 - clip[0]))
        d = (reference - policy)[row, column]
        divergences.append({"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1}[kl_estimator])
        total += weight_of(is_new, row, aggregation) * (kl * divergences[-1] - gain)
    return total, np.mean(clipped), np.mean(divergences)


VARIANTS = {
    "GRPO": {"aggregation": "sequence", "clip": (0.2, 0.2), "kl": 0.04},
    "DAPO": {"clip": (0.2, 0.28)},
    "Dr. GRPO": {"aggregation": "constant", "clip": (0.2, 0.2)},
    "GSPO": {"aggregation": "sequence", "importance": "sequence", "clip": (3e-4, 4e-4)},
    "two-sided": {"delta": 1.5, "kl": 0.1, "kl_estimator": "k2"},
    "GSPO, two-sided": {"importance": "sequence", "delta": 1.3, "kl": 0.1, "kl_estimator": "k1"},
}
DEFAULTS = {"aggregation": "token", "clip": (0.2, 0.28), "delta": None, "importance": "token", "kl": 0.0}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_loss_is_that_of_its_definition(name):
    options = DEFAULTS | {"kl_estimator": "k3"} | VARIANTS[name]
    policy, old, reference, advantages, is_new = drawn()
    want, clipped, divergence = by_loops(policy, old, reference, advantages, is_new, **options)
    weights = grpo.token_weights(is_new, options["aggregation"], max_length=8)
    own = {key: value for key, value in options.items() if key != "aggregation"}
    arrays = (jnp.asarray(array, jnp.float32) for array in (old, advantages, weights, reference))
    *arrays, reference32 = arrays

    def loss_of(policy):
        return grpo.policy_loss(policy, *arrays, reference=reference32, **own)

    (got, metrics), gradient = jax.value_and_grad(loss_of, has_aux=True)(jnp.asarray(policy, jnp.float32))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(metrics["clipped"], clipped, rtol=1e-6)
    np.testing.assert_allclose(metrics["kl"], divergence, rtol=1e-5)
    np.testing.assert_allclose(metrics["difference"], np.abs(policy - old)[is_new].max(), rtol=1e-6)
    # the gradient of k1 is that of k2
    estimator = {"k1": "k2"}.get(options["kl_estimator"], options["kl_estimator"])
    for row, column in itertools.product(range(SHAPE[0]), range(SHAPE[1])):
        step = np.zeros(SHAPE)
        step[row, column] = 1e-6
        around = [
            by_loops(policy + sign * step, old, reference, advantages, is_new, **options | {"kl_estimator": estimator})
            for sign in (1, -1)
        ]
        want = (around[0][0] - around[1][0]) / 2e-6
        np.testing.assert_allclose(gradient[row, column], want, rtol=1e-3, atol=1e-6)


def test_what_is_not_learned_may_hold_anything():
    policy, old, reference, advantages, is_new = drawn()
    weights = jnp.asarray(grpo.token_weights(is_new))
    values = [
        grpo.policy_loss(
            *(jnp.asarray(np.where(is_new, array, other), jnp.float32) for array in (policy, old)),
            jnp.asarray(advantages, jnp.float32),
            weights,
            reference=jnp.asarray(np.where(is_new, reference, other), jnp.float32),
            kl=0.1,
        )
        for other in (0.0, np.nan)
    ]
    jax.tree.map(np.testing.assert_array_equal, *values)


class Model(nnx.Module):
    """Its losses are those of the rows that it is asked for; those without adapters are others."""

    def __init__(self, own, of_reference):
        self.own, self.of_reference = (nnx.Param(jnp.asarray(each, jnp.float32)) for each in (own, of_reference))

    def losses(self, tokens, targets, *, mask, temperature, topk_indices=None, adapters=True, entropies=False):
        assert tokens.shape == targets.shape == mask.shape and temperature == 0.5
        if entropies:
            assert topk_indices.shape == (2, *tokens.shape, 1)  # layers first
            self.sow(nnx.Intermediate, "entropies", jnp.full(tokens.shape, 2.0))
        return (self.own if adapters else self.of_reference)[...][tokens[:, 0]]


def test_parts_of_a_batch_have_its_loss():
    """Also where they have different numbers of tokens; and measures of parts add up."""
    policy, old, reference, advantages, is_new = drawn(1)
    row = np.broadcast_to(np.arange(4, dtype=np.int32)[:, None], SHAPE)
    choices = np.zeros((2, *SHAPE, 1), np.int32)
    rows = TrainingRows(row, row, is_new, is_new, np.full(SHAPE, np.nan), old.astype(np.float32), choices)
    loss, model = grpo.loss_of(kl=0.1, temperature=0.5, clip=(0.2, 0.3)), Model(-policy, -reference)
    options = DEFAULTS | {"aggregation": "sequence", "clip": (0.2, 0.3), "kl": 0.1, "kl_estimator": "k3"}
    want, clipped, divergence = by_loops(policy, old, reference, advantages, is_new, **options)
    for parts in (1, 2, 4):
        weights = grpo.token_weights(is_new, "sequence")
        batch = grpo.batch_of(rows, weights, advantages, parts=parts, replay=True, at_temperature=True)
        found = [loss(model, {name: array[n] for name, array in batch.items()}) for n in range(parts)]
        value, metrics = jax.tree.map(lambda *each: np.mean(each, axis=0), *found)
        np.testing.assert_allclose(value, want, rtol=1e-5)
        np.testing.assert_allclose(metrics["tokens"] * parts, is_new.sum())
        of_tokens = {name: metrics[name] / metrics["tokens"] for name in ("clipped", "kl", "entropy")}
        assert of_tokens == pytest.approx({"clipped": clipped, "kl": divergence, "entropy": 2.0}, rel=1e-5)
        largest = [np.abs(policy - old)[own][is_new[own]].max(initial=0.0) for own in np.split(np.arange(4), parts)]
        np.testing.assert_allclose(metrics["differences"], largest, rtol=1e-5)
    with pytest.raises(ValueError, match="parts must divide the 4 rows, got 3"):
        grpo.batch_of(rows, weights, advantages, parts=3)
