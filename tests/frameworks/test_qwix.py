"""Weights that qwix quantized, multiplied by jgg."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from tests.support.documents import code_of, run_code
from tests.support.frameworks import framework

pytestmark = framework("qwix")


@pytest.mark.parametrize("tiled_axes", [{}, {1: 32}, {1: 64, 2: 16}])
def test_weights(tiled_axes):
    import qwix

    w = jax.random.normal(jax.random.key(0), (4, 128, 96))
    channels = {0, 2} - tiled_axes.keys()
    quantized = qwix.quantize(w, jnp.float8_e4m3fn, channelwise_axes=channels, tiled_axes=tiled_axes)
    converted = jgg.QuantizedArray.from_qwix(quantized)
    want = np.asarray(qwix.dequantize(quantized))
    np.testing.assert_array_equal(converted.dequantize(jnp.float32), want)
    x, sizes = jax.random.normal(jax.random.key(1), (30, 128)), jnp.array([10, 0, 17, 3])
    got, want = (jgg.grouped_gemm(x, of, sizes, w_layout="ekn") for of in (converted, want))
    np.testing.assert_array_equal(got, want)


def test_the_recipe():
    import qwix

    (code,) = code_of("integrations.md", "qwix")
    names = run_code(code)
    w = qwix.dequantize(names["quantized"])
    np.testing.assert_allclose(names["y"], jnp.repeat(jnp.sum(w, axis=1), 5, axis=0), rtol=1e-5, atol=1e-5)
