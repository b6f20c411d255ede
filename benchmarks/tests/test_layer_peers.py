"""Whole layers of other libraries in `benchmarks.layers`: what they compute, and how they are judged and reported."""

import contextlib
import dataclasses
import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from benchmarks import layer as measuring
from benchmarks import layer_peers, layers, plots
from jgg.tuning.timing import Measurement
from jgg.tuning.workloads import Layer

TINY = Layer("tiny", tokens=12, hidden=16, expert_intermediate=8, experts=4, topk=2)
OWN = ["--m=24", "--k=16", "--n=16", "--experts=4", "--topk=2", "--dtype=float32"]  # the same sizes


@pytest.fixture
def run_layers(tmp_path, no_timing, monkeypatch, capsys):
    """Measures only peers, and does not time them; returns the exit code, what it printed and its JSON."""
    right = Measurement("right", seconds=1e-3, error=0.0)
    monkeypatch.setattr(layers, "copy_bandwidth", lambda: 1e9)
    for name, result in (("_measure_pass", right), ("_measure_routing", None), ("_measure_dense", None)):
        monkeypatch.setattr(layers, name, lambda *_, result=result: result)
    monkeypatch.setattr(layers, "measure_memory", lambda *_: None)

    def run(*arguments):
        out = tmp_path / "result"
        code = layers.main(["--quiet", "--out", str(out), *OWN, *arguments])
        plots.main([f"{out}.json"])
        assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        return code, capsys.readouterr().out, json.loads(out.with_suffix(".json").read_text())

    return run


def test_a_layer_around_ragged_dot_is_beside_jgg(run_layers, monkeypatch):
    for name in ("tokamax", "sonicmoe"):
        away = dataclasses.replace(layer_peers.LAYER_PEERS[name], dtypes=("float32",), unavailable=lambda: "away")
        monkeypatch.setitem(layer_peers.LAYER_PEERS, name, away)
    code, output, result = run_layers("--peers=all")
    assert code == 0
    assert result["skipped"] == {"tokamax": "away", "sonicmoe": "away", "liger": "it is measured in bfloat16"}
    assert all(f"Skipped {name}: {why}" in output for name, why in result["skipped"].items())
    ((name, passes),) = result["layers"][0]["peers"].items()
    assert (name, passes.keys()) == ("ragged_dot", {"forward", "forward + backward"})
    assert all((each["status"], each["seconds"]) == ("right", 2e-3) for each in passes.values())


@pytest.mark.parametrize("w_layout", ["enk", "ekn"])
def test_a_layer_around_ragged_dot_has_all_results(w_layout, monkeypatch):
    problem, which = measuring.LayerProblem(TINY, "float32", w_layout), measuring.FORWARD_BACKWARD
    arrays = problem.operands()
    (way,) = layer_peers.LAYER_PEERS["ragged_dot"].prepare(which, problem, arrays)
    results = way.compute()
    assert results.keys() == {"y", "topk_indices", "d x", "d w_router", "d w_gate_up", "d w_down"}
    assert measuring.LayerReference.of(problem, which, arrays, results["topk_indices"]).check(results).status == "right"


def test_a_peer_that_is_wrong_or_raises_is_reported(run_layers, monkeypatch):
    def wrong():
        return {"": lambda x, w, sizes: 1.01 * jax.lax.ragged_dot(x, w, sizes)}

    def raising():
        def fail(*_):
            raise ExceptionGroup("all failed", [NotImplementedError("no such GPU\nand more"), ValueError("no")])

        return {"": fail}

    for name, functions in (("ragged_dot", wrong), ("tokamax", raising)):
        peer = layer_peers.LayerPeer(lambda *a, functions=functions: layer_peers._around(functions, *a), ("float32",))
        monkeypatch.setitem(layer_peers.LAYER_PEERS, name, peer)
    code, output, result = run_layers("--peers=ragged_dot,tokamax")
    assert code == 1
    measured = result["layers"][0]["peers"]
    assert [each["status"] for each in measured["ragged_dot"].values()] == ["WRONG", "WRONG"]
    assert [each["seconds"] for each in measured["ragged_dot"].values()] == [None, None]
    assert [each["reason"] for each in measured["tokamax"].values()] == ["NotImplementedError: no such GPU"] * 2
    assert "own ragged_dot forward: WRONG: error" in output
    assert "own tokamax forward + backward: failed: NotImplementedError: no such GPU" in output


def test_a_peer_that_raises_is_no_failure_of_jgg(run_layers, monkeypatch):
    def no_kernel(*_):
        raise RuntimeError("no kernel")

    monkeypatch.setitem(layer_peers.LAYER_PEERS, "ragged_dot", layer_peers.LayerPeer(no_kernel))
    assert run_layers("--peers=ragged_dot")[0] == 0


def test_choices_by_rounded_logits_are_right_where_only_rounding_changed_them():
    """A router in bfloat16 rounds its logits; what it computes is compared with a reference for its choices."""
    layer = Layer("narrow", tokens=64, hidden=128, expert_intermediate=64, experts=8, topk=2)
    problem, which = measuring.LayerProblem(layer, "bfloat16"), measuring.FORWARD
    arrays = problem.operands()
    (way,) = layer_peers.LAYER_PEERS["ragged_dot"].prepare(which, problem, arrays)
    logits = measuring.logits_of(arrays["x"], arrays["w_router"])
    largest = float(jnp.max(jnp.abs(logits)))
    order = jnp.argsort(logits, axis=1)
    for step, status in ((0.001, "right"), (0.1, "WRONG")):
        # the experts that logits choose in which the third is larger than it is by this share of the largest logit
        third = jnp.arange(8)[None] == order[:, -3:-2]
        chosen = jax.lax.top_k(logits + third.astype(jnp.float32) * step * largest, 2)[1]
        assert (chosen != jax.lax.top_k(logits, 2)[1]).any()
        routed = layer_peers._OfChoices(problem, which, arrays, rounds_router=True)
        results = {"y": expected_of(problem, arrays, chosen), "topk_indices": chosen}
        assert routed.check(results).status == status
    exact = layer_peers._OfChoices(problem, which, arrays, rounds_router=False)
    assert exact.check(way.compute()).status == "right"


def expected_of(problem, arrays, chosen):
    return measuring._expected(problem, measuring.FORWARD, None)(arrays, chosen)["y"]


class Tensor:
    """The part of a torch tensor's interface that TorchLayer uses, around an array of JAX."""

    def __init__(self, array):
        self.array = array

    def detach(self):
        return Tensor(self.array)

    def requires_grad_(self):
        return self

    def contiguous(self):
        return self

    def t(self):
        return Tensor(self.array.T)


@pytest.fixture
def torch(monkeypatch):
    """A stand-in for torch whose functions compute jgg's layer, with w_router [E, H] and the layout "enk"."""
    problem = measuring.LayerProblem(TINY, "float32", "enk")

    def compute(x, w_router, w_gate_up, w_down):
        floats = {"x": x, "w_router": w_router.T, "w_gate_up": w_gate_up, "w_down": w_down}
        results = measuring.layer_function(problem, measuring.FORWARD)(floats)
        return results["y"], results["topk_indices"]

    def forward(*tensors):
        return Tensor(compute(*(tensor.array for tensor in tensors))[0])

    def choose(*tensors):
        return Tensor(compute(*(tensor.array for tensor in tensors))[1])

    def grad(y, tensors, dy):
        vjp = jax.vjp(lambda *arrays: compute(*arrays)[0], *(tensor.array for tensor in tensors))[1]
        return tuple(map(Tensor, vjp(dy.array)))

    stand_in = SimpleNamespace(no_grad=contextlib.nullcontext, autograd=SimpleNamespace(grad=grad))
    monkeypatch.setitem(sys.modules, "torch", stand_in)
    monkeypatch.setattr(layer_peers, "to_torch", Tensor)
    monkeypatch.setattr(layer_peers, "to_jax", lambda tensor: tensor.array)
    return lambda *_: (forward, choose)


@pytest.mark.parametrize("w_layout", ["enk", "ekn"])
@pytest.mark.parametrize("which", measuring.PASSES)
def test_a_layer_of_torch_gets_and_gives_arrays_in_its_layout(which, w_layout, torch):
    problem = measuring.LayerProblem(TINY, "float32", w_layout)
    arrays = problem.operands()
    (way,) = layer_peers._torch_layer(torch, which, problem, arrays)
    assert way.tensors["w_router"].array.shape == (4, 16)
    assert way.tensors["w_gate_up"].array.shape == (4, 16, 16)
    assert way.tensors["w_down"].array.shape == (4, 16, 8)
    results = way.compute()
    gradients = {"d x", "d w_router", "d w_gate_up", "d w_down"} if which == measuring.FORWARD_BACKWARD else set()
    assert results.keys() == {"y", "topk_indices"} | gradients
    assert measuring.LayerReference.of(problem, which, arrays, results["topk_indices"]).check(results).status == "right"


def test_peers_are_not_beside_fp8(monkeypatch, capsys):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with pytest.raises(SystemExit):
        layers.main([*OWN[:-1], "--dtype=fp8", "--peers=ragged_dot"])
    assert "--peers must be none with --dtype fp8, got ragged_dot" in capsys.readouterr().err


def test_tables_of_all_layers_and_peers_are_at_most_100_columns_wide(capsys):
    args = layers.make_parser().parse_args(["--layer=all", "--dtype=bfloat16"])
    measured = dict.fromkeys(measuring.PASSES, Measurement("right", seconds=123.4e-3, error=0.0))
    rows = [
        layers.LayerRow(
            problem,
            measured,
            measured,
            dict.fromkeys(layer_peers.LAYER_PEERS, measured),
            dense_seconds=dict.fromkeys(measuring.PASSES, 1e-3),
            copy_bandwidth=2.5e12,
            product_seconds={f"{gemm} {op}": 1e-3 for gemm in ("up", "down") for op in ("forward", "dx", "dw")},
        )
        for problem in layers.problems_of(args)
    ]
    layers.layers_report.show(rows, {}, False)
    lines = capsys.readouterr().out.splitlines()
    assert sum("granite-3.1-3b-a800m" in line for line in lines) == 4
    assert max(map(len, lines)) <= 100
