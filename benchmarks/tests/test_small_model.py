"""The small model that comparisons train."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.small_model import Settings, held_out_bits, held_out_windows, make_model, measure

SETTINGS = Settings(
    steps=1, batch=2, seq=16, hidden=64, layers=1, experts=4, topk=2, seed=0, implementation=None, dtype="float32",
    fp8=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def small_model():
    model = make_model(SETTINGS, nnx.Rngs(0))
    model.w_head[...] = jax.random.normal(jax.random.key(1), (64, 256))
    return model, functools.partial(jax.jit(measure), model)


def test_model_predicts_bytes_from_earlier_ones_alone(small_model):
    _, measure_windows = small_model
    windows = np.random.default_rng(0).integers(0, 256, (2, 17), dtype=np.uint8)
    changed = windows.copy()
    changed[:, 9] += 1
    bits, other = measure_windows(windows).bits, measure_windows(changed).bits
    np.testing.assert_allclose(bits[:, :8], other[:, :8], rtol=1e-5)
    assert (jnp.abs(bits[:, 8:] - other[:, 8:]) > 1e-3).all()


def test_model_measures_loads_and_their_imbalance(small_model):
    _, measure_windows = small_model
    measured = measure_windows(np.zeros((2, 17), np.uint8))  # every position is routed alike
    np.testing.assert_array_equal(np.sort(measured.group_sizes, axis=1), [[0, 0, 32, 32]])
    assert 1 < measured.imbalance < 4


def test_held_out_windows_predict_every_byte_once():
    text = np.arange(100, dtype=np.uint8)
    windows, is_real = held_out_windows(text, seq=16, batch=4)
    assert windows.shape == (2, 4, 17)
    np.testing.assert_array_equal(windows[:, :, 1:][is_real], text[1:])
    np.testing.assert_array_equal(windows[:, :, :-1][is_real], text[:-1])


def test_evaluation_is_the_mean_over_all_held_out_bytes(small_model):
    model, measure_windows = small_model
    text = np.random.default_rng(0).integers(0, 256, 38, dtype=np.uint8)
    value = held_out_bits(model, *held_out_windows(text, seq=16, batch=2))
    padded = np.pad(text, (0, 11))
    bits = [measure_windows(padded[[range(i, i + 17)] * 2]).bits[0] for i in (0, 16, 32)]
    np.testing.assert_allclose(value, np.concatenate(bits)[:37].mean(), rtol=1e-5)
