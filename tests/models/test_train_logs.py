"""`jgg.train.Log`: lines of JSON, also of a run that goes on, and what goes to other tools."""

import json
import sys
import types

import pytest

from jgg.train import Log


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_that_goes_on_replaces_what_it_makes_again(tmp_path):
    path = tmp_path / "out.jsonl"
    with Log(path) as log:
        for step in (1, 2, 3):
            log.write(step, {"loss": 4.0 - step, "mfu": None})
    assert lines(path) == [{"step": step, "loss": 4.0 - step} for step in (1, 2, 3)]
    path.write_text(path.read_text() + '{"step": 4, "lo')  # killed while it wrote
    with Log(path) as log:
        log.write(3, {"loss": 9.0})
        log.write(4, {"loss": 8.0})
    assert lines(path) == [{"step": step, "loss": loss} for step, loss in ((1, 3.0), (2, 2.0), (3, 9.0), (4, 8.0))]
    with Log(path) as log:
        log.write(1, {"loss": 5.0})
    assert lines(path) == [{"step": 1, "loss": 5.0}]


def test_tensorboard_gets_the_same(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    with Log(tmp_path / "out.jsonl", trackers=["tensorboard"]) as log:
        log.write(1, {"loss": 2.0, "mfu": None})
        log.write(5, {"loss": 1.5})
    (file,) = (tmp_path / "out.tensorboard").iterdir()
    found, content = [], file.read_bytes()
    while content:  # records of TFRecord: length, its checksum, the event, its checksum
        size = int.from_bytes(content[:8], "little")
        event = Event.FromString(content[12 : 12 + size])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        content = content[16 + size :]
    assert found == [(1, "loss", 2.0), (5, "loss", 1.5)]


def test_weights_and_biases_gets_the_same(tmp_path, monkeypatch):
    called = []
    run = types.SimpleNamespace(
        log=lambda values, step: called.append((step, values)), finish=lambda: called.append("finish")
    )
    module = types.ModuleType("wandb")
    module.init = lambda **settings: called.append(settings) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    with Log(tmp_path / "out.jsonl", trackers=["wandb"], settings={"rank": 4}) as log:
        log.write(1, {"loss": 2.0})
    assert called == [{"name": "out", "config": {"rank": 4}}, (1, {"loss": 2.0}), "finish"]


def test_what_is_not_there_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="trackers must be of tensorboard, wandb, got 'mlflow'"):
        Log(tmp_path / "out.jsonl", trackers=["mlflow"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="the tracker wandb needs a package: pip install wandb"):
        Log(tmp_path / "out.jsonl", trackers=["wandb"])
