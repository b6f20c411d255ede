"""GEMMs compared with other libraries: which are measured, how the best variant is found, ratios and pictures."""

import dataclasses
import json
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks import gemms, peers, plots
from jgg.cli import bench
from jgg.core.choices import GROUPS
from jgg.tuning import timing, ways

OWN = ["--m=24", "--k=16", "--n=16", "--experts=4", "--topk=2", "--dtype=float32"]


@pytest.fixture
def run_gemms(tmp_path, no_timing, monkeypatch, capsys):
    """Runs the benchmark; returns the exit code, what it printed and its JSON."""
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 1e9)

    def run(*arguments):
        out = tmp_path / "gemms"
        code = gemms.main(["--quiet", *OWN, "--out", str(out), *arguments])
        return code, capsys.readouterr().out, json.loads(out.with_suffix(".json").read_text())

    return run


def measured(result):
    (row,) = result["rows"]
    return {name: each["status"] for name, each in row["measurements"].items()}


@pytest.mark.parametrize("groups", GROUPS)
def test_bounds_and_peers_are_beside_jgg(groups, run_gemms, tmp_path, monkeypatch):
    away = dataclasses.replace(peers.PEERS["tokamax"], unavailable=lambda: "away")
    monkeypatch.setitem(peers.PEERS, "tokamax", away)
    code, output, result = run_gemms("--op=gather", "--peers=dense,ragged_dot,tokamax", f"--groups={groups}")
    assert code == 0
    assert measured(result) == dict.fromkeys(("jgg", "even", "one group", "dense", "ragged_dot"), "right")
    assert "Skipped tokamax: away" in output and result["skipped"] == {"tokamax": "away"}
    assert result["ratios"]["gather"]["ragged_dot"] == {
        "geometric_mean": 1.0,
        "smallest": 1.0,
        "smallest_of": "own gemm",
        "gemms": 1,
    }
    plots.main([str(tmp_path / "gemms.json")])
    assert (tmp_path / "gemms.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_printed_as_it_is_written(run_gemms):
    _, output, result = run_gemms("--op=dx", "--peers=none", "--json")
    assert json.loads(output) == result


def test_a_peer_that_is_wrong_or_raises_ends_nothing(run_gemms, monkeypatch):
    def wrong(*arguments):
        way = ways.ragged_dot(*arguments)
        return [dataclasses.replace(way, function=lambda arrays: way.function(arrays) + jnp.ones((), jnp.float32))]

    def out_of_memory(*_):
        raise RuntimeError("out of memory\nwith a long trace")

    monkeypatch.setitem(peers.PEERS, "torch", peers.Peer(out_of_memory))
    code, output, _ = run_gemms("--op=forward", "--peers=torch")
    assert code == 0
    assert "torch, own gemm forward: failed: RuntimeError: out of memory" in output.splitlines()
    monkeypatch.setitem(peers.PEERS, "ragged_dot", peers.Peer(wrong))
    code, _, result = run_gemms("--op=forward", "--peers=ragged_dot")
    assert code == 1
    assert measured(result) == {"jgg": "right", "ragged_dot": "WRONG", "even": "right", "one group": "right"}
    assert result["ratios"] == {}


def test_what_was_measured_is_kept_when_a_peer_ends_the_process(run_gemms, monkeypatch, tmp_path):
    def ends(op, *_):
        return sys.exit() if op == "dx" else []

    monkeypatch.setitem(peers.PEERS, "torch", peers.Peer(ends))
    with pytest.raises(SystemExit):
        run_gemms("--op=forward,dx", "--peers=torch")
    result = json.loads((tmp_path / "gemms.json").read_text())
    assert result["interrupted"]
    assert [row["op"] for row in result["rows"]] == ["forward"]


@dataclasses.dataclass(frozen=True)
class Way(ways.Way):
    """A result, and seconds or an error in place of a measurement."""

    result: jax.Array
    seconds: float | Exception

    def compute(self):
        return self.result

    def measure(self):
        if isinstance(self.seconds, Exception):
            raise self.seconds
        return timing.Timing(self.seconds, self.result)


def test_the_fastest_right_configuration_counts():
    reference = timing.Reference(jnp.ones((2, 2)), bound=1e-3)
    wrong, right = jnp.zeros((2, 2)), jnp.ones((2, 2))
    found = [
        Way(wrong, 0.1, variant="wrong"),
        Way(right, 3.0, variant="slow"),
        Way(right, 2.0, variant="fast"),
        Way(right, ValueError("no"), variant="bad"),
    ]
    best = peers.measure_best(lambda: found, reference)
    assert (best.status, best.variant, best.seconds, best.error) == ("right", "fast", 2.0, 0)
    assert best.others == ("wrong: WRONG: error 1, at most 0.001 is right", "bad: failed: ValueError: no")
    assert peers.measure_best(lambda: found[::3], reference).status == "WRONG"
    assert peers.measure_best(lambda: found[3:], reference).status == "failed"


def test_ratios_are_geometric_means_over_gemms():
    def row(layer, dense, own=1.0):
        right = {"jgg": own, "dense": dense}
        found = {name: timing.Measurement("right", seconds=each) for name, each in right.items()}
        return bench.Row(layer, "up", "forward", None, found)

    rows = [row("a", 2.0), row("b", 0.5), row("c", 8.0), row("d", None)]
    found = {"geometric_mean": pytest.approx(2.0), "smallest": 0.5, "smallest_of": "b up", "gemms": 3}
    assert gemms.ratios(rows, ["dense", "torch"]) == {"forward": {"dense": found}}


def test_a_peer_is_measured_in_its_dtypes():
    args = types.SimpleNamespace(peers="all", dtype="fp8")
    assert list(gemms.peers_of(args)[0]) == ["dense", "bfloat16"]
    for name, dtype, message in (
        ("bfloat16", "float32", "is measured in fp8, got"),
        ("gpt", "fp8", "must be of dense,"),
    ):
        with pytest.raises(ValueError, match=message):
            gemms.peers_of(types.SimpleNamespace(peers=name, dtype=dtype))


def test_a_package_that_is_missing_or_broken_is_a_reason(tmp_path, monkeypatch):
    (tmp_path / "tokamax.py").write_text("raise OSError('libcudart.so.99: not found\\nand more')")
    monkeypatch.syspath_prepend(tmp_path)
    assert peers.PEERS["tokamax"].unavailable() == "OSError: libcudart.so.99: not found"
    monkeypatch.setitem(sys.modules, "torch", None)
    assert peers.PEERS["torch"].unavailable() == "torch is not installed"
    assert peers.PEERS["quack"].unavailable() == "torch is not installed"
