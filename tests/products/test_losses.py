"""The losses of targets by logits, against float64 in every implementation, and their bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.core.gpu_target import current_target
from jgg.launching.choice import How
from jgg.models.operations.losses import LOSSES, Scored
from tests.support.closeness import assert_close
from tests.support.marks import INTERPRET, KERNELS, TRITON, on

EVERYWHERE = on("xla", INTERPRET, TRITON)


def how(implementation):
    return How(implementation, current_target())


def case(rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    logits = 5 * rng.standard_normal((rows, columns)) + 30 * rng.standard_normal((rows, 1))
    return Scored(jnp.asarray(logits, "float32"), jnp.asarray(rng.integers(0, columns, rows), "int32"))


def losses64(operands, scale, softcap=None):
    logits = np.asarray(operands.logits).astype(np.float64) * scale
    logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
    highest = logits.max(axis=1, keepdims=True)
    log_sums = highest[:, 0] + np.log(np.exp(logits - highest).sum(axis=1))
    return log_sums - np.take_along_axis(logits, np.asarray(operands.targets)[:, None], axis=1)[:, 0], log_sums


@EVERYWHERE
@pytest.mark.parametrize(
    ("rows", "columns", "scale"), [(3, 17, 1.0), (1, 1, 1.0), (4, 20000, 0.3), (2, 16384, 1.0), (0, 8, 1.0)]
)
def test_losses_and_log_sums(rows, columns, scale, implementation):
    operands = case(rows, columns)
    got = LOSSES(how(implementation), operands, scale=scale)
    assert [result.dtype for result in got] == ["float32", "float32"]
    assert_close(list(got), list(losses64(operands, scale)), 1e-6)


@EVERYWHERE
@pytest.mark.parametrize(("columns", "scale"), [(17, 1.0), (20000, 0.3)])
def test_capped_logits(columns, scale, implementation):
    operands = case(4, columns)
    got = LOSSES(how(implementation), operands, scale=scale, softcap=30.0)
    assert_close(list(got), list(losses64(operands, scale, 30.0)), 1e-6)
    large = operands._replace(logits=operands.logits.at[0, 3].set(jnp.inf).at[1].set(-1e38).at[2, 5].set(jnp.nan))
    losses, log_sums = LOSSES(how(implementation), large, scale=scale, softcap=30.0)
    assert np.isfinite(losses[:2]).all() and np.isnan(log_sums[2])
    np.testing.assert_allclose(log_sums[1], np.log(columns) - 30, rtol=1e-5)


@EVERYWHERE
def test_what_is_not_finite(implementation):
    logits = np.zeros((5, 20), np.float32)
    logits[0, 3], logits[1], logits[2, 1:], logits[3, 2], logits[4, 7] = -np.inf, 1e38, -np.inf, np.nan, -1e38
    for scale in (1.0, 0.5):
        losses, log_sums = LOSSES(how(implementation), Scored(jnp.asarray(logits), jnp.zeros(5, "int32")), scale=scale)
        want = [np.log(19), scale * 1e38 + np.log(20), 0, np.nan, np.log(19)]
        np.testing.assert_allclose(log_sums, np.float32(want), rtol=1e-6)
        np.testing.assert_allclose(losses[:3], [np.log(19), 0 if scale == 1 else losses[1], 0], rtol=1e-6)


@EVERYWHERE
def test_targets_outside_have_the_loss_nan(implementation):
    logits = case(4, 20).logits
    losses, log_sums = LOSSES(how(implementation), Scored(logits, jnp.array([-1, 20, 19, -20], "int32")), scale=1.0)
    np.testing.assert_array_equal(np.isnan(losses), [True, True, False, True])
    assert np.isfinite(log_sums).all()


@KERNELS
@pytest.mark.parametrize("scale", [0.3, 1 / 6])
def test_logits_scaled_before_give_the_same_bits(scale, implementation):
    """Those that a model returns are scaled; the loss scales them here, and does not write them again."""
    operands = case(9, 9000)
    scaled = operands._replace(logits=jax.jit(lambda logits: logits * scale)(operands.logits))
    run = functools.partial(LOSSES, how(implementation))
    jax.tree.map(np.testing.assert_array_equal, run(scaled, scale=1.0), run(operands, scale=scale))


@KERNELS
def test_a_row_has_the_same_bits_alone_and_among_others(implementation):
    operands = case(37, 500)
    run = functools.partial(LOSSES, how(implementation), scale=0.3)
    among = run(operands)
    for row in (0, 20, 36):
        alone = run(jax.tree.map(lambda array, row=row: array[row : row + 1], operands))
        for own, whole in zip(alone, among, strict=True):
            np.testing.assert_array_equal(own[0], whole[row])


@EVERYWHERE
@pytest.mark.parametrize("axes", [Scored(0, 0), Scored(0, None), Scored(None, 0)])
def test_losses_under_vmap(axes, implementation):
    each = [case(3, 20, seed) for seed in range(2)]
    arrays = [
        jnp.stack([getattr(own, name) for own in each]) if axis == 0 else getattr(each[0], name)
        for name, axis in axes._asdict().items()
    ]
    run = functools.partial(LOSSES, how(implementation), scale=0.5)
    got = jax.jit(jax.vmap(run, in_axes=(axes,)))(Scored(*arrays))
    for number in range(2):
        own = Scored(*(array if axis is None else array[number] for array, axis in zip(arrays, axes, strict=True)))
        assert_close([result[number] for result in got], list(losses64(own, 0.5)), 1e-6)


@EVERYWHERE
def test_gradients(implementation):
    operands = case(3, 20)

    def total(logits):
        return jnp.sum(LOSSES(how(implementation), operands._replace(logits=logits), scale=0.5).losses)

    got = jax.jit(jax.grad(total))(operands.logits)
    probabilities = np.asarray(jax.nn.softmax(operands.logits * 0.5, axis=1))
    want = 0.5 * (probabilities - np.eye(20)[np.asarray(operands.targets)])
    assert_close(got, want, 1e-5)
