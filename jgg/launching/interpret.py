"""Runs the kernels on the CPU in Triton's interpreter, under `jax.jit`, to check them where there is no GPU."""

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgg.core.gpu_target import Target
from jgg.core.manual_axes import vary_over, varying_axes
from jgg.core.quantized import DTYPES
from jgg.core.versions import check_kernels_can_run
from jgg.launching.launch import Kernel, Launch

# Few programs with many tiles each, so that the loop of a persistent kernel takes several steps even in small tests.
# The interpreter runs one program after the other, so that more of them would not be faster.
TARGET = Target(compute_capability=90, num_sms=3, name="Triton interpreter", is_interpreted=True)
_PACKAGE = "jgg.interpreted_kernels"


class InterpreterLock:
    """Keeps kernels from being compiled while one is interpreted.

    While Triton's interpreter runs, it replaces parts of Triton's language for every thread. So either several threads
    compile, or one thread interprets and none compiles.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._compiling = 0

    @contextlib.contextmanager
    def compiles(self) -> Iterator[None]:
        """Held while kernels are compiled."""
        with self._changed:
            self._compiling += 1
        try:
            yield
        finally:
            with self._changed:
                self._compiling -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def interprets(self) -> Iterator[None]:
        """Held while a kernel is interpreted."""
        with self._changed:
            self._changed.wait_for(lambda: self._compiling == 0)
            yield


INTERPRETER_LOCK = InterpreterLock()


def call(kernel: Kernel, launch: Launch) -> dict[str, jax.Array]:
    """Interprets a kernel of `jgg.kernels` in a host callback; under `vmap`, once for each batch element."""
    arrays = launch.arrays
    dtypes = [array.dtype for array in arrays.values()] + [result.dtype for result in launch.result_types.values()]
    if jnp.bfloat16 in dtypes:
        raise TypeError(
            "implementation='interpret' takes float32 and float16, got bfloat16, which Triton's interpreter gets wrong."
        )
    check_kernels_can_run()
    constant = {key: value for key, value in launch.operands.items() if key not in arrays}

    from triton.tools.tensor_descriptor import TensorDescriptor

    from jgg.launching.jax_triton_fixes import host_tensor, products_in_order

    interpreted = _interpreted(kernel)
    axes = varying_axes(*arrays.values())

    def run(arrays: dict[str, jax.Array]) -> dict[str, np.ndarray]:
        types = launch.result_types
        outputs = {key: np.full(r.shape, _unwritten(r.dtype), _interpreted_dtype(r.dtype)) for key, r in types.items()}
        outputs |= {key: _as_interpreted(arrays[key]) for key in launch.updated}
        tensors = {key: host_tensor(_as_interpreted(array)) for key, array in arrays.items()}
        tensors |= {key: host_tensor(array) for key, array in outputs.items()}
        for key, tma in launch.descriptors.items():
            tensors[key] = TensorDescriptor(tensors[key], tma.shape, tma.strides, tma.block_shape)
        # as on a GPU, Inf and NaN are values like any other
        with INTERPRETER_LOCK.interprets(), products_in_order(), np.errstate(all="ignore"):
            interpreted[launch.grid](**tensors, **constant, **launch.constants)
        return {key: output.astype(types[key].dtype) for key, output in outputs.items()}

    results = jax.pure_callback(run, launch.result_types, arrays, vmap_method="sequential")
    return {key: vary_over(axes, result) for key, result in results.items()}


def _interpreted_dtype(dtype: np.dtype) -> np.dtype:
    """float16 in place of FP8: it holds every FP8 number, and Triton's interpreter takes a NaN in FP8 for a number."""
    return np.dtype(np.float16) if dtype in DTYPES else dtype


def _as_interpreted(array: jax.Array) -> np.ndarray:
    return np.array(array).astype(_interpreted_dtype(array.dtype))


def _unwritten(dtype: np.dtype) -> float:
    """The value that outputs are filled with first, NaN or the lowest integer; it shows what a kernel did not write."""
    return np.nan if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min


@functools.cache
def _interpreted(kernel: Kernel) -> Any:
    """The same kernel from a second copy of the package `jgg.kernels`, in which `triton.jit` makes it interpreted."""
    import triton

    module = f"{_package().__name__}.{kernel.__module__.rpartition('.')[2]}"
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        return getattr(importlib.import_module(module), kernel.__name__)


@functools.cache
def _package() -> ModuleType:
    import triton

    from jgg.launching.jax_triton_fixes import interpreted_reductions

    origin = importlib.import_module("jgg.kernels")
    loader = importlib.machinery.SourceFileLoader(_PACKAGE, str(origin.__file__))
    spec = importlib.machinery.ModuleSpec(_PACKAGE, loader, origin=origin.__file__, is_package=True)
    spec.submodule_search_locations = list(origin.__path__)
    package = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = package
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        loader.exec_module(package)
        vars(importlib.import_module(f"{_PACKAGE}.tiles")).update(interpreted_reductions())
    return package
