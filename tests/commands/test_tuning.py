"""The search for fast configurations, on the kernels in the interpreter, and its command."""

import dataclasses
import json
import logging
import shlex

import jax
import jax.numpy as jnp
import pytest

import jgg
from jgg.cli import main
from jgg.core.gpu_target import Target
from jgg.launching import tuned_configs, tuned_files
from jgg.launching.heuristic import heuristic_config
from jgg.launching.kernel_configs import CONFIG_TYPES
from jgg.tuning import search as tuning
from jgg.tuning.workloads import gemm, load_layers
from tests.support.marks import thorough_but
from tests.support.tuned_entries import HOPPER, SIZES, chosen

pytestmark = pytest.mark.usefixtures("own_file")

TINY = {"num_rows": 48, "in_features": 32, "out_features": 48, "num_experts": 3, "dtype": "float32"}


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("op", thorough_but(("forward",), CONFIG_TYPES.keys(), pytest.mark.sweep))
def test_search(op, own_file):
    trials = []
    found = tuning.tune_op(op, gemm(**TINY), own_file, "interpret", trials.append)
    assert len(trials) >= 4
    assert {trial.failure for trial in trials} == {None}
    assert found.milliseconds == min(trial.milliseconds for trial in trials)
    assert tuned_files.parse(own_file) == (found,)
    assert (
        tuned_configs.find(CONFIG_TYPES[op], gemm(**TINY), HOPPER) is None
    )  # what the interpreter measured is for no GPU


@pytest.mark.sweep
@pytest.mark.interpret
def test_search_in_fp8(own_file):
    problem = gemm(**TINY | {"dtype": "float8_e4m3fn", "in_features": 272}, permute_x=True)
    problem = dataclasses.replace(problem, out_dtype=jnp.dtype("float16"))
    trials = []
    found = tuning.tune_op("forward", problem, own_file, "interpret", trials.append)
    assert {trial.failure for trial in trials} == {None}
    assert {trial.config.fuse_gather for trial in trials} == {True, False}
    assert found.config.block_k == 128
    assert tuned_files.parse(own_file) == (found,)


@pytest.mark.interpret
def test_an_interrupted_search_keeps_the_best_so_far(own_file):
    trials = []

    def report(trial):
        trials.append(trial)
        if len(trials) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuning.tune_op("forward", gemm(**TINY), own_file, "interpret", report)
    (kept,) = tuned_files.parse(own_file)
    assert kept.milliseconds == min(trial.milliseconds for trial in trials[:2])


@pytest.mark.interpret
def test_a_wrong_or_failing_configuration_is_never_chosen(own_file, monkeypatch):
    right = tuning.product

    def fail(arrays):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: shared memory\nand more")

    def product(op, problem, implementation, config=None):
        function = right(op, problem, implementation, config)
        if config is not None and config.band == 2:
            return lambda arrays: function(arrays) * 1.01
        return fail if config is not None and config.band == 4 else function

    monkeypatch.setattr(tuning, "product", product)
    trials = []
    found = tuning.tune_op("forward", gemm(**TINY), own_file, "interpret", trials.append)
    failures = {trial.config.band: trial.failure for trial in trials if trial.failure}
    assert failures.keys() == {2, 4}
    assert "allowed" in failures[2]
    assert failures[4] == "JaxRuntimeError: RESOURCE_EXHAUSTED: shared memory"
    assert found.config.band in (8, 16)

    monkeypatch.setattr(tuning, "product", lambda *_: fail)
    with pytest.raises(RuntimeError, match=r"No configuration of dx works.*shared memory"):
        tuning.tune_op("dx", gemm(**TINY), own_file, "interpret")


def test_candidates_in_fp8_fit_the_device():
    for layer in load_layers().values():
        for problem in layer.gemms(dtype="float8_e4m3fn").values():
            for target in (HOPPER, Target(89, 142)):
                configs = tuning.first_candidates("forward", problem, target)
                assert len(set(configs)) == len(configs) >= (1 if target is HOPPER else 2)  # whose kernel has one tile
                for config in configs:
                    sums = config.block_m * config.block_n // (32 * config.num_warps)
                    assert config.kernel == "hopper" or sums <= 64  # of a thread


def test_candidates_fit_the_device():
    for layer in load_layers().values():
        for problem in layer.gemms().values():
            for op in CONFIG_TYPES:
                configs = tuning.first_candidates(op, problem, HOPPER)
                assert configs[0] == heuristic_config(CONFIG_TYPES[op], problem, HOPPER)
                assert len(set(configs)) == len(configs) > 2
                for config in configs:
                    rows, columns, _ = config.tile(problem.w_layout)
                    threads = 32 * config.num_warps * (2 if config.kernel == "hopper" else 1)  # of a cluster
                    assert rows * columns // threads <= 128  # accumulators of a thread


def test_tune_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(tuning, "device_target", lambda: None)
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        jgg.tune(64, 32, 32, 4)
    with pytest.raises(ValueError, match="num_rows must be a multiple of topk, 3, got 64"):
        jgg.tune(64, 32, 32, 4, 3)
    in_fp8 = {"dtype": "float8_e4m3fn"}
    with pytest.raises(ValueError, match=r"ops must be one of \('forward',\), got 'dx'"):
        jgg.tune(64, 32, 32, 4, ops="dx", **in_fp8)
    with pytest.raises(ValueError, match=r"w_layout must be one of \('enk',\), got 'ekn'"):
        jgg.tune(64, 32, 32, 4, w_layout="ekn", **in_fp8)


USAGE = {
    "unknown layer": (["--layer", "nonesuch"], "--layer must be of qwen3-30b-a3b"),
    "size missing": (["--m", "64", "--k", "32", "--n", "32"], "got --m and no --experts"),
    "layer and sizes": (["--layer", "olmoe-1b-7b", "--m", "64"], "--m must be given without --layer"),
    "topk": (["--m", "64", "--k", "32", "--n", "32", "--experts", "4", "--topk", "3"], "multiple of --topk 3, got 64"),
    "unknown op": (["--op", "fwd,up"], "--op must be of forward, dx, dw; got 'up'"),
    "no file": (["--shapes", "nonesuch.json"], "nonesuch.json"),
    "unknown op in fp8": (["--op", "dx", "--dtype", "fp8"], "--op must be of forward; got 'dx'"),
    "layout in fp8": (["--w-layout", "ekn", "--dtype", "fp8"], "--w-layout must be enk with --dtype fp8"),
    "nowhere to write": (["--interpret"], "--interpret needs --out"),
    "bfloat16 interpreted": (["--interpret", "--out", "own"], "--interpret needs another --dtype than bfloat16"),
}


@pytest.mark.parametrize(("arguments", "message"), USAGE.values(), ids=USAGE)
def test_usage_errors(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["tune", *arguments])
    assert message in capsys.readouterr().err


def test_a_miss_is_logged_once_with_the_command_that_fills_it(caplog, monkeypatch):
    problem = gemm(**SIZES | {"num_rows": 8 * 4321}, permute_y=True, weighted=True, w_layout="ekn")  # of no other test
    with caplog.at_level(logging.INFO, logger="jgg"):
        for _ in range(2):
            chosen(problem, op="dw")
    (record,) = caplog.records
    command = record.getMessage().partition("GPU: ")[2]

    calls = []
    monkeypatch.setattr("jgg.cli.tune.device_target", lambda: HOPPER)
    monkeypatch.setattr("jgg.cli.tune.run_all", lambda *arguments: calls.append(arguments) or 0)
    assert main(shlex.split(command)[1:]) == 0
    (((search,), *_),) = calls
    assert (search.problem, search.op) == (problem, "dw")


@pytest.mark.parametrize(("asked", "workers"), [(2**31 - 1, 3), (2, 2)])
def test_there_are_no_more_processes_than_searches(asked, workers, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("jgg.cli.tune.run_all", lambda *arguments: calls.append(arguments) or 0)
    sizes = ["--m", "16", "--k", "16", "--n", "16", "--experts", "2", "--w-layout", "enk", "--dtype", "float32"]
    assert main(["tune", *sizes, "--interpret", "--out", str(tmp_path / "own"), "--workers", str(asked)]) == 0
    (searches, _, _, number, _), *_ = calls
    assert (len(searches), number) == (3, workers)


@pytest.mark.thorough
@pytest.mark.interpret
def test_command(tmp_path, capsys):
    """With workers, which are processes of their own; without, the next test."""
    sizes = {"m": 48, "k": 32, "n": 48, "experts": 3, "dtype": "float32", "w-layout": "ekn"}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    out = tmp_path / "found.json"
    options = ["--op", "fwd,dx", "--interpret", "--permute-y", "--weighted", "--workers", "2"]
    assert main(["tune", *words, *options, "--out", str(out)]) == 0
    found = tuned_files.parse(out)
    assert {entry.op for entry in found} == {"forward", "dx"}
    assert {entry.problem for entry in found} == {gemm(**TINY, w_layout="ekn", permute_y=True, weighted=True)}
    assert str(out) in capsys.readouterr().out


@pytest.mark.interpret
def test_command_goes_on_after_a_failure(tmp_path, monkeypatch, capsys):
    def tune_op(op, *arguments, **options):
        if op == "dx":
            raise RuntimeError("No configuration of dx works")
        return tuning.tune_op(op, *arguments, **options)

    monkeypatch.setattr("jgg.cli.tune.tune_op", tune_op)
    sizes = ["--m", "32", "--k", "16", "--n", "16", "--experts", "2", "--dtype", "float32", "--w-layout", "enk"]
    out = tmp_path / "found.json"
    assert main(["tune", *sizes, "--op", "dx,dw", "--interpret", "--workers", "1", "--out", str(out)]) == 1
    assert [entry.op for entry in tuned_files.parse(out)] == ["dw"]
    assert "No configuration of dx works" in capsys.readouterr().out


def test_shapes_file(tmp_path):
    fields = {"name": "own", "tokens": 8, "hidden": 16, "expert_intermediate": 32, "experts": 4, "topk": 2}
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"comment": "", "layers": [fields | {"ep": 8}]}))
    up, down = load_layers(path)["own"].gemms().values()
    assert (up.num_rows, up.in_features, up.out_features) == (16, 16, 64)
    assert (down.in_features, down.out_features, down.num_experts) == (32, 16, 4)
    for change, message in (
        ({"topk": 5}, "at most its 4 experts, got 5"),
        ({"hidden": "x"}, "hidden of layer 'own' must be a positive int32, got 'x'"),
        ({"tokens": 2**31}, "tokens of layer 'own' must be a positive int32, got 2147483648"),
        ({"topk": True}, "topk of layer 'own' must be a positive int32, got True"),
        ({"name": ["own"]}, r"name of a layer must be text, got \['own'\]"),
    ):
        path.write_text(json.dumps({"layers": [fields | change]}))
        with pytest.raises(ValueError, match=message):
            load_layers(path)
    path.write_text(json.dumps({"layers": [{"name": "own"}]}))
    with pytest.raises(ValueError, match="no key 'tokens'"):
        load_layers(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"shapes\.json must be a JSON file with a list of layers"):
        load_layers(path)
