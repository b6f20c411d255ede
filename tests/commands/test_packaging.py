"""What is built and installed: the same kernels in every form, an import that starts nothing."""

import functools
import hashlib
import json
import re
import shutil
import subprocess
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import jgg
from jgg.cli import info
from jgg.core import versions
from tests.support import processes
from tests.support.processes import ROOT

# One worker builds, once for all tests here.
pytestmark = pytest.mark.xdist_group("packaging")
OTHER_FORMS = [pytest.param(form, marks=pytest.mark.sweep) for form in ("wheel_from_sdist", "editable_wheel")]

# Prints, from an interpreter that sees one form of jgg, which modules jgg.kernels has.
LIST_KERNELS = """
import hashlib, importlib.util, json, pathlib, pkgutil, site, sys
form, *dependencies = sys.argv[1:]
site.addsitedir(form)
sys.path += dependencies
import jgg, jgg.kernels
sources = {
    module.name: hashlib.sha256(
        pathlib.Path(importlib.util.find_spec(f"jgg.kernels.{module.name}").origin).read_bytes()
    ).hexdigest()
    for module in pkgutil.iter_modules(jgg.kernels.__path__)
}
top_level = importlib.util.find_spec("kernels")
print(json.dumps([jgg.__file__, sources, top_level and top_level.origin]))
"""

# Goes before a program that must run without the packages that not every installation has.
HIDE_OPTIONAL = """
import importlib.machinery, sys
HIDDEN = {"flax", "jax_triton", "matplotlib", "optax", "safetensors", "tqdm", "triton"}
class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
"""


run_python = functools.partial(processes.run, JAX_PLATFORMS="cpu")


def build(source, out, *kinds):
    """Builds without a warning, such as one of a folder that setuptools takes for a package which was forgotten."""
    run_python("-m", "build", "--no-isolation", *kinds, "--outdir", out, cwd=source, PYTHONWARNINGS="error")
    (wheel,) = out.glob("*.whl")
    return wheel


def unpack(wheel, folder):
    """Installs a wheel as pip does one that has no scripts."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def wheel_names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the checkout, so that building leaves nothing in it and finds nothing stale."""
    folder = tmp_path_factory.mktemp("source") / "checkout"
    folder.mkdir()
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("examples", "jgg", "kernels"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build(source, tmp_path_factory.mktemp("wheel"), "--wheel")


@pytest.fixture(scope="module")
def wheel_from_sdist(source, tmp_path_factory):
    return build(source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def editable_wheel(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("editable")
    hook = "import sys, setuptools.build_meta as b; b.build_editable(sys.argv[1])"
    run_python("-c", hook, out, cwd=source)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.mark.parametrize("form", ["checkout", "wheel", *OTHER_FORMS])
def test_every_form_has_the_same_kernels(form, request, source, tmp_path):
    if form == "checkout":
        folder, home = source, source
    else:
        folder = unpack(request.getfixturevalue(form), tmp_path)
        home = source if form == "editable_wheel" else folder
    # -S: without the jgg that is installed here; its dependencies are passed by path instead.
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    output = run_python("-I", "-S", "-c", LIST_KERNELS, folder, *paths, cwd=tmp_path)
    location, sources, top_level = json.loads(output)

    assert Path(location).is_relative_to(home)
    assert sources == {
        path.stem: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (source / "kernels").glob("*.py")
        if path.stem != "__init__"
    }
    assert "tiles" in sources
    if form not in ("checkout", "editable_wheel"):  # which put the checkout on the path, and with it its kernels/
        assert top_level is None


@pytest.mark.parametrize("form", ["wheel", OTHER_FORMS[0]])
def test_wheel_holds_the_package_and_nothing_else(form, request, source):
    names = wheel_names(request.getfixturevalue(form))
    package = {
        str(path.relative_to(source))
        for pattern in ("jgg/py.typed", "jgg/**/*.py", "jgg/**/*.json")
        for path in source.glob(pattern)
    }
    kernels = {f"jgg/kernels/{path.name}" for path in (source / "kernels").glob("*.py")}
    assert {"jgg/__init__.py", "jgg/py.typed"} <= package

    metadata = {name for name in names if name.startswith("jgg-")}
    assert names - metadata == package | kernels
    assert {name.partition("/")[2] for name in metadata} >= {"METADATA", "entry_points.txt", "licenses/LICENSE"}


@pytest.mark.thorough
def test_sdist_holds_the_examples(wheel_from_sdist):
    (sdist,) = wheel_from_sdist.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")} <= names


def pip_commands(*arguments):
    """What `make` would have pip do in an empty checkout."""
    done = subprocess.run(["make", "-Bn", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return [line.partition(" -m pip ")[2] for line in done.stdout.splitlines() if " -m pip " in line]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["test", "demo"])
def test_without_a_gpu_make_leaves_nothing_that_looks_for_one(target):
    assert pip_commands(target, "GPU=")[-1] == "uninstall -qq -y jax-cuda12-pjrt"
    assert "cuda12]" in pip_commands(target, "GPU=cuda12")[-1]


def test_jax_starts_quietly_where_no_gpu_is():
    """JAX starts quietly for a user of the environment that `make test` made, too."""
    installed = [name for name in ("jax-cuda12-pjrt", "jax-cuda13-pjrt") if versions.installed(name)]
    if installed or info.has_nvidia_gpu():
        pytest.skip(f"JAX looks for a GPU here, with {installed}; `jgg info` says what to do if there is none")
    out, errors = processes.start("-c", "import jax; jax.devices()", JAX_PLATFORMS="").communicate(timeout=300)
    assert (out, errors) == ("", "")


def test_the_version_is_the_one_that_files_repeat():
    assert f"\nversion: {jgg.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest == "Unreleased" if jgg.__version__.endswith(".dev0") else newest.startswith(f"{jgg.__version__} (")


def test_import_starts_no_backend_and_loads_neither_triton_nor_what_measures():
    program = """
import sys
import jgg
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
assert not {"triton", "jax_triton", "flax"} & sys.modules.keys()
assert not [name for name in sys.modules if name.startswith(("jgg.tuning", "jgg.tuning"))]
import jax
jax.devices()
assert xla_bridge.backends_are_initialized()  # else the check above would prove nothing
"""
    run_python("-W", "error", "-c", program)


def test_works_without_triton_and_optional_packages():
    program = """
try:
    import triton
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("triton is not hidden")
import jax.numpy as jnp
import jgg
import jgg.cli
assert "rich" not in sys.modules  # which takes long to import, and help does not need
y = jgg.ragged_dot(jnp.ones((3, 2)), jnp.ones((2, 2, 4)), jnp.array([1, 2], jnp.int32))
assert y.shape == (3, 4) and (y == 2).all(), y
"""
    run_python("-c", HIDE_OPTIONAL + program)
