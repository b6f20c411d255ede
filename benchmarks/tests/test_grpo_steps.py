"""`benchmarks.grpo` measures a small model on a CPU."""

import json

import jax
import pytest

from benchmarks import grpo


@pytest.mark.parametrize("only_sampling", [False, True])
def test_a_small_model_is_measured_on_a_cpu(only_sampling, tmp_path, capsys):
    file = tmp_path / "grpo.json"
    options = ["--only-sampling"] if only_sampling else []
    with jax.numpy_dtype_promotion("standard"):  # of optax
        assert grpo.main(["--steps", "2", "--json", str(file), *options]) == 0
    rows = json.loads(file.read_text())["rows"]
    parts = ["sampling, 4 rows"] + ([] if only_sampling else ["packing", "learning, 4 x 32", "step"])
    assert [row["part"] for row in rows] == parts
    assert "sampling, 4 rows" in capsys.readouterr().out
    assert only_sampling or float(rows[-1]["sampler - trainer"]) < 0.01  # equal bits are promised on GPUs alone
