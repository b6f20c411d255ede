"""Compiled kernels: several at a time, and kept in a folder, from which some are never taken."""

import importlib
import os
import resource
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import jgg
from jgg.core import files

jax_triton = pytest.importorskip("jax_triton")

from jax_triton import triton_lib  # noqa: E402

from jgg.core.versions import WARP_SPECIALIZED, unlike  # noqa: E402
from jgg.launching import compile_ahead, triton  # noqa: E402
from jgg.launching.compile_ahead import AheadCompiler, Noted  # noqa: E402
from jgg.launching.interpret import InterpreterLock  # noqa: E402
from jgg.launching.launch import Launch  # noqa: E402
from jgg.primitives.operation import Operation  # noqa: E402
from tests.support import processes, workers  # noqa: E402

HAS_GLUON_KERNEL = unlike(WARP_SPECIALIZED) is None
needs_gluon = pytest.mark.skipif(not HAS_GLUON_KERNEL, reason=f"{unlike(WARP_SPECIALIZED)}")
GLUON = {"num_rows": 4096, "num_experts": 4, "in_features": 256, "out_features": 256}
PLAIN = GLUON | {"num_rows": 64}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jgg" / "kernels"


@pytest.fixture
def compiled(monkeypatch):
    """One item for each kernel that Triton has compiled."""
    compile_kernel, items = triton_lib.compile_ttir_inplace, []

    def count(*arguments):
        items.append(arguments)
        return compile_kernel(*arguments)

    monkeypatch.setattr(triton_lib, "compile_ttir_inplace", count)
    return items


def program(*sizes, compute_capability=90, wrap=lambda function: function):
    """The program of products of those sizes, as if in a new process."""
    for module, name in (("forward", "forward_kernel"), *([("hopper", "hopper_kernel")] if HAS_GLUON_KERNEL else [])):
        kernel = getattr(importlib.import_module(f"jgg.kernels.{module}"), name)
        vars(kernel).pop("_jT_kernel_cache", None)
    jax.clear_caches()
    with jgg.target(compute_capability):
        traced = jax.jit(wrap(products)).trace([operands(**each) for each in sizes])
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def operands(num_rows, num_experts, in_features, out_features):
    x = jax.ShapeDtypeStruct((num_rows, in_features), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((num_experts, out_features, in_features), jnp.bfloat16)
    return x, w, jax.ShapeDtypeStruct((num_experts,), jnp.int32)


def products(of_each):
    return [jgg.grouped_gemm(*arrays, implementation="triton") for arrays in of_each]


@pytest.mark.parametrize(
    ("sizes", "name"),
    [(PLAIN, "forward_kernel"), pytest.param(GLUON, "hopper_kernel", marks=[pytest.mark.sweep, needs_gluon])],
)
def test_is_compiled_once(sizes, name, folder, compiled):
    first = program(sizes)
    (path,) = folder.iterdir()
    assert path.name.startswith(name)
    assert len(compiled) == 1
    assert program(sizes) == first
    assert len(compiled) == 1


def test_is_compiled_for_each_device_and_each_constant(folder, compiled):
    program(PLAIN)
    program(PLAIN, compute_capability=80)
    program(PLAIN | {"in_features": 512})
    assert len(list(folder.iterdir())) == len(compiled) == 3


DAMAGE = {"truncated": lambda text: text[: len(text) // 2], "edited": lambda text: text.replace(".reqntid", ".maxntid")}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_file_is_replaced(damage, folder, compiled):
    first = program(PLAIN)
    (path,) = folder.iterdir()
    whole = path.read_text()
    path.write_text(damage(whole))
    assert program(PLAIN) == first
    assert len(compiled) == 2
    assert path.read_text() == whole


def test_no_kernel_passes_for_another(folder, compiled):
    first = program(PLAIN)
    (path,) = folder.iterdir()
    program(PLAIN | {"in_features": 512})
    (other,) = set(folder.iterdir()) - {path}
    path.write_text(other.read_text())
    assert program(PLAIN) == first
    assert len(compiled) == 3


def test_a_file_that_others_may_write_is_not_taken(folder, compiled, caplog):
    first = program(PLAIN)
    (path,) = folder.iterdir()
    path.chmod(0o664)
    assert program(PLAIN) == first
    assert len(compiled) == 2
    assert str(path) in caplog.text
    assert path.stat().st_mode & 0o777 == 0o644  # a new file has its place


def read_only(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")  # where not even root makes a folder


def full(monkeypatch):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def no_home(monkeypatch):
    def getpwuid(uid):
        raise KeyError(f"uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", getpwuid)


@pytest.mark.parametrize("hinder", [read_only, full, no_home])
def test_compiles_where_nothing_can_be_kept_and_says_so_once(hinder, folder, compiled, monkeypatch, caplog):
    files.warn_once.cache_clear()  # as in a new process
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    hinder(monkeypatch)
    try:
        for _ in range(2):
            assert "triton_kernel_call" in program(PLAIN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert len(compiled) == 2
    assert len([record for record in caplog.records if record.name == "jgg" and "kept" in record.message]) == 1
    assert not folder.is_dir() or not list(folder.iterdir())


def test_always_compiles_on_demand(folder, compiled, monkeypatch):
    program(PLAIN)
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    program(PLAIN)
    assert len(compiled) == 2


def test_a_package_that_cannot_be_imported_is_told_with_what_helps(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)  # as one that was built for another version of Triton
    with pytest.raises(ImportError, match=r"versions of .* that fit \(see jgg info\): .*jax_triton"):
        program(PLAIN)


LARGER = PLAIN | {"in_features": 512}


def on_one_device(function):
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)


@pytest.fixture
def with_threads(monkeypatch):
    """A function that lets this many threads compile alongside the program's own, and forgets earlier records."""
    return lambda count: monkeypatch.setattr(Operation, "ahead", AheadCompiler(count))


@pytest.mark.parametrize("wrap", [lambda function: function, on_one_device], ids=["jit", "shard_map"])
def test_kernels_of_a_program_are_compiled_side_by_side(wrap, folder, compiled, with_threads, monkeypatch):
    with_threads(0)
    one_by_one = program(PLAIN, LARGER, wrap=wrap)
    assert len(compiled) == 2
    for path in folder.iterdir():
        path.unlink()
    compile_kernel, both = triton_lib.compile_ttir_inplace, threading.Barrier(2, timeout=300)

    def with_the_other(*arguments):
        both.wait()
        if threading.current_thread() is not threading.main_thread():
            time.sleep(1.5)  # so that the program comes to this kernel and has to wait
        return compile_kernel(*arguments)

    monkeypatch.setattr(triton_lib, "compile_ttir_inplace", with_the_other)
    with_threads(1)
    assert program(PLAIN, LARGER, wrap=wrap) == one_by_one
    assert len(compiled) == 4


def test_what_is_only_traced_is_not_compiled(compiled, with_threads):
    with_threads(1)
    jax.clear_caches()
    with jgg.target(90):
        jax.eval_shape(products, [operands(**PLAIN), operands(**LARGER)])
    assert Operation.ahead.noted
    assert not compiled


def test_only_so_many_operations_are_remembered(monkeypatch):
    monkeypatch.setattr(compile_ahead, "MOST_NOTED", 2)
    compiler = AheadCompiler(1)
    operations = [Noted(False, (((size,), jnp.dtype("float32")),), frozenset()) for size in range(3)]
    for operation in (*operations, operations[1]):
        compiler.note(operation)
    assert list(compiler.noted) == operations[1:]


def test_an_error_of_a_thread_comes_from_the_program(folder, with_threads, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no such instruction")

    with monkeypatch.context() as patched:
        patched.setattr(triton_lib, "compile_ttir_inplace", fail)
        with_threads(1)
        with pytest.raises(RuntimeError, match="no such instruction"):
            program(PLAIN, LARGER)
    assert "triton_kernel_call" in program(PLAIN, LARGER)


def test_several_compile_or_one_interprets():
    language, events = InterpreterLock(), []

    def during(kind, others):
        """Starts others while this thread does something of the kind; `events` says in which order they came."""
        with getattr(language, kind)():
            threads = [threading.Thread(target=do, args=(other,)) for other in others]
            for thread, other in zip(threads, others, strict=True):
                thread.start()
                thread.join(0.2 if "interprets" in (kind, other) else 60)  # long enough to see that it waits, or to end
            events.append("end")
        for thread in threads:
            thread.join(60)

    def do(kind):
        with getattr(language, kind)():
            events.append(kind)

    during("compiles", ["compiles", "interprets", "compiles"])
    assert events == ["compiles", "compiles", "end", "interprets"]
    events.clear()
    during("interprets", ["compiles", "compiles"])
    assert events == ["end", "compiles", "compiles"]


def test_a_new_result_before_another_array_is_refused():
    count_experts_kernel = importlib.import_module("jgg.kernels.routing").count_experts_kernel
    launch = Launch({"counts": jnp.zeros(4, jnp.int32)}, {"experts": jax.ShapeDtypeStruct((4,), jnp.int32)}, {}, (1,))
    with pytest.raises(
        ValueError, match=r"new results \['experts'\] after all other arrays, got \['experts', 'counts'\]"
    ):
        triton.call(90, count_experts_kernel, launch)


THREADS = """
from concurrent.futures import ThreadPoolExecutor
import jax, jgg

def lower(features):
    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((64, features), (4, 64, features)))
    run = jax.jit(lambda *arrays: jgg.grouped_gemm(*arrays, implementation="triton"))
    with jgg.target(90):
        run.trace(x, w, jax.ShapeDtypeStruct((4,), "int32")).lower(lowering_platforms=("cuda",))

with ThreadPoolExecutor(8) as pool:
    list(pool.map(lower, range(64, 64 + 8 * 16, 16)))
print("lowered")
"""


@pytest.mark.thorough
def test_threads_may_compile_the_first_kernels_of_a_process():
    """Triton's modules import each other: a thread once imported one that another had not completed."""
    assert processes.printed(processes.start("-c", THREADS, JAX_PLATFORMS="cpu")) == "lowered\n"


def test_the_programs_of_tests_that_were_read_last_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = workers.kept_programs()
    for name, read in (("a", 3), ("b", 1), ("c", 2)):
        (folder / name).write_bytes(bytes(8192))
        os.utime(folder / name, (read, 0))
    workers.remove_oldest(folder.parent, 16384)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "c"]
    monkeypatch.setenv("XLA_FLAGS", "--other")
    assert workers.kept_programs() != folder
