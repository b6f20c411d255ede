"""Launches the Triton kernels; the only module that calls triton_call."""

import importlib

import jax

from jgg.implementations import kernels
from jgg.implementations.kernels import Launch
from jgg.target import current_target
from jgg.varying import vary_over, varying_axes

# The newest PTX that every driver for CUDA 12.6 and later assembles, and enough for sm_80 to sm_100. Triton's own
# default can be newer than the driver's assembler.
_PTX_VERSION = 86

_MODULES = {
    "forward_kernel": "forward",
    "backward_dx_kernel": "backward_dx",
    "backward_dw_kernel": "backward_dw",
    "combine_kernel": "combine",
}


def forward(problem, config, *arrays, **options):
    """See `implementations.kernels.forward`."""
    return kernels.forward(call, current_target(), problem, config, *arrays, **options)


def backward_dx(problem, config, *arrays, **options):
    """See `implementations.kernels.backward_dx`."""
    return kernels.backward_dx(call, current_target(), problem, config, *arrays, **options)


def backward_dw(problem, config, *arrays, **options):
    """See `implementations.kernels.backward_dw`."""
    return kernels.backward_dw(call, current_target(), problem, config, *arrays, **options)


def load_kernel(name: str, package: str = "jgg.kernels"):
    """The jitted kernel of that name from a copy of the kernels package."""
    return getattr(importlib.import_module(f"{package}.{_MODULES[name]}"), name)


def call(name: str, launch: Launch) -> dict[str, jax.Array]:
    """Launches a kernel through `jax_triton.triton_call`; under `vmap`, once for each batch element."""
    import jax_triton

    kernel = load_kernel(name)
    arrays = {key: value for key, value in launch.operands.items() if isinstance(value, jax.Array)}
    constant = {key: value for key, value in launch.operands.items() if key not in arrays}
    axes = varying_axes(*arrays.values())

    @jax.custom_batching.sequential_vmap
    def run(arrays):
        tma = {
            key: jax_triton.TensorDescriptor(arrays[key], descriptor.shape, descriptor.strides, descriptor.block_shape)
            for key, descriptor in launch.descriptors.items()
        }
        return jax_triton.triton_call(
            **(arrays | tma),
            **constant,
            **launch.constants,
            kernel=kernel,
            out_type=tuple(launch.outputs.values()),
            grid=launch.grid,
            name=f"jgg_{name}",
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            compute_capability=current_target().compute_capability,
            backend_options={"ptx_version": _PTX_VERSION, "enable_fp_fusion": True},
            cost_estimate={"flops": launch.flops, "bytes_accessed": launch.bytes_accessed},
        )

    outputs = run(arrays)
    return {key: vary_over(axes, output) for key, output in zip(launch.outputs, outputs, strict=True)}
