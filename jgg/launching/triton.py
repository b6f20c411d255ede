"""Launches the Triton kernels; the only module that calls triton_call."""

import threading
from types import ModuleType

import jax
import numpy as np

from jgg.core.manual_axes import vary_over, varying_axes
from jgg.core.versions import FIXED, check_kernels_can_run, unlike
from jgg.launching.launch import Kernel, Launch, Tma

# shape, strides, block and layout of a TMA descriptor, as jax_triton.TensorDescriptor takes them
type Description = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], object]

# The oldest PTX version that supports the GPU, but at least 8.6, which the drivers of CUDA 12.6 and later assemble.
# Triton's own default can be too new for the driver's assembler.
_PTX_VERSIONS = dict.fromkeys((80, 86, 87, 89, 90, 100), 86) | {103: 88, 110: 90, 120: 87, 121: 88}
_loading = threading.Lock()
_TRITON_NAMES = {"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}  # dtypes for which JAX has another name


def call(compute_capability: int, kernel: Kernel, launch: Launch) -> dict[str, jax.Array]:
    """Launches a kernel of `jgg.kernels` through `jax_triton.triton_call`."""
    jax_triton = load()
    # An array that a kernel writes over can be a slice of a larger array, or its result can go into such a slice, as in
    # a scan. XLA would then let the kernel work on the slice in place, and forget that it writes over what it reads. It
    # forgets that too where another operand or result is a slice. Barriers keep all arrays of such a kernel apart from
    # slices.
    barrier = jax.lax.optimization_barrier
    refs = {key: jax.new_ref(barrier(array)) for key, array in launch.updated.items()}
    operands: dict[str, object] = {key: each for key, each in launch.operands.items() if key not in refs}
    if refs:
        operands = {key: barrier(each) if isinstance(each, jax.Array) else each for key, each in operands.items()}
    new = [key for key in launch.outputs if key not in refs]
    _check_order(kernel, launch, new)
    operands, descriptions = {**operands, **refs}, _descriptions(kernel, launch)
    for key in descriptions.keys() - new:
        operands[key] = jax_triton.TensorDescriptor(operands[key], *descriptions[key])
    described = {number: descriptions[key] for number, key in enumerate(new) if key in descriptions}
    outputs = jax_triton.triton_call(
        **operands,
        **launch.constants,
        kernel=kernel,
        out_type=tuple(launch.outputs[key] for key in new),
        grid=launch.grid,
        name=f"jgg_{kernel.__name__}",
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        num_ctas=launch.num_ctas,
        compute_capability=compute_capability,
        backend_options=_options(compute_capability, described, launch.max_registers),
        cost_estimate={"flops": launch.flops, "bytes_accessed": launch.bytes_accessed},
    )
    axes = varying_axes(*launch.arrays.values())
    results = dict(zip(new, outputs, strict=True)) | {key: jax.freeze(ref) for key, ref in refs.items()}
    return {key: vary_over(axes, barrier(result) if refs else result) for key, result in results.items()}


def _check_order(kernel: Kernel, launch: Launch, new: list[str]) -> None:
    """Raises unless new results are the last arrays among the kernel's parameters, as jax-triton hands them over."""
    arrays = [name for name in kernel.arg_names if name in launch.arrays or name in new]
    if new and arrays[-len(new) :] != new:
        raise ValueError(f"{kernel.__name__} must have its new results {new} after all other arrays, got {arrays}.")


def load() -> ModuleType:
    """Imports the module jax_triton, changed by `jax_triton_fixes` if the installed versions are in FIXED.

    Triton's modules import each other, so a second thread could import one that is not complete yet. Call this before
    importing `jgg.kernels`.
    """
    check_kernels_can_run()
    with _loading:
        try:
            import jax_triton
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"implementation='triton' needs versions of Triton, jax-triton and JAX that fit (see jgg info): {error}"
            ) from error
        if unlike(FIXED) is None:
            from jgg.launching import jax_triton_fixes

            jax_triton_fixes.correct_jax_triton()
    return jax_triton


def _descriptions(kernel: Kernel, launch: Launch) -> dict[str, Description]:
    """Shape, strides, block and layout of each TMA descriptor."""
    arrays = {**launch.arrays, **launch.outputs}
    return {
        key: (tma.shape, tma.strides, tma.block_shape, _shared_layout(kernel, tma, arrays[key].dtype))
        for key, tma in launch.descriptors.items()
    }


def _options(
    compute_capability: int, described_outputs: dict[int, Description], max_registers: int | None
) -> dict[str, object]:
    """Options of the compiler, and the descriptions of outputs by their number, which jax_triton_fixes takes out."""
    options: dict[str, object] = {"enable_fp_fusion": True, "maxnreg": max_registers}
    if compute_capability in _PTX_VERSIONS:
        options["ptx_version"] = _PTX_VERSIONS[compute_capability]
    if described_outputs:
        options["output_descriptors"] = tuple(described_outputs.items())
    return options


def _shared_layout(kernel: Kernel, tma: Tma, dtype: np.dtype) -> object:
    """The layout in shared memory of a descriptor's blocks in a cluster of two; None for kernels not in Gluon."""
    if not kernel.is_gluon():
        return None
    from triton.experimental.gluon import language

    axes = [int(axis == tma.cta_axis) for axis in range(len(tma.block_shape))]
    block_shape, element = list(tma.block_shape), getattr(language, _TRITON_NAMES.get(dtype.name, dtype.name))
    return language.NVMMASharedLayout.get_default_for(block_shape, element, cga_layout=[axes])
