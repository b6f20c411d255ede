"""How jax-triton 0.4.1 compiles this package's kernels: Gluon's as Triton itself does, and each but once.

jax-triton runs Triton's own pipelining passes over a Gluon kernel, which make its asynchronous products wait, and
launches it with the warps of its first partition rather than with those of all. And it compiles anew in every process,
which takes seconds for each kernel. Here what is compiled is kept in the platform's folder for caches, and what several
threads need is compiled by one of them. A kept kernel is machine code, so it is taken only from a file that no other
user can have written and whose content has the digest that it begins with.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import re
import sys
import threading
from concurrent.futures import Future

import jax_triton
import jax_triton.triton_lib as triton_lib
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.experimental.gluon import GluonJITFunction
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import AutoLayout

from jgg.files import cache_folder, read_own_text, replace_text, warn_once
from jgg.target import Target

_logger = logging.getLogger("jgg")

_running: dict[str, Future] = {}  # what threads compile right now
_lock = threading.Lock()

_FORMAT = 2  # of the files, and of what is compiled from the same kernel; raise it where either changes


class _GluonBackend(CUDABackend):
    """Triton's CUDA backend with Gluon's passes in place of Triton's."""

    @staticmethod
    def make_ttir(mod, metadata, options, capability):
        return mod

    def make_ttgir(self, mod, metadata, options, capability):
        return self.gluon_to_ttgir(mod, metadata, options, capability)


def correct_jax_triton() -> None:
    """Makes jax-triton compile the kernels of this package as said above; those of others are not touched.

    It uses inner functions of both, so it is for the versions that `jgg.warp_specialization` names.
    """
    with _lock:
        _correct_jax_triton()


@functools.cache
def _correct_jax_triton():
    by_jax_triton = triton_lib.TritonFunction._compile_kernel

    def compile_kernel(self, spec, gpu_target, backend, options):
        if not self.fn.__module__.startswith("jgg."):
            return by_jax_triton(self, spec, gpu_target, backend, options)
        backend = _GluonBackend(gpu_target) if isinstance(self.fn, GluonJITFunction) else backend
        parsed = backend.parse_options(options)
        name = _name(self.fn, spec, gpu_target, parsed)

        def load_or_compile():
            folder = cache_folder()
            path = folder and folder / "kernels" / name
            kept = _load(path)
            if kept is None:
                if isinstance(self.fn, GluonJITFunction):
                    _let_gluon_be_cleared()
                _, ttir, _, compiled = by_jax_triton(self, spec, gpu_target, backend, options)
                _keep(path, ttir, compiled)
                kept = ttir, compiled
            return kept

        ttir, compiled = _once_at_a_time(name, load_or_compile)
        _check_fits(self.fn.__name__, compiled.shared_mem_bytes, gpu_target.arch)
        return _launchable(ttir, compiled, gpu_target, options["num_ctas"]), ttir, parsed, compiled

    triton_lib.TritonFunction._compile_kernel = compile_kernel


def _once_at_a_time(name, compute):
    """compute(), or what another thread computes for that kernel right now."""
    with _lock:
        is_first = name not in _running
        future = _running.setdefault(name, Future())
    if is_first:
        try:
            future.set_result(compute())
        except BaseException as error:
            future.set_exception(error)
        finally:
            with _lock:
                del _running[name]
    return future.result()


def _check_fits(kernel, needed, compute_capability):
    """Raises ValueError for a kernel that would fail at its launch, as only one of a given configuration can."""
    available = Target(compute_capability, num_sms=0).shared_memory
    if needed > available:
        raise ValueError(
            f"kernel_config_fwd, kernel_config_bwd_dx and kernel_config_bwd_dw must leave each kernel within the "
            f"{available} bytes of shared memory of sm_{compute_capability}, got {needed} bytes for {kernel}: "
            f"ask for smaller blocks or fewer stages."
        )


def _launchable(ttir, compiled, gpu_target, num_ctas):
    threads = int(re.search(r"\.reqntid (\d+)", compiled.binary)[1])
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


def _let_gluon_be_cleared():
    """Spares a process the 20 lines in which it would report, as it ends, that Gluon's types were leaked.

    Triton's C++ keeps some classes of Gluon for good. Through their methods they keep what Gluon's modules hold, but
    not the modules, and Python clears only a module that is still there at the end. So one of them gets to keep those.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("triton.experimental.gluon.")]
    AutoLayout._modules_until_the_end = modules


def _name(kernel, spec, gpu_target, options):
    """The name of the file of a kernel, with the hash of all that it depends on."""
    source_type = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source_type(kernel, spec.signature, spec.constants, spec.attrs).hash()
    environment = sorted(get_cache_invalidating_env_vars().items())
    versions = triton.__version__, jax_triton.__version__
    parts = (_FORMAT, source, gpu_target, options.hash(), environment, versions)
    return f"{kernel.__name__}-{hashlib.sha256(repr(parts).encode()).hexdigest()}"


def _digest(path, text):
    """Of the name too, so that no kernel passes for another."""
    return hashlib.sha256(f"{path.name}\n{text}".encode()).hexdigest()


def _load(path):
    """A kernel's TTIR and CompilationResult, or None."""
    if path is None or triton.knobs.compilation.always_compile or triton_lib._JAX_TRITON_DUMP_DIR:
        return None
    try:
        digest, _, text = read_own_text(path).partition("\n")
        if digest != _digest(path, text):
            raise ValueError("it is not as it was written")
        content = json.loads(text)
        return content["ttir"], triton_lib.CompilationResult(**content["compiled"])
    except FileNotFoundError:
        return None
    except PermissionError as error:
        warn_once(f"A compiled kernel is not taken from a file that others may have written or that is theirs: {error}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        _logger.info("A compiled kernel cannot be read from %s: %s", path, error)
    return None


def _keep(path, ttir, compiled):
    if path is None:
        return
    # the stages between are for jax-triton's dumps alone
    text = json.dumps({"ttir": ttir, "compiled": dataclasses.asdict(compiled) | {"ttgir": "", "llir": ""}})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, f"{_digest(path, text)}\n{text}", mode=0o644)
    except OSError as error:
        reason = error.strerror or error
        warn_once(f"Compiled kernels cannot be kept in {path.parent}, so each process compiles them: {reason}")
