"""Launches the Triton kernels; the only module that calls triton_call."""

import functools
import importlib

import jax

from jgg.implementations import combining, kernels, layer_kernels, weight_gradient
from jgg.implementations.launch import Launch
from jgg.varying import vary_over, varying_axes
from jgg.warp_specialization import untested_version

# The newest PTX that every driver for CUDA 12.6 and later assembles, and enough for sm_80 to sm_100. Triton's own
# default can be newer than the driver's assembler.
_PTX_VERSION = 86

MODULES = {
    "forward_kernel": "forward",
    "backward_dx_kernel": "backward_dx",
    "backward_dw_kernel": "backward_dw",
    "combine_kernel": "combine",
    "group_sums_kernel": "group_sums",
    "hopper_kernel": "hopper",
    "activate_kernel": "activation",
    "activate_backward_kernel": "activation",
    "top_k_kernel": "routing",
    "count_experts_kernel": "routing",
    "sum_counts_kernel": "routing",
    "place_rows_kernel": "routing",
}
GLUON_KERNELS = ("hopper_kernel",)


def forward(target, problem, config, *arrays, **options):
    """See `implementations.kernels.forward`."""
    return kernels.forward(_call_for(target), target, problem, config, *arrays, **options)


def backward_dx(target, problem, config, *arrays, **options):
    """See `implementations.kernels.backward_dx`."""
    return kernels.backward_dx(_call_for(target), target, problem, config, *arrays, **options)


def backward_dw(target, problem, config, *arrays, **options):
    """See `implementations.weight_gradient.backward_dw`."""
    return weight_gradient.backward_dw(_call_for(target), target, problem, config, *arrays, **options)


def combine(target, problem, config, rows, positions, scales, topk):
    """See `implementations.combining.combine`."""
    return [combining.combine(_call_for(target), rows, positions, topk, scales)]


def activate(target, problem, config, *arrays, **options):
    """See `implementations.layer_kernels.activate`."""
    return layer_kernels.activate(_call_for(target), *arrays, **options)


def activate_backward(target, problem, config, *arrays, **options):
    """See `implementations.layer_kernels.activate_backward`."""
    return layer_kernels.activate_backward(_call_for(target), *arrays, **options)


def top_k(target, problem, config, scores, topk):
    """See `implementations.layer_kernels.top_k`."""
    return layer_kernels.top_k(_call_for(target), scores, topk)


def sort(target, problem, config, experts, num_experts):
    """See `implementations.layer_kernels.sort`."""
    return layer_kernels.sort(_call_for(target), experts, num_experts)


def load_kernel(name: str, package: str = "jgg.kernels"):
    """The jitted kernel of that name from a copy of the kernels package."""
    return getattr(importlib.import_module(f"{package}.{MODULES[name]}"), name)


def _call_for(target):
    return functools.partial(call, target.compute_capability)


def call(compute_capability: int, name: str, launch: Launch) -> dict[str, jax.Array]:
    """Launches a kernel through `jax_triton.triton_call`."""
    try:
        import jax_triton

        kernel = load_kernel(name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"implementation='triton' needs versions of Triton, jax-triton and JAX that fit (see jgg info): {error}"
        ) from error
    if untested_version() is None:
        from jgg.implementations import compiling

        compiling.correct_jax_triton()
    operands = dict(launch.operands)
    layouts = {}
    if name in GLUON_KERNELS:
        from jgg.implementations import gluon

        layouts = {key: gluon.shared_layout(tma, operands[key].dtype) for key, tma in launch.descriptors.items()}
    for key, tma in launch.descriptors.items():
        operands[key] = jax_triton.TensorDescriptor(
            operands[key], tma.shape, tma.strides, tma.block_shape, layouts.get(key)
        )
    # Where an array that a kernel writes over is a slice of another, or its result goes into one, as in a scan, XLA
    # would let the kernel read or write that slice itself and forget that it writes over what it reads. Barriers keep
    # the slices apart.
    barrier = jax.lax.optimization_barrier
    refs = {key: jax.new_ref(barrier(array)) for key, array in launch.updated.items()}
    new = [key for key in launch.outputs if key not in refs]
    outputs = jax_triton.triton_call(
        **operands,
        **refs,
        **launch.constants,
        kernel=kernel,
        out_type=tuple(launch.outputs[key] for key in new),
        grid=launch.grid,
        name=f"jgg_{name}",
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        num_ctas=launch.num_ctas,
        compute_capability=compute_capability,
        backend_options={"ptx_version": _PTX_VERSION, "enable_fp_fusion": True},
        cost_estimate={"flops": launch.flops, "bytes_accessed": launch.bytes_accessed},
    )
    axes = varying_axes(*launch.arrays.values())
    results = dict(zip(new, outputs, strict=True)) | {key: barrier(jax.freeze(ref)) for key, ref in refs.items()}
    return {key: vary_over(axes, result) for key, result in results.items()}
