"""The cost model and `jgg plan`, and `jgg scale` on two CPU devices, where the model is held against the program."""

import dataclasses
import json
import os

import pytest

from jgg.cli import main, scale
from jgg.measuring.cost_model import Cluster, Strategy, best, cost, strategies
from jgg.measuring.workloads import Layer
from tests.support import processes

LAYER = Layer("wide", tokens=64, hidden=256, expert_intermediate=64, experts=8, topk=2)
CLUSTER = Cluster(16, node_size=4, link=4e6, network=1e6, flops=1e9, memory=1e9)
TOKENS, WEIGHTS = 64 * 256 * 2, 3 * 256 * 64 * 8 * 2  # bytes

# strategy: bytes over links and over the network, by hand
TRAFFIC = {
    # gradients: each device's half is reduced, then gathered
    Strategy(replicas=2): (2 * WEIGHTS / 2, 0),
    Strategy(replicas=2, fsdp=True): (3 * WEIGHTS / 2, 0),
    # y and dx
    Strategy(tensor=2): (2 * 2 * TOKENS / 2, 0),
    # tokens and their results, in both passes; half of the rows stay
    Strategy(expert=2): (4 * TOKENS, 0),
    Strategy(expert=2, exchange="ragged_all_to_all"): (4 * 2 * TOKENS / 2, 0),
    # 4 devices of 4 nodes: 3 tokens' parts come from the own node, and 12 by one of 4 devices each
    Strategy(expert=16): (4 * 15 * TOKENS, 4 * 12 / 4 * TOKENS),
    Strategy(expert=16, exchange="ragged_all_to_all"): (4 * 2 * 3 / 16 * TOKENS, 4 * 2 * 12 / 16 * TOKENS),
    # a pair of neighbours by 8 replicas of half the weights, one of which is in each node's other pair
    Strategy(tensor=2, replicas=8): (2 * TOKENS + 2 * 7 * WEIGHTS / 16, 2 * 6 / 2 * WEIGHTS / 16),
}


@pytest.mark.parametrize("strategy", TRAFFIC, ids=str)
def test_traffic(strategy):
    layer = dataclasses.replace(LAYER, experts=16 if strategy.expert == 16 else 8)
    layer = dataclasses.replace(layer, tokens=LAYER.tokens // strategy.tensor)
    assert cost(layer, strategy, CLUSTER).traffic == pytest.approx(TRAFFIC[strategy])


def test_seconds_and_memory():
    found = cost(LAYER, Strategy(expert=2, buffer_factor=1), CLUSTER)
    flops = 18 * 64 * 2 * 256 * 64
    assert found.flops == flops
    assert found.seconds == pytest.approx(flops / 1e9 + 4 * TOKENS / 4e6)
    assert found.efficiency == pytest.approx(flops / 1e9 / found.seconds)
    # state and weights of half the experts; all tokens, the pre-activation; rows, results, all tokens and their y
    assert found.memory == WEIGHTS / 2 * (8 + 1) + 128 * (256 + 128) * 2 + 2 * 2 * TOKENS + 2 * 2 * TOKENS
    # of two choices at random a token needs the other device with probability 3 / 4
    assert found.minimum == pytest.approx(4 * TOKENS * 3 / 4)


def test_best_fits_and_is_fastest():
    layer, cluster = dataclasses.replace(LAYER, tokens=4), dataclasses.replace(CLUSTER, memory=3e6)
    found = best(layer, cluster, strategies(layer, cluster))
    assert found and all(c.memory <= 3e6 and s.devices == 16 for s, c in found)
    assert [c.seconds for _, c in found] == sorted(c.seconds for _, c in found)
    assert len(found) < len(strategies(layer, cluster))


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
    assert scale.bytes_sent(HLO) == at_once + 256 * 3 / 4 + 64 * 3 + 2 * 20 / 2


def test_plan_prints_and_plots(tmp_path, capsys):
    out = tmp_path / "plan"
    assert main(["plan", "--layer", "mixtral-8x7b", "--devices", "8,16", "--link-gbps", "450", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines() if line.strip().startswith(("8 ", "16 "))]
    assert [line[0] for line in lines] == ["8"] * 4 + ["16"] * 4
    assert "expert 8 by ragged_all_to_all" in printed
    assert "A model, not a measurement" in printed
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


# what is wrong: (arguments, message)
REFUSED = {
    "no such layer": (["--layer", "gpt"], "--layer must be of"),
    "three devices": (["--devices", "3"], "must be powers of two, got 3"),
    "no link": (["--link-gbps", "0"], "must be greater than 0"),
    "no folder": (["--out", "nowhere/plan"], "which is no folder"),
}


# options: the strategies of two devices
CHOSEN = {
    "by default": (
        [], ["data 2", "fsdp 2", "expert 2 by all_gather", "expert 2 by ragged_all_to_all", "tensor 2"],
    ),
    "by name": (["--strategy", "ragged_all_to_all"], ["expert 2 by ragged_all_to_all"]),
}  # fmt: skip


@pytest.mark.parametrize(("options", "names"), CHOSEN.values(), ids=CHOSEN)
def test_scale_chooses_strategies(options, names, monkeypatch):
    chosen = []
    monkeypatch.setattr("jax.device_count", lambda: 2)
    monkeypatch.setattr("jgg.cli.scale.run_all", lambda layer, strategies, *_: chosen.extend(strategies) or 0)
    assert main(["scale", *options]) == 0
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
    monkeypatch.setattr("jgg.cli.scale.run_all", lambda layer, _, dtype, *rest: measured.append((layer, dtype)) or 0)
    assert main(["scale", *options]) == 0
    ((layer, dtype),) = measured
    assert (layer.tokens, layer.hidden, dtype) == sizes
    assert capsys.readouterr().out.startswith("" if options else "scaled down: no GPU")


def test_scale_refuses_a_strategy_that_it_does_not_know(capsys):
    with pytest.raises(SystemExit):
        main(["scale", "--strategy", "data,experts"])
    assert (
        "--strategy must be of data, fsdp, all_gather, ragged_all_to_all, tensor; got 'experts'"
        in capsys.readouterr().err
    )


def test_scale_splits_as_the_layer_can_be():
    assert [str(s) for s in scale.choose_strategies(LAYER, 4, 1.5, ("tensor", "all_gather"))] == [
        "tensor 4",
        "expert 4 by all_gather",
        "expert 2 by all_gather, data 2",
    ]
    odd = dataclasses.replace(LAYER, experts=6, expert_intermediate=66)
    assert [str(s) for s in scale.choose_strategies(odd, 4, 1.5)] == [
        "data 4",
        "fsdp 4",
        "expert 2 by all_gather, data 2",
        "expert 2 by ragged_all_to_all, data 2",
    ]


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_plan_refuses(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(["plan", *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.thorough
def test_scale_measures_what_the_model_says_is_sent(tmp_path):
    """In a process of its own with two devices: each strategy is right and sends what the model counts."""
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({"layers": [dataclasses.asdict(LAYER)]}))
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    command = ["scale", "--shapes", shapes, "--layer", "wide", "--dtype", "float32", "--steps", "1"]
    process = processes.start(
        "-m", "jgg", *command, "--buffer-factor", "2", "--out", tmp_path / "scale", JAX_PLATFORMS="cpu", XLA_FLAGS=flags
    )
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "5/5" in errors  # the progress bar
    measured = json.loads((tmp_path / "scale.json").read_text())["measurements"]
    assert [m["name"] for m in measured] == ["one device", "data 2", "fsdp 2", "expert 2 by all_gather", "tensor 2"]
    for entry in measured:
        assert entry["error"] < 1e-5 and entry["overflow"] == 0 and entry["seconds"] > 0, entry
        assert entry["tokens"] == 64 * (1 if entry["name"] == "one device" else 2)
        in_float32 = 2 * sum(cost(LAYER, Strategy(**entry["strategy"]), Cluster(2)).traffic)
        assert in_float32 <= entry["moved"] <= 1.1 * in_float32, entry  # router and weights of rows come on top
