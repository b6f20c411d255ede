"""The benchmark of optimizers runs on a CPU, and its ways agree."""

import json

import jax
import pytest

from benchmarks import optimizers


@pytest.fixture(autouse=True)
def optax_promotion():
    """Optax mixes dtypes in its own arithmetic."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def rows_of(tmp_path, *arguments):
    assert optimizers.main([*arguments, "--json", str(tmp_path / "table.json")]) == 0
    return json.loads((tmp_path / "table.json").read_text())["rows"]


def test_iterations(tmp_path, capsys):
    rows = rows_of(tmp_path, "--peers", "optax,quack")
    assert "QuACK is left out" in capsys.readouterr().out
    assert {row["by"] for row in rows} >= {"jgg, gram, float16", "XLA, standard, bfloat16", "optax, bfloat16"}
    assert all(float(row["error"]) < 0.3 for row in rows)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--peers", "optax,nope"], "--peers must be of optax, quack; got 'nope'"),
        (["--run", "loss", "--hidden", "32"], "--hidden must be a multiple of 64, got 32"),
        (["--run", "loss", "--steps", "0"], "--steps: must be 1 or more, got 0"),
        (["--run", "step", "--layers", "0"], "--layers: must be 1 or more, got 0"),
    ],
)
def test_what_is_wrong_is_named(given, message, capsys):
    with pytest.raises(SystemExit):
        optimizers.main(given)
    assert message in capsys.readouterr().err


def test_steps(tmp_path):
    rows = rows_of(tmp_path, "--run", "step", "--layers", "2", "--batch", "2", "--repeats", "1")
    assert [row["optimizer"] for row in rows] == ["SGD", "AdamW", "Muon", "Muon by XLA"]


def test_losses(tmp_path):
    small = "--steps", "3", "--hidden", "64", "--demo-layers", "1", "--demo-sequence", "32"
    rows = rows_of(tmp_path, "--run", "loss", *small)
    assert len(rows) == 5 and all(2 < float(row["bits/byte"]) < 9 for row in rows)


def test_states(tmp_path):
    small = "--steps", "3", "--hidden", "64", "--demo-layers", "1", "--demo-sequence", "32"
    rows = rows_of(tmp_path, "--run", "states", *small)
    assert [row["state"] for row in rows] == ["float32", "8 bits"] * 3
    for exact, row in zip(rows[::2], rows[1::2], strict=True):
        assert float(row["bytes"]) < 0.3 * float(exact["bytes"])
        assert float(exact["difference"]) == 0 and float(row["difference"]) < 0.1
