"""The code of docs/in-your-model.md runs, and does what the page says."""

import jax
import numpy as np
import pytest
from flax import nnx

import jgg.nnx
from tests.support.documents import code_of, run_code

pytestmark = pytest.mark.usefixtures("as_a_reader_runs_it")
MASTERS = "Bfloat16 parameters with float32 masters"
SECTIONS = "Train", "Linen", MASTERS, "Many layers", "Freeze the experts"


@pytest.fixture(scope="module")
def blocks():
    """The blocks of code of each section."""
    return {section: code_of("in-your-model.md", section) for section in SECTIONS}


@pytest.mark.thorough
def test_it_trains_and_scans(blocks):
    names = run_code("\n".join(code for section in SECTIONS[:4] for code in blocks[section]))
    assert names["losses"][-1] < names["losses"][0]
    assert names["block"].moe.w_down.dtype == "bfloat16" and names["block"].norm.scale.dtype == "float32"
    assert names["y"].shape == names["x"].shape
    assert names["balance"].shape == (4,)
    of_linen = names["gradients"]["moe"]
    assert of_linen.keys() == {"w_router", "w_gate_up", "w_down"}
    assert all(np.any(gradient) for gradient in of_linen.values())


@pytest.mark.sweep
def test_frozen_experts_stay(blocks):
    """By a filter or in FP8, all but the experts trains."""
    (train,), (frozen, in_fp8) = blocks["Train"], blocks["Freeze the experts"]
    for code in (train + frozen, train + frozen + in_fp8):
        names = run_code(code)
        moe, x = names["block"].moe, names["x"]
        before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(moe)))  # a step writes over the arrays
        names["step"](names["block"], names["optimizer"], x, -x)
        after = nnx.to_pure_dict(nnx.state(moe))
        assert np.any(after.pop("w_router") != before.pop("w_router"))
        jax.tree.map(np.testing.assert_array_equal, after, before)
    assert type(moe.w_down) is jgg.nnx.Frozen
