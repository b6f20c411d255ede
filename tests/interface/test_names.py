"""`import jgg`: what it makes reachable, for programs and for type checkers, and that it imports nothing before use."""

import ast
import types

import pytest

import jgg
from tests.commands.test_packaging import HIDE_OPTIONAL, run_python
from tests.support.processes import ROOT

MODULES = {"activations", "data", "extend", "hf", "integrations", "layers"}
MODULES |= {"linen", "models", "nnx", "optim", "sharding", "train"}


def test_public_names_alone_are_listed():
    assert set(dir(jgg)) == {*jgg.__all__, "__version__", *MODULES}
    assert {name for name in dir(jgg) if isinstance(getattr(jgg, name), types.ModuleType)} == MODULES
    assert jgg.__version__ and len(jgg.__all__) == len(set(jgg.__all__)) > 20


def test_type_checkers_see_the_same_names():
    tree = ast.parse((ROOT / "jgg" / "__init__.py").read_text())
    (seen,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    names = {(node.module, alias.name) for node in seen.body for alias in node.names if alias.asname == alias.name}
    wanted = {("jgg", name) for name in MODULES} | {(home, name) for name, home in jgg._HOMES.items()}
    assert names == wanted


def test_a_name_that_is_not_there_is_told():
    with pytest.raises(AttributeError, match="module 'jgg' has no attribute 'grouped'"):
        _ = jgg.grouped
    with pytest.raises(ImportError, match="cannot import name 'grouped'"):
        from jgg import grouped  # noqa: F401


def test_nothing_is_imported_before_it_is_used():
    program = """
import sys
before = set(sys.modules)
import jgg
dir(jgg)
assert not {"jax", "numpy"} & sys.modules.keys()
assert {name for name in sys.modules if name.startswith("jgg")} == {"jgg"}
assert jgg.models.load and jgg.train.Trainer and jgg.nnx.MoE
from jgg import grouped_gemm, optim
assert jgg.grouped_gemm is grouped_gemm and jgg.optim is optim
from jgg import *
assert moe_mlp is jgg.moe_mlp
"""
    run_python("-c", program)


def test_what_a_module_needs_is_named():
    program = """
import jgg
for name in ("data", "linen", "models", "nnx", "optim"):
    try:
        getattr(jgg, name)
    except ImportError as error:
        assert str(error) == f"jgg.{name} needs Flax: pip install 'jgg[flax]'", error
    else:
        raise AssertionError(name)
    assert name not in dir(jgg)
try:
    from jgg import nnx
except ImportError as error:
    assert "pip install 'jgg[flax]'" in str(error)
try:
    jgg.train
except ImportError as error:
    assert str(error) == "jgg.train needs Orbax: pip install 'jgg[train]'", error
help(jgg)
"""
    run_python("-c", HIDE_OPTIONAL.replace('"flax",', '"flax", "orbax",') + program)
