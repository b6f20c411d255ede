"""Tuned configurations: which is chosen, what a file may hold, how the search keeps what it measured."""

import dataclasses
import json
import logging
import shlex

import jax
import jax.numpy as jnp
import pytest

import jgg
from jgg import tuning
from jgg.cli import main
from jgg.configs import tuned_configs, tuned_files
from jgg.configs.heuristic import heuristic_config, hopper_config
from jgg.configs.kernel_configs import CONFIG_TYPES, KERNELS
from jgg.core.gpu_target import Target
from jgg.core.schedule import group_bounds
from jgg.launching.choice import Launcher
from jgg.measuring.workloads import gemm, load_layers
from jgg.products.forward import FORWARD, Forward
from tests.support.tuned_entries import HOPPER, PROBLEM, SIZES, UNUSUAL, chosen, entry


@pytest.fixture(autouse=True)
def own_file(tmp_path, monkeypatch):
    """The user's file is one that does not exist yet, and none comes with jgg."""
    path = tmp_path / "own" / "tuned.json"
    monkeypatch.setenv("JGG_TUNED", str(path))
    monkeypatch.setattr(tuned_files, "shipped_files", lambda: [tmp_path / "shipped.json"])
    return path


def test_an_entry_survives_its_file(own_file):
    entries = [
        entry(),
        entry(gemm(**SIZES, w_layout="ekn", permute_x=True, biased=True), jgg.KernelConfigDX(num_warps=4)),
        entry(gemm(**SIZES, dtype="float32", precision="highest", permute_y=True, weighted=True), UNUSUAL),
        entry(gemm(**SIZES, dtype="float8_e4m3fn"), jgg.KernelConfigForward(block_k=128)),
    ]
    for each in entries:
        tuned_files.merge(own_file, each)
    assert list(tuned_files.parse(own_file)) == entries
    assert {path.name for path in own_file.parent.iterdir()} == {"tuned.json", ".tuned.json.lock"}


def test_without_a_file_the_heuristic_chooses():
    for op in CONFIG_TYPES:
        assert chosen(op=op) == heuristic_config(CONFIG_TYPES[op], PROBLEM, HOPPER)


def test_the_kernel_gets_the_tuned_configuration(own_file):
    launches = []

    def call(kernel, launch):
        launches.append(launch)
        return {key: jnp.zeros(out.shape, out.dtype) for key, out in launch.outputs.items()}

    problem = gemm(num_rows=64, in_features=64, out_features=64, num_experts=4)
    x, w = jnp.ones(problem.x_shape, problem.dtype), jnp.ones(problem.w_shape, problem.dtype)
    bounds = group_bounds(jnp.full(4, 16), 64)
    for expected in (heuristic_config(jgg.KernelConfigForward, problem, HOPPER).band, 3):
        FORWARD.launch(Launcher(call, HOPPER), Forward(x, w, bounds), problem=problem)
        assert launches[-1].constants["BAND"] == expected
        tuned_files.merge(own_file, entry(problem))
    given = Launcher(call, HOPPER, jgg.KernelConfigForward(band=5))
    FORWARD.launch(given, Forward(x, w, bounds), problem=problem)
    assert launches[-1].constants["BAND"] == 5


NEAR = {"rows": {"num_rows": 2 * 65536}, "K": {"in_features": 1024}, "N": {"out_features": 2880}}
FAR = {"rows": {"num_rows": 4 * 65536}, "K": {"in_features": 512}, "N": {"out_features": 4096}}
OTHER = {
    "permute_x": {"permute_x": True},
    "permute_y": {"permute_y": True},
    "weights": {"weighted": True},
    "bias": {"biased": True},
    "size of dtype": {"dtype": "float32"},
    "alignment": {"out_features": 1537},
}


@pytest.mark.parametrize("change", NEAR.values(), ids=NEAR)
def test_a_near_problem_uses_the_entry(own_file, change):
    tuned_files.merge(own_file, entry())
    assert chosen(gemm(**SIZES | change)) == UNUSUAL


@pytest.mark.parametrize("change", [*FAR.values(), *OTHER.values()], ids=[*FAR, *OTHER])
def test_another_problem_does_not(own_file, change):
    tuned_files.merge(own_file, entry())
    assert chosen(gemm(**SIZES | change)) != UNUSUAL


@pytest.mark.parametrize("op", CONFIG_TYPES)
def test_an_entry_serves_the_other_layout_until_that_has_its_own(own_file, op):
    config = CONFIG_TYPES[op](block_m=32, block_n=64, block_k=128)
    turned = dataclasses.replace(config, block_n=128, block_k=64) if op == "dw" else config
    problem = gemm(**SIZES | {"in_features": 1024}, w_layout="ekn")
    tuned_files.merge(own_file, entry(config=config))
    assert chosen(problem, op) == turned
    own = dataclasses.replace(config, band=3)
    tuned_files.merge(own_file, entry(gemm(**SIZES, w_layout="ekn"), own))
    assert chosen(problem, op) == own
    assert chosen(op=op) == config


def test_an_entry_for_these_sizes_serves_the_other_layout_rather_than_one_for_twice_the_features(own_file):
    tuned_files.merge(own_file, entry())
    far = gemm(**SIZES | {"in_features": 2 * SIZES["in_features"]}, w_layout="ekn")
    tuned_files.merge(own_file, entry(far, jgg.KernelConfigForward(band=3)))
    assert chosen(gemm(**SIZES, w_layout="ekn")) == UNUSUAL


def test_another_device_or_product_does_not(own_file):
    tuned_files.merge(own_file, entry())
    assert chosen() == UNUSUAL
    assert chosen(target=Target(90, 132, "NVIDIA H100 80GB HBM3")) == UNUSUAL  # the same multiprocessor
    assert chosen(target=Target(90, 132)) == UNUSUAL  # named for ahead-of-time lowering
    assert chosen(target=Target(100, 148)) != UNUSUAL
    assert chosen(op="dx") == heuristic_config(jgg.KernelConfigDX, PROBLEM, HOPPER)


def test_the_nearest_entry_is_used(own_file):
    for features, band in ((1024, 11), (1536, 12), (2560, 13)):
        tuned_files.merge(
            own_file, entry(gemm(**SIZES | {"in_features": features}), jgg.KernelConfigForward(band=band))
        )
    assert [chosen(gemm(**SIZES | {"in_features": k})).band for k in (1024, 1120, 1600, 2048, 4096)] == [
        11, 11, 12, 13, 13,
    ]  # fmt: skip


def test_an_entry_that_does_not_fit_is_passed_over(own_file):
    """Tiles of [128, 256] with four stages fit with a result of 16 bits alone: one of 32 takes 327,712 bytes."""
    wide = jgg.KernelConfigForward(block_n=256, band=3)
    tuned_files.merge(own_file, entry(config=wide))
    far = jgg.KernelConfigForward(band=5)
    tuned_files.merge(own_file, entry(gemm(**SIZES | {"in_features": 1024}), far))
    assert chosen() == wide
    float32 = dataclasses.replace(PROBLEM, out_dtype=jnp.dtype("float32"))
    assert chosen(float32) == far
    tuned_files.merge(own_file, entry(gemm(**SIZES | {"in_features": 1024}), wide))
    assert chosen(float32) == heuristic_config(jgg.KernelConfigForward, float32, HOPPER)
    given = tuned_configs.choose_config(jgg.KernelConfigForward, float32, HOPPER, wide)
    assert given == wide  # refused where it is compiled, and its memory known


def test_an_entry_for_a_tile_that_the_hopper_kernel_has_not_is_passed_over(own_file):
    tuned_files.merge(own_file, entry(config=dataclasses.replace(UNUSUAL, kernel="hopper", block_m=512)))
    assert chosen() == heuristic_config(jgg.KernelConfigForward, PROBLEM, HOPPER)


def test_an_entry_for_the_hopper_kernel_is_passed_over_where_that_cannot_run(own_file):
    weighted = gemm(**SIZES, weighted=True)
    tuned_files.merge(own_file, entry(weighted, hopper_config(jgg.KernelConfigDX, "enk")))
    far = gemm(**SIZES | {"in_features": 1024}, weighted=True)
    tuned_files.merge(own_file, entry(far, jgg.KernelConfigDX(band=3)))
    assert chosen(weighted, op="dx") == jgg.KernelConfigDX(band=3)


def test_the_own_file_comes_before_the_shipped_one(own_file):
    (shipped,) = tuned_files.shipped_files()
    tuned_files.merge(shipped, entry(config=jgg.KernelConfigForward(band=5)))
    assert chosen().band == 5
    tuned_files.merge(own_file, entry(gemm(**SIZES | {"in_features": 1024})))
    assert chosen() == UNUSUAL


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
    sizes = ["--m", "16", "--k", "16", "--n", "16", "--experts", "2", "--w-layout", "enk"]
    assert main(["tune", *sizes, "--interpret", "--out", str(tmp_path / "own"), "--workers", str(asked)]) == 0
    (searches, _, _, number, _), *_ = calls
    assert (len(searches), number) == (3, workers)


def edited(part=None, **changes):
    """A file of one entry, of which someone changed fields of the problem, of the config or its own."""
    content = entry().as_json()
    if part is None:
        content |= changes
    else:
        content[part] |= changes
    return json.dumps({"format": 1, "entries": [content]})


DAMAGED = {
    "empty": "",
    "no JSON": "{",
    "nested": "[" * 100_000,
    "a list": "[]",
    "other format": '{"format": 99, "entries": []}',
    "no entries": '{"format": 1}',
    "truncated": edited()[:-100],
    "bad config": edited("config", block_m=100),
    "unknown field": edited("config", warp=1),
    "a list for a config": edited(config=["block_m"]),
    "text for a switch": edited("config", use_tma_load_x="no"),
    "unknown kernel": edited("config", kernel="volta"),
    "text for the former switch": edited("config", warp_specialized="no"),
    "true for a number": edited("config", band=True),
    "large number": edited("config", band=2**30),
    "huge number": edited("problem", topk=10**400),
    "unknown op": edited(op="sideways"),
    "text for a size": edited("problem", num_rows="65536"),
    "fraction for a size": edited("problem", in_features=2048.0),
    "no rows": edited("problem", num_rows=0),
    "no expert": edited("problem", num_experts=-1),
    "unknown dtype": edited("problem", dtype="float8_e3m4"),
    "unknown layout": edited("problem", w_layout="nek"),
    "unknown precision": edited("problem", precision="BEST"),
    "no time": edited(milliseconds=0),
    "endless time": edited(milliseconds=float("inf")),
    "endless capability": edited(compute_capability=float("inf")),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named_and_ignored_but_not_overwritten(own_file, content):
    own_file.parent.mkdir()
    own_file.write_text(content)
    with pytest.warns(UserWarning, match=r"tuned\.json is no file of tuned configurations"):
        assert chosen() == heuristic_config(jgg.KernelConfigForward, PROBLEM, HOPPER)
    with pytest.raises(ValueError, match=r"tuned\.json is no file"):
        tuned_files.merge(own_file, entry())
    assert own_file.read_text() == content


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_file_without_names_of_kernels_is_read(own_file, kernel):
    """Older files say whether the kernel was warp-specialized, where files now name the kernel."""
    measured = entry(config=jgg.KernelConfigForward(kernel=kernel))
    config = dict(measured.as_json()["config"], warp_specialized=kernel == "hopper")
    del config["kernel"]
    own_file.parent.mkdir()
    own_file.write_text(edited(config=config))
    assert tuned_files.parse(own_file) == (measured,)
    tuned_files.merge(own_file, entry(device="NVIDIA H100"))
    assert tuned_files.parse(own_file)[0] == measured
    assert "warp_specialized" not in own_file.read_text()


def test_merge_replaces_only_the_same_product_on_the_same_device(own_file):
    others = [entry(config=jgg.KernelConfigDX()), entry(device="NVIDIA H100")]
    for each in (*others, entry(milliseconds=2.0)):
        tuned_files.merge(own_file, each)
    tuned_files.merge(own_file, entry(milliseconds=3.0), keep_faster=True)
    assert [each.milliseconds for each in tuned_files.parse(own_file)] == [1, 1, 2]
    tuned_files.merge(own_file, entry(milliseconds=1.5), keep_faster=True)
    assert [each.milliseconds for each in tuned_files.parse(own_file)] == [1, 1, 1.5]
    tuned_files.merge(own_file, entry(milliseconds=4.0))
    assert [each.milliseconds for each in tuned_files.parse(own_file)] == [1, 1, 4]


def test_a_cache_folder_is_used_where_no_file_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("JGG_TUNED")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tuned_files.merge(tuned_files.user_file(), entry())
    assert chosen() == UNUSUAL


# The search itself, on the kernels in the interpreter.
TINY = {"num_rows": 48, "in_features": 32, "out_features": 48, "num_experts": 3, "dtype": "float32"}


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("op", CONFIG_TYPES)
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
                assert len(set(configs)) == len(configs) > 1
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
}


@pytest.mark.parametrize(("arguments", "message"), USAGE.values(), ids=USAGE)
def test_usage_errors(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["tune", *arguments])
    assert message in capsys.readouterr().err


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
