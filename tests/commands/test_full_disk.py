"""Commands that cannot write: what was measured is printed, and one line says what could not be written and why."""

import dataclasses
import json
import subprocess
import sys

import jax
import pytest

from jgg import tuning
from jgg.cli import bench_run, demo, main, scale
from jgg.cli.demo import train
from jgg.measuring import timing, ways
from jgg.measuring.strategies import Strategy
from jgg.measuring.workloads import Layer, gemm
from tests.support.processes import ROOT

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
def no_timing(monkeypatch):
    """A call takes 1 ms."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(bench_run, "copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(ways, "measure", lambda function, arrays, *_, **__: timing.Timing(1e-3, function(arrays)))


@pytest.mark.usefixtures("no_timing")
@pytest.mark.parametrize("as_json", [False, True])
def test_bench_prints_what_it_measured(as_json, prefix, capsys):
    options = ["--op", "forward", "--peers", "none", "--quiet", "--out", str(prefix), *["--json"] * as_json]
    assert main(["bench", *SIZES, *options]) == 1
    output = check_errors(capsys, prefix, "json")
    if as_json:
        assert json.loads(output)["rows"][0]["measurements"]["jgg"]["milliseconds"] == 1
    else:
        assert "own gemm  32, 16, 16, 2  forward  1.00" in output


@pytest.fixture
def trained(monkeypatch):
    """`jgg demo` has this result at once."""
    result = train.Result(
        demo.Settings(
            steps=1,
            batch=1,
            seq=8,
            hidden=64,
            layers=1,
            experts=2,
            topk=1,
            seed=0,
            out="",
            implementation=None,
            dtype="float32",
            fp8=False,
            temperature=1.0,
            quiet=True,
        ),
        "xla",
        100,
        10,
        1000,
        500,
        train=[{"step": 1, "bits_per_byte": 4.0, "tokens_per_second": 8.0}],
        held_out=[{"step": 1, "bits_per_byte": 4.5}],
        expert_load=[[0.5, 0.5]],
        train_seconds=1.0,
    )

    class Demo:
        def __init__(self, settings):
            self.result = dataclasses.replace(result, settings=settings)

        def run(self):
            return self.result

    monkeypatch.setattr(train, "Demo", Demo)


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


@pytest.mark.parametrize("as_json", [False, True])
def test_scale_measures_on(as_json, prefix, monkeypatch, capsys):
    rows = [scale.StrategyRow(Strategy(replicas=n), 0.5, 8 * n, 0.0, 0, 1.0, 0.0) for n in (1, 2)]
    monkeypatch.setattr(scale, "measure", lambda layer, strategy, *_: rows[strategy.devices - 1])
    path, strategies = prefix.with_suffix(".json"), [row.strategy for row in rows]
    assert scale.run_all(Layer("small", 8, 16, 16, 4, 2), strategies, "float32", 1, path, as_json) == 1
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == f"jgg: could not write {path}: Is a directory"
    assert "Wrote" not in printed.out
    if as_json:
        assert len(json.loads(printed.out)["measurements"]) == 2
    else:
        assert "data 2" in printed.out


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


def run_into(file, *arguments, prelude="pass"):
    program = f"import sys; {prelude}; import _jgg_command; sys.exit(_jgg_command.main())"
    with open(file, "w") as out:
        command = [sys.executable, "-c", program, *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True, timeout=100)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize("arguments", [["info"], ["completion", "bash"]])
def test_stdout_that_is_full_is_named_in_a_line(arguments):
    done = run_into("/dev/full", *arguments)
    assert (done.returncode, done.stderr) == (1, "jgg: could not write stdout: No space left on device\n")


def test_without_room_for_temporary_files_commands_run(tmp_path):
    done = run_into(tmp_path / "out", "info", prelude="import tempfile; tempfile.tempdir = '/proc/none'")
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert (tmp_path / "out").read_text().startswith("Versions\n")


def test_other_errors_of_files_keep_their_traceback(monkeypatch):
    def devices(*_):
        raise NO_SPACE

    monkeypatch.setattr(jax, "device_count", devices)
    with pytest.raises(OSError, match="No space left"):
        main(["scale"])


@pytest.mark.usefixtures("trained")
def test_a_picture_that_cannot_be_drawn_leaves_the_old_one(tmp_path, monkeypatch, capsys):
    from matplotlib.figure import Figure

    def savefig(self, path, **_):
        path.write_bytes(b"half")
        raise NO_SPACE

    monkeypatch.setattr(Figure, "savefig", savefig)
    (tmp_path / "out.png").write_text("old")
    assert main(["demo", "--quiet", "--out", str(tmp_path / "out")]) == 1
    assert f"jgg: could not write {tmp_path / 'out.png'}: No space left on device" in capsys.readouterr().err
    assert (tmp_path / "out.png").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"out.png", "out.json"}
