"""Steps of whole models on several devices: forced choices, what is sent, times in a trace, and predictions."""

import argparse
import csv
import json
import os

import jax
import numpy as np
import pytest

from benchmarks import links, traces, training, training_step
from benchmarks.model_configs import config_of
from benchmarks.strategies import Strategy
from jgg.cli.errors import UsageError
from jgg.tuning.workloads import Layer
from tests.support import processes

# T 4, H 8, I 16, E 4, k 2 in 2 bytes: tokens have 64 bytes, weights 3 * 4 * 8 * 16 * 2 = 3,072
TINY = Layer("tiny", tokens=4, hidden=8, expert_intermediate=16, experts=4, topk=2)
# bytes that each of two devices sends, by hand
SENT = {
    Strategy(replicas=2): 2 * 3072 / 2,
    Strategy(replicas=2, fsdp=True): 3 * 3072 / 2,
    Strategy(expert=2): 4 * 64,
    # one token of six chooses no expert of the other device, which has two of four
    Strategy(expert=2, exchange="ragged_all_to_all"): 4 * 64 * 5 / 6,
    Strategy(tensor=2): 4 * 64,
    Strategy(expert=2, replicas=2): 4 * 64 + 2 * 3072 / 2 / 2,
}


def options(*given):
    parser = argparse.ArgumentParser()
    training_step.add_model_options(parser)
    return parser.parse_args(given)


def test_balanced_choices_are_even_and_on_all_devices():
    config = config_of("qwen3-30b-a3b", 3, is_small=False)
    choices = np.asarray(training_step.balanced_choices(config, (2, 64)))
    assert choices.shape == (3, 2, 64, 8)
    np.testing.assert_array_equal(np.bincount(choices[1].ravel(), minlength=128), np.full(128, 8))
    assert (np.sort(choices // 16, axis=-1) == np.arange(8)).all()  # of 8 devices


def test_what_devices_cannot_split_is_refused():
    with pytest.raises(UsageError, match=r"must split the 1 devices, got \(1, 1, 4, 1\)"):
        training_step.sharding_of(options("--expert", "4"), jax.devices()[:1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--expert", "3"], "--expert and --fsdp must split 8 experts, got 3 and 1"),
        (["--fsdp-splits", "features"], "--fsdp-splits features needs several devices along --fsdp, got 1"),
        (["--fsdp-splits", "features", "--fsdp", "2", "--expert", "3"], "--expert must split 8 experts, got 3"),
        (["--fsdp-splits", "features", "--fsdp", "7"], "--fsdp must split 64 features, got 7"),
        (["--tensor", "2"], "--tensor must be 1 where a model has gates before ups, as qwen3-30b-a3b, got 2"),
        (["--model", "gpt-oss-20b", "--tensor", "5"], "--tensor must split 32 features of experts, got 5"),
    ],
)
def test_what_a_model_cannot_be_split_by_is_refused(given, message):
    args = options(*given, "--layers", "2")
    with pytest.raises(UsageError) as error:
        training_step.training_of(args, config_of(args.model, 2, is_small=True), jax.devices() * 8)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing/found.json", "missing/found.json is in missing, which is no folder"),
        ("/tmp", "must be a file, got the folder /tmp"),
    ],
)
def test_what_cannot_be_written_is_refused_before_steps(path, message, capsys):
    with pytest.raises(SystemExit):
        training.make_parser().parse_args(["--json", path])
    assert f"argument --json: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", SENT, ids=str)
def test_bytes_that_a_layer_sends(strategy):
    assert links.predict_layer(TINY, strategy, 1.0).sent == SENT[strategy]


def test_predictions_are_near_what_was_measured():
    with links.ROWS.open() as file:
        # gathers of weights are slower than other collectives
        rows = [row for row in csv.DictReader(file) if row["strategy"] != "fsdp"]
    predicted = {cells[:3]: cells for cells in links.layer_table()}
    for row in rows:
        cells = predicted[row["gpu"], int(row["gpus"]), row["strategy"]]
        assert float(cells[3]) == pytest.approx(float(row["mb_sent"]), rel=0.02), cells
        adds_up_four = (row["strategy"], row["gpus"]) == ("tensor", "4")  # results of devices one by one
        assert float(cells[4]) == pytest.approx(float(row["ms"]), rel=0.15 if adds_up_four else 0.1), cells


def test_bytes_and_flops_of_a_step():
    config = config_of("qwen3-30b-a3b", 2, is_small=True)  # H 64, I 32, E 8, k 2; 4 heads of 16, 2 of them k, v
    of_layer = 64 * 64 * 2 + 2 * 64 * 32 + 64 * 8 + 2 * 64 + 2 * 16
    step = links.step_of(options("--expert", "4", "--fsdp", "2", "--sequence", "16"), config)
    experts, tokens, ends = 2 * 3 * 8 * 64 * 32, 2 * 16 * 64 * 2 * 2, config.vocabulary * 64
    assert step.sent == {
        "exchange": pytest.approx(5 * 3 * tokens),
        "experts": 3 / 2 * experts / 4 * 2,
        "other matrices of layers": 3 * 7 / 8 * (2 * of_layer + 64) * 2,
        "embedding and head": 2 * 7 / 8 * 2 * ends * 2,
    }
    assert step.trained == (experts + 2 * of_layer + 64 + 2 * ends) / 8
    matrices = 2 * (64 * 64 * 2 + 2 * 64 * 32 + 64 * 8 + 3 * 2 * 64 * 32) + ends
    pairs = 16 * 17 / 2
    assert step.flops == 2 * (6 * 16 * matrices + 12 * pairs * 4 * 16 * 2)


def test_devices_along_fsdp_split_features_where_the_options_say_so():
    """More of them than there are experts."""
    args = options("--fsdp", "16", "--fsdp-splits", "features", "--layers", "2")
    config = config_of(args.model, 2, is_small=True)
    assert config.moe.num_experts == 8
    training_step.check_experts(args, config)
    devices = np.asarray(jax.devices() * 16)
    assert training_step.sharding_of(args, devices).weight_specs("ekn")["w_gate_up"] == jax.P(None, "fsdp", None)


def test_times_of_a_trace():
    events = [("multiply", 0, 10), ("ncclDevKernel_AllGather_RING_LL", 5, 20), ("add", 18, 22), ("multiply", 30, 34)]
    assert traces.times_of(events) == (34, 15, 22 + 4 - (10 + 4 + 4), 8)


def test_a_trace_without_a_gpu_has_no_times(tmp_path):
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(jax.numpy.ones(3) + 1)
    assert traces.shares_of(tmp_path) is None


def test_steps_on_eight_devices(tmp_path):
    """All that is printed, and planned, on CPU devices."""
    path = tmp_path / "found.json"
    given = ["--expert", "4", "--fsdp", "2", "--balanced", "--buffer-factor", "1", "--steps", "2", "--json", str(path)]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    process = processes.start("-m", "benchmarks.training", *given, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    output, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    found = json.loads(path.read_text())
    assert (found["num_devices"], found["load"], found["overflow"]) == (8, 1.0, 0)
    assert found["speed"]["tokens"] == 2 * 2 * 8 * 64
    assert found["loss"] == pytest.approx(np.log(config_of("qwen3-30b-a3b", 2, is_small=True).vocabulary), rel=0.1)
    assert "each device needs" in output
