"""Programs made on one machine and run on another."""

import jax
import jax.numpy as jnp
from cases import make_data
from transforms import ORDER, WITH_EVERYTHING, assert_close, expected_outputs, forward_and_backward

import jgg


def test_export_for_cpu_and_cuda():
    function = forward_and_backward(WITH_EVERYTHING, None)
    data = make_data(WITH_EVERYTHING, "float32")
    arguments = [jnp.asarray(getattr(data, name)) for name in ORDER]
    with jgg.target(90):
        exported = jax.export.export(
            jax.jit(function),
            platforms=("cpu", "cuda"),
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")],
        )(*arguments)
    # the program for CUDA is in there
    assert "triton_kernel_call_ffi" in exported.mlir_module()
    restored = jax.export.deserialize(exported.serialize())
    assert set(restored.platforms) == {"cpu", "cuda"}
    expected = expected_outputs(WITH_EVERYTHING, *(getattr(data, name) for name in ORDER))
    assert_close(list(restored.call(*arguments)), list(expected))
