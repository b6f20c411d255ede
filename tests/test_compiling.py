"""Compiled kernels are kept in a folder: what is found there, what is not, and what is never taken from it."""

import jax
import jax.numpy as jnp
import pytest

import jgg

jax_triton = pytest.importorskip("jax_triton")

from jax_triton import triton_lib  # noqa: E402

from jgg.implementations import triton  # noqa: E402

GLUON = {"num_rows": 4096, "num_experts": 4, "in_features": 256, "out_features": 256}
PLAIN = GLUON | {"num_rows": 64}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **__: tmp_path)
    return tmp_path / "kernels"


@pytest.fixture
def compiled(monkeypatch):
    """One item for each kernel that Triton has compiled."""
    compile_kernel, items = triton_lib.compile_ttir_inplace, []

    def count(*arguments):
        items.append(arguments)
        return compile_kernel(*arguments)

    monkeypatch.setattr(triton_lib, "compile_ttir_inplace", count)
    return items


def program(sizes, compute_capability=90):
    """The program of a product, as if in a new process."""
    for name in ("forward_kernel", "hopper_kernel"):
        vars(triton.load_kernel(name)).pop("_jT_kernel_cache", None)
    x = jax.ShapeDtypeStruct((sizes["num_rows"], sizes["in_features"]), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((sizes["num_experts"], sizes["out_features"], sizes["in_features"]), jnp.bfloat16)
    group_sizes = jax.ShapeDtypeStruct((sizes["num_experts"],), jnp.int32)
    with jgg.target(compute_capability):
        traced = jax.jit(lambda *arrays: jgg.grouped_gemm(*arrays, implementation="triton")).trace(x, w, group_sizes)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("sizes", "name"), [(PLAIN, "forward_kernel"), (GLUON, "hopper_kernel")])
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


@pytest.mark.parametrize("content", ["", "{}", '{"ttir": "", "compiled": {"name": "forward_kernel"}}', "[]"])
def test_damaged_file_is_replaced(content, folder, compiled):
    first = program(PLAIN)
    (path,) = folder.iterdir()
    whole = path.read_text()
    path.write_text(content)
    assert program(PLAIN) == first
    assert len(compiled) == 2
    assert path.read_text() == whole


def test_compiles_where_nothing_can_be_kept(folder, compiled):
    folder.write_text("in the place of the folder")
    assert "triton_kernel_call" in program(PLAIN)
    assert len(compiled) == 1


def test_always_compiles_on_demand(folder, compiled, monkeypatch):
    program(PLAIN)
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    program(PLAIN)
    assert len(compiled) == 2


def test_versions_that_were_not_tested_are_left_as_they_are(monkeypatch):
    corrected = []
    monkeypatch.setattr("jgg.implementations.compiling.correct_jax_triton", lambda: corrected.append(True))
    program(PLAIN)
    assert corrected
    monkeypatch.setattr(triton, "untested_version", lambda: "another version")
    corrected.clear()
    program(PLAIN)
    assert not corrected
