"""Changes jax-triton and uses private parts of it and of Triton; the other modules use only their public parts.

The changes are made only with the versions in `jgg.core.versions.FIXED`; any other jax-triton stays unchanged. They
affect only how jgg's kernels are compiled, except dead code elimination, which changes for every kernel of jax-triton.
`tools/upstream/` has a report of each, with a program that reproduces it; none has been sent yet.

| what | why | without it |
| --- | --- | --- |
| compiled kernels are kept on disk, and all threads share one compilation | jax-triton 0.4.1 compiles again in every process and thread | a process starts seconds later for each kernel |
| a launch has as many threads as the PTX says | jax-triton 0.4.1 launches only the warps of the first partition | warp-specialized kernels fail at launch |
| Gluon kernels go through Gluon's passes | jax-triton 0.4.1 runs Triton's pipelining over them | results are right, but each matrix product waits for the one before |
| dead code elimination keeps every call, `partial_eval.dce_rules` | jax 0.12 gives such rules one argument more than jax-triton 0.4.1's takes | with jax 0.12 a call lowers only inside a primitive of jgg, and no kernel is compiled ahead |
| TMA descriptors say that they are not im2col | jax-triton 0.4.1 reads that field, which Triton 3.7 does not set | no kernel with TMA compiles: sm_90 and later fail |
| an output of a kernel can be a TMA descriptor | jax-triton 0.4.1 makes descriptors of operands only | warp-specialized kernels do not lower |
| a kernel that needs more shared memory than the GPU has is refused at compile time | jax-triton 0.4.1 leaves that to the launch | the program fails when it runs, and does not name the kernel |
| Gluon's modules live until the process ends | Triton 3.9's C++ keeps some of Gluon's classes | a process prints 20 lines about leaks as it ends |

The private parts that are used:

| what | for | without it |
| --- | --- | --- |
| the folder to which jax-triton 0.4.1 dumps kernels | while it dumps, nothing is compiled ahead | two threads would make the same folder |
| `tl.standard._sum_combine` and `_elementwise_max` | Triton's interpreter computes them as NumPy's sum and maximum | results are right, but computed element by element: routing 20 tokens takes 4 s, not 1 |
| `interpreter_builder.create_dot` | interpreted products add their terms in one order | NumPy's BLAS picks an order for each shape and processor: the bits of a row depend on both |
| the methods of torch's tensor that `_HostTensor` has | the interpreter of Triton 3.7 to 3.9 calls them | the interpreter needs torch |
"""  # noqa: E501

import contextlib
import dataclasses
import functools
import hashlib
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax_triton
import jax_triton.triton_lib as triton_lib
import numpy as np
import triton
from jax.interpreters import mlir, partial_eval
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.language import AutoLayout

from jgg.core.gpu_target import Target
from jgg.launching.kernel_cache import Kernel, kept

_FORMAT = 3  # raise it when the format of kept kernels changes, or the way in which the same kernel is compiled
_lock = threading.Lock()


class _Backend(CUDABackend):
    """Triton's CUDA backend, which also sets the field of TMA descriptors that jax-triton reads."""

    def make_ptx(self, src: Any, metadata: dict[str, Any], *arguments: Any) -> Any:
        for descriptor in metadata["tensordesc_meta"]:
            descriptor.setdefault("is_im2col", False)
        return super().make_ptx(src, metadata, *arguments)


class _GluonBackend(_Backend):
    """The CUDA backend with Gluon's passes in place of Triton's."""

    @staticmethod
    def make_ttir(mod: object, metadata: dict[str, object], options: object, capability: int) -> object:
        return mod

    def make_ttgir(self, mod: object, metadata: dict[str, object], options: object, capability: int) -> object:
        return self.gluon_to_ttgir(mod, metadata, options, capability)


def correct_jax_triton() -> None:
    """Makes the changes to jax-triton that this module's docstring lists, once for the process."""
    with _lock:
        _correct_jax_triton()


@functools.cache
def _correct_jax_triton() -> None:
    by_jax_triton = triton_lib.TritonFunction._compile_kernel

    def compile_kernel(self: Any, spec: Any, gpu_target: Any, backend: Any, backend_options: Any) -> tuple[Any, ...]:
        if not self.fn.__module__.startswith("jgg."):
            return by_jax_triton(self, spec, gpu_target, backend, backend_options)
        is_gluon = isinstance(self.fn, GluonJITFunction)
        backend = (_GluonBackend if is_gluon else _Backend)(gpu_target)
        parsed = backend.parse_options(backend_options)

        def compile_it() -> Kernel:
            if is_gluon:
                _let_gluon_be_cleared()
            _, ttir, _, compiled = by_jax_triton(self, spec, gpu_target, backend, backend_options)
            return {"ttir": ttir, "compiled": dataclasses.asdict(compiled)}

        if triton.knobs.compilation.always_compile or dumps_kernels():
            kernel = compile_it()
        else:
            # the intermediate stages are needed only for dumps
            kernel = kept(_name(self.fn, spec, gpu_target, parsed), lambda: _without_stages(compile_it()))
        compiled = triton_lib.CompilationResult(**kernel["compiled"])
        check_fits(self.fn.__name__, compiled.shared_mem_bytes, gpu_target.arch)
        launchable = _launchable(kernel["ttir"], compiled, gpu_target, backend_options["num_ctas"])
        return launchable, kernel["ttir"], parsed, compiled

    triton_lib.TritonFunction._compile_kernel = compile_kernel
    mlir.register_lowering(triton_lib.triton_kernel_call_p, _lower, platform="cuda")
    partial_eval.dce_rules[triton_lib.triton_kernel_call_p] = _keep_call


def _lower(ctx: Any, *arrays: Any, backend_options: Any, **params: Any) -> Any:
    """Lowers a call as jax-triton does, but lets its outputs have TMA descriptors."""
    options = dict(backend_options)
    described = options.pop("output_descriptors", None)
    if described is not None:
        ctx = ctx.replace(avals_out=_Outputs(ctx.avals_out, dict(described)))
        backend_options = triton_lib.FrozenDict(options)
    return triton_lib.triton_kernel_call_lowering(
        triton_lib.make_cuda_target, ctx, *arrays, backend_options=backend_options, **params
    )


class _Outputs(list[object]):
    """The types of a call's outputs; an index gives an output's TMA descriptor, if it has one, instead of its type.

    jax-triton indexes the outputs to pass them to the kernel, but iterates over their types to lower the call.

    Args:
      described: what the TMA descriptor of an output needs, by the output's number.
    """

    def __init__(self, avals: list[Any], described: dict[int, Any]):
        super().__init__(avals)
        self._descriptors = {
            number: triton_lib.TensorDescriptor(avals[number], *description)
            for number, description in described.items()
        }

    def __getitem__(self, number: Any) -> Any:
        return self._descriptors.get(number) or super().__getitem__(number)


def _keep_call(used_outs: list[bool], *live_ins_and_call: Any) -> tuple[list[bool], Any]:
    call = live_ins_and_call[-1]
    return [True] * len(call.invars), call


def _without_stages(kernel: Kernel) -> Kernel:
    return kernel | {"compiled": kernel["compiled"] | {"ttgir": "", "llir": ""}}


def check_fits(kernel: str, needed: int, compute_capability: int) -> None:
    """Raises ValueError for a kernel that needs more shared memory than the GPU has, so that its launch would fail.

    Only a configuration or tiles that a user gives can lead to such a kernel.
    """
    available = Target(compute_capability, num_sms=0).shared_memory
    if needed > available:
        raise ValueError(
            f"kernel_config_fwd, kernel_config_bwd_dx, kernel_config_bwd_dw and a tuned file must leave each kernel "
            f"within the {available} bytes of shared memory of sm_{compute_capability}, got {needed} bytes for "
            f"{kernel}: ask for smaller blocks or fewer stages."
        )


def _launchable(ttir: str, compiled: Any, gpu_target: Any, num_ctas: int) -> Any:
    (threads,) = map(int, re.findall(r"\.reqntid (\d+)", compiled.binary))
    scratch = compiled.global_scratch_size, compiled.global_scratch_align
    return triton_lib.triton_kernel_call_lib.TritonKernel(
        compiled.name,
        threads // 32,
        num_ctas,
        compiled.shared_mem_bytes,
        compiled.binary,
        ttir,
        gpu_target.arch,
        *(scratch if compiled.global_scratch_size is not None else ()),
    )


def _let_gluon_be_cleared() -> None:
    """Keeps a process from printing, as it ends, 20 lines about leaked types of Gluon.

    Triton's C++ keeps some classes of Gluon for good, and their methods keep the contents of Gluon's modules alive, but
    not the modules. Python clears only modules that still exist at the end, so one of those classes keeps them too.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("triton.experimental.gluon.")]
    AutoLayout._modules_until_the_end = modules


def _name(kernel: Any, spec: Any, gpu_target: Any, options: Any) -> str:
    """The name of a compiled kernel's file, with a hash of everything that the compiled kernel depends on."""
    source_type = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source_type(kernel, spec.signature, spec.constants, spec.attrs).hash()
    environment = sorted(get_cache_invalidating_env_vars().items())
    versions = triton.__version__, jax_triton.__version__
    parts = (_FORMAT, source, gpu_target, options.hash(), environment, versions)
    return f"{kernel.__name__}-{hashlib.sha256(repr(parts).encode()).hexdigest()}"


def dumps_kernels() -> bool:
    """Whether jax-triton writes each kernel that it compiles to a folder."""
    return bool(triton_lib._JAX_TRITON_DUMP_DIR)


def interpreted_reductions() -> dict[str, triton.JITFunction]:
    """Triton's functions to interpret in place of `add` and `highest` of `kernels.tiles`, where Triton has them."""
    names = {"add": "_sum_combine", "highest": "_elementwise_max"}
    standard = vars(triton.language.standard)
    return {own: standard[name] for own, name in names.items() if name in standard}


@contextlib.contextmanager
def products_in_order() -> Iterator[None]:
    """Has interpreted kernels add the terms of a product one after another; for one thread at a time."""
    from triton.runtime.interpreter import interpreter_builder

    vars(interpreter_builder)["create_dot"] = _dot_in_order
    try:
        yield
    finally:
        del vars(interpreter_builder)["create_dot"]


def _dot_in_order(left: Any, right: Any, added: Any, *_: Any) -> Any:
    """`added + left @ right`, from the first term to the last in every element, whatever the shapes."""
    total = added.data.copy()
    for column, row in zip(left.data.T.astype(total.dtype), right.data.astype(total.dtype), strict=True):
        total += np.multiply.outer(column, row)  # rounded twice: NumPy never fuses the two on any processor
    return type(added)(total, added.dtype.scalar)


def host_tensor(array: np.ndarray) -> "_HostTensor":
    """An array as an operand of an interpreted kernel; what the kernel stores is written to the array itself."""
    return _HostTensor(array)


class _HostTensor:
    """A NumPy array with the methods of torch's tensor that Triton's interpreter uses; it may write to the array."""

    def __init__(self, array: Any = None):
        self.array = array

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "_HostTensor":
        return self

    def cpu(self) -> "_HostTensor":
        return self

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def new_empty(self, *_: object, **__: object) -> "_HostTensor":
        return _HostTensor()

    def set_(self, storage: "_HostTensor", *_: object) -> None:
        self.array = storage.array

    def copy_(self, storage: "_HostTensor") -> None:
        pass  # nothing to copy: the interpreter worked on this very memory
