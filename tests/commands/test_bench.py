"""The command `jgg bench`: what it measures, checks, prints, writes and refuses."""

import dataclasses
import functools
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from _jgg_command.parser import make_parser
from jgg.cli import bench_report, bench_run, bench_settings, main, options
from jgg.cli.console import number
from jgg.measuring import peers, timing, ways, workloads

pytestmark = pytest.mark.xdist_group("bench")  # one worker compiles what they share
OWN = ["--m=24", "--k=8", "--n=6", "--experts=4", "--topk=2", "--dtype=float32"]


@pytest.fixture
def run_bench(tmp_path, monkeypatch, capsys):
    """Runs `jgg bench`; returns the exit code, what it printed and its JSON."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    def run(*arguments):
        out = tmp_path / "result"
        code = main(["bench", "--quiet", "--out", str(out), *arguments])
        return code, capsys.readouterr().out, json.loads(out.with_suffix(".json").read_text())

    return run


@functools.cache
def reference(op, problem, group_sizes):
    """What Reference.of computes of the operands that `workloads` makes with these sizes; slow to compile."""
    arrays = workloads.operands(problem) | {"group_sizes": jnp.asarray(group_sizes, jnp.int32)}
    return timing.Reference.of(op, problem, arrays)


@pytest.fixture
def no_timing(monkeypatch):
    """A call takes 1 ms, whatever it computes, so that only results are measured."""

    class Cached:
        @staticmethod
        def of(op, problem, arrays):
            return reference(op, problem, tuple(arrays["group_sizes"].tolist()))

    monkeypatch.setattr(bench_run, "Reference", Cached)
    monkeypatch.setattr(bench_run, "copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(ways, "measure", lambda function, arrays, *_, **__: timing.Timing(1e-3, function(arrays)))


def by_op(result):
    return {row["op"]: row["measurements"] for row in result["rows"]}


def test_every_product_is_right_and_its_numbers_agree(run_bench):
    code, output, result = run_bench(*OWN, "--op=fwd", "--peers=dense")
    assert (code, result["interrupted"]) == (0, False)
    assert result["copy_bytes_per_second"] > 0
    assert f"{number(result['copy_bytes_per_second'] / 1e9)} GB/s" in output
    assert set(result) >= {"command", "date", "versions", "device", "settings"}
    assert [row["op"] for row in result["rows"]] == ["forward"]
    for row in result["rows"]:
        assert row["flops"] == 2 * 24 * 8 * 6
        assert row["bytes"] == 4 * (24 * 8 + 4 * 6 * 8 + 24 * 6)
        assert set(row["measurements"]) == {"jgg", "even", "one group", "dense"}
        for name, measurement in row["measurements"].items():
            seconds = measurement["seconds"]
            num_bytes = 4 * (24 * 8 + 6 * 8 + 24 * 6) if name in ("one group", "dense") else row["bytes"]
            least = max(row["measurements"]["dense"]["seconds"], num_bytes / result["copy_bytes_per_second"])
            assert measurement["percent_of_roofline"] == pytest.approx(100 * least / seconds)
            assert measurement["status"] == "right"
            assert measurement["error"] <= measurement["allowed_error"] < 1e-3
            assert measurement["tflops"] == pytest.approx(row["flops"] / seconds / 1e12)
            assert measurement["gbytes_per_second"] == pytest.approx(num_bytes / seconds / 1e9)
            dense = row["measurements"]["dense"]["seconds"]
            assert measurement["percent_of_dense"] == pytest.approx(100 * dense / seconds)


def expected(op, problem, arrays):
    """The product in float64, by a loop over groups."""
    x, w, dy = (np.asarray(arrays[name], np.float64) for name in ("x", "w", "dy"))
    w = w if problem.w_layout == "enk" else w.swapaxes(1, 2)
    if problem.permute_x:
        x = x[np.asarray(arrays["gather_indices"]) // problem.topk]
    ends = np.cumsum(arrays["group_sizes"])
    y, dx, dw = np.zeros(problem.y_shape), np.zeros_like(x), np.zeros_like(w)
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        rows = slice(start, end)
        y[rows], dx[rows], dw[expert] = x[rows] @ w[expert].T, dy[rows] @ w[expert], dy[rows].T @ x[rows]
    dw = dw if problem.w_layout == "enk" else dw.swapaxes(1, 2)
    return {"forward": y, "dx": dx, "dw": dw}[op]


@pytest.mark.parametrize("w_layout", ["enk", "ekn"])
@pytest.mark.parametrize("op", bench_settings.OPS)
@pytest.mark.parametrize(("name", "groups"), [("dense", "one"), ("ragged_dot", "some-empty")])
def test_peers_compute_what_jgg_does(name, groups, op, w_layout):
    op, permute_x = ("forward", True) if op == "gather" else (op, False)
    problem = workloads.gemm(
        num_rows=24,
        in_features=8,
        out_features=6,
        num_experts=4,
        topk=2,
        dtype="float32",
        w_layout=w_layout,
        permute_x=permute_x,
    )
    arrays = workloads.operands(problem, groups)
    (way,) = peers.PEERS[name].prepare(op, problem, arrays)
    np.testing.assert_allclose(way.compute(), expected(op, problem, arrays), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("no_timing")
@pytest.mark.parametrize("groups", workloads.GROUPS)
def test_each_kind_of_groups_has_its_bounds(groups, run_bench):
    code, _, result = run_bench(*OWN, "--op=gather", "--peers=dense,ragged_dot", f"--groups={groups}")
    assert code == 0
    measurements = by_op(result)["gather"]
    assert set(measurements) == {"jgg", "even", "one group", "dense", "ragged_dot"}
    assert {measurement["status"] for measurement in measurements.values()} == {"right"}


def settings_of(*arguments):
    return bench_settings.Settings.from_args(make_parser("").parse_args(["bench", *arguments]))


@pytest.mark.sweep
def test_fp8_is_beside_bfloat16_and_a_dense_product_in_fp8(run_bench):
    sizes = ["--m=24", "--k=16", "--n=8", "--experts=4", "--topk=2"]
    code, _, result = run_bench(*sizes, "--dtype=fp8", "--op=dx,dw,gather")
    assert code == 0
    for op, row in zip(("dx", "gather"), result["rows"], strict=True):
        assert (row["op"], row["in_features"], row["dtype"]) == (op, 16, "float8_e4m3fn")
        assert row["measurements"].keys() == {"jgg", "even", "one group", "dense", "bfloat16"}
        assert all(each["status"] == "right" for each in row["measurements"].values())
        assert row["measurements"]["bfloat16"]["error"] is not None
        assert row["measurements"]["dense"]["error"] is None
        assert result["ratios"][op]["bfloat16"]["gemms"] == 1


def test_defaults_without_a_gpu_are_one_layer_scaled_down(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    settings = settings_of()
    assert settings.scaled_down
    assert (settings.dtype, settings.ops, settings.peers) == ("float32", workloads.OPS, ("dense", "ragged_dot"))
    first = next(iter(workloads.load_layers().values()))
    problems = settings.problems("forward")
    assert list(problems) == [(first.name, gemm) for gemm in ("up", "down")]
    up = problems[first.name, "up"]
    assert (up.num_rows, up.in_features, up.out_features, up.num_experts) == (
        256 * first.topk,
        first.hidden // 16,
        2 * first.expert_intermediate // 16,
        16,
    )
    assert settings.problems("gather")[first.name, "up"].permute_x


def test_defaults_with_a_gpu_are_one_layer_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    settings = settings_of()
    assert not settings.scaled_down
    assert settings.dtype == "bfloat16"
    known = workloads.load_layers()
    assert settings.layers == (known["qwen3-30b-a3b"],)
    assert settings.time_limit < 120
    named = settings_of("--layer=mixtral-8x7b")
    assert (named.layers, named.time_limit) == ((known["mixtral-8x7b"],), None)
    assert settings_of("--layer=all").layers == tuple(known.values())


@pytest.mark.usefixtures("no_timing")
def test_what_there_is_no_time_for_is_named(monkeypatch, capsys):
    ticks = itertools.count()  # a look at the clock takes a second
    monkeypatch.setattr(bench_run, "time", types.SimpleNamespace(monotonic=lambda: next(ticks)))
    settings = dataclasses.replace(settings_of(*OWN, "--quiet", "--op=forward,dx", "--peers=dense"), time_limit=3)
    result = bench_run.run(settings, lambda _: None)
    assert [(row.op, set(row.measurements)) for row in result.rows] == [("forward", {"jgg", "even"})]
    assert (result.left_out, result.interrupted) == (["own gemm forward", "own gemm dx"], False)
    bench_report.show(result)
    assert "Not all was measured, for lack of time, of own gemm forward, own gemm dx: name" in capsys.readouterr().out


def test_tables_of_all_layers_are_at_most_100_columns_wide(capsys):
    settings = settings_of("--layer=all", "--op=forward,dx,dw,gather", "--dtype=bfloat16")
    names = ["dense", "ragged_dot", "tokamax", "torch", "quack"]
    right = timing.Measurement("right", seconds=12.3456e-3, error=0.0)
    rows = [
        bench_run.Row(layer, gemm, op, problem, dict.fromkeys(["jgg", "even", "one group", *names], right))
        for op in settings.ops
        for (layer, gemm), problem in settings.problems(op).items()
    ]
    bench_report.show(bench_run.Result(settings, names, {}, 2.5e12, rows, [], False))
    lines = capsys.readouterr().out.splitlines()
    assert sum("granite-3.1-3b-a800m down" in line for line in lines) >= 8
    assert max(len(line) for line in lines[2:]) <= 100


def test_a_run_that_is_scaled_down_says_so():
    result = bench_run.Result(dataclasses.replace(settings_of(*OWN), scaled_down=True))
    assert "scaled down: no GPU" in bench_report.header(result)


def test_layers_come_from_a_file(tmp_path):
    layer = {"name": "tiny", "tokens": 6, "hidden": 8, "expert_intermediate": 4, "experts": 3, "topk": 2}
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({"layers": [layer]}))
    settings = settings_of(f"--shapes={shapes}")
    assert settings.layers == (workloads.Layer(**layer),)
    assert not settings.scaled_down
    assert settings.problems("dw")["tiny", "down"].y_shape == (12, 8)


@pytest.mark.usefixtures("no_timing")
def test_peers_that_cannot_run_are_named_with_the_reason(run_bench, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "tokamax", peers.Peer(None, unavailable=lambda: "it is on holiday"))
    code, output, result = run_bench(*OWN, "--op=dx", "--peers=tokamax,dense")
    assert code == 0
    assert result["skipped"] == {"tokamax": "it is on holiday"}
    assert "Skipped tokamax: it is on holiday" in output
    assert set(by_op(result)["dx"]) == {"jgg", "even", "one group", "dense"}


def off_by_one(prepare):
    """Like prepare, with 1 added to every result."""

    def wrong(*arguments):
        (way,) = prepare(*arguments)
        return [dataclasses.replace(way, function=lambda arrays: way.function(arrays) + jnp.ones((), jnp.float32))]

    return wrong


@pytest.mark.usefixtures("no_timing")
def test_a_peer_that_is_wrong_is_reported_and_not_timed(run_bench, monkeypatch):
    right = peers.PEERS["ragged_dot"]
    monkeypatch.setitem(peers.PEERS, "ragged_dot", dataclasses.replace(right, prepare=off_by_one(right.prepare)))
    code, output, result = run_bench(*OWN, "--op=forward", "--peers=ragged_dot")
    assert code == 1
    measurements = by_op(result)["forward"]
    assert measurements["jgg"]["status"] == "right"
    wrong = measurements["ragged_dot"]
    assert (wrong["status"], wrong["seconds"], wrong["tflops"]) == ("WRONG", None, None)
    assert 0.1 < wrong["error"] < 1
    assert f"ragged_dot, own gemm forward: WRONG: error {wrong['error']:.3g}" in output
    assert result["ratios"] == {}


@pytest.mark.usefixtures("no_timing")
def test_jgg_is_checked_too(run_bench, monkeypatch):
    def wrong_product(*arguments):
        return lambda arrays: timing.product(*arguments)(arrays).at[3, 2].set(jnp.nan)

    monkeypatch.setattr(bench_run, "product", wrong_product)
    code, output, result = run_bench(*OWN, "--op=forward", "--peers=none")
    assert code == 1
    assert {m["status"] for m in by_op(result)["forward"].values()} == {"WRONG"}
    assert by_op(result)["forward"]["jgg"]["error"] == "nan"
    assert "WRONG: error nan" in output


@pytest.mark.usefixtures("no_timing")
def test_a_result_that_turns_wrong_while_it_is_timed_is_caught(run_bench, monkeypatch):
    monkeypatch.setattr(ways, "measure", lambda function, arrays, *_, **__: timing.Timing(1e-3, 2 * function(arrays)))
    code, _, result = run_bench(*OWN, "--op=dw", "--peers=none")
    assert code == 1
    assert by_op(result)["dw"]["jgg"]["status"] == "WRONG"
    assert by_op(result)["dw"]["jgg"]["seconds"] is None


@pytest.mark.usefixtures("no_timing")
def test_a_peer_that_raises_ends_nothing(run_bench, monkeypatch):
    def out_of_memory(op, problem, arrays):
        raise RuntimeError("out of memory\nwith a long trace")

    monkeypatch.setitem(peers.PEERS, "torch", peers.Peer(out_of_memory))
    code, output, result = run_bench(*OWN, "--op=forward,dx", "--peers=torch")
    assert code == 0
    measured = by_op(result)
    assert [measured[op]["torch"]["status"] for op in ("forward", "dx")] == ["failed", "failed"]
    assert measured["dx"]["jgg"]["status"] == "right"
    assert "torch, own gemm forward; own gemm dx: failed: RuntimeError: out of memory" in output.splitlines()


@pytest.mark.usefixtures("no_timing")
def test_jgg_that_raises_is_a_failure(run_bench, monkeypatch):
    def no_product(*arguments):
        def run(arrays):
            raise RuntimeError("no kernel")

        return run

    monkeypatch.setattr(bench_run, "product", no_product)
    code, output, _ = run_bench(*OWN, "--op=forward", "--peers=none")
    assert code == 1
    assert "jgg, own gemm forward: failed: RuntimeError: no kernel" in output


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
    best = ways.measure_best(lambda: found, reference)
    assert (best.status, best.variant, best.seconds, best.error) == ("right", "fast", 2.0, 0)
    assert best.others == ("wrong: WRONG: error 1, at most 0.001 is right", "bad: failed: ValueError: no")
    assert ways.measure_best(lambda: found[::3], reference).status == "WRONG"
    assert ways.measure_best(lambda: found[3:], reference).status == "failed"


def fails_in_the_second_row(error):
    """In place of `measure`: the first row is measured, of the second its first product."""
    calls = []

    def measure(function, arrays, *_, **__):
        calls.append(function)
        if len(calls) == 6:  # the second row's bounds
            raise error
        return timing.Timing(1e-3, function(arrays))

    return measure


@pytest.mark.usefixtures("no_timing")
def test_an_interrupt_keeps_what_was_measured(run_bench, monkeypatch):
    monkeypatch.setattr(ways, "measure", fails_in_the_second_row(KeyboardInterrupt))
    code, output, result = run_bench(*OWN, "--op=forward,dx,dw", "--peers=dense")
    assert code == 130
    assert result["interrupted"]
    assert "Interrupted: not everything was measured" in output
    measured = {op: set(measurements) for op, measurements in by_op(result).items()}
    assert measured == {"forward": {"jgg", "even", "one group", "dense"}, "dx": {"jgg"}}


def test_what_was_measured_is_kept_when_a_peer_ends_the_process(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(ways, "measure", fails_in_the_second_row(SystemExit))
    with pytest.raises(SystemExit):
        main(["bench", "--quiet", *OWN, "--op=forward,dx", "--peers=dense", "--out", str(tmp_path / "kept")])
    result = json.loads((tmp_path / "kept.json").read_text())
    assert result["interrupted"]
    assert {op: set(rows) for op, rows in by_op(result).items()} == {"forward": {"jgg", "even", "one group", "dense"}}


def test_an_interrupt_before_anything_was_measured_writes_nothing(monkeypatch, tmp_path, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(bench_run, "copy_bandwidth", interrupt)
    assert main(["bench", "--quiet", *OWN, "--out", str(tmp_path / "none")]) == 130
    assert "Interrupted." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ratios_are_geometric_means_over_gemms():
    problem = workloads.gemm(num_rows=4, in_features=2, out_features=2, num_experts=2)
    rows = [
        bench_run.Row(
            layer,
            "up",
            "forward",
            problem,
            {
                "jgg": bench_run.Measurement("right", seconds=1.0),
                "dense": bench_run.Measurement("right", seconds=dense),
            },
        )
        for layer, dense in (("a", 2.0), ("b", 0.5), ("c", 8.0))
    ]
    rows.append(bench_run.Row("d", "up", "forward", problem, {"jgg": bench_run.Measurement("WRONG")}))
    found = bench_report.ratios(rows, ["forward", "dx"], ["dense", "torch"])
    assert found == {
        "forward": {
            "dense": {
                "geometric_mean": pytest.approx(2.0),
                "smallest": 0.5,
                "smallest_of": "b up",
                "gemms": 3,
            }
        }
    }


def test_products_are_not_moved_out_of_the_loop_that_times_them():
    problem = workloads.gemm(num_rows=8, in_features=4, out_features=4, num_experts=2, dtype="float32")
    with jax.default_device(jax.devices("cpu")[0]):
        (way,) = peers.PEERS["dense"].prepare("forward", problem, workloads.operands(problem, "one"))
        text = timing._repeated(way.function, 3, False).lower(way.arrays).compile().as_text()
    entry = text[text.index("\nENTRY ") :]
    assert " dot(" in text
    assert "while(" in entry
    assert " dot(" not in entry and "kCustom" not in entry


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer=gpt-9"], "--layer must be of qwen3-30b-a3b, "),
        (["--layer=gpt-9"], "got 'gpt-9'"),
        (["--m=8", "--n=8", "--experts=2"], "--m, --k, --n and --experts must be given together, got --m and no --k"),
        (["--topk=2"], "got --topk and no --m, --k, --n, --experts"),
        ([*OWN, "--m=7"], "--m must be a multiple of --topk 2, got 7"),
        ([*OWN, "--experts=1"], "--topk must be at most --experts 1, got 2"),
        (["--m=0"], "--m: must be 1 or more, got 0"),
        ([*OWN, "--layer=mixtral-8x7b"], "--m must be given without --layer"),
        (["--shapes=nowhere.json"], "--shapes must name a file of layers: "),
        ([*OWN, "--op=forward,backward"], "--op must be of forward, dx, dw, gather; got 'backward'"),
        ([*OWN, "--op=layer"], "python -m benchmarks.layers measures whole layers"),
        ([*OWN, "--peers=dense,quack"], "--peers must be of dense, ragged_dot, bfloat16; got 'quack'; in a checkout"),
        ([*OWN, "--peers=bfloat16"], "--peers bfloat16 is measured in fp8, got --dtype float32"),
        ([*OWN, "--dtype=fp8", "--w-layout=ekn"], "--w-layout must be enk with --dtype fp8"),
        ([*OWN, "--groups=odd"], "--groups: invalid choice: 'odd'"),
        ([*OWN, "--out=nowhere/bench"], "which is no folder"),
        ([*OWN, "--implementation=triton"], "--implementation triton needs a GPU that JAX can use"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, monkeypatch, capsys):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(options, "device_target", lambda: None)
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_numbers_have_three_digits():
    values = [None, 0, 0.01234, 1.2345, 12.345, 123.45, 12345.6]
    assert [number(value) for value in values] == [
        "-",
        "0",
        "0.0123",
        "1.23",
        "12.3",
        "123",
        "12,346",
    ]
    assert number(np.float64(2)) == "2.00"
