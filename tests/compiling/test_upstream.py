"""What jgg takes from jax-triton, private parts among them: a test fails by name where another version differs.

docs/development.md says what to do then, under "A new jax-triton".
"""

import inspect

import pytest

from jgg.core import versions

jax_triton = pytest.importorskip("jax_triton")
triton_lib = pytest.importorskip("jax_triton.triton_lib")

# what jgg/launching names, with the parameters that it passes or takes
TAKEN = {
    "triton_call": (
        lambda: jax_triton.triton_call,
        "kernel out_type grid name num_warps num_stages num_ctas compute_capability backend_options cost_estimate",
    ),
    "TensorDescriptor": (lambda: jax_triton.TensorDescriptor, "base shape strides block_shape layout"),
    "TritonFunction._compile_kernel": (
        lambda: triton_lib.TritonFunction._compile_kernel,
        "self spec gpu_target backend backend_options",
    ),
    "CompilationResult": (
        lambda: triton_lib.CompilationResult,
        "binary name shared_mem_bytes ttgir llir global_scratch_size global_scratch_align tensordesc_meta",
    ),
    "triton_kernel_call_lowering": (
        lambda: triton_lib.triton_kernel_call_lowering,
        "make_target_func ctx backend_options",
    ),
    "triton_kernel_call_p": (lambda: triton_lib.triton_kernel_call_p.bind, None),
    "make_cuda_target": (lambda: triton_lib.make_cuda_target, "compute_capability num_ctas"),
    "_JAX_TRITON_DUMP_DIR": (lambda: triton_lib._JAX_TRITON_DUMP_DIR, None),
}


def test_the_changes_are_for_the_jax_triton_that_is_installed():
    installed = versions.installed("jax-triton")
    assert installed.startswith(versions.FIXED["jax-triton"]), (
        f"jgg/launching/jax_triton_fixes.py is for {versions.FIXED['jax-triton']}, got {installed}: "
        "see A new jax-triton in docs/development.md"
    )


@pytest.mark.parametrize("name", TAKEN)
def test_jax_triton_has_what_jgg_takes_from_it(name):
    find, names = TAKEN[name]
    found = find()
    if names:
        assert not {*names.split()} - inspect.signature(found).parameters.keys()


@pytest.mark.parametrize("name", ["zeroed_outputs", "input_output_aliases", "out_shape"])
def test_jgg_passes_nothing_that_the_next_jax_triton_changes(name):
    """Those of jax-triton's head in 2026-11, 0.5.0; the others are in the section of docs/development.md."""
    from jgg.launching import triton

    assert name not in inspect.getsource(triton)
