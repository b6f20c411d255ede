"""Symmetric products in `benchmarks.symmetric`: what is computed, and how it is judged."""

import json

import jax.numpy as jnp
import pytest

from benchmarks import symmetric
from jgg.tuning.timing import Measurement


def test_every_product_is_right_and_is_written(no_timing, tmp_path, capsys):
    file = tmp_path / "results.json"
    symmetric.main(["--shapes=2x12x20", "--dtype=float32", f"--json={file}"])
    measured = json.loads(file.read_text())["measured"]
    assert [case["product"] for case in measured] == list(symmetric.PRODUCTS)
    assert {case["measured"]["xla"]["status"] for case in measured} == {"right"}
    assert "gram 2x12x20 float32\n  xla" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("product", "flops", "elements"),
    [
        ("gram", 2 * 2 * 12 * 12 * 20, 2 * 12 * (20 + 12)),
        ("square", 2 * 2 * 12 * 12 * 12, 2 * 12 * (12 + 12)),
        ("apply", 2 * 2 * 12 * 12 * 20, 2 * 12 * (12 + 20 + 20)),
    ],
)
def test_work_of_a_product(product, flops, elements):
    case = symmetric.Case(product, 2, 12, 20, "bfloat16")
    assert (case.flops, case.bytes_accessed) == (flops, 2 * elements)


def test_a_wrong_result_is_reported(no_timing, monkeypatch):
    case = symmetric.Case("gram", 2, 12, 20, "float32")
    compute = symmetric.Case.compute

    def half(self, arrays, implementation, config=None, precision=None):
        y = compute(self, arrays, "xla", precision=precision)
        return y if implementation == "xla" else jnp.tril(y)

    monkeypatch.setattr(symmetric.Case, "compute", half)
    monkeypatch.setattr(symmetric.jax, "default_backend", lambda: "gpu")
    measured = symmetric.measure(case, tries_more=False)
    assert {measured[name].status for name in ("kernels", "hopper")} == {"WRONG"}
    assert "WRONG" in symmetric.as_text(case, {"kernels": measured["kernels"]})
    assert "2.000 ms" in symmetric.as_text(case, {"xla": Measurement("right", 2e-3)})
