"""What Gluon kernels need from jax-triton beyond plain Triton's: layouts of descriptors, and two corrections.

jax-triton 0.4.1 runs Triton's own pipelining passes over a Gluon kernel, which make its asynchronous products wait, and
launches with the warps of the kernel's first partition rather than with those of all. `warp_specialization` has the
versions that this was tested with.
"""

import functools
import re

import jax_triton.triton_lib as triton_lib
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon import GluonJITFunction, language
from triton.experimental.gluon.language import NVMMASharedLayout

from jgg.implementations.launch import Tma


def shared_layout(tma: Tma, dtype) -> NVMMASharedLayout:
    """The layout in shared memory of a descriptor's blocks, in a cluster of two."""
    axes = [int(axis == tma.cta_axis) for axis in range(len(tma.block_shape))]
    return NVMMASharedLayout.get_default_for(list(tma.block_shape), getattr(language, dtype.name), cga_layout=[axes])


class _GluonBackend(CUDABackend):
    """Triton's CUDA backend with Gluon's passes in place of Triton's."""

    @staticmethod
    def make_ttir(mod, metadata, options, capability):
        return mod

    def make_ttgir(self, mod, metadata, options, capability):
        return self.gluon_to_ttgir(mod, metadata, options, capability)


@functools.cache
def correct_jax_triton():
    """Makes jax-triton compile and launch Gluon kernels as Triton itself does; plain kernels are not touched."""
    compile_kernel = triton_lib.TritonFunction._compile_kernel

    def compile_any_kernel(self, spec, gpu_target, backend, backend_options):
        if not isinstance(self.fn, GluonJITFunction):
            return compile_kernel(self, spec, gpu_target, backend, backend_options)
        _, ttir, options, compiled = compile_kernel(self, spec, gpu_target, _GluonBackend(gpu_target), backend_options)
        threads = int(re.search(r"\.reqntid (\d+)", compiled.binary)[1])
        scratch = compiled.global_scratch_size, compiled.global_scratch_align
        kernel = triton_lib.triton_kernel_call_lib.TritonKernel(
            compiled.name,
            threads // 32,
            backend_options["num_ctas"],
            compiled.shared_mem_bytes,
            compiled.binary,
            ttir,
            gpu_target.arch,
            *(scratch if compiled.global_scratch_size is not None else ()),
        )
        return kernel, ttir, options, compiled

    triton_lib.TritonFunction._compile_kernel = compile_any_kernel
