"""Layers on several devices: which strategies it measures and what bytes it counts, on two CPU devices."""

import dataclasses
import json
import os

import pytest

from benchmarks import scale, sent
from benchmarks.strategies import Strategy, choose_strategies
from jgg.tuning.workloads import Layer
from tests.support import processes

LAYER = Layer("wide", tokens=64, hidden=256, expert_intermediate=64, experts=8, topk=2)
TOKENS, WEIGHTS = 4 * 64 * 256, 4 * 3 * 256 * 64 * 8  # bytes of float32

# bytes that each of two devices sends, by hand
SENT = {
    # gradients: each device's half is reduced, then gathered; with fsdp weights are gathered in both passes
    "data 2": 2 * WEIGHTS / 2,
    "fsdp 2": 3 * WEIGHTS / 2,
    # tokens and their results, in both passes
    "expert 2 by all_gather": 4 * TOKENS,
    # in both passes, tokens that chose one of the other device's four experts, and their results
    "expert 2 by ragged_all_to_all": 4 * TOKENS * (1 - (4 / 8) * (3 / 7)),
    # y and dx of both devices' tokens: each device sums half of them, and then they are gathered
    "tensor 2": 2 * 2 * 2 * TOKENS / 2,
}

HLO = """
  %all-gather.1 = bf16[8,16]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  %rs = f32[2,16]{1,0} reduce-scatter(%p), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %ar = (f32[4]{0}, f32[]) all-reduce(%p, %q), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%sum
  %ag = (bf16[2,16]{1,0}, bf16[8,16]{1,0}) all-gather-start(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  %named = f32[2,16]{1,0} reduce-scatter(%p), replica_groups=mesh['a'=2,'b'=4] {'a','b'}, dimensions={0}, to_apply=%sum
  %done = bf16[8,16]{1,0} all-gather-done(%ag)
  %ags = ((bf16[2,16]{1,0}), bf16[8,16]{1,0}) all-gather-start(%p), channel_id=1, replica_groups=[1,4]<=[4]
  %rss = ((bf16[8,16]{1,0}), bf16[2,16]{1,0}) reduce-scatter-start(%p), channel_id=1, replica_groups=mesh['e'=4] {'e'}
  %ars = ((f32[4]{0}, f32[]), (f32[4]{0}, f32[])) all-reduce-start(%p, %q), replica_groups={{0,1}}, to_apply=%sum
"""


def test_bytes_sent():
    at_once = 256 * 3 / 4 + 128 * 3 + 2 * 20 / 2 + 256 * 3 / 4 + 128 * 7
    assert sent.bytes_sent(HLO) == at_once + 256 * 3 / 4 + 64 * 3 + 2 * 20 / 2


# options: the strategies of two devices
CHOSEN = {
    "by default": (
        [],
        ["data 2", "fsdp 2", "expert 2 by all_gather", "expert 2 by ragged_all_to_all", "tensor 2"],
    ),
    "by name": (["--strategy", "ragged_all_to_all"], ["expert 2 by ragged_all_to_all"]),
}


@pytest.mark.parametrize(("options", "names"), CHOSEN.values(), ids=CHOSEN)
def test_scale_chooses_strategies(options, names, monkeypatch):
    chosen = []
    monkeypatch.setattr("jax.device_count", lambda: 2)
    monkeypatch.setattr(scale, "run_all", lambda layer, strategies, *_: chosen.extend(strategies) or 0)
    assert scale.main(options) == 0
    assert [str(strategy) for strategy in chosen] == ["one device", *names]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ([], (256, 128, "float32")),
        (["--layer", "olmoe-1b-7b"], (8192, 2048, "float32")),
        (["--tokens", "64"], (64, 2048, "float32")),
    ],
)
def test_scale_measures_small_sizes_without_a_gpu(options, sizes, monkeypatch, capsys):
    measured = []
    monkeypatch.setattr(scale, "run_all", lambda layer, _, dtype, *rest: measured.append((layer, dtype)) or 0)
    assert scale.main(options) == 0
    ((layer, dtype),) = measured
    assert (layer.tokens, layer.hidden, dtype) == sizes
    assert capsys.readouterr().out.startswith("" if options else "scaled down: no GPU")


def test_scale_refuses_a_strategy_that_it_does_not_know(capsys):
    with pytest.raises(SystemExit):
        scale.main(["--strategy", "data,experts"])
    assert (
        "--strategy must be of data, fsdp, all_gather, ragged_all_to_all, tensor; got 'experts'"
        in capsys.readouterr().err
    )


def test_scale_splits_as_the_layer_can_be():
    assert [str(s) for s in choose_strategies(LAYER, 4, 1.5, ("tensor", "all_gather"))] == [
        "tensor 4",
        "expert 4 by all_gather",
        "expert 2 by all_gather, data 2",
    ]
    odd = dataclasses.replace(LAYER, experts=6, expert_intermediate=66)
    assert [str(s) for s in choose_strategies(odd, 4, 1.5)] == [
        "data 4",
        "fsdp 4",
        "expert 2 by all_gather, data 2",
        "expert 2 by ragged_all_to_all, data 2",
    ]


def test_scale_measures_what_is_sent(tmp_path):
    """In a process of its own with two devices: each strategy is right and sends what the formulas say."""
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({"layers": [dataclasses.asdict(LAYER)]}))
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    command = ["--shapes", shapes, "--layer", "wide", "--dtype", "float32", "--steps", "1"]
    process = processes.start(
        "-m",
        "benchmarks.scale",
        *command,
        "--buffer-factor",
        "2",
        "--out",
        tmp_path / "scale",
        JAX_PLATFORMS="cpu",
        XLA_FLAGS=flags,
    )
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    measured = json.loads((tmp_path / "scale.json").read_text())["measurements"]
    assert [m["name"] for m in measured] == ["one device", *SENT]
    for entry in measured:
        assert entry["error"] < 1e-5 and entry["overflow"] == 0 and entry["seconds"] > 0, entry
        assert entry["tokens"] == 64 * (1 if entry["name"] == "one device" else 2)
        sent = SENT.get(entry["name"], 0)
        assert sent <= entry["moved"], entry
        if "ragged" not in entry["name"]:  # on CPUs an all-gather takes the place of that exchange
            assert entry["moved"] <= 1.1 * sent, entry  # router and weights of rows come on top


@pytest.mark.parametrize("is_writable", [True, False])
def test_scale_prints_json_as_it_writes_it(is_writable, tmp_path, monkeypatch, capsys):
    rows = [scale.StrategyRow(Strategy(replicas=n), 0.5, 8 * n, 0.0, 0, 1.0, 0.0) for n in (1, 2)]
    monkeypatch.setattr(scale, "measure", lambda layer, strategy, *_: rows[strategy.devices - 1])
    path = tmp_path / ("scale.json" if is_writable else "nowhere/scale.json")
    strategies = [row.strategy for row in rows]
    assert scale.run_all(LAYER, strategies, "float32", 1, path, as_json=True) == (not is_writable)
    printed = capsys.readouterr()
    assert [each["name"] for each in json.loads(printed.out)["measurements"]] == ["one device", "data 2"]
    if is_writable:
        assert printed.out == path.read_text()
    else:
        assert printed.err.splitlines()[-1] == f"jgg: could not write {path}: No such file or directory"
