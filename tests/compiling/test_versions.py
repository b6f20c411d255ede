"""What other versions of Triton and jax-triton than those here lead to; tools/versions.py runs tests with some."""

import functools

import jax
import pytest

import jgg
from jgg.core import versions
from tests.support import processes

pytest.importorskip("jax_triton")

FIXED = {"triton": "3.9.0", "jax-triton": "0.4.1"}

# Lowers a product for Hopper with that Triton. Prints whose function compiled its kernel, and what was kept.
LOWER = """
import os, pathlib, sys
import jax, jax.numpy as jnp
import jgg
from jgg.core import versions
versions.installed = {"triton": sys.argv[1], "jax-triton": "0.4.1"}.get
shapes = [(4096, 256), jnp.bfloat16], [(4, 256, 256), jnp.bfloat16], [(4,), jnp.int32]
with jgg.target(90):
    traced = jax.jit(jgg.grouped_gemm).trace(*[jax.ShapeDtypeStruct(*shape) for shape in shapes])
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
from jax_triton import triton_lib
print("triton_kernel_call" in text, triton_lib.TritonFunction._compile_kernel.__module__)
print(sorted(path.name.partition("-")[0] for path in pathlib.Path(os.environ["XDG_CACHE_HOME"]).glob("jgg/kernels/*")))
"""


@pytest.mark.parametrize(
    ("triton", "module", "kept"),
    [
        pytest.param("3.9.0", "jgg.launching.jax_triton_fixes", ["hopper_kernel"], marks=pytest.mark.sweep),
        ("3.8.0", "jgg.launching.jax_triton_fixes", ["forward_kernel"]),
        ("3.10.0", "jax_triton.triton_lib", []),
    ],
)
def test_the_way_that_a_triton_takes(triton, module, kept, tmp_path, monkeypatch):
    """jgg lowers as with Triton `triton`, in a process of its own: jgg's corrections of jax-triton last for good."""
    if versions.unlike(versions.WARP_SPECIALIZED):
        pytest.skip("this Triton cannot stand for 3.9")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert processes.run("-c", LOWER, triton).splitlines() == [f"True {module}", str(kept)]


# Routes by the interpreted kernels as with a Triton whose interpreter has no functions of its own for sums and maxima.
ROUTE = """
import numpy as np
import jgg
from jgg.launching import jax_triton_fixes
jax_triton_fixes.interpreted_reductions = dict
logits = np.random.default_rng(0).normal(size=(7, 5)).astype("float32")
ours, expected = (jgg.route(logits, topk=2, implementation=name) for name in ("interpret", "xla"))
for each, other in zip(ours, expected, strict=True):
    np.testing.assert_allclose(each, other, rtol=1e-6)
"""


@pytest.mark.thorough
@pytest.mark.interpret
def test_the_interpreter_needs_no_private_function_of_triton(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    processes.run("-c", ROUTE)


@pytest.mark.parametrize("implementation", ["triton", "interpret"])
@pytest.mark.parametrize(
    ("package", "version", "remedy"),
    [
        ("triton", "3.6.0", r"triton>=3\.7\.1 \(PyTorch 2\.12 and later bring one\), got 3\.6\.0: pip install '"),
        ("jax-triton", "0.3.1", r"jax-triton>=0\.4\.1, got 0\.3\.1: pip install 'jax-triton>=0\.4\.1,<0\.5', or use "),
    ],
)
def test_a_version_that_is_too_old_is_told_with_what_helps(package, version, remedy, implementation, monkeypatch):
    monkeypatch.setattr(versions, "installed", (FIXED | {package: version}).get)
    shapes = [(3, 4), "float32"], [(2, 5, 4), "float32"], [(2,), "int32"]
    compute = jax.jit(functools.partial(jgg.grouped_gemm, implementation=implementation))
    platform = {"triton": "cuda", "interpret": "cpu"}[implementation]
    with jgg.target(80), pytest.raises(ImportError, match=remedy):
        compute.trace(*[jax.ShapeDtypeStruct(*shape) for shape in shapes]).lower(lowering_platforms=(platform,))


@pytest.mark.parametrize(
    ("version", "specifier", "is_in"),
    [
        ("3.7.1", ">=3.7.1", True),
        ("3.10.0", ">=3.7.1", True),
        ("3.7.0", ">=3.7.1", False),
        ("0.12.0.1", ">=0.11.1,<0.13", True),
        ("0.13.0.dev1", ">=0.11.1,<0.13", False),
    ],
)
def test_numbers_of_a_version_are_compared(version, specifier, is_in):
    assert versions.satisfies(version, specifier) == is_in


def test_a_package_that_is_not_installed_is_told():
    assert versions.unlike({"no-such-package": ("1.",)}) == "no-such-package is not installed"
