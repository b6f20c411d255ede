"""Commands that cannot write files: what was measured is printed, and one line says which files and why."""

import collections
import json
from unittest import mock

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jgg.train
from jgg.cli import main
from jgg.cli.demo import report, run
from jgg.cli.training import finetune, loop, results
from jgg.train import checkpoints
from jgg.tuning import search as tuning
from jgg.tuning.workloads import gemm
from tests.support.models import folder_with_tokenizer

NO_SPACE = OSError(28, "No space left on device")
SIZES = ["--m", "32", "--k", "16", "--n", "16", "--experts", "2"]


@pytest.fixture
def prefix(tmp_path):
    """A prefix of files that cannot be written, root neither, since folders have their names."""
    for suffix in ("json", "png"):
        (tmp_path / f"out.{suffix}").mkdir()
    return tmp_path / "out"


def check_errors(capsys, prefix, *suffixes):
    """The text on stdout; stderr has one line, on the files with these suffixes."""
    printed = capsys.readouterr()
    failures = "; ".join(f"{prefix}.{suffix}: Is a directory" for suffix in suffixes)
    assert printed.err == f"jgg: could not write {failures}\n"
    assert "Wrote" not in printed.out
    others = {path.name for path in prefix.parent.iterdir()} - {"out.json", "out.png"}
    assert not others
    return printed.out


@pytest.fixture
def trained(monkeypatch):
    """`jgg demo` has this result at once."""

    def result_of(args, model):
        numbers = {"train_bytes": 100, "held_out_bytes": 10, "parameters": 1000, "active_parameters": 500}
        return report.Result(config=args.noted(), implementation="xla", **numbers)

    def learn(training, model, result, temperature):
        result.train.append({"step": 1, "bits_per_byte": 4.0, "tokens_per_second": 8.0})
        result.held_out.append({"step": 1, "bits_per_byte": 4.5})
        result.expert_load, result.train_seconds = [[0.5, 0.5]], 1.0

    monkeypatch.setattr(run, "_prepare", lambda *_: (None, None))
    monkeypatch.setattr(run, "_result_of", result_of)
    monkeypatch.setattr(run, "_learn", learn)


@pytest.mark.usefixtures("trained")
def test_demo_prints_what_it_measured(prefix, capsys):
    assert main(["demo", "--quiet", "--out", str(prefix)]) == 1
    assert check_errors(capsys, prefix, "json", "png").startswith("Held out: 4.500 bits per byte after 1 steps")


@pytest.mark.usefixtures("trained")
def test_what_can_be_written_is(prefix, capsys):
    prefix.with_suffix(".json").rmdir()
    assert main(["demo", "--out", str(prefix)]) == 1
    printed = capsys.readouterr()
    assert printed.err == f"jgg: could not write {prefix}.png: Is a directory\n"
    assert printed.out.endswith(f"Wrote {prefix}.json\n")
    assert json.loads(prefix.with_suffix(".json").read_text())["history"]


@pytest.mark.parametrize("is_full_later", [False, True])
def test_tune_prints_what_it_found(is_full_later, tmp_path, monkeypatch, capsys):
    tried, out = [], tmp_path / "own.json"

    def merge(*_, **__):
        if len(tried) > is_full_later:
            raise NO_SPACE

    def attempt(op, problem, config, *_):
        tried.append(config)
        return tuning.Trial(config, milliseconds=1.0 / len(tried))

    monkeypatch.setattr(tuning, "merge", merge)
    monkeypatch.setattr(tuning, "_try", attempt)
    monkeypatch.setattr(tuning.Reference, "of", lambda *_: None)
    arguments = ["--op", "forward", "--w-layout", "enk", "--dtype", "float32", "--interpret", "--workers", "1"]
    assert main(["tune", *SIZES, *arguments, "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert len(tried) > 3
    assert f"32x16x16 forward enk: {1 / len(tried):.3f} ms, " in printed and "KernelConfigForward" in printed
    assert f"; {out} could not be written: No space left on device" in printed
    assert "Wrote" not in printed


def test_tuning_raises_in_the_end_what_kept_it_from_writing(tmp_path, monkeypatch, caplog):
    def merge(*_, **__):
        raise NO_SPACE

    monkeypatch.setattr(tuning, "merge", merge)
    monkeypatch.setattr(tuning, "_try", lambda op, problem, config, *_: tuning.Trial(config, milliseconds=1.0))
    monkeypatch.setattr(tuning.Reference, "of", lambda *_: None)
    trials, problem = [], gemm(num_rows=32, in_features=16, out_features=16, num_experts=2)
    with pytest.raises(OSError, match="No space left"):
        tuning.tune_op("forward", problem, tmp_path / "own.json", "interpret", trials.append)
    assert len(trials) > 3
    (record,) = caplog.records
    assert "own.json could not be written, which is tried again" in record.message


@pytest.mark.usefixtures("trained")
def test_a_picture_that_cannot_be_drawn_leaves_the_old_one(tmp_path, monkeypatch, capsys):
    from matplotlib.figure import Figure

    def savefig(self, path, **_):
        path.write_bytes(b"half")
        raise NO_SPACE

    monkeypatch.setattr(Figure, "savefig", savefig)
    (tmp_path / "out.png").write_text("old")
    (tmp_path / "out.json").write_text('{"config": 1, "final": 2, "history": 3}')
    assert main(["demo", "--quiet", "--out", str(tmp_path / "out")]) == 1
    assert f"jgg: could not write {tmp_path / 'out.png'}: No space left on device" in capsys.readouterr().err
    assert (tmp_path / "out.png").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"out.png", "out.json"}


def test_a_checkpoint_that_finds_no_room_ends_training(tmp_path, monkeypatch):
    """Before Orbax begins, whose threads would print how each of them failed; and whatever Orbax raises."""
    used = collections.namedtuple("Usage", "total used free")

    def fit(folder):
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        trainer = jgg.train.Trainer(model, optax.sgd(0.1), lambda model, x: (jnp.mean(model(x)), ()))
        return list(trainer.fit(lambda _: jnp.ones((1, 2)), 3, checkpoints=folder, save_every=2))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.shutil, "disk_usage", lambda _: used(9, 9, 2**20))
        message = r"could not write checkpoints into .*/a: No space left on device: 4\.0 MiB are needed, 1\.0 are free"
        with pytest.raises(jgg.train.TrainingError, match=message) as raised:
            fit(tmp_path / "a")
    assert raised.value.step == 2
    for name in ("save", "close"):
        with monkeypatch.context() as patched:
            patched.setattr(checkpoints.ocp.CheckpointManager, name, mock.Mock(side_effect=NO_SPACE))
            with pytest.raises(jgg.train.TrainingError, match=r"could not write checkpoints into .*: No space left"):
                fit(tmp_path / name)


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("last", [2, 3])
def test_what_was_learned_is_saved_if_only_the_end_of_a_log_or_a_checkpoint_is_not(
    is_log, last, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    folder_with_tokenizer("qwen3_moe", tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"text": "t1 t2"}\n')
    record = jgg.train.Record(last, {}, None)

    def records(*_):
        if is_log:
            yield record
        error = jgg.train.TrainingError("could not write checkpoints into ck: full")
        error.step = last
        raise error

    def write(*_):
        raise NO_SPACE

    monkeypatch.setattr(finetune, "_load", lambda *_: "model")
    monkeypatch.setattr(results.AdapterOutput, "write", lambda *_: "where")
    monkeypatch.setattr(loop, "trainer_of", lambda *_: mock.Mock(model="model"))
    monkeypatch.setattr(loop, "records", records)
    monkeypatch.setattr(loop.Run, "measured", lambda *_: {"loss": 1.0})
    monkeypatch.setattr(loop.Run, "in_words", lambda *_: "step")
    monkeypatch.setattr(jgg.train.Log, "write", write)
    what = f"{tmp_path}/out.jsonl: No space left on device" if is_log else "checkpoints into ck: full"
    message = f"jgg: could not write {what}"
    arguments = ["finetune", "model", "--data", "data.jsonl", "--output", "out", "--steps", "3"]
    if last < 3:
        with pytest.raises(SystemExit, match=f"^{message}$"):
            main(arguments)
        return
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.err == f"{message}\n" and printed.out.endswith("\nwrote where\n")
